"""A damaged data set: noticed by size, and made again in another folder with the command that `verify` prints."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_prep import Document, Tokenizer, UserError, prepare
from data_prep.dataset.rebuild_command import how_to_rebuild
from tests.support.data_prep_command import Command, files_of
from tests.support.error_codes import coded
from tests.support.preparations import prepared, read_texts, trained, write_texts

SHARDS = ["shards.min_shards=3", "shards.valid_fraction=0.1", "shards.unit_bytes=30000"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def printed_command(command: Command, folder: Path) -> list[str]:
    """The words of the command that `verify` prints for a damaged data set."""
    assert command("verify", folder, "--workers", 1) == 1
    (line,) = [line for line in command.errors.splitlines() if "clozeworks shards --" in line or "sources=" in line]
    program, *words = shlex.split(line.partition(": ")[2])
    assert program == "clozeworks"
    return words


@pytest.mark.fault(row=58, fault="a finished set has a damaged shard", required="it is reported")
def test_a_finished_set_with_a_file_cut_or_gone_is_not_called_complete(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    prepared(small_corpus, tokenizer, output, *SHARDS)
    (output / "train-000001.tar").write_bytes((output / "train-000001.tar").read_bytes()[:-512])
    (output / "valid-000000.index.safetensors").unlink()
    with pytest.raises(UserError, check=coded("damaged-data-set")) as refused:
        prepared(small_corpus, tokenizer, output, *SHARDS)
    message = str(refused.value)
    assert "train-000001.tar has " in message and "valid-000000.index.safetensors is missing" in message
    assert "another --output" in message and "train-000000" not in message


@pytest.mark.fault(row=58, fault="a shard has a flipped byte", required="a command makes the same bytes elsewhere")
@pytest.mark.parametrize("of", ["files", "one_named_source", "everything"])
def test_the_printed_command_makes_the_same_bytes_in_another_folder(
    of: str, small_corpus: Path, small_tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    """Also of names with spaces and quotes, numbers as texts, and settings of every section."""
    folder, inputs = tmp_path / "it's a set", tmp_path / "in puts"
    inputs.mkdir()
    texts = read_texts(small_corpus)
    lines = [json.dumps({"text": text, "n": number}) + "\n" for number, text in enumerate(texts)]
    one, two = inputs / "o'ne.jsonl", inputs / "two #2.jsonl"
    one.write_text("".join(lines[:120]), encoding="utf-8")
    two.write_text("".join(lines[80:]), encoding="utf-8")
    config = tmp_path / "settings.yaml"
    settings: dict[str, Any] = {
        "sources": [
            {"name": "one", "input": str(one), "license": "CC0: free # really", "date": "2026-05-01", "weight": 2.0},
            {"name": "1e3", "input": [str(two)], "url": "https://example.org/two", "weight": 1.0},
        ],
        "documents": {
            "language": "no",
            "min_document_characters": 150,
            "filters": [{"name": "metadata", "keep": "n >= 7"}],
            "metadata_fields": ["n"],
            "txt_documents": "blank_lines",
        },
        "deduplication": {"near": True, "threshold": 0.7},
        "shards": {"min_shards": 3, "valid_fraction": 0.1, "seed": 7},
        "total_tokens": 10_000,
    }
    config.write_text(yaml.safe_dump(settings), encoding="utf-8")
    arguments = {
        "files": ["--input", one, two, *SHARDS],
        "one_named_source": ["--input", one, "--source-name", "a name", *SHARDS],
        "everything": ["--config", config],
    }
    words = ["shards", *arguments[of], "--tokenizer", small_tokenizer, "--output", folder, "--workers", 1]
    assert command(*words) == 0, command.errors
    whole = files_of(folder)
    flip(folder / "train-000001.tar")
    again = printed_command(command, folder)
    assert command(*again, "--workers", 1) == 0, command.errors
    assert files_of(tmp_path / "it's a set-rebuilt") == whole
    (tmp_path / "it's a set-rebuilt" / "train-000001.tar").replace(folder / "train-000001.tar")
    assert command("verify", folder, "--workers", 1) == 0


def test_functions_of_the_python_api_are_no_command(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    too_short: Callable[[Document], str | None] = lambda document: "short" if len(document.text) < 50 else None  # noqa: E731
    prepare(small_corpus, tokenizer=small_tokenizer, output=tmp_path / "out", filters=[too_short], num_workers=1)
    flip(next((tmp_path / "out").glob("train-*.tar")))
    assert command("verify", tmp_path / "out", "--workers", 1) == 1
    assert (
        "the command or call that made it, with another output" in command.errors
        and "clozeworks shards" not in command.errors
    )


@pytest.mark.parametrize(
    ("folder", "tokenizer", "output"),
    [
        ("/data/set", "/data/set/tokenizer", "/data/set-rebuilt"),
        ("/", "/tokenizer", "DIR"),
        ("s3://bucket/sets/a/", "s3://bucket/sets/a/tokenizer", "s3://bucket/sets/a-rebuilt"),
        ("s3://bucket", "s3://bucket/tokenizer", "DIR"),
        ("sftp://user:pw@host/set", "sftp://host/set/tokenizer", "sftp://host/set-rebuilt"),
        ("sftp://user:pw@host", "sftp://host/tokenizer", "DIR"),
        ("https://host/set", "https://host/set/tokenizer", "DIR"),
        ("https://host/set?sig=secret", "https://host/set/tokenizer", "DIR"),
    ],
)
def test_the_printed_addresses_have_no_login_and_can_be_written(
    folder: str, tokenizer: str, output: str, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    (command,) = how_to_rebuild(folder, prepared(small_corpus, small_tokenizer, tmp_path / "out", *SHARDS))
    assert shlex.split(command)[-4:] == ["--tokenizer", tokenizer, "--output", output]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("corpus", ["documents=x/a.jsonl"]),
        ("corpus", ["corpus.v=2/a.jsonl"]),
        ("corpus", ["-a.jsonl"]),
        ("-name", ["a.jsonl"]),
    ],
)
def test_inputs_that_a_command_takes_for_something_else_are_a_setting(
    name: str,
    files: list[str],
    tmp_path: Path,
    small_tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    """Here in the form of patterns, because an existing file is never an override."""
    monkeypatch.chdir(tmp_path)
    for number, file in enumerate(files):
        Path(file).parent.mkdir(exist_ok=True)
        write_texts(tmp_path / file, [f"Text {number}.{index}, with some words in it." for index in range(40)])
    inputs = {name: [file.replace("a.", "?.") for file in files]}
    prepared(inputs, small_tokenizer, tmp_path / "out", *SHARDS)
    whole = files_of(tmp_path / "out")
    flip(next((tmp_path / "out").glob("train-*.tar")))
    again = printed_command(command, tmp_path / "out")
    assert command(*again, "--workers", 1) == 0, command.errors
    assert files_of(tmp_path / "out-rebuilt") == whole


def test_another_tokenizer_is_no_part_of_the_command(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    folder = tmp_path / "out"
    manifest = prepared(small_corpus, small_tokenizer, folder, *SHARDS)
    shutil.rmtree(folder / "tokenizer")
    trained(read_texts(small_corpus), folder / "tokenizer", vocab_size=700)
    assert command("verify", folder, "--workers", 1) == 1
    assert "clozeworks shards" not in command.errors, "a copy of the tokenizer is enough"
    (folder / "train-000001.tar").unlink()
    words = printed_command(command, folder)
    assert manifest.tokenizer.fingerprint in words[words.index("--tokenizer") + 1]
    assert str(folder / "tokenizer") not in words


def test_a_changed_data_card_or_a_stray_file_needs_no_command(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    prepared(small_corpus, small_tokenizer, tmp_path / "out", *SHARDS)
    card = tmp_path / "out" / "DATA_CARD.md"
    card.write_text(card.read_text(encoding="utf-8") + "More.\n", encoding="utf-8")
    shutil.copy(tmp_path / "out" / "train-000001.tar", tmp_path / "out" / "train-000099.tar")
    assert command("verify", tmp_path / "out", "--workers", 1) == 1
    assert "--write-card" in command.errors and "same bytes elsewhere" not in command.errors


@pytest.mark.parametrize(
    "change",
    [
        {"documents": None},
        {"documents": {"filters": [{"name": "my:own"}]}},
        {"documents": {"filters": None}},
        {"documents": {"filters": ["language"]}, "safeguards": {"filters": ["language"]}},
        {"documents": {"formats": [1]}},
        {"documents": {"formats": {".x": 1}}},
        {"safeguards": None},
        {"safeguards": {"filters": None}},
        {"shards": {"unknown": 1}},
        {"sources": [{"name": "a", "input": 3}]},
        {"sources": []},
    ],
)
def test_a_manifest_without_its_settings_is_no_command(
    change: dict[str, Any], small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    """As earlier releases wrote them, later ones may, and people edit them."""
    manifest = prepared(small_corpus, small_tokenizer, tmp_path / "out", *SHARDS)
    (command,) = how_to_rebuild("/out", manifest)
    assert command.startswith("clozeworks shards --input ")
    sections = {name: _merged(manifest.config.get(name, {}), value) for name, value in change.items()}
    # Some of these are no manifest at all, so it is not validated.
    changed = manifest.model_copy(update={"config": {**manifest.config, **sections}})
    assert how_to_rebuild("/out", changed) == ["the command or call that made it, with another output"]


def _merged(before: Any, value: Any) -> Any:
    return {**before, **value} if isinstance(value, dict) else value


def test_changes_are_counted_by_kind_on_a_line_of_their_own(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    """A shell would take words after the command for arguments."""
    manifest = prepared(small_corpus, small_tokenizer, tmp_path / "out", *SHARDS)
    command = how_to_rebuild("/out", manifest)
    addition = {name: value for name, value in manifest.config.items() if name != "additions"}
    for num_additions, version, expected in (
        (1, 2, "then repeat 1 addition in the new folder"),
        (0, 2, "then repeat 1 removal in the new folder: until then it holds the removed documents again"),
        (
            2,
            1_238,
            "then repeat 2 additions and 1,235 removals in the new folder: until then it holds the removed documents "
            "again",
        ),
    ):
        config = {**manifest.config, "additions": [addition] * num_additions}
        changed = manifest.model_copy(update={"version": version, "config": config})
        assert how_to_rebuild("/out", changed) == [*command, expected]


def test_additions_are_counted_after_the_command_of_the_first_version(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    first = Path(shutil.copy(small_corpus, tmp_path / "first.jsonl"))
    more = write_texts(tmp_path / "more.jsonl", ["Something new.", "Something else, also new."])
    manifest = prepared(first, small_tokenizer, tmp_path / "out", *SHARDS)
    whole = {shard.name: (tmp_path / "out" / shard.name).read_bytes() for shard in manifest.shards}
    prepared({"more": more}, small_tokenizer, tmp_path / "out", *SHARDS, add=True)
    flip(tmp_path / "out" / "train-000001.tar")
    assert command("verify", tmp_path / "out", "--workers", 1) == 1
    lines = iter(command.errors.splitlines())
    line = next(line for line in lines if "clozeworks shards" in line)
    assert next(lines) == "then repeat 1 addition in the new folder"
    assert command(*shlex.split(line.partition(": ")[2])[1:], "--workers", 1) == 0
    made = {name: data for name, data in files_of(tmp_path / "out-rebuilt").items() if name.endswith(".tar")}
    assert made == whole


def test_the_option_of_earlier_releases_says_what_to_do_instead(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    words = ["shards", "--input", small_corpus, "--tokenizer", small_tokenizer, "--output", tmp_path / "out"]
    assert command(*words, "--repair") == 2
    assert command.errors.count("\n") == 1 and "another --output makes the same bytes" in command.errors
    assert not (tmp_path / "out").exists() and command("shards", "--help") == 0 and "--repair" not in command.output
