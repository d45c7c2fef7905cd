"""Reasons of a user's format for leaving documents out: every command knows them as steps of reading."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from data_prep import open_dataset
from tests.support.data_prep_command import Command

MODULE = """
from data_prep import Document
from data_prep.documents.formats.input_format import Format
from data_prep.documents.rejects import BadInput, Fault

class Poems(Format):
    def documents(self, stream, reading):
        for number, line in enumerate(stream.read().decode().splitlines(), 1):
            place = f"poem {number}"
            if line.startswith("!"):
                reading.rejects.bad(place, Fault("is no poem", line[1:] if line != "!!" else 3))
            elif line.startswith("?"):
                raise BadInput(f"{reading.rejects.where} is prose", "prose", spoils_file=True)
            else:
                yield Document(line, source=reading.fields.source)
"""


@pytest.fixture
def shards(small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The command that prepares the poems of the folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_poems", None)
    (tmp_path / "own_poems.py").write_text(MODULE)
    formats = "documents.formats={.poem: own_poems:Poems}"
    settings = ("documents.on_bad_input=skip", "shards.min_shards=1", "--workers", 1, "--tokenizer", small_tokenizer)
    return ["shards", formats, *settings, "--input", tmp_path / "*.poem"]


def write(folder: Path, *lines: str) -> None:
    poems = [f"The {number} birds of the field fly over the green hills of the night." for number in range(40)]
    (folder / "a.poem").write_text("\n".join([*poems, *lines]) + "\n")
    (folder / "b.poem").write_text("The last bird sings on the hill.\n?\n")


def canonical(values: dict[str, object]) -> str:
    """A manifest's text."""
    return json.dumps(values, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def test_reasons_of_a_format_are_accepted_by_every_command(
    shards: list[object], command: Command, tmp_path: Path
) -> None:
    write(tmp_path, "!no title", "!no title", "!removed", "!duplicate", "!too many bytes")
    output, merged = tmp_path / "out", tmp_path / "merged"
    assert command(*shards, "--output", output) == 0, command.errors
    expected = {
        "format .poem: no title": 2,
        "format .poem: removed": 1,
        "format .poem: duplicate": 1,
        "format .poem: prose": 1,
        "too many bytes": 1,
    }
    assert open_dataset(output).manifest.dropped == expected
    assert {step.name: step.dropped for step in open_dataset(output).manifest.steps}["reading"] == expected
    assert command("verify", output) == 0, command.output
    for words in (("stats", output), ("inspect", output, "--documents", 1)):
        assert command(*words) == 0, command.errors
        assert words[0] == "inspect" or "format .poem: no title" in command.output
    assert "no title" in (output / "DATA_CARD.md").read_text()
    document = re.search(r"\b[0-9a-f]{16}\b", command.output)
    assert document is not None or command("inspect", output, "--documents", 1) == 0
    found = re.search(r"\b[0-9a-f]{16}\b", command.output)
    assert found is not None
    (tmp_path / "list.txt").write_text(f"{found.group()}\n")
    assert command("remove", output, "--documents", tmp_path / "list.txt") == 0, command.errors
    assert command("verify", output) == 0, command.output
    assert command(*shards, "--output", merged, "--shard-range", "1/1") == 0, command.errors
    merge = ["merge", *shards[1:], "--output", merged]
    assert command(*merge) == 0, command.errors
    assert command("verify", merged) == 0, command.output
    assert open_dataset(merged).manifest.dropped == expected


def test_a_set_of_an_earlier_release_with_such_reasons_is_sound(
    shards: list[object], command: Command, tmp_path: Path
) -> None:
    write(tmp_path, "!no title")
    output = tmp_path / "out"
    assert command(*shards, "--output", output) == 0, command.errors
    path = output / "manifest.json"
    values = json.loads(path.read_text().replace("format .poem: no title", "no title"))
    path.write_text(canonical(values))
    assert command("verify", output, "--write-card") == 0, command.output + command.errors
    assert open_dataset(output).manifest.steps[0].dropped["no title"] == 1, "a reason of reading"


@pytest.mark.parametrize("reason", ["!", "x" * 101, "tab\there"])
def test_a_reason_that_no_manifest_can_count_is_an_error_of_the_format(
    reason: str, shards: list[object], command: Command, tmp_path: Path
) -> None:
    write(tmp_path, "!no title", f"!{reason}")
    assert command(*shards, "--output", tmp_path / "out") == 1 and "[format-reasons]" in command.errors
    assert not (tmp_path / "out/manifest.json").exists()
