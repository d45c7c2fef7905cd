"""Preparation alone: installed without extras in an environment of its own, it makes a data set and shows it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCKS = "documents.txt_documents=blank_lines"
FORBIDDEN = ("torch", "deepspeed", "mlflow", "transformers", "sklearn", "scipy", "pandas")


@pytest.mark.slow
def test_the_core_installation_prepares_data_and_names_the_extra_of_everything_else(tmp_path: Path) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("CLOZEWORKS_", "PYTHON", "VIRTUAL"))
    } | {"CLOZEWORKS_VENV": str(tmp_path / "venv")}

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )

    made = run("bash", REPOSITORY / "launch" / "environment.sh", "core")
    assert made.returncode == 0, made.stdout + made.stderr
    binaries = tmp_path / "venv" / "bin"
    absent = "import importlib.util as u, sys; sys.exit(any(u.find_spec(name) for name in sys.argv[1:]))"
    assert run(binaries / "python", "-c", absent, *FORBIDDEN).returncode == 0
    words = "the quick brown fox jumps over a lazy dog while seven wise owls read old maps of distant shores".split()
    lines = [" ".join(words[(i * j) % len(words)] for j in range(1, 30)) + f" number {i}." for i in range(400)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(lines), encoding="utf-8")
    for command in (
        ("tokenizer", "--input", "corpus.txt", "--output", "tokenizer", "--vocab-size", 400, BLOCKS),
        ("shards", "--input", "corpus.txt", "--tokenizer", "tokenizer", "--output", "shards", BLOCKS),
        ("verify", "shards"),
        ("stats", "shards", "--output", "page"),
        ("inspect", "shards"),
    ):
        done = run(binaries / "python", "-m", "data_prep", *command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert (tmp_path / "shards" / "manifest.json").is_file() and (tmp_path / "page" / "index.html").is_file()
    assert run(binaries / "clozeworks", "verify", "shards").returncode == 0
    assert run(binaries / "clozeworks", "--help").returncode == 0
    for command, extra in (("show-batch", "train"), ("finetune", "finetune"), ("embed", "registry")):
        arguments = {
            "show-batch": ["--config", "tiny_cpu"],
            "finetune": "--model m --task classification --train corpus.txt --text-column a --label-column b".split(),
            "embed": ["--model", "m", "--neighbors", "fox"],
        }[command]
        done = run(binaries / "clozeworks", command, *arguments)
        assert done.returncode == 2 and f"[{extra}]" in done.stderr and "[missing-extra]" in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1
