"""launch/demo.sh up to its first step, with stand-ins for the environment and Python: what it refuses, and when."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = """
prepare_environment() { touch "$root/prepared"; export PATH=$root/bin:$PATH; }
count_gpus() { echo 0; }
"""
# Takes every setting but those of a section named wrong, and fails at the first step that works on text: by wrong usage
# where the vocabulary is of 8192 pieces or more.
PYTHON = """#!/bin/sh
case "$*" in
    *--print-config*wrong.* | *wrong.*--print-config*) echo "error: unknown setting" >&2; exit 2 ;;
    *"data_prep tokenizer"*hf://*) echo "offline=$HF_HUB_OFFLINE"; exit 1 ;;
    *"data_prep tokenizer"*--vocab-size\\ ????) echo "$*"; exit 2 ;;
    *"data_prep tokenizer"*) echo "$*"; exit 1 ;;
    -c*) echo 2 ;;
esac
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository that holds demo.sh and stand-ins for what it calls."""
    for folder in ("launch", "bin", "texts"):
        (tmp_path / folder).mkdir()
    shutil.copy(REPOSITORY / "launch" / "demo.sh", tmp_path / "launch")
    (tmp_path / "launch" / "environment.sh").write_text(ENVIRONMENT)
    (tmp_path / "bin" / "python").write_text(PYTHON)
    (tmp_path / "bin" / "python").chmod(0o755)
    for name in ("one", "two"):
        (tmp_path / "texts" / f"{name}.txt").write_text("text\n")
    return tmp_path


def demo(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = ("CLOZEWORKS", "MLFLOW", "HF_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    command = ["bash", "launch/demo.sh", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60)


def test_a_missing_corpus_is_reported_before_anything_is_installed(root: Path) -> None:
    refused = demo(root, "--corpus", "texts/*.jsonl")
    assert refused.returncode == 2 and "texts/*.jsonl matches no file" in refused.stderr
    assert not (root / "prepared").exists() and not (root / "demo").exists()
    for pattern in ("texts/*.txt", "texts/{one,two}.txt", "texts/**/*.txt", "s3://bucket/*.txt"):
        assert "step 3/6" in demo(root, "--fresh", "--corpus", pattern).stderr


def test_a_data_set_of_the_hub_is_read_from_there(root: Path) -> None:
    tried = demo(root, "--corpus", "hf://datasets/user/tales/data/*.parquet")
    assert "step 3/6" in tried.stderr and (root / "demo/logs/tokenizer.log").read_text().endswith("offline=\n")


def test_an_option_that_is_given_twice_is_refused(root: Path) -> None:
    refused = demo(root, "--corpus", "texts/one.txt", "--corpus", "texts/two.txt")
    assert refused.returncode == 2 and "--corpus is given twice" in refused.stderr and not (root / "demo").exists()


def test_a_demo_without_a_finished_step_binds_nobody(root: Path) -> None:
    assert "step 3/6" in demo(root, "--corpus", "texts/one.txt").stderr
    assert "step 3/6" in demo(root, "--corpus", "texts/two.txt").stderr
    (root / "demo" / ".done" / "tokenizer").touch()
    refused = demo(root, "--corpus", "texts/one.txt")
    assert refused.returncode == 2 and "holds a demo made from" in refused.stderr


def test_a_misspelled_setting_is_reported_before_the_first_step(root: Path) -> None:
    refused = demo(root, "--corpus", "texts/one.txt", "--", "wrong.max_steps=3")
    assert refused.returncode == 2 and "unknown setting" in refused.stderr and "[2/6]" not in refused.stdout
    assert "[3/6]" in demo(root, "--corpus", "texts/one.txt", "--", "training.max_steps=3").stdout


@pytest.mark.parametrize("corpus", ["texts", "texts/", "/"])
def test_a_folder_as_corpus_is_reported_before_anything_is_installed(root: Path, corpus: str) -> None:
    refused = demo(root, "--corpus", corpus)
    assert refused.returncode == 2 and "is a folder; give a file of it, or a quoted pattern such as '" in refused.stderr
    assert "/*.txt'" in refused.stderr and not (root / "prepared").exists() and not (root / "demo").exists()


@pytest.mark.parametrize(
    ("output", "told"),
    [("texts/one.txt", "is a file; name a folder"), ("texts/one.txt/a", r"cannot be made (Not a directory)")],
)
def test_an_output_that_cannot_be_is_one_paragraph(root: Path, output: str, told: str) -> None:
    refused = demo(root, "--corpus", "texts/one.txt", "--output", output)
    assert refused.returncode == 2 and not (root / "prepared").exists()
    assert refused.stderr.startswith(f"error: --output {root}/{output} {told}") and refused.stderr.count("\n") == 1


def test_a_small_text_gets_a_vocabulary_of_its_size(root: Path) -> None:
    assert "--vocab-size N " in demo(root, "--help").stdout
    corpus = ("--corpus", "texts/one.txt")
    refused = demo(root, *corpus)
    assert refused.returncode == 2 and "give --vocab-size N (was 8192)" in refused.stderr
    assert "without --fresh" not in refused.stderr
    other = demo(root, *corpus, "--vocab-size", "300")
    assert "--vocab-size 300\n" in other.stdout and "without --fresh to resume" in other.stderr
    for wrong in ("0", "many", "-5", ""):
        assert "--vocab-size needs a number" in demo(root, *corpus, "--vocab-size", wrong).stderr
    (root / "demo" / ".done" / "tokenizer").touch()
    refused = demo(root, *corpus)
    assert refused.returncode == 2 and "a demo with --vocab-size 300, not 8192; give --fresh" in refused.stderr
