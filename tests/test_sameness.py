"""tests/sameness.py: what it calls the same, and the smallest comparison of the working tree with its own commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sameness import compare

SCRIPT = Path(__file__).with_name("sameness.py")


def test_a_part_is_the_same_different_or_not_comparable_with_the_reason() -> None:
    before = {"tokenizer": "a", "shards": "b", "run metrics": "failed: unknown setting"}
    verdicts = compare(before, {"tokenizer": "a", "shards": "c", "run metrics": "d", "new": "e"})
    assert (verdicts["tokenizer"], verdicts["shards"]) == ("same", "different")
    assert verdicts["run metrics"] == "not comparable (before: failed: unknown setting)"
    assert verdicts["new"].startswith("not comparable (before: ")


@pytest.mark.slow
def test_a_tree_is_the_same_as_its_own_commit() -> None:
    command = [sys.executable, str(SCRIPT), "--before", "HEAD", "--only", "stage0_fp32_none", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines()] == ["same"] * 5
