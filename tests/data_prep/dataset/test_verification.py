"""Verification: a sound set passes, and every kind of damage is found and named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from data_prep import open_dataset
from data_prep.base.errors import UserError
from data_prep.dataset import verification
from data_prep.dataset.data_card import write_data_card
from data_prep.dataset.verification import verify_shards
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.living_data_sets import Record, change_manifest, forge_shard, records_of, remove, write_shard
from tests.support.preparations import read_texts, trained


@pytest.fixture
def folder(small_shards: Path, tmp_path: Path) -> Path:
    """A copy of the small shards that a test may damage."""
    return Path(shutil.copytree(small_shards, tmp_path / "shards"))


def problems(folder: Path) -> str:
    return "\n".join(verify_shards(str(folder))[1])


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    edit(values)
    (folder / "manifest.json").write_text(json.dumps(values))


def test_a_sound_set_has_no_problems(folder: Path) -> None:
    manifest, found = verify_shards(str(folder))
    assert found == [] and manifest.train.documents > 100


@pytest.mark.parametrize("name", ["train-000002.tar", "train-000001.index.safetensors", "token_counts.safetensors"])
@pytest.mark.parametrize("damage", ["flipped", "missing", "truncated"])
def test_damage_to_a_file_is_named(folder: Path, name: str, damage: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 16
    (folder / name).write_bytes(bytes(data if damage == "flipped" else data[: len(data) // 2]))
    if damage == "missing":
        (folder / name).unlink()
    found = problems(folder)
    assert name in found and len(found.splitlines()) == 1


def test_a_shard_with_anothers_content_is_named(folder: Path) -> None:
    shutil.copy(folder / "train-000001.tar", folder / "train-000000.tar")
    assert "train-000000.tar" in problems(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:40_000], "cut off or overwritten"),
        (lambda data: b"x" * len(data), "cut off or overwritten"),
        (lambda data: data[:-9000] + bytes([data[-9000] ^ 1]) + data[-8999:], "this shard with some bytes changed"),
    ],
)
def test_the_kind_of_damage_of_a_shard_is_reported(
    folder: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = folder / "train-000002.tar"
    path.write_bytes(change(path.read_bytes()))
    assert message in problems(folder) and "train-000002.tar" in problems(folder)


def test_a_changed_byte_in_the_ids_of_documents_does_not_make_it_another_shard(folder: Path) -> None:
    path = folder / "train-000002.tar"
    member = next(member for member in tarfile.open(path) if member.name.endswith(".document_ids.npy"))
    data = bytearray(path.read_bytes())
    data[member.offset_data + member.size - 1] ^= 1
    path.write_bytes(data)
    assert "it is this shard with some bytes changed" in problems(folder)


def test_a_shard_of_another_data_set_is_reported(folder: Path, tmp_path: Path) -> None:
    records = records_of(folder / "train-000000.tar")
    others = [dataclasses.replace(record, document_ids=record.document_ids + np.uint64(1)) for record in records]
    write_shard(str(tmp_path / "other"), "train-000000", others)
    shutil.copy(tmp_path / "other" / "train-000000.tar", folder)
    assert "it is a whole shard of other documents" in problems(folder)


def test_a_shard_of_another_tokenizer_is_reported(folder: Path, tmp_path: Path) -> None:
    records = records_of(folder / "train-000000.tar")
    others = [dataclasses.replace(record, tokens=(record.tokens + 300).astype(np.uint16)) for record in records]
    write_shard(str(tmp_path / "other"), "train-000000", others)
    shutil.copy(tmp_path / "other" / "train-000000.tar", folder)
    assert "it is a shard of another tokenizer" in problems(folder)


def test_a_foreign_tokenizer_of_the_same_size_is_named(folder: Path, small_corpus: Path) -> None:
    texts = [text[::-1] for text in read_texts(small_corpus)]
    other = trained(texts, folder / "tokenizer", vocab_size=800).fingerprint
    mine = open_dataset(folder).manifest.tokenizer.fingerprint
    assert mine in problems(folder) and other in problems(folder) and mine != other


def test_a_shard_that_the_manifest_does_not_name_is_reported(folder: Path) -> None:
    shutil.copy(folder / "train-000001.tar", folder / "train-000099.tar")
    assert "train-000099.tar is not in the manifest of any version" in problems(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda record: _with(record, tokens=np.where(record.tokens == record.tokens[7], 800, record.tokens)),
            "token ids",
        ),
        (
            lambda record: _with(record, tokens=np.where(record.tokens == record.tokens[7], 4, record.tokens)),
            "token ids",
        ),
        (lambda record: _with(record, tokens=record.tokens.astype(np.uint32)), "tokens of type uint32, not uint16"),
        (lambda record: _with(record, sources=record.sources + np.uint16(1)), "source that the manifest does not name"),
        (lambda record: _with(record, document_ids=record.document_ids * np.uint64(0)), "documents twice"),
    ],
)
def test_wrong_records_are_found_although_the_hashes_agree(
    folder: Path, change: Callable[[Record], Record], message: str
) -> None:
    forge_shard(folder, 0, change)
    assert message in problems(folder)


def test_words_and_bytes_are_those_of_the_text(folder: Path) -> None:
    """Ids of pieces of other lengths, in range: nothing but the counts of text can tell."""

    def swapped(record: Record) -> Record:
        tokens = record.tokens.copy()
        tokens[record.tokens == 270], tokens[record.tokens == 600] = 600, 270
        return dataclasses.replace(record, tokens=tokens)

    forge_shard(folder, 0, swapped)
    found = problems(folder)
    assert re.search(r"has \d+ (words|text_bytes), and the manifest names", found)


def test_duplicates_are_a_problem_only_where_they_were_dropped(folder: Path) -> None:
    forge_shard(folder, 0, lambda record: _with(record, document_ids=record.document_ids * np.uint64(0)))
    assert "documents twice" in problems(folder)
    edit_manifest(folder, lambda values: values["config"]["deduplication"].__setitem__("exact", False))
    assert "documents twice" not in problems(folder)


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_removed_document_that_is_still_there_is_named(folder: Path, version: str) -> None:
    first = open_dataset(folder).manifest
    record, *_ = records_of(folder / "train-000001.tar")
    ids = np.sort(record.document_ids[:2])
    remove(folder, ids=ids)
    assert verify_shards(str(folder), version=version)[1] == []
    back = {name: first.model_dump(mode="json")[name] for name in ("train", "valid", "sources", "token_counts")}
    edit_manifest(folder, lambda values: values.update(back))
    found = problems(folder)
    assert f"train-000001.tar holds 2 removed documents: {int(ids[0]):016x}, {int(ids[1]):016x}" in found
    assert re.search("0 removed documents.* 2$", found, re.MULTILINE)


def test_documents_of_a_removed_source_are_named(folder: Path) -> None:
    removal = {"version": 1, "source": "corpus", "ids": None, "documents": 0, "tokens": 0}
    edit_manifest(folder, lambda values: values["removals"].append(removal))
    assert "documents of the removed source 'corpus'" in problems(folder)


def test_files_of_removed_ids_are_checked(folder: Path) -> None:
    record, *_ = records_of(folder / "train-000001.tar")
    remove(folder, ids=record.document_ids[:2])
    path = folder / "removed-000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert "removed-000002.safetensors has other content" in problems(folder)
    path.unlink()
    assert "removed-000002.safetensors is missing" in problems(folder)


def test_an_edited_older_manifest_is_named(folder: Path) -> None:
    record, *_ = records_of(folder / "train-000001.tar")
    remove(folder, ids=record.document_ids[:2])
    path = folder / "manifest-000001.json"
    path.write_text(path.read_text().replace('"corpus"', '"corpse"'))
    assert "the manifest of version 1" in problems(folder)


def test_an_edit_that_changes_no_count_is_found(folder: Path) -> None:
    edit_manifest(folder, lambda values: values["sources"][0].__setitem__("license", "CC0-1.0"))
    found = problems(folder)
    assert "manifest.json was edited" in found
    assert "DATA_CARD.md does not name the digest" in found
    change_manifest(folder)  # as if we had written it
    assert "manifest.json was edited" not in problems(folder)
    assert "DATA_CARD.md does not name the digest" in problems(folder)
    write_data_card(str(folder), open_dataset(folder).manifest)
    assert problems(folder) == ""


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text.replace("| not stated |", "| CC0-1.0 |"), r"line \d+ is .*CC0-1.0"),
        (lambda text: text + "One line more.\n", r"line \d+ is 'One line more.', and the manifest gives ''"),
        (lambda text: text + "\n", r"line \d+ is '', and the manifest has no such line"),
        (lambda text: text[: len(text) // 2], r"line \d+ is"),
        (lambda text: text.replace("\n", "\r\n"), "does not name the digest"),
        (lambda text: "", "does not name the digest"),
    ],
)
def test_an_edited_card_is_named_and_can_be_rewritten(folder: Path, edit: Callable[[str], str], message: str) -> None:
    path = folder / "DATA_CARD.md"
    whole = path.read_bytes()
    path.write_bytes(edit(whole.decode()).encode())
    assert re.search(rf"DATA_CARD\.md .*{message}", problems(folder)) and len(problems(folder).splitlines()) == 1
    path.unlink()
    assert "DATA_CARD.md is missing" in problems(folder)
    write_data_card(str(folder), open_dataset(folder).manifest)
    assert path.read_bytes() == whole and problems(folder) == ""


def test_of_a_card_that_another_version_wrote_the_digest_is_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "DATA_CARD.md"
    path.write_text(path.read_text().replace("## Format", "## The format"))
    assert "'## The format'" in problems(folder)
    monkeypatch.setattr(verification, "own_version", lambda: "9.9")
    assert problems(folder) == ""
    path.write_text(path.read_text().replace(open_dataset(folder).manifest.digest, "0" * 64))
    assert "does not name the digest" in problems(folder)


def test_files_of_unfinished_work_are_no_problem(folder: Path) -> None:
    shutil.copy(folder / "train-000001.tar", folder / "train-000099.tar")
    (folder / ".removal").mkdir()
    assert problems(folder) == ""


def test_a_remote_set_is_checked_and_leaves_no_copies(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    for path in (path for path in folder.rglob("*") if path.is_file()):
        memory.pipe_file(f"/verified-set/{path.relative_to(folder)}", path.read_bytes())
    assert verify_shards("memory://verified-set")[1] == []
    assert not list((tmp_path / "cache").rglob("*.tar"))
    data = bytearray((folder / "train-000002.tar").read_bytes())
    data[9000] ^= 1
    memory.pipe_file("/verified-set/train-000002.tar", bytes(data))
    memory.rm("/verified-set/valid-000000.tar")
    found = "\n".join(verify_shards("memory://verified-set")[1])
    assert "train-000002.tar is damaged" in found and "valid-000000.tar is missing" in found


def _with(record: Record, **changes: np.ndarray) -> Record:
    values = {**record.__dict__, **changes}
    if values["tokens"].dtype != np.uint32:
        values["tokens"] = values["tokens"].astype(np.uint16)
    return Record(**values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: values["valid"].__setitem__("unigram_entropy_nats", 1.0), "unigram entropy of valid"),
        (lambda values: values["sources"][0].__setitem__("documents", 1), "source corpus has"),
        (lambda values: values["train"]["shards"][1].__setitem__("min_document_tokens", 1), "shortest document"),
    ],
)
def test_a_manifest_edited_by_hand_is_found(folder: Path, edit: Callable[[dict[str, Any]], None], message: str) -> None:
    edit_manifest(folder, edit)
    assert message in problems(folder)


def test_files_outside_the_tokenizers_folder_are_not_read(folder: Path) -> None:
    path = folder / "tokenizer" / "tokenizer_info.json"
    values = json.loads(path.read_text())
    values["files"]["../manifest.json"] = "0" * 64
    path.write_text(json.dumps(values))
    found = problems(folder)
    assert "tokenizer_info.json is damaged" in found
    assert hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest() not in found


def test_a_manifest_without_shards_does_not_add_up(folder: Path) -> None:
    nothing = {"shards": [], "documents": 0, "sentences": 0, "tokens": 0, "unigram_entropy_nats": None}
    edit_manifest(folder, lambda values: values.update(train=nothing, valid=nothing))
    found = problems(folder)
    assert "source corpus has 0 documents, and the manifest names 200" in found
    assert "train-000000.tar is not in the manifest of any version" in found


def test_a_folder_without_a_manifest_is_no_shard_set(folder: Path) -> None:
    storage.remove(folder / "manifest.json")
    with pytest.raises(UserError, match="manifest.json", check=coded("missing-manifest")):
        verify_shards(str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "format version None"),
        ('{"format_version": 3}', "format version 3"),
        ('{"format_version": 2}', r"is damaged \(clozeworks_version: Field required\)"),
    ],
)
def test_an_invalid_manifest_is_reported(folder: Path, text: str, message: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message):
        verify_shards(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "tokenizer_report.json"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damage_to_a_file_of_the_tokenizer_is_named(folder: Path, name: str, damage: str) -> None:
    path = folder / "tokenizer" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    if damage == "missing":
        path.unlink()
    found = problems(folder)
    assert str(path) in found and found.count("\n") == 0


def test_a_flipped_byte_of_a_token_makes_no_shard_of_another_tokenizer(folder: Path) -> None:
    path = folder / "train-000000.tar"
    data = bytearray(path.read_bytes())
    offset = data.index(records_of(path)[0].tokens.tobytes())
    data[offset + 101] = 0xFF  # the high byte of a token: an id that the vocabulary has not
    path.write_bytes(bytes(data))
    assert "it is this shard with some bytes changed" in problems(folder)
