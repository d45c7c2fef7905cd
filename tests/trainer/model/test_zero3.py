from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import fork_server


@pytest.mark.spawn
@pytest.mark.parametrize(("loss", "decoder"), [("whole", "tied"), ("chunked", "tied"), ("chunked", "own")])
def test_gradients_under_zero_3_with_checkpointing_are_plain_pytorchs(tmp_path, loss, decoder):
    """The tied matrix is used twice in a step and gathered for each; one rank adds in the same order, so
    exactly."""
    words = [str(Path(__file__).with_name("zero3_worker.py")), str(tmp_path / "rendezvous"), loss, decoder]
    worker = fork_server.run(words, tmp_path, os.environ | fork_server.FIXED, timeout=300)
    assert worker.returncode == 0, worker.stderr[-3000:]
    number = {"tied": 50, "own": 25}[decoder]
    assert f"parameters {number} largest difference 0.0" in worker.stdout, worker.stdout[-3000:]
