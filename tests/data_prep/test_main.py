"""The command line of data preparation, run in this process: what it prints, writes and answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.errors import run_command


class Command:
    """Runs `python -m data_prep ...`; keeps status and both outputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.output = self.errors = ""

    def __call__(self, *arguments: object) -> int:
        self._monkeypatch.setattr(sys, "argv", ["data_prep", *map(str, arguments)])
        self._capsys.readouterr()
        try:
            run_command(main)
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        self.output, self.errors = self._capsys.readouterr()
        return status


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def test_a_corpus_goes_all_the_way(command: Command, small_corpus: Path, tmp_path: Path) -> None:
    tokenizer, shards = tmp_path / "tokenizer", tmp_path / "shards"
    assert command("tokenizer", "--input", small_corpus, "--output", tokenizer, "--vocab-size", 700) == 0
    assert "tokens a word" in command.output and "pieces               700" in command.output
    arguments = [
        "shards",
        "--input",
        small_corpus,
        "--tokenizer",
        tokenizer,
        "--output",
        shards,
        "--workers",
        1,
    ]
    assert command(*arguments, "shards.min_shards=2") == 0
    assert "in 2 shards" in command.output and "dropped: nothing" in command.output
    assert command(*arguments, "shards.min_shards=2") == 0
    assert "is complete already" in command.output
    assert command(*arguments, "shards.min_shards=3") == 1
    assert "shards.min_shards was 2 and is now 3" in command.errors and "Traceback" not in command.errors
    assert command(*arguments, "shards.min_shards=3", "--fresh") == 0
    assert command("verify", shards, "--workers", 1) == 0
    assert command.output.startswith("ok: 4 shards, 200 documents")


def test_the_tokenizer_command_again_does_nothing_or_refuses(
    command: Command, small_corpus: Path, tmp_path: Path
) -> None:
    arguments = ["tokenizer", "--input", small_corpus, "--output", tmp_path / "out"]
    assert command(*arguments, "--vocab-size", 700) == 0
    assert command(*arguments, "--vocab-size", 700) == 0 and "is complete already" in command.output
    assert command(*arguments, "--vocab-size", 701) == 1 and "--fresh" in command.errors
    assert command(*arguments, "--vocab-size", 701, "--fresh") == 0


def test_overrides_may_follow_the_input_files(command: Command, small_corpus: Path, tmp_path: Path) -> None:
    assert (
        command(
            "tokenizer",
            "--output",
            tmp_path / "out",
            "--dry-run",
            "--input",
            small_corpus,
            "tokenizer.vocab_size=777",
        )
        == 0
    )
    assert "would train 777 pieces on 1 files" in command.output and not (tmp_path / "out").exists()


def test_a_dry_run_of_shards_writes_nothing(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert (
        command("shards", "--input", small_corpus, "--tokenizer", small_tokenizer, "--output", output, "--dry-run") == 0
    )
    assert "would read 1 files" in command.output and "8 train and 1 valid shards" in command.output
    assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--input", "{tmp}/missing.jsonl"], 2, "no input file matches"),
        (["--input", "{tmp}"], 2, "is a folder"),
        (["--input", "{tmp}/report.pdf"], 2, "an ending that is not read here"),
        (["--input", "{tmp}/empty.jsonl"], 1, "nothing is left of the inputs"),
        ([], 2, "no input is named"),
        (["--input", "{corpus}", "documents.text_field=body"], 1, "has no field 'body' (its fields: text)"),
        (["--input", "{corpus}", "shards.valid_fraction=2"], 2, "shards.valid_fraction=2"),
        (["--input", "{corpus}", "shards.vaild_fraction=0.1"], 2, "did you mean shards.valid_fraction?"),
        (["--input", "{corpus}", "--workers", "0"], 2, "--workers=0"),
        (["--input", "{corpus}", "--wrokers", "2"], 2, "unrecognized arguments: --wrokers"),
        (["--input", "{corpus}", "--config", "{tmp}/none.yaml"], 2, "none.yaml does not exist"),
    ],
)
def test_mistakes_are_one_paragraph_and_leave_no_manifest(
    command: Command,
    small_corpus: Path,
    small_tokenizer: Path,
    tmp_path: Path,
    arguments: list[str],
    status: int,
    message: str,
) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "report.pdf").touch()
    filled = [argument.format(tmp=tmp_path, corpus=small_corpus) for argument in arguments]
    assert command("shards", "--tokenizer", small_tokenizer, "--output", tmp_path / "out", *filled) == status
    assert message in command.errors and "Traceback" not in command.errors
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_an_output_that_is_a_file_is_refused(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("mine")
    assert command("shards", "--input", small_corpus, "--tokenizer", small_tokenizer, "--output", tmp_path / "out") == 2
    assert "is a file" in command.errors and (tmp_path / "out").read_text() == "mine"


def test_verify_answers_1_and_names_the_damage(command: Command, small_shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    for path in small_shards.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(small_shards)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (folder / "train-000001.tar").unlink()
    assert command("verify", folder, "--workers", 1) == 1
    assert "train-000001.tar is missing" in command.errors
    assert command("stats", tmp_path / "nowhere") == 1 and "holds no manifest.json" in command.errors


def test_inspect_shows_sentences_of_real_documents(command: Command, small_shards: Path, small_corpus: Path) -> None:
    assert command("inspect", small_shards, "--documents", 2, "--split", "valid") == 0
    assert command.output.count("=== valid-000000.tar") == 2
    lines = [line.removeprefix("  | ").strip() for line in command.output.splitlines() if line.startswith("  | ")]
    corpus = " ".join(" ".join(json.loads(line)["text"].split()) for line in small_corpus.read_text().splitlines())
    assert lines and all(line in corpus for line in lines)
    assert command("inspect", small_shards, "--shard", 4) == 2 and "from 0 to 3" in command.errors


def test_stats_show_counts_lengths_and_pieces(command: Command, small_shards: Path) -> None:
    assert command("stats", small_shards) == 0
    manifest = json.loads((small_shards / "manifest.json").read_text())
    for text in (
        f"{manifest['train']['tokens']:,}",
        "dropped: nothing",
        "median",
        "most frequent pieces: ",
        "#####",
        "corpus",
    ):
        assert text in command.output
