from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data_prep import verify
from data_prep.base.errors import UsageError, UserError
from data_prep.tokenizer.foreign_files import fingerprint_of
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import WRITERS
from tests.support.preparations import prepared, read_texts, trained
from tests.support.toy_run import tiny_config
from trainer.data import shard_cache
from trainer.data import shard_set as shard_set_module
from trainer.data.order import ComponentEpoch
from trainer.data.packing import RowSettings, document_starts
from trainer.data.randomness import root_key
from trainer.data.shard_cache import DamagedFile
from trainer.data.shard_set import (
    WINDOW_SHARDS,
    Shard,
    check_own_tokenizer,
    check_pairs,
    check_tokenizer,
    open_shard_set,
    tokenizer_of_run,
)
from trainer.preflight.data_checks import check_data

DOCUMENTS = [[[4, 3], [5]], [[2], [2, 2], [9], [1]]]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_lie_where_the_index_says(tmp_path: Path, corpus_at: Callable, dtype: str) -> None:
    corpus = corpus_at(tmp_path, DOCUMENTS, documents_a_record=2, dtype=dtype)
    found: list[int] = []
    for shard in corpus.shard_set.shards("train"):
        index, tokens = shard.read_index(), shard.read_tokens()
        assert tokens.dtype == np.dtype(dtype)
        for start, length in zip(document_starts(index, shard.itemsize), index.document_lengths, strict=True):
            found += tokens[start : start + length].tolist()
    assert found == corpus.train_ids.tolist()


def test_shards_without_documents_are_left_out(tmp_path: Path, corpus_at: Callable) -> None:
    corpus = corpus_at(tmp_path, [[[3]], [], [[4]]])
    assert [shard.record.name for shard in corpus.shard_set.shards("train")] == ["train-000000.tar", "train-000002.tar"]
    assert corpus.shard_set.shards("valid") == []


def test_no_manifest_is_no_shard_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no manifest.json"):
        open_shard_set(str(tmp_path))


@pytest.mark.parametrize("damage", ["a flipped bit", "a cut", "another shard", "nothing there"])
def test_a_damaged_shard_is_named_when_it_is_read(tmp_path: Path, corpus_at: Callable, damage: str) -> None:
    corpus_at(tmp_path, DOCUMENTS)
    path = tmp_path / "train-000001.tar"
    data = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        data[700] ^= 1
        path.write_bytes(data)
    elif damage == "a cut":
        path.write_bytes(data[:-512])
    elif damage == "another shard":
        path.write_bytes((tmp_path / "train-000000.tar").read_bytes())
    else:
        path.unlink()
    shards = open_shard_set(str(tmp_path)).shards("train")
    assert shards[0].read_tokens().size
    with pytest.raises(UserError, match=r"train-000001\.tar"):
        shards[1].read_tokens()


def test_a_checked_shard_is_not_read_again(
    tmp_path: Path, corpus_at: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = corpus_at(tmp_path, DOCUMENTS).shard_set.shards("train")[0]
    first = shard.read_tokens()
    monkeypatch.setattr(shard_set_module.storage, "sha256_of", lambda url: pytest.fail("read again"))
    assert shard.read_tokens() is first


def test_a_shard_that_another_process_checked_is_not_read_again_unless_it_was_written_since(
    tmp_path: Path, corpus_at: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus_at(tmp_path / "data", DOCUMENTS)

    def open_first() -> Shard:
        return open_shard_set(str(tmp_path / "data"), tmp_path / "cache").shards("train")[0]

    open_first().read_tokens()
    with monkeypatch.context() as patch:
        patch.setattr(shard_cache.storage, "sha256_of", lambda path: pytest.fail("read again"))
        open_first().read_tokens()
    path = tmp_path / "data" / "train-000000.tar"
    times, data = path.stat(), bytearray(path.read_bytes())
    data[700] ^= 1
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DamagedFile, check=coded("damaged-shard"), match="sha256"):
        open_first().read_tokens()


def test_remote_shards_are_copied_to_the_cache(tmp_path: Path, corpus_at: Callable) -> None:
    import fsspec

    corpus = corpus_at(tmp_path / "local", DOCUMENTS)
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "local").iterdir():
        memory.pipe_file(f"/shards-of-this-test/{path.name}", path.read_bytes())
    remote = open_shard_set("memory://shards-of-this-test", tmp_path / "cache")
    for ours, theirs in zip(corpus.shard_set.shards("train"), remote.shards("train"), strict=True):
        assert np.array_equal(ours.read_tokens(), theirs.read_tokens())
    assert sorted(path.name.partition("-")[2] for path in (tmp_path / "cache").glob("[!.]*")) == [
        "train-000000.tar",
        "train-000001.tar",
    ]


def test_a_window_verifies_its_local_shards_and_the_next_windows_ahead(tmp_path: Path, corpus_at: Callable) -> None:
    corpus_at(tmp_path / "local", [[[5, 5]]] * 40)
    shards = open_shard_set(str(tmp_path / "local"), tmp_path / "cache").shards("train")
    ComponentEpoch(shards, RowSettings(16, None, 0.1), root_key(0)).segments_of_epoch(np.array([0]))
    deadline = time.monotonic() + 20
    while len(found := list((tmp_path / "cache").glob(".verified/[!.]*"))) < 2 * WINDOW_SHARDS:
        assert time.monotonic() < deadline, f"{len(found)} shards are verified"
        time.sleep(0.01)


def test_a_window_fetches_its_remote_shards_and_the_next_windows_ahead(tmp_path: Path, corpus_at: Callable) -> None:
    import fsspec

    corpus_at(tmp_path / "local", [[[5, 5]]] * 40)
    memory = fsspec.filesystem("memory")
    for path in (tmp_path / "local").iterdir():
        memory.pipe_file(f"/shards-ahead/{path.name}", path.read_bytes())
    shards = open_shard_set("memory://shards-ahead", tmp_path / "cache").shards("train")
    opened = ComponentEpoch(shards, RowSettings(16, None, 0.1), root_key(0))
    opened.segments_of_epoch(np.array([0]))
    deadline = time.monotonic() + 20
    while len(list((tmp_path / "cache").glob("[!.]*.tar"))) < 2 * WINDOW_SHARDS and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(list((tmp_path / "cache").glob("[!.]*.tar"))) == 2 * WINDOW_SHARDS


def test_the_tokenizer_must_be_that_of_the_shards(
    tmp_path: Path, corpus_at: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = corpus_at(tmp_path / "one", DOCUMENTS, fingerprint="a" * 64).shard_set
    two = corpus_at(tmp_path / "two", DOCUMENTS, fingerprint="b" * 64).shard_set
    found = SimpleNamespace(fingerprint="a" * 64, is_named=("a" * 64).__eq__)
    monkeypatch.setattr(shard_set_module.Tokenizer, "load", lambda folder: found)
    check_tokenizer([one, one], None, vocab_size=1000)
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    check_tokenizer([one], str(folder), vocab_size=1000)
    with pytest.raises(UserError, check=coded("mixed-tokenizers"), match=f"(?s){'a' * 64}.*{'b' * 64}"):
        check_tokenizer([one, two], None, vocab_size=1000)
    with pytest.raises(UserError, check=coded("another-tokenizer"), match=f"{folder}.*{'a' * 64}.*{'b' * 64}"):
        check_tokenizer([two], str(folder), vocab_size=1000)
    with pytest.raises(UserError, check=coded("missing-path"), match="/no/such/folder"):
        check_tokenizer([one], "/no/such/folder", vocab_size=1000)


def test_a_tokenizer_that_an_earlier_release_named_is_that_of_the_shards(tmp_path: Path) -> None:
    texts = [f"the river number {number} and its bridge" for number in range(60)]
    given = WRITERS["xlm-roberta"](tmp_path / "given", texts)
    values = json.loads((given / "tokenizer.json").read_text())
    values["model"]["vocab"][9][1] += 1e-15
    (given / "tokenizer.json").write_text(json.dumps(values))
    own = Path(shutil.copytree(given, tmp_path / "own"))
    tokenizer = Tokenizer.load(own)
    files = {path.name: path.read_bytes() for path in own.iterdir()}
    earlier = fingerprint_of(files, tokenizer.special_tokens, exact_scores=True)
    tokenizer.info.model_copy(update={"fingerprint": earlier}).write(own)
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    sets = []
    for name, folder in (("old", own), ("new", given)):
        prepared({"text": tmp_path / "text.jsonl"}, folder, tmp_path / name)
        sets.append(open_shard_set(str(tmp_path / name)))
    named = [each.manifest.tokenizer.fingerprint for each in sets]
    assert named[0] == earlier != named[1]
    size = tokenizer.vocab_size
    for mixed in (sets, sets[::-1]):
        check_tokenizer(mixed, None, size)
        for folder in (given, own):
            check_tokenizer(mixed, str(folder), size)
    shutil.rmtree(tmp_path / "old" / "tokenizer")
    shutil.copytree(tmp_path / "new" / "tokenizer", tmp_path / "old" / "tokenizer")
    check_own_tokenizer(sets[0])
    assert verify(tmp_path / "old").manifest.tokenizer.fingerprint == earlier
    other = WRITERS["xlm-roberta"](tmp_path / "other", texts[:5])
    with pytest.raises(UserError, check=coded("another-tokenizer")):
        check_tokenizer(sets, str(other), size)


def test_rows_of_pairs_need_a_tokenizer_with_one_separator(tmp_path: Path, corpus_at: Callable) -> None:
    shard_set = corpus_at(tmp_path / "shards", DOCUMENTS).shard_set
    for kind, write in WRITERS.items():
        folder = str(write(tmp_path / kind, ["the river and a village where masks are sold"] * 9))
        if kind in ("wordpiece", "byte level"):
            check_pairs(shard_set, folder)
        else:
            with pytest.raises(UsageError, match=r"joins two texts by </s> </s>.*data\.sentence_pairs=none"):
                check_pairs(shard_set, folder)


@pytest.mark.long
def test_a_run_on_pairs_is_refused_where_the_tokenizer_writes_other_pairs(small_corpus: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(WRITERS["roberta"](tmp_path / "tokenizer", read_texts(small_corpus)))
    prepared(small_corpus, tokenizer, tmp_path / "shards", "shards.valid_fraction=0.1")
    shard_sets = [open_shard_set(str(tmp_path / "shards"))]
    settings = {"shards": str(tmp_path / "shards"), "sequence_length": 64}
    training = {"micro_batch_tokens": 64, "global_batch_tokens": 64}
    for task, is_refused in (("none", False), ("next_sentence", True)):
        config = tiny_config(
            model={"vocab_size": tokenizer.vocab_size, "max_position_embeddings": 64},
            data={**settings, "sentence_pairs": task},
            training=training,
        )
        with pytest.raises(UsageError, match="joins two texts") if is_refused else nullcontext():
            check_data(config, shard_sets)


def test_a_tokenizer_on_the_hub_is_downloaded_or_answered_with_the_command(
    tmp_path: Path, corpus_at: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one = corpus_at(tmp_path / "one", DOCUMENTS, fingerprint="a" * 64).shard_set
    assert tokenizer_of_run(None, one) == one.tokenizer_folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match=r"hf download someone/tiny --local-dir tiny", check=coded("hub-name-offline")):
        check_tokenizer([one], "someone/tiny", vocab_size=1000)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: f"{tmp_path}/cache/{name}")
    assert tokenizer_of_run("someone/tiny", one) == f"{tmp_path}/cache/someone/tiny"
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    assert tokenizer_of_run("someone/tiny", one) == "someone/tiny"


def test_a_folder_that_is_no_data_set_is_named_by_its_content(tmp_path: Path) -> None:
    with pytest.raises(UsageError, check=coded("missing-path"), match="nowhere does not exist"):
        open_shard_set(str(tmp_path / "nowhere"))
    (tmp_path / "corpus.jsonl.gz").write_bytes(b"")
    for raw, named in ((tmp_path / "corpus.jsonl.gz", "corpus.jsonl.gz"), (tmp_path, "/\\*.jsonl.gz")):
        expected = f"tokenizer --input \\S*{named}.* shards --input \\S*{named}"
        with pytest.raises(UsageError, check=coded("text-instead-of-shards"), match=expected):
            open_shard_set(str(raw))
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(UsageError, check=coded("tokenizer-instead-of-shards"), match=f"data.shards={tmp_path} is"):
        open_shard_set(str(tmp_path))


def test_an_unfinished_preparation_is_no_raw_text(tmp_path: Path) -> None:
    (tmp_path / ".plan.json").touch()
    with pytest.raises(UsageError, check=coded("missing-manifest"), match="clozeworks shards"):
        open_shard_set(str(tmp_path))


def test_ids_beyond_the_models_vocabulary_are_refused(tmp_path: Path, corpus_at: Callable) -> None:
    shard_set = corpus_at(tmp_path, DOCUMENTS).shard_set
    needed = shard_set.manifest.tokenizer.vocab_size
    check_tokenizer([shard_set], None, vocab_size=needed)
    with pytest.raises(UserError, check=coded("vocabulary-too-small"), match=f"={needed - 1} .*={needed}"):
        check_tokenizer([shard_set], None, vocab_size=needed - 1)


def test_a_tokenizer_copy_that_was_replaced_is_refused(tmp_path: Path, small_shards: Path, small_corpus: Path) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(small_shards, shards)
    check_own_tokenizer(open_shard_set(str(shards)))
    shutil.rmtree(shards / "tokenizer")
    trained(read_texts(small_corpus), shards / "tokenizer", vocab_size=700)
    with pytest.raises(UserError, match="tokenizer has fingerprint .* were made with"):
        check_own_tokenizer(open_shard_set(str(shards)))
