"""Documents by id and by place: exactly those of the tar, without reading the tar."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from data_prep import open_dataset
from data_prep.base.errors import UserError
from data_prep.dataset.shard_documents import ShardDocuments, all_shards, find_document
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.living_data_sets import ShardRecord, records_by_key


def test_every_document_is_found_and_read_as_it_stands_in_its_tar(small_shards: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    num_documents = 0
    for split, shard in all_shards(manifest):
        documents = ShardDocuments(str(small_shards), manifest, split, shard)
        number = 0
        for key, record in records_by_key(small_shards / shard.name).items():
            starts = record.documents.tolist()
            for start, stop in zip(starts, [*starts[1:], len(record.tokens)], strict=True):
                place = documents.location(number)
                assert (place.record_key, starts[place.number_in_record]) == (key, start)
                assert place.document_id == record.document_ids[place.number_in_record]
                assert documents.numbers_of(place.document_id) == [number]
                sentences = documents.sentences(number)
                own = record.sentences[(record.sentences >= start) & (record.sentences < stop)].tolist()
                assert np.array_equal(np.concatenate(sentences), record.tokens[start:stop])
                assert np.cumsum([0, *map(len, sentences[:-1])]).tolist() == [first - start for first in own]
                assert (place.num_tokens, place.num_sentences) == (stop - start, len(own))
                number += 1
        assert number == len(documents) == shard.documents
        num_documents += number
    assert num_documents == 200 and len(manifest.train.shards[0].name) > 0
    assert max(shard.records for shard in manifest.train.shards) > 1


def test_an_id_leads_to_shard_record_and_source_in_either_split(small_shards: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    for split, shard in all_shards(manifest):
        *_, (key, record) = records_by_key(small_shards / shard.name).items()
        (place,) = find_document(str(small_shards), int(record.document_ids[-1]))
        assert (place.split, place.shard, place.record_key) == (split, shard, key)
        assert place.number_in_record == len(record.documents) - 1
        assert place.source == manifest.sources[0]


def test_an_unknown_id_is_an_error_that_names_it(small_shards: Path) -> None:
    with pytest.raises(UserError, match="000000000000abcd .*200", check=coded("unknown-document")):
        find_document(str(small_shards), 0xABCD)


def test_a_shard_that_is_cut_off_is_damaged(small_shards: Path, tmp_path: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    shard = manifest.train.shards[0]
    (tmp_path / shard.index.name).write_bytes((small_shards / shard.index.name).read_bytes())
    whole = (small_shards / shard.name).read_bytes()
    documents = ShardDocuments(str(tmp_path), manifest, "train", shard)
    with pytest.raises(UserError, check=coded("unreadable-file")):
        documents.sentences(0)
    (tmp_path / shard.name).write_bytes(whole[: len(whole) // 2 + 1])
    assert documents.sentences(0)
    with pytest.raises(UserError, match="train-000000.tar", check=coded("damaged-shard")):
        documents.sentences(len(documents) - 1)
    (tmp_path / shard.name).write_bytes(b"\xff" * len(whole))
    with pytest.raises(UserError, match="document 0", check=coded("damaged-shard")):
        documents.sentences(0)


def forged(folder: Path, shard: ShardRecord, shard_bytes: int, **arrays: np.ndarray) -> ShardRecord:
    """A record of the shard with another index, as whoever forged both would write it: every checksum agrees."""
    index = {name: array.copy() for name, array in load_file(folder / shard.index.name).items()} | arrays
    save_file(index, folder / shard.index.name)
    written = (folder / shard.index.name).read_bytes()
    file = shard.index.model_copy(update={"bytes": len(written), "sha256": hashlib.sha256(written).hexdigest()})
    tokens = int(index["document_lengths"].sum(dtype=np.int64))
    return shard.model_copy(update={"bytes": shard_bytes, "tokens": tokens, "index": file})


def test_a_forged_index_allocates_no_memory_and_reads_only_the_shard(
    small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = open_dataset(small_shards).manifest
    shard = manifest.train.shards[0]
    for name in (shard.name, shard.index.name):
        (tmp_path / name).write_bytes((small_shards / name).read_bytes())
    whole = load_file(tmp_path / shard.index.name)
    lengths, sentences = whole["document_lengths"].copy(), whole["sentence_lengths"].copy()
    lengths[0] += np.uint32(4_000_000_000)
    sentences[0] += np.uint32(4_000_000_000)
    huge = {"document_lengths": lengths, "sentence_lengths": sentences}
    with pytest.raises(UserError, check=coded("damaged-index")):
        ShardDocuments(str(tmp_path), manifest, "train", forged(tmp_path, shard, shard.bytes, **huge))
    far = {"token_offsets": whole["token_offsets"] + np.uint64(1 << 50)}
    for arrays in huge, {**whole, **far}:
        documents = ShardDocuments(str(tmp_path), manifest, "train", forged(tmp_path, shard, 1 << 62, **arrays))
        monkeypatch.setattr(storage, "open_read", None)  # it is not even opened
        with pytest.raises(UserError, match="train-000000.tar .*document 0", check=coded("damaged-shard")):
            documents.sentences(0)
        monkeypatch.undo()


def test_an_index_of_sources_that_the_manifest_does_not_name_is_refused(small_shards: Path, tmp_path: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    shard = manifest.train.shards[0]
    (tmp_path / shard.index.name).write_bytes((small_shards / shard.index.name).read_bytes())
    sources = np.full(shard.documents, len(manifest.sources), np.uint16)
    with pytest.raises(UserError, match=shard.index.name, check=coded("damaged-index")):
        ShardDocuments(str(tmp_path), manifest, "train", forged(tmp_path, shard, shard.bytes, document_sources=sources))


def test_a_remote_shard_is_read_without_fetching_it(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "local_copy", None)
    manifest = open_dataset(small_shards).manifest
    shard = manifest.train.shards[1]
    url = "memory://shard-documents/set"
    for name in (shard.name, shard.index.name):
        storage.write_bytes(storage.join(url, name), (small_shards / name).read_bytes())
    here, there = (ShardDocuments(folder, manifest, "train", shard) for folder in (str(small_shards), url))
    assert [part.tolist() for part in there.sentences(7)] == [part.tolist() for part in here.sentences(7)]
