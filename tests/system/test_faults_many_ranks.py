"""Ranks of large worlds in a fake process group: the last ones hold padding only, of a parameter group or of all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import fork_server
from tests.support.toy_processes import NORMALIZED, OPTIMIZERS

TRIED = [optimizer for optimizer in OPTIMIZERS if optimizer != NORMALIZED]
"""It asks for all parameters of other ranks, which a fake group has none of."""
SCRIPT = Path(__file__).parents[1] / "support" / "fake_ranks.py"


def run_rank(folder: Path, rank: int, world_size: int, jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each job of one rank reports."""
    plan = folder / "jobs.json"
    plan.write_text(json.dumps(jobs))
    described = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank % 8)}
    environment = os.environ | fork_server.FIXED | described
    process = fork_server.start([str(SCRIPT), str(plan)], folder, environment)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stdout + stderr
    return json.loads(plan.with_suffix(".out").read_text())


def jobs_of(folder: Path, stage: int) -> list[dict[str, Any]]:
    precisions = {1: "bf16", 2: "fp32", 3: "bf16"}
    return [
        {
            "output_dir": str(folder / str(number)),
            "stage": stage,
            "precision": precisions[stage],
            "optimizer": optimizer,
        }
        for number, optimizer in enumerate(TRIED)
    ]


@pytest.mark.fault(
    row="75",
    fault="the last ranks of 32 to 512 hold nothing but padding, of a parameter group or of all",
    required="every optimizer steps, saves and loads",
)
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("rank", "world_size", "stage", "groups_of_padding"),
    [
        # The toy model has 110 numbers in biases and norms, four on each of 32 ranks: the last ranks hold none; and
        # 1,144 in matrices, 36 on each of 32 ranks, six on each of 256: there the last ranks hold none of them either.
        (31, 32, 1, "some"),
        (31, 32, 2, "some"),
        (255, 256, 1, "all"),
        (511, 512, 2, "all"),
        (511, 512, 3, "all"),
    ],
)
def test_row_75_a_rank_of_padding_steps_saves_and_loads_with_every_optimizer(
    rank, world_size, stage, groups_of_padding, tmp_path
):
    reports = run_rank(tmp_path, rank, world_size, jobs_of(tmp_path, stage))
    # Where a rank left one out, the others would wait for it; from ZeRO 2 on each of two groups is a step of its own.
    assert reports[TRIED.index("stable_adamw")]["meetings"] == (3 if stage == 1 else 6)
    for report in reports:
        assert report["steps"] == 2 and report["same"] and report["finite"]
        assert report["groups_of_padding"] > 0
        assert (report["fragments"] == 0) == (report["groups_of_padding"] == report["groups"])
    assert (reports[0]["fragments"] == 0) == (groups_of_padding == "all")


@pytest.mark.fault(
    row="75",
    fault="the last rank of a preset on 256 or 512 holds nothing but padding of a parameter group",
    required="it steps, saves and loads",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "rank", "world_size"), [("ettin_17m", 255, 256), ("bert_base", 511, 512), ("modern_large", 511, 512)]
)
def test_row_75_the_last_rank_of_a_preset_steps_saves_and_loads(preset, rank, world_size, tmp_path):
    (report,) = run_rank(tmp_path, rank, world_size, [{"output_dir": str(tmp_path / "run"), "preset": preset}])
    assert report["groups_of_padding"] > 0 and report["steps"] == 2 and report["same"] and report["fragments"] > 0
