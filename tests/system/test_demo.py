"""The demo's whole way, with a training of a few steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import fork_server

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.launcher, pytest.mark.spawn]


def forking_environment(folder: Path) -> Path:
    """This environment, but that its `python` and `deepspeed` are forks; made once."""
    if folder.exists():
        return folder
    binaries = folder / "bin"
    binaries.mkdir(parents=True)
    python = fork_server.stand_in(binaries)
    (binaries / "deepspeed").write_text(f'#!/bin/sh\nexec {python} {sys.prefix}/bin/deepspeed "$@"\n')
    (binaries / "deepspeed").chmod(0o755)
    for path in (*Path(sys.prefix).iterdir(), *Path(sys.prefix, "bin").iterdir()):
        link = folder / path.relative_to(sys.prefix)
        if not link.exists():
            link.symlink_to(path)
    return folder


def demo(output: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_TRACKING")}
    return subprocess.run(
        ["bash", str(REPOSITORY / "launch" / "demo.sh"), "--output", str(output), *arguments],
        env=env | fork_server.FIXED | {"CLOZEWORKS_VENV": str(forking_environment(output.with_name("environment")))},
        capture_output=True,
        text=True,
        timeout=1500,
    )


@pytest.mark.parametrize("corpus", ["text", pytest.param("docstrings", marks=pytest.mark.slow)])
def test_the_demo_goes_from_a_corpus_to_filled_masks_and_skips_what_is_done(corpus, tmp_path):
    """The docstrings of all packages take a minute; else the text is a part of them."""
    options: tuple[str, ...] = ()
    if corpus == "text":
        text = tmp_path / "part.jsonl"
        collect = [
            sys.executable,
            str(REPOSITORY / "launch" / "demo" / "collect_docstrings.py"),
            "--max-bytes",
            "300000",
        ]
        subprocess.run([*collect, "--output", str(text)], check=True)
        options = ("--corpus", str(text), "--vocab-size", "1000")
    options = (*options, "--", "training.max_steps=4", "evaluation.max_tokens=4096")
    first = demo(tmp_path / "demo", *options)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    for part in (
        "ok: ",
        "step 4/4",
        "registered clozeworks-demo version 1",
        "masked word: ",
        "The model has read only ",
        "guesses:",
        "ACTUAL: ",
        "MASKED: ",
        "MODEL: ",
        "unigram baseline",
        "mlflow ui --backend-store-uri",
    ):
        assert part in first.stdout, part
    assert "given twice" not in first.stdout + first.stderr
    again = demo(tmp_path / "demo", *options)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("finished before; --fresh repeats it") == (5 if corpus == "docstrings" else 4)
    (tmp_path / "other.txt").write_text("another text\n")
    other = demo(tmp_path / "demo", "--corpus", str(tmp_path / "other.txt"))
    assert (
        other.returncode == 2 and f"holds a demo made from {text if corpus == 'text' else 'docstrings'}" in other.stderr
    )
    assert demo(tmp_path / "demo", "--wrong").returncode == 2
