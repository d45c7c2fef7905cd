"""Near-duplicates and additions through the whole of preparation: what is left out, where, and for which reason."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from data_prep import Tokenizer, open_dataset
from data_prep.base.errors import UsageError, UserError
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.kill_points import stopped_after
from tests.support.living_data_sets import records_of
from tests.support.preparations import Manifest, id_of, planned, prepared, write_texts

WORDS = (
    "river village teacher engine letter garden winter morning harbour library machine question answer mountain "
    "student doctor kitchen window painting journey market theory number method experiment language history forest"
).split()
OVERRIDES = [
    "deduplication.threshold=0.6",
    "shards.min_shards=2",
    "shards.valid_fraction=0.2",
    "shards.unit_bytes=20000",
]


def texts(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=120)) + "." for _ in range(count)]


def nearly(text: str) -> str:
    words = text.split()
    words[60] = "elsewhere"
    return " ".join(words)


def make(
    sources: dict[str, Path], tokenizer: Tokenizer, folder: Path, near: bool = False, add: bool = False
) -> Manifest:
    return prepared(sources, tokenizer, folder, *OVERRIDES, f"deduplication.near={str(near).lower()}", add=add)


def add(sources: dict[str, Path], tokenizer: Tokenizer, folder: Path, near: bool = False) -> Manifest:
    return make(sources, tokenizer, folder, near, add=True)


def contents(folder: Path, tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Every document and its source's number, from all shards that the current manifest names."""
    found = []
    for shard in open_dataset(folder).manifest.shards:
        for record in records_of(folder / shard.name):
            documents = np.split(record.tokens, record.documents[1:].astype(np.int64))
            found += zip(map(tokenizer.decode, documents), record.sources.tolist(), strict=True)
    return sorted(found)


def test_near_duplicates_are_dropped_and_counted_and_the_first_is_kept(tokenizer: Tokenizer, tmp_path: Path) -> None:
    originals = texts(40, 1)
    first = write_texts(tmp_path / "z.jsonl", originals)
    second = write_texts(tmp_path / "a.jsonl", [*map(nearly, originals[:10]), *texts(5, 2), originals[0]])
    manifest = make({"one": first, "two": second}, tokenizer, tmp_path / "out", near=True)
    assert manifest.dropped == {"duplicate": 1, "near duplicate": 10}
    kept = [(" " + text, 0) for text in originals] + [(" " + text, 1) for text in texts(5, 2)]
    assert contents(tmp_path / "out", tokenizer) == sorted(kept)
    steps = [(step.name, step.documents_in, step.documents_out) for step in manifest.steps[2:4]]
    assert steps == [("deduplication", 56, 55), ("near duplicates", 55, 45)]


@pytest.mark.parametrize(("shared_words", "is_warned_of"), [(110, True), (60, False)])
def test_a_source_lost_to_a_chain_of_similar_documents_gives_a_warning(
    shared_words: int, is_warned_of: bool, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each document shares most of its words with the next, and none with the one after many."""
    generator = random.Random(3)
    words = generator.choices(WORDS, k=120 + 29 * (120 - shared_words))
    starts = range(0, 30 * (120 - shared_words), 120 - shared_words)
    chain = [" ".join(words[start : start + 120]) + "." for start in starts]
    sources = {
        "chain": write_texts(tmp_path / "chain.jsonl", chain),
        "rest": write_texts(tmp_path / "rest.jsonl", texts(20, 4)),
    }
    manifest = make(sources, tokenizer, tmp_path / "out", near=True)
    assert (manifest.sources[0].dropped == {"near duplicate": 29}) == is_warned_of
    warned = "warning: source chain: 29 of its 30 documents were dropped as near-duplicates" in capsys.readouterr().err
    assert warned == is_warned_of and manifest.sources[1].dropped == {}


def test_where_all_held_out_documents_are_near_duplicates_another_is_held_out(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A corpus of near-copies of one text: all but the first are left out, wherever their hashes fall."""
    text = texts(1, 3)[0]
    copies = [text, *(text.replace("river", f"river{number}", 1) for number in range(12)), *texts(2, 4)]
    manifest = make({"one": write_texts(tmp_path / "a.jsonl", copies)}, tokenizer, tmp_path / "out", near=True)
    assert manifest.train.documents + manifest.valid.documents == 3
    assert manifest.train.documents >= 1 and manifest.valid.documents >= 1
    assert all(shard.documents for shard in manifest.shards)
    listed = {name for shard in manifest.shards for name in (shard.name, shard.index.name)}
    assert listed == {path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(("train", "valid"))}


def test_a_held_out_near_duplicate_is_counted(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 13 documents the hash of one alone says valid, and that one is a near-copy of another."""

    def is_held_out(text: str) -> bool:
        return id_of(text) >> 32 < 0.2 * 2**32

    originals = [text for text in texts(40, 5) if not is_held_out(text)][:12]
    variants = (originals[0].replace(" ", f" {number} ", 1) for number in range(100))
    copy = next(text for text in variants if is_held_out(text))
    corpus = write_texts(tmp_path / "a.jsonl", [*originals, copy])
    manifest = make({"one": corpus}, tokenizer, tmp_path / "out", near=True)
    assert (manifest.train.documents, manifest.valid.documents) == (11, 1)
    assert manifest.dropped == {"near duplicate": 1}
    assert contents(tmp_path / "out", tokenizer) == sorted((" " + text, 0) for text in originals)
    assert (
        "note: no document of the validation split is left (1 of 13, all left out as duplicates)"
        in capsys.readouterr().err
    )


def test_an_addition_holds_only_new_documents_in_new_shards(tokenizer: Tokenizer, tmp_path: Path) -> None:
    old, new = texts(40, 5), texts(20, 6)
    folder = tmp_path / "set"
    before = make({"old": write_texts(tmp_path / "old.jsonl", old)}, tokenizer, folder)
    bytes_before = {path.name: path.read_bytes() for path in folder.glob("*-0*") if path.is_file()}
    added = write_texts(tmp_path / "new.jsonl", [*old[:7], *new, new[0]])
    after = add({"new": added}, tokenizer, folder)
    assert after.dropped == {"duplicate": 1, "in the data set already": 7}
    assert (after.version, after.parent) == (2, before.digest)
    assert [source.name for source in after.sources] == ["old", "new"] and after.sources[1].documents == 20
    assert contents(folder, tokenizer) == sorted([(" " + text, 0) for text in old] + [(" " + text, 1) for text in new])
    assert {name: (folder / name).read_bytes() for name in bytes_before} == bytes_before
    assert not (folder / ".work").exists()
    together = {"old": tmp_path / "old.jsonl", "new": added}
    whole = make(together, tokenizer, tmp_path / "whole")
    splits = [(split.documents, split.tokens) for split in (after.train, after.valid)]
    assert splits == [(split.documents, split.tokens) for split in (whole.train, whole.valid)]


def test_near_copies_of_the_data_set_are_left_out_of_an_addition(tokenizer: Tokenizer, tmp_path: Path) -> None:
    old, new = texts(30, 7), texts(10, 8)
    folder = tmp_path / "set"
    make({"old": write_texts(tmp_path / "old.jsonl", old)}, tokenizer, folder)
    added = write_texts(tmp_path / "new.jsonl", [*map(nearly, old[:6]), *old[10:12], *new])
    after = add({"new": added}, tokenizer, folder, near=True)
    assert after.dropped == {"near duplicate": 6, "in the data set already": 2}
    assert contents(folder, tokenizer) == sorted([(" " + text, 0) for text in old] + [(" " + text, 1) for text in new])


def test_the_same_addition_again_is_complete_and_another_of_its_name_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    make({"old": write_texts(tmp_path / "old.jsonl", texts(30, 9))}, tokenizer, folder)
    added = write_texts(tmp_path / "new.jsonl", texts(9, 10))
    add({"new": added}, tokenizer, folder)
    current = open_dataset(folder).manifest
    before = files_of(folder)
    assert add({"new": added}, tokenizer, folder) == current
    with pytest.raises(UsageError, match="'old'", check=coded("source-name-taken")):
        add({"old": added}, tokenizer, folder)
    write_texts(added, texts(9, 11))
    with pytest.raises(UserError, match=r"new\.jsonl.*8501", check=coded("other-preparation")):
        add({"new": added}, tokenizer, folder)
    assert make({"old": tmp_path / "old.jsonl"}, tokenizer, folder) == current
    assert files_of(folder) == before


def test_an_addition_of_another_tokenizer_or_split_is_refused(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "set"
    parent = make({"old": write_texts(tmp_path / "old.jsonl", texts(30, 12))}, tokenizer, folder)
    added = write_texts(tmp_path / "new.jsonl", texts(9, 13))
    with pytest.raises(UsageError, match="valid_fraction=0.3.*0.2", check=coded("other-valid-fraction")):
        planned({"new": added}, tokenizer, *OVERRIDES, "shards.valid_fraction=0.3", parent=parent)
    monkeypatch.setattr(tokenizer, "fingerprint", "f" * 64)
    with pytest.raises(UserError, match=f"f{{64}}.*{parent.tokenizer.fingerprint}", check=coded("other-tokenizer")):
        planned({"new": added}, tokenizer, *OVERRIDES, parent=parent)


@pytest.mark.parametrize("file", ["known-*", "exclusions*", "train-*.tar", "*.done.json", "token_counts*", "manifest*"])
def test_a_stopped_addition_goes_on_to_the_same_bytes(file: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    old, added = write_texts(tmp_path / "old.jsonl", texts(30, 14)), write_texts(tmp_path / "new.jsonl", texts(12, 15))
    made = []
    for name in ("whole", "stopped"):
        folder = tmp_path / name
        make({"old": old}, tokenizer, folder)
        if name == "stopped":
            with pytest.raises(KeyboardInterrupt), stopped_after(0, file):
                add({"new": added}, tokenizer, folder)
            assert open_dataset(folder).manifest.version == 1
        add({"new": added}, tokenizer, folder)
        made.append({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})
    assert made[0] == made[1]


def test_an_addition_without_new_documents_is_a_version_of_the_same_shards(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "set"
    old = texts(30, 16)
    before = make({"old": write_texts(tmp_path / "old.jsonl", old)}, tokenizer, folder)
    after = add({"copies": write_texts(tmp_path / "copies.jsonl", old[:5])}, tokenizer, folder)
    assert after.shards == before.shards and after.dropped == {"in the data set already": 5}
    assert {path.name for path in folder.glob("*.tar")} == {shard.name for shard in before.shards}
