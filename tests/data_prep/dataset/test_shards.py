"""Shards: plain webdataset tars whose bytes follow from their records, with an index that can be trusted."""

from __future__ import annotations

import dataclasses
import io
import pickle
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from data_prep.base.errors import UserError
from data_prep.dataset.shards import Record, index_of, read_index, read_records, write_shard
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.living_data_sets import ShardRecord


def record(*documents: list[int], first_id: int = 5, dtype: type = np.uint16) -> Record:
    """A record of documents given as lists of sentence lengths."""
    lengths = [sum(document) for document in documents]
    sentences = [length for document in documents for length in document]
    return Record(
        tokens=np.arange(first_id, first_id + sum(lengths)).astype(dtype),
        documents=(np.cumsum(lengths) - lengths).astype(np.uint32),
        sentences=(np.cumsum(sentences) - sentences).astype(np.uint32),
        sources=np.zeros(len(documents), np.uint16),
        document_ids=np.arange(len(documents), dtype=np.uint64) + np.uint64(2**63 + first_id),
    )


@pytest.fixture
def shard(tmp_path: Path) -> ShardRecord:
    return write_shard(str(tmp_path), "train-000003", [record([2, 3], [4]), record([1], first_id=40)])


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_token_offsets_point_at_the_tokens_in_the_tar(tmp_path: Path, dtype: type) -> None:
    records = [record([2, 3], [4], dtype=dtype), record([700], first_id=40, dtype=dtype), record([1], dtype=dtype)]
    shard = write_shard(str(tmp_path), "train-000000", records)
    data = (tmp_path / shard.name).read_bytes()
    offsets = read_index(str(tmp_path), shard).token_offsets.tolist()
    for expected, offset in zip(records, offsets, strict=True):
        assert np.array_equal(np.frombuffer(data, dtype, len(expected.tokens), offset), expected.tokens)
        assert offset % np.dtype(dtype).itemsize == 0


def test_the_index_holds_the_lengths_of_all_documents_and_sentences(tmp_path: Path, shard: ShardRecord) -> None:
    index = read_index(str(tmp_path), shard)
    assert index.document_lengths.tolist() == [5, 4, 1]
    assert index.sentence_counts.tolist() == [2, 1, 1]
    assert index.sentence_lengths.tolist() == [2, 3, 4, 1]
    assert index.record_document_counts.tolist() == [2, 1]
    assert (shard.documents, shard.sentences, shard.tokens, shard.records, shard.min_document_tokens) == (
        3,
        4,
        10,
        2,
        1,
    )


def test_webdataset_reads_the_same_records_as_our_reader(small_shards: Path) -> None:
    import webdataset

    paths = sorted(small_shards.glob("*.tar"))
    assert len(paths) == 5
    for path in paths:
        ours = list(read_records(path))
        theirs = list(webdataset.WebDataset(str(path), shardshuffle=False).decode())
        assert [sample["__key__"] for sample in theirs] == [key for key, _, _ in ours]
        assert len(ours) > 2
        for sample, (_, expected, _) in zip(theirs, ours, strict=True):
            for field in ("tokens", "documents", "sentences", "sources", "document_ids"):
                found = sample[f"{field}.npy"]
                assert found.dtype == getattr(expected, field).dtype and np.array_equal(found, getattr(expected, field))


def test_the_same_records_give_the_same_bytes(tmp_path: Path, shard: ShardRecord) -> None:
    again = write_shard(str(tmp_path / "again"), "train-000003", [record([2, 3], [4]), record([1], first_id=40)])
    assert again == shard


def test_the_tar_is_the_one_that_webdatasets_own_writer_makes(tmp_path: Path) -> None:
    from webdataset import TarWriter

    records = [record([2, 3], [4]), record([7000], first_id=40)]
    shard = write_shard(str(tmp_path), "train-000003", records)
    theirs = io.BytesIO()
    with TarWriter(theirs, encoder=False, mtime=0) as writer:
        for number, item in enumerate(records):
            arrays = {f"{field}.npy": _npy(array) for field, array in dataclasses.asdict(item).items()}
            writer.write({"__key__": f"000003-{number:05d}", **arrays})
    assert (tmp_path / shard.name).read_bytes() == theirs.getvalue()


@pytest.mark.spawn
def test_no_process_that_writes_shards_loads_torch() -> None:
    program = (
        "import sys, data_prep.pipeline.map_task, data_prep.pipeline.reduce_task\n"
        "from data_prep.dataset.shards import write_shard; write_shard(sys.argv[1], 'train-000000', [])\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", program, folder], check=True, timeout=60)


@pytest.mark.parametrize("name", ["index.safetensors", "missing"])
def test_a_damaged_or_missing_index_is_named(tmp_path: Path, shard: ShardRecord, name: str) -> None:
    path = tmp_path / shard.index.name
    if name == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(bytes(data))
    with pytest.raises(UserError, match="train-000003.index.safetensors (has other content|is missing)"):
        read_index(str(tmp_path), shard)


def test_an_index_that_does_not_add_up_is_refused(tmp_path: Path, shard: ShardRecord) -> None:
    arrays = safetensors.numpy.load((tmp_path / shard.index.name).read_bytes())
    arrays["sentence_lengths"] = np.array([3, 3, 4, 1], np.uint32)
    data = safetensors.numpy.save(arrays)
    storage.write_bytes(tmp_path / shard.index.name, data)
    sha256 = storage.sha256_of(tmp_path / shard.index.name)
    forged = shard.model_copy(update={"index": shard.index.model_copy(update={"sha256": sha256})})
    with pytest.raises(UserError, check=coded("damaged-index")):
        read_index(str(tmp_path), forged)


def _tar(path: Path, members: list[tuple[str, bytes | None]]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            if data is None:
                member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))
    return path


def _npy(array: np.ndarray, allow_pickle: bool = False) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=allow_pickle)
    return buffer.getvalue()


_TOKENS = _npy(np.arange(5, 9, dtype=np.uint16))
_BOMB = _npy(np.zeros(1, np.uint16)).replace(b"(1,)", b"(9999999999,)".ljust(4))


@pytest.mark.parametrize(
    "members",
    [
        [("../../outside.tokens.npy", _TOKENS)],
        [("/absolute.tokens.npy", _TOKENS)],
        [("0-0.tokens.npy", None)],
        [("0-0.tokens.pyd", pickle.dumps("code"))],
        [("0-0.tokens.npy", _npy(np.array([{}], object), allow_pickle=True))],
        [("0-0.tokens.npy", _npy(np.arange(4.0)))],
        [("0-0.tokens.npy", _BOMB)],
        [("0-0.tokens.npy", b"not an array")],
        [("0-0.tokens.npy", _TOKENS), ("0-1.tokens.npy", _TOKENS)],
        [("0-0.tokens.npy", _TOKENS)],
    ],
    ids=["parent", "absolute", "link", "pickle", "objects", "floats", "bomb", "garbage", "interleaved", "incomplete"],
)
def test_a_tar_that_is_no_shard_is_refused(tmp_path: Path, members: list[tuple[str, bytes | None]]) -> None:
    path = _tar(tmp_path / "evil.tar", members)
    with pytest.raises(UserError, match="evil.tar", check=coded("damaged-shard")):
        list(read_records(path))
    assert [file.name for file in tmp_path.iterdir()] == ["evil.tar"]


def test_a_tar_cut_short_is_refused(tmp_path: Path, shard: ShardRecord) -> None:
    path = tmp_path / shard.name
    path.write_bytes(path.read_bytes()[:4800])
    with pytest.raises(UserError, match="train-000003.tar", check=coded("damaged-shard")):
        list(read_records(path))


def test_index_of_a_record_by_hand() -> None:
    index = index_of(record([2, 3], [4]), 77)
    assert index.document_lengths.tolist() == [5, 4] and index.sentence_lengths.tolist() == [2, 3, 4]
    assert index.token_offsets.tolist() == [77]
