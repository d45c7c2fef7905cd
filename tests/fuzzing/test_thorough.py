"""The fuzzing tests over thousands of mutations; `CLOZEWORKS_FUZZ_EXAMPLES=N` gives each so many, slow ones N/10."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
EXAMPLES = 3_000


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("test_fuzz_*.py")))
def test_thousands_of_mutations(name: str, tmp_path: Path) -> None:
    """In a process of their own each, which a crash of a library would end."""
    command = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    command += ["--show-capture=no"]
    answer = subprocess.run(
        [*command, "--basetemp", str(tmp_path / "pytest"), "--timeout", "3000", str(FOLDER / name)],
        cwd=FOLDER.parents[1],
        env={**os.environ, "CLOZEWORKS_FUZZ_EXAMPLES": str(EXAMPLES)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, f"status {answer.returncode}\n{answer.stdout[-6000:]}{answer.stderr[-2000:]}"
