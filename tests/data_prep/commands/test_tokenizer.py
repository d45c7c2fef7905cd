"""`tokenizer` on the command line: one command from files to a proved tokenizer with its report."""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

from data_prep import Tokenizer
from data_prep.base.errors import UsageError, UserError
from data_prep.commands import tokenizer
from data_prep.tokenizer.tokenizer import TokenizerInfo
from data_prep.tokenizer.tokenizer_report import GroupReport, read_report
from tests.support.error_codes import coded
from tests.support.references import check_parity

MULTILINGUAL = {"fr": "fr", "de": "de", "zh": "zh", "ko": "ko", "ar": "ar_web"}
REPOSITORY = Path(__file__).resolve().parents[3]


def run(*arguments: object) -> None:
    parser = argparse.ArgumentParser()
    tokenizer.add_arguments(parser)
    words = [str(argument) for argument in arguments]
    overrides = [word for word in words if "=" in word]
    tokenizer.run(parser.parse_args([word for word in words if "=" not in word]), overrides)


def folder_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_the_folder_holds_only_model_json_report_and_marker(
    small_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--input", small_corpus, "--output", tmp_path / "out", "--vocab-size", 700, "--workers", 1)
    assert set(folder_of(tmp_path / "out")) - {".lock"} == {
        "tokenizer.model",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer_report.json",
        "tokenizer_info.json",
    }
    output = capsys.readouterr()
    assert "bytes" in output.out and "longest" in output.out and "MB/s" in output.err
    assert "200 documents" in output.err


@pytest.mark.spawn
def test_workers_and_units_change_no_byte(small_corpus: Path, tmp_path: Path) -> None:
    arguments = ["--input", small_corpus, "--vocab-size", 600, "tokenizer.sample_bytes=30000"]
    run(*arguments, "--output", tmp_path / "one", "--workers", 1)
    run(*arguments, "--output", tmp_path / "two", "--workers", 2, "shards.unit_bytes=10000")
    assert folder_of(tmp_path / "one") == folder_of(tmp_path / "two")


def test_changed_settings_and_inputs_are_named(
    small_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(small_corpus.read_bytes())
    arguments = ["--input", copy, "--output", tmp_path / "out", "tokenizer.vocab_size=600"]
    run(*arguments)
    capsys.readouterr()
    run(*arguments)
    assert "is complete" in (output := capsys.readouterr().out) and "note:" not in output
    copy.write_bytes(small_corpus.read_bytes())
    run(*arguments)
    assert f"note: {copy} " in capsys.readouterr().out
    changes = {
        "tokenizer.sampling_alpha was 1.0 and is now 0.5": "tokenizer.sampling_alpha=0.5",
        "tokenizer.byte_fallback was true and is now false": "tokenizer.byte_fallback=false",
        "documents.on_bad_input was": "documents.on_bad_input=skip",
    }
    for message, override in changes.items():
        with pytest.raises(UserError, match=message, check=coded("other-tokenizer")):
            run(*arguments, override)
    with copy.open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(UserError, match="copy.jsonl.bytes was", check=coded("other-tokenizer")):
        run(*arguments)


def test_symbols_and_unknown_characters_by_overrides(small_corpus: Path, tmp_path: Path) -> None:
    overrides = [
        "tokenizer.vocab_size=500",
        "tokenizer.byte_fallback=false",
        "tokenizer.user_symbols=['<sep>','@user']",
    ]
    run("--input", small_corpus, "--output", tmp_path / "out", *overrides)
    made = Tokenizer.load(tmp_path / "out")
    assert made.pieces[5:7] == ["<sep>", "@user"] and made.vocab_size == 500
    report = read_report(tmp_path / "out")
    assert report is not None and report.everything.byte_tokens == 0
    with pytest.raises(UsageError, match="'a b'", check=coded("invalid-setting")):
        run("--input", small_corpus, "--output", tmp_path / "other", "tokenizer.user_symbols=[a b]")


def test_a_url_gets_the_tokenizer(small_corpus: Path) -> None:
    run("--input", small_corpus, "--output", "memory://tokenizer-command/out", "--vocab-size", 600)
    names = {Path(name).name for name in fsspec.filesystem("memory").ls("/tokenizer-command/out", detail=False)}
    assert {"tokenizer.model", "tokenizer_info.json", "tokenizer_report.json"} <= names
    assert Tokenizer.load("memory://tokenizer-command/out").vocab_size == 600


@pytest.mark.spawn
def test_a_killed_training_leaves_no_tokenizer_and_is_run_again(small_corpus: Path, tmp_path: Path) -> None:
    """Killed in the middle of the sampling: the same command then makes what an undisturbed one does."""
    code = (
        "import os, signal, sys\n"
        "from data_prep.tokenizer_training.training_sample import TrainingSample\n"
        "from data_prep.__main__ import main\n"
        "add_text = TrainingSample.add_text\n"
        "def killing(self, *arguments):\n"
        "    add_text(self, *arguments)\n"
        "    if self.num_documents == 50: os.kill(os.getpid(), signal.SIGKILL)\n"
        "TrainingSample.add_text = killing\n"
        "main()\n"
    )
    arguments = ["--input", str(small_corpus), "--output", str(tmp_path / "out"), "--vocab-size", "600"]
    command = [sys.executable, "-c", code, "tokenizer", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=120).returncode == -9
    assert TokenizerInfo.read(tmp_path / "out") is None and (tmp_path / "out" / ".sampling").is_dir()
    run(*arguments)
    run(*arguments[:2], "--output", tmp_path / "other", *arguments[4:])
    assert folder_of(tmp_path / "out") == folder_of(tmp_path / "other")


def test_half_written_files_of_a_killed_training_are_removed(small_corpus: Path, tmp_path: Path) -> None:
    left = tmp_path / "out" / ".tokenizer.json.123-abcd.partial"
    left.parent.mkdir()
    left.write_text("{")
    run("--input", small_corpus, "--output", tmp_path / "out", "--vocab-size", 700, "--workers", 1)
    assert not left.exists() and (tmp_path / "out" / "tokenizer.json").exists()


def _multilingual_config(folder: Path, files: dict[str, Path], settings: dict[str, Any]) -> Path:
    sources = [{"name": f"text {code}", "input": str(path), "language": code} for code, path in files.items()]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"sources": sources, "tokenizer": settings}))
    return path


def _assert_sane(languages: dict[str, GroupReport]) -> None:
    assert set(languages) == set(MULTILINGUAL)
    for code, group in languages.items():
        assert group.documents > 0 and group.unknown_tokens == 0, code
        assert 1.0 < group.bytes_per_token < 8, code
        assert group.tokens_per_character < 1.2, code
    for code in ("fr", "de"):
        assert 1 < languages[code].tokens_per_word < 4, code
    assert languages["zh"].tokens_per_word > 2 * languages["fr"].tokens_per_word  # it writes no spaces


@pytest.mark.long
def test_five_languages_are_learned_evenly_and_reported(
    corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {}
    for code, name in MULTILINGUAL.items():
        source = corpora / "pack_multilingual" / f"{name}.jsonl.gz"
        if not source.is_file():
            pytest.skip(f"{source} is absent")
        files[code] = tmp_path / f"{code}.jsonl"
        with gzip.open(source, "rt", encoding="utf-8") as lines, files[code].open("w", encoding="utf-8") as part:
            for line in itertools.islice(lines, 6 if code == "ar" else 40):
                part.write(json.dumps({"text": json.loads(line)["text"][:4_000]}) + "\n")
    settings = {"vocab_size": 5_000, "sampling_alpha": 0.0, "sampling_by": "language", "sample_bytes": 150_000}
    run("--config", _multilingual_config(tmp_path, files, settings), "--output", tmp_path / "out", "--workers", 1)
    report = read_report(tmp_path / "out")
    assert report is not None
    _assert_sane(report.languages)
    arabic = report.languages["ar"]
    assert arabic.sample_share is not None and arabic.corpus_share is not None
    assert arabic.sample_share > 1.4 * arabic.corpus_share
    assert "by language" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.spawn
def test_the_whole_multilingual_pack_agrees_with_hugging_face(corpora: Path, tmp_path: Path) -> None:
    files = {code: corpora / "pack_multilingual" / f"{name}.jsonl.gz" for code, name in MULTILINGUAL.items()}
    settings = {"vocab_size": 30_000, "sampling_alpha": 0.5, "sampling_by": "language", "sample_bytes": 8_000_000}
    run("--config", _multilingual_config(tmp_path, files, settings), "--output", tmp_path / "out", "--workers", 2)
    report = read_report(tmp_path / "out")
    assert report is not None
    _assert_sane(report.languages)
    for path in files.values():
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            check_parity(tmp_path / "out", [json.loads(line)["text"][:50_000] for line in lines])


def test_a_new_training_that_fails_leaves_the_tokenizer_that_is_there(small_corpus: Path, tmp_path: Path) -> None:
    arguments = ["--input", small_corpus, "--output", tmp_path / "out", "--workers", 1]
    run(*arguments, "--vocab-size", 600)
    with pytest.raises(UsageError, match="900,?000", check=coded("vocab-size-out-of-range")):
        run(*arguments, "--vocab-size", 900_000, "--fresh")
    assert Tokenizer.load(tmp_path / "out").vocab_size == 600


@pytest.mark.long
def test_tempering_without_effect_is_reported(
    small_corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--input", small_corpus, "--vocab-size", 600, "--workers", 1, "tokenizer.sampling_alpha=0.5"]
    run(*arguments, "--output", tmp_path / "all")
    assert "tokenizer.sampling_alpha=0.5" in capsys.readouterr().err
    run(*arguments, "--output", tmp_path / "some", "tokenizer.sample_bytes=50000")
    assert "sampling_alpha" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "size"),
    [
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:30], 600),
        ("bad.jsonl", b"{", 600),
        ("a.txt", b"a", 9000),
    ],
)
def test_a_refused_run_takes_the_folders_away_that_it_made(
    tmp_path: Path, name: str, content: bytes, size: int
) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "mine").mkdir()
    for output in ("new/folder", "mine"):
        with pytest.raises(UserError):
            run("--input", tmp_path / name, "--output", tmp_path / output, "--vocab-size", size, "--workers", 1)
    assert {path.name for path in tmp_path.iterdir()} == {name, "mine"}


def test_two_sizes_of_a_vocabulary_are_refused(small_corpus: Path, tmp_path: Path) -> None:
    arguments = ["--input", small_corpus, "--output", tmp_path / "out", "--vocab-size", 600, "--dry-run"]
    run(*arguments, "tokenizer.vocab_size=600")
    with pytest.raises(UsageError, match="600.*700", check=coded("contradicting-arguments")):
        run(*arguments, "tokenizer.vocab_size=700")
