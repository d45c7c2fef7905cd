"""What `inspect` shows: the text of the corpus, where it lies and where it came from."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep import Tokenizer, open_dataset
from data_prep.base.errors import UsageError
from data_prep.dataset.shard_documents import ShardDocuments
from data_prep.reports.inspection import document_report, inspect_report, parse_document_id
from tests.support.error_codes import coded
from tests.support.hostile_shards import NAMES, write_hostile_shards
from tests.support.living_data_sets import Record, remove, write_data_set
from tests.support.preparations import id_of, normalized, read_texts


@pytest.fixture(scope="module")
def folder(small_tokenizer: Path, small_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "set"
    write_hostile_shards(folder, small_corpus, small_tokenizer)
    return folder


def shown_text(lines: list[str]) -> str:
    return " ".join(line.removeprefix("  | ") for line in lines if line.startswith("  | "))


def test_a_document_is_shown_whole_with_its_source_by_the_hash_of_its_text(folder: Path, small_corpus: Path) -> None:
    texts = read_texts(small_corpus)
    longest = max(texts[150:], key=len)
    cleaned = normalized(longest)
    lines = list(document_report(str(folder), id_of(longest)))
    assert shown_text(lines) == cleaned.strip()
    assert sum(line.startswith("  | ") for line in lines) > 12
    assert f"document id   {id_of(longest):016x}" in lines
    assert any(line.startswith("source        $\\frac{$ \\u202e\\x1b[31m") for line in lines)
    assert "license       CC0-1.0" in lines and "language      fr" in lines and "source url    -" in lines
    assert not any(NAMES[2] in line or "\x1b" in line for line in lines)


def test_all_pieces_of_a_split_document_are_shown_in_order(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder / "tokenizer")
    pieces = [tokenizer.encode(text) for text in (" The first piece.", " The second piece.", " Another text.")]
    ids = np.array([7, 7, 8], np.uint64)
    starts = np.cumsum([0, *map(len, pieces)])[:3].astype(np.uint32)
    record = Record(np.concatenate(pieces), starts, starts, np.array([1, 1, 0], np.uint16), ids)
    like = open_dataset(folder).manifest
    write_data_set(tmp_path, {"train": [[record]]}, tokenizer=like.tokenizer, sources=like.sources)
    (tmp_path / "tokenizer").symlink_to(folder / "tokenizer")
    lines = list(document_report(str(tmp_path), 7))
    assert shown_text(lines) == "The first piece. The second piece."
    assert [line for line in lines if line.startswith("---")] == [
        f"--- {number} of 2 pieces or copies with this id" for number in (1, 2)
    ]
    assert sum(line.startswith("source        <script>") for line in lines) == 2
    with pytest.raises(UsageError, check=coded("empty-split")):
        list(inspect_report(str(tmp_path), "valid", 0, 1))


def test_documents_of_a_shard_are_shown_from_any_place(folder: Path) -> None:
    lines = list(inspect_report(str(folder), "train", 1, 6))
    heads = [line for line in lines if line.startswith("===")]
    assert len(heads) == 6 and all(" train-000001.tar record 000001-0000" in head for head in heads)
    later = [line for line in inspect_report(str(folder), "train", 1, 3, 2) if line.startswith("===")]
    assert later == heads[2:5]
    (shard,) = open_dataset(folder).manifest.valid.shards
    last = [line for line in inspect_report(str(folder), "valid", 0, 9, shard.documents - 1) if line.startswith("===")]
    assert len(last) == 1
    with pytest.raises(UsageError, match=f"{shard.documents}", check=coded("skip-out-of-range")):
        list(inspect_report(str(folder), "valid", 0, 1, shard.documents))
    for number in (3, -1):
        with pytest.raises(UsageError, match="0 to 2", check=coded("unknown-shard")):
            list(inspect_report(str(folder), "train", number, 1))


def test_the_first_shard_is_shown_after_a_removal_rewrote_shards(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "set")
    manifest = open_dataset(folder).manifest
    first = ShardDocuments(str(folder), manifest, "train", manifest.train.shards[0]).location(0)
    remove(tmp_path / "set", ids=[first.document_id])
    assert open_dataset(tmp_path / "set").manifest.train.shards[0].name == "train-000003.tar"
    heads = [line for line in inspect_report(str(tmp_path / "set"), "train", None, 1) if line.startswith("===")]
    assert heads[0].startswith("=== train-000001.tar")
    with pytest.raises(UsageError, match="1 to 3", check=coded("unknown-shard")):
        list(inspect_report(str(tmp_path / "set"), "train", 0, 1))


@pytest.mark.parametrize(("text", "number"), [("00000000000000fF", 255), ("f" * 16, 2**64 - 1)])
def test_an_id_is_hexadecimal(text: str, number: int) -> None:
    assert parse_document_id(text) == number


@pytest.mark.parametrize("text", ["", "xyz", "f" * 17, "-1", "12 ", "b3", "f" * 15, "0x" + "f" * 14, "f" * 16 + "\n"])
def test_an_invalid_document_id_is_refused(text: str) -> None:
    with pytest.raises(UsageError, check=coded("malformed-document-id")):
        parse_document_id(text)
