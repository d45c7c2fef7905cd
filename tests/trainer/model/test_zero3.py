from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.spawn
def test_gradients_under_zero_3_with_checkpointing_are_plain_pytorchs(tmp_path):
    """The tied matrix is used twice in a step and gathered for each; one rank adds in the same order, so
    exactly."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"),
    }
    worker = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("zero3_worker.py")), str(tmp_path / "rendezvous")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert worker.returncode == 0, worker.stderr[-3000:]
    assert "parameters 50 largest difference 0.0" in worker.stdout, worker.stdout[-3000:]
