"""Verification: a sound set passes, and every kind of damage is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import storage
from data_prep.errors import UserError
from data_prep.manifest import read_manifest
from data_prep.shards import Record, read_records, write_shard
from data_prep.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from data_prep.verify import verify_shards


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


def forge_shard(folder: Path, change: Callable[[Record], Record]) -> None:
    """Write the first train shard anew from changed records, with a manifest that vouches for it."""
    records = [change(record) for _, record, _ in list(read_records(folder / "train-000000.tar"))]
    shard = write_shard(str(folder), "train-000000", records)
    edit_manifest(folder, lambda values: values["train"]["shards"].__setitem__(0, shard.model_dump(mode="json")))


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


def test_a_foreign_tokenizer_of_the_same_size_is_named(folder: Path, small_corpus: Path) -> None:
    texts = [json.loads(line)["text"][::-1] for line in small_corpus.read_text(encoding="utf-8").splitlines()]
    train_tokenizer(texts, folder / "tokenizer", TokenizerSettings(vocab_size=800))
    mine = read_manifest(str(folder)).tokenizer.fingerprint
    other = Tokenizer.load(folder / "tokenizer").fingerprint
    assert mine in problems(folder) and other in problems(folder) and mine != other


def test_a_shard_that_the_manifest_does_not_name_is_reported(folder: Path) -> None:
    shutil.copy(folder / "train-000001.tar", folder / "train-000099.tar")
    assert "train-000099.tar is not in the manifest" in problems(folder)


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
        (
            lambda record: _with(record, tokens=record.tokens.astype(np.uint32)),
            "tokens of type uint32, not uint16",
        ),
        (
            lambda record: _with(record, sources=record.sources + np.uint16(1)),
            "source that the manifest does not name",
        ),
        (lambda record: _with(record, document_ids=record.document_ids * np.uint64(0)), "documents twice"),
    ],
)
def test_shards_that_lie_are_found_though_their_hashes_agree(
    folder: Path, change: Callable[[Record], Record], message: str
) -> None:
    forge_shard(folder, change)
    assert message in problems(folder)


def _with(record: Record, **changes: np.ndarray) -> Record:
    values = {**record.__dict__, **changes}
    if values["tokens"].dtype != np.uint32:
        values["tokens"] = values["tokens"].astype(np.uint16)
    return Record(**values)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: values["train"].__setitem__("tokens", 5), "the manifest counts 5 train tokens"),
        (lambda values: values["valid"].__setitem__("unigram_entropy_nats", 1.0), "unigram entropy of valid"),
        (lambda values: values["sources"][0].__setitem__("documents", 1), "source corpus has"),
        (
            lambda values: values["train"]["shards"][1].__setitem__("min_document_tokens", 1),
            "shortest document",
        ),
    ],
)
def test_a_manifest_edited_by_hand_is_found(folder: Path, edit: Callable[[dict[str, Any]], None], message: str) -> None:
    edit_manifest(folder, edit)
    assert message in problems(folder)


def test_a_folder_without_a_manifest_is_no_shard_set(folder: Path) -> None:
    storage.remove(folder / "manifest.json")
    with pytest.raises(UserError, match="no manifest.json, so it is no complete shard set"):
        verify_shards(str(folder))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "format version None"),
        ('{"format_version": 2}', "format version 2"),
        ('{"format_version": 1}', "is damaged at"),
    ],
)
def test_a_manifest_that_is_none_is_named(folder: Path, text: str, message: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=message):
        verify_shards(str(folder))
