"""The commands remove and verify as people use them: what they print, what they refuse, what they leave."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from data_prep import open_dataset
from tests.support.data_prep_command import Command
from tests.support.living_data_sets import document_ids, make_data_set
from tests.support.preparations import read_texts


@pytest.fixture(scope="module")
def original(small_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = read_texts(small_corpus)
    folder = tmp_path_factory.mktemp("remove") / "shards"
    make_data_set(folder, {"north": texts[:120], "south": texts[120:]}, small_tokenizer)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "shards"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_misspelt_folder_is_reported_and_nothing_is_made(command: Command, original: Path, tmp_path: Path) -> None:
    assert command("remove", tmp_path / "nope", "--source", "south") == 2 and str(tmp_path / "nope") in command.errors
    assert command("verify", original / "manifest.json") == 2
    assert str(original) in command.errors
    assert not list(tmp_path.iterdir())


def test_a_note_that_is_not_utf_8_is_refused_before_anything_is_removed(command: Command, folder: Path) -> None:
    before = files(folder)
    assert command("remove", folder, "--source", "south", "--note", "bad\udcff") == 2
    assert r"bad\udcff" in command.errors and files(folder) == before


@pytest.mark.long
def test_a_source_is_removed_and_then_purged(command: Command, folder: Path) -> None:
    before = files(folder)
    assert command("remove", folder, "--source", "south", "--dry-run") == 0
    assert "4 of 4 shards" in command.output and files(folder) == before
    assert command("remove", folder, "--source", "south", "--workers", 1) == 0
    assert "removed source 'south': 80 documents" in command.output and "--purge" in command.output
    assert command("verify", folder, "--workers", 1) == 0
    assert "120 documents" in command.output and "source 'south' (80 documents)" in command.output
    assert "note: " in command.output and "--purge" in command.output
    inputs = folder.parent / "x.jsonl"
    inputs.write_text('{"text": "A text."}\n')
    fresh = ("--input", inputs, "--tokenizer", folder / "tokenizer", "--output", folder, "--fresh", "--dry-run")
    for name in ("shards", "merge"):
        assert command(name, *fresh) == 1 and "[fresh-would-undo-removals]" in command.errors
    assert command("verify", folder, "--version", "1", "--workers", 1) == 0
    assert "200 documents" in command.output and "version 1" in command.output
    assert command("remove", folder, "--source", "south") == 0
    assert "source 'south'" in command.output and "nothing was done" in command.output
    assert command("remove", folder, "--purge", "--dry-run") == 0
    assert "would delete 10 files" in command.output
    assert command("remove", folder, "--purge") == 0
    assert "deleted 10 files" in command.output
    assert command("verify", folder, "--workers", 1) == 0 and "note:" not in command.output
    assert command("verify", folder, "--version", "1") == 2
    assert "version 1" in command.errors and "2 (" in command.errors
    assert not set(before) & {name for name in files(folder) if name.endswith(".tar")}


def test_documents_are_removed_by_a_file_of_ids(command: Command, folder: Path, tmp_path: Path) -> None:
    ids = document_ids(folder, "north")[:3]
    listed = tmp_path / "ids.txt"
    listed.write_text("# asked for\n" + "".join(f"{document:016x}\n" for document in ids))
    assert command("remove", folder, "--documents", listed, "--purge", "--workers", 1) == 0
    assert "removed 3 documents" in command.output and "deleted" in command.output
    assert not set(ids) & set(document_ids(folder))
    assert command("inspect", folder, "--document", f"{ids[0]:016x}") == 2
    assert "[unknown-document]" in command.errors
    assert command("verify", folder, "--workers", 1) == 0
    assert command("remove", folder, "--documents", listed, "--purge") == 0, "and once more"
    assert "3 documents" in command.output and "nothing was done" in command.output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ([], 2, "[missing-argument]"),
        (["--source", "west"], 2, "'north', 'south'"),
        (["--documents", "none.txt"], 2, "[missing-path]"),
        (["--source", "south", "--documents", "x"], 2, "not allowed with argument"),
        (["--source", "north", "--source", "south"], 2, "north and south"),
        (["--source", "south", "--workers", "0"], 2, "[workers-out-of-range]"),
    ],
)
def test_a_refused_removal_changes_no_file(
    command: Command, folder: Path, arguments: list[str], status: int, message: str
) -> None:
    before = files(folder)
    assert command("remove", folder, *arguments) == status
    assert message in command.errors and files(folder) == before
    assert open_dataset(folder).manifest.version == 1


def test_verify_names_every_problem_and_fails(command: Command, folder: Path) -> None:
    (folder / "train-000001.tar").unlink()
    (folder / "valid-000000.index.safetensors").write_bytes(b"")
    assert command("verify", folder, "--workers", 1) == 1
    assert "to make the same bytes elsewhere: clozeworks shards " in command.errors
    assert "2 problems" in command.errors and "[damaged-data-set]" in command.errors
    assert "train-000001.tar" in command.errors and "valid-000000.index.safetensors" in command.errors
