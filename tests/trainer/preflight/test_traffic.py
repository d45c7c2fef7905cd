"""What DeepSpeed's ranks really send in a step, beside the formulas of `trainer/preflight/scale.py`."""

from __future__ import annotations

import json

import pytest

from tests.support import toy_traffic
from tests.support.toy_processes import finish, start_ranks
from trainer.preflight.scale import sent_bytes

WORLD_SIZE = 2
LIKE_A_LARGE_MODEL = {
    1: {"zero_optimization": {"reduce_bucket_size": 50_000}},
    2: None,
    3: {"zero_optimization": {"stage3_prefetch_bucket_size": 0}},
}
"""Owners get sums of a few buckets of many. DeepSpeed fetches 50 million numbers ahead and keeps them: all of a model
as small as this."""
TOLERANCE = 0.02
"""Small parameters that stage 3 keeps whole, padding, the counts of a batch and the gradient norm."""


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_sends_what_the_formula_says(stage, tmp_path, small_shards):
    jobs = [
        {
            "stage": stage,
            "deepspeed": LIKE_A_LARGE_MODEL[stage],
            "precision": precision,
            "rows": toy_traffic.MICRO_ROWS * WORLD_SIZE * accumulation,
        }
        for precision in ("fp32", "bf16")
        for accumulation in (1, 3)
    ]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"shards": str(small_shards), "jobs": jobs}))
    for status, stdout, stderr in finish(start_ranks([toy_traffic.__file__, str(plan)], WORLD_SIZE)):
        assert status == 0, f"exit status {status}\n{stdout}\n{stderr}"
    reports = json.loads(plan.with_suffix(".out").read_text())
    for job, report in zip(jobs, reports, strict=True):
        number_bytes = 4 if job["precision"] == "fp32" else 2
        exchanged_on = WORLD_SIZE if stage == 1 and job["precision"] == "bf16" else None
        expected = sent_bytes(
            *(report["parameters"], report["tied"], number_bytes, 4 if exchanged_on is None else 2),
            *(stage, WORLD_SIZE, report["micro_batches"], exchanged_on),
        )
        assert report["micro_batches"] == job["rows"] // (toy_traffic.MICRO_ROWS * WORLD_SIZE)
        assert sum(report["sent"].values()) == pytest.approx(expected, rel=TOLERANCE), (job, report)
