"""Takedown of what is not present: every listed value is remembered, counted, and kept out of later additions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_prep import Dataset, open_dataset, prepare
from tests.support.data_prep_command import Command
from tests.support.kill_points import stopped_after
from tests.support.living_data_sets import file_bytes, problems_of
from tests.support.preparations import Manifest, read_texts

SETTINGS: dict[str, Any] = {
    "documents": {"url_field": "url", "id_field": "id"},
    "shards": {"min_shards": 2, "valid_fraction": 0.2},
}


@pytest.fixture(scope="module")
def texts(small_corpus: Path) -> list[str]:
    return read_texts(small_corpus)


def write(path: Path, texts: list[str], host: str) -> Path:
    """Write documents with URLs https://HOST/NUMBER and ids HOST-NUMBER."""
    lines = [
        {"text": text, "url": f"https://{host}/{number}", "id": f"{host}-{number}"} for number, text in enumerate(texts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def original(texts: list[str], small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    corpus = write(folder / "corpus.jsonl", texts[:60], "a.org")
    prepare(corpus, tokenizer=small_tokenizer, output=folder / "set", config=SETTINGS, num_workers=1)
    return folder / "set"


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "set"))


def add(folder: Path, texts: list[str], host: str) -> Dataset:
    more = write(folder.parent / f"{host}.jsonl", texts, host)
    return prepare(more, add_to=folder, source_name=host, config=SETTINGS, num_workers=1)


def last_removal(folder: Path) -> tuple[int, int, str]:
    removal = open_dataset(folder).manifest.removals[-1]
    return removal.documents, removal.not_present, removal.kind


@pytest.mark.long
@pytest.mark.fault(
    row="66",
    fault="a takedown of URLs and ids that no document has",
    required="remembered; every later addition excludes them",
)
@pytest.mark.parametrize("column", ["url", "id"])
def test_a_value_that_is_not_present_stays_out_of_every_later_addition(
    command: Command, folder: Path, texts: list[str], column: str
) -> None:
    listed = {"url": "https://b.org/3", "id": "b.org-3"}[column]
    found = {"url": "https://a.org/1", "id": "a.org-1"}[column]
    (folder.parent / "list.txt").write_text(f"{listed}\n{found}\n{listed}\n")
    arguments = ("remove", folder, f"--{column}s", folder.parent / "list.txt", "--workers", 1)
    assert command(*arguments, "--purge") == 0, command.errors
    assert f"requested, not present: 1: {listed}\n" in command.output
    assert last_removal(folder) == (1, 1, "URL" if column == "url" else "corpus id")
    assert add(folder, texts[60:80], "b.org").sources["b.org"].dropped == {"removed earlier": 1}
    add(folder, texts[80:90], "c.org")
    assert command("remove", folder, "--purge") == 0
    (folder.parent / "b.org.jsonl").rename(folder.parent / "again.jsonl")
    dataset = prepare(folder.parent / "again.jsonl", add_to=folder, source_name="d", config=SETTINGS, num_workers=1)
    assert dataset.sources["d"].dropped["removed earlier"] == 1, "also after other versions and their deletion"
    assert not {listed, found} & {getattr(document, column) for document in open_dataset(folder)}
    assert problems_of(folder) == []
    assert command("verify", folder, "--workers", 1) == 0 and "1 value requested, not present" in command.output
    assert "1 requested, not present" in (folder / "DATA_CARD.md").read_text()


def test_a_repeated_takedown_does_nothing_and_still_lists_what_is_not_present(command: Command, folder: Path) -> None:
    (folder.parent / "urls.txt").write_text("https://b.org/3\nhttps://a.org/1\n")
    arguments = ("remove", folder, "--urls", folder.parent / "urls.txt", "--workers", 1)
    assert command(*arguments) == 0
    before = file_bytes(folder)
    assert command(*arguments) == 0 and "nothing was done" in command.output
    assert "requested, not present: 1: https://b.org/3\n" in command.output
    assert "removed before: https://a.org/1\n" in command.output and file_bytes(folder) == before
    (folder.parent / "urls.txt").write_text("https://b.org/3\nhttps://b.org/4\n")
    assert command(*arguments) == 0 and last_removal(folder) == (0, 1, "URL"), "only the new one is counted"


@pytest.mark.fault(
    row="66",
    fault="a strict takedown of values that are not present",
    required="everything else is removed; exit status 1",
)
def test_strict_does_the_removal_and_exits_with_1(command: Command, folder: Path) -> None:
    (folder.parent / "urls.txt").write_text("https://a.org/1\nhttps://b.org/3\n")
    arguments = ("remove", folder, "--urls", folder.parent / "urls.txt", "--workers", 1, "--strict")
    before = file_bytes(folder)
    assert command(*arguments, "--dry-run") == 1 and "[not-present]" in command.errors and file_bytes(folder) == before
    assert command(*arguments) == 1 and "[not-present]" in command.errors and "https://b.org/3" in command.errors
    assert last_removal(folder) == (1, 1, "URL")
    assert command(*arguments) == 1, "a repetition says the same"
    (folder.parent / "urls.txt").write_text("https://a.org/1\n")
    assert command(*arguments) == 0, "it was present and was removed"


@pytest.mark.fault(
    row="66",
    fault="a takedown of document ids that no document has",
    required="remembered; every later addition excludes them",
)
def test_document_ids_that_are_not_present_are_kept_out_too(command: Command, folder: Path, texts: list[str]) -> None:
    other = add(Path(shutil.copytree(folder, folder.parent / "other")), texts[60:62], "b.org")
    ids = [str(document.document_id) for document in other if document.source == "b.org"]
    (folder.parent / "documents.txt").write_text("\n".join(ids))
    arguments = ("remove", folder, "--documents", folder.parent / "documents.txt", "--workers", 1)
    assert command(*arguments, "--strict") == 1 and "[not-present]" in command.errors
    assert f"requested, not present: 2: {min(ids)}" in command.output and last_removal(folder) == (0, 2, "document id")
    assert command(*arguments) == 0 and "nothing was done" in command.output
    assert add(folder, texts[60:64], "c.org").sources["c.org"].dropped == {"removed earlier": 2}
    assert problems_of(folder) == []


def test_names_match_as_the_provenance_holds_them(folder: Path, command: Command, texts: list[str]) -> None:
    """White space at the ends of a line of a list does not count."""
    (folder.parent / "urls.txt").write_text("  https://b.org/\ufffd \r\n", encoding="utf-8")
    assert command("remove", folder, "--urls", folder.parent / "urls.txt", "--workers", 1) == 0
    more = folder.parent / "more.jsonl"
    more.write_text(json.dumps({"text": texts[60], "url": "https://b.org/\ufffd"}) + "\n")
    with more.open("a") as file:
        file.write(json.dumps({"text": texts[61], "url": "https://b.org/x"}) + "\n")
    dataset = prepare(more, add_to=folder, source_name="b", config=SETTINGS, num_workers=1)
    assert dataset.sources["b"].dropped == {"removed earlier": 1}


def test_a_takedown_stopped_at_any_write_remembers_absent_values(
    folder: Path, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "urls.txt").write_text("https://b.org/3\n")
    arguments = ("remove", folder, "--urls", tmp_path / "urls.txt", "--workers", 1)
    for num_writes in range(0, 5, 2):
        copy = Path(shutil.copytree(folder, tmp_path / f"copy-{num_writes}"))
        with stopped_after(num_writes):
            assert command(arguments[0], copy, *arguments[2:]) == 130
        assert command(arguments[0], copy, *arguments[2:]) == 0, command.errors
        assert last_removal(copy) == (0, 1, "URL")


def test_a_manifest_without_the_count_keeps_its_digest(folder: Path, command: Command) -> None:
    (folder.parent / "urls.txt").write_text("https://a.org/1\n")
    assert command("remove", folder, "--urls", folder.parent / "urls.txt", "--workers", 1) == 0
    text = (folder / "manifest.json").read_text(encoding="utf-8")
    assert "not_present" not in text and Manifest.model_validate_json(text).to_json() == text
