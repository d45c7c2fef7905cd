"""The prediction's arithmetic by hand, and what DeepSpeed's ranks really send in a step beside its formulas."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.predictions import (
    NVLINK_BYTES_PER_SECOND,
    StepTraffic,
    efficiency_lines,
    link_bytes_per_second,
    sent_bytes,
    step_traffic,
)
from tests.support import toy_traffic
from tests.support.toy_processes import finish, start_ranks
from trainer import load_config
from trainer.config.objective_settings import MASKED_LM_ALONE
from trainer.config.run_config import RunConfig
from trainer.model.sizes import flops_per_token
from trainer.objectives.pretraining import num_parameters

MILLION = ["training.global_batch_tokens=1048576"]
LIKE_A_LARGE_MODEL = {
    1: {"zero_optimization": {"reduce_bucket_size": 50_000}},
    2: None,
    3: {"zero_optimization": {"stage3_prefetch_bucket_size": 0}},
}
"""Owners get sums of a few buckets of many. DeepSpeed fetches 50 million numbers ahead and keeps them: all of a model
as small as this."""
TOLERANCE = 0.02
"""Small parameters that stage 3 keeps whole, padding, the counts of a batch and the gradient norm."""
WORLD_SIZE = 2
AFTER = ["deepspeed={bf16: {immediate_grad_update: false}}"]


def preset(*overrides: str) -> RunConfig:
    return load_config("bert_large_64gpu", list(overrides))


def efficiency(config: RunConfig, world_size: int, bytes_per_second: float) -> float:
    return step_traffic(config, config.stages[0], world_size, 450e12).efficiency(bytes_per_second)


def test_traffic_by_hand():
    """A thousand numbers of 2 bytes, 100 of them tied, on 4 ranks: rings send three quarters of a tensor."""
    sizes = {"num_numbers": 1000, "num_tied": 100, "number_bytes": 2, "gradient_bytes": 4, "accumulation_steps": 8}
    assert sent_bytes(**sizes, zero_stage=1, world_size=4) == (2 * 4 + 2) * 750
    assert sent_bytes(**sizes, zero_stage=2, world_size=4) == (8 * 2 * 4 + 2) * 750
    assert sent_bytes(**sizes, zero_stage=3, world_size=4) == 8 * (2 * 2 + 4) * 750 + 8 * 2 * 2 * 75
    assert sent_bytes(**sizes, zero_stage=3, world_size=1) == 0
    sizes["gradient_bytes"] = 2
    assert sent_bytes(**sizes, zero_stage=2, world_size=4) == (4 * 2 * 4 + 2) * 750, "where the user wants bf16"
    # Exchanged: of what a rank computed three quarters; of its quarter of the sums three quarters; then its weights.
    for node in (1, 4):
        assert sent_bytes(**sizes, zero_stage=1, world_size=4, exchanged_on=node) == 2 * 750 + 4 * 187.5 + 2 * 750
    # On nodes of two half goes to the neighbor, and half of half the sums to the other node.
    assert sent_bytes(**sizes, zero_stage=1, world_size=4, exchanged_on=2) == 2 * 500 + 4 * 250 + 4 * 187.5 + 2 * 750
    assert sent_bytes(**sizes, zero_stage=1, world_size=1, exchanged_on=8) == 0


def test_a_step_by_hand():
    """Computes 10 s, sends 60 bytes within 6 of them and 8 after them; its last 5 bytes are ready at the end."""
    step = StepTraffic(
        useful_seconds=8.0, compute_seconds=10.0, hiding_seconds=6.0, hidden_bytes=60, last_bytes=5, exposed_bytes=8
    )
    assert step.seconds(1e30) == pytest.approx(10.0)
    assert step.seconds(20.0) == pytest.approx(10 + 5 / 20 + 8 / 20), "hidden but for the last bucket"
    assert step.seconds(5.0) == pytest.approx(10 + (12 - 6) + 8 / 5), "the network is still busy when the backward ends"
    assert step.efficiency(1e30) == pytest.approx(0.8), "a fifth of what is computed only fills up"


def test_the_traffic_of_bert_large_on_64_gpus_by_hand():
    """Of each of 8 nodes the fp32 sums, 7 parts of 8 to other nodes, and an eighth of them again to their owners."""
    step = step_traffic(preset(), preset().stages[0], 64, 450e12)
    parameters = num_parameters(preset().model, MASKED_LM_ALONE)
    assert step.hidden_bytes == pytest.approx(4 * parameters * 7 / 8 * 9 / 8)
    assert step.exposed_bytes == pytest.approx(2 * parameters * 63 / 64, abs=1)
    assert step.last_bytes == pytest.approx(4 * 30_528 * 1024 * 7 / 8 * 9 / 8)
    assert step.compute_seconds == pytest.approx(65_536 * flops_per_token(preset().model, 512) / 450e12)
    assert step.hiding_seconds == pytest.approx(step.compute_seconds * 2 / 3)


def test_gpus_of_one_node_exchange_in_bf16():
    step = step_traffic(preset(), preset().stages[0], 8, 450e12)
    assert step.hidden_bytes == pytest.approx((2 + 4 / 8) * num_parameters(preset().model, MASKED_LM_ALONE) * 7 / 8)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_limits_or_neighbors_nothing_is_lost(stage):
    config = preset(f"zero.stage={stage}", *(["training.precision=fp32"] if stage == 0 else []))
    assert efficiency(config, 64, 1e30) == pytest.approx(1.0)
    assert efficiency(config, 1, 1.0) == pytest.approx(1.0), "one rank sends nothing"
    shares = [efficiency(config, 64, speed) for speed in (1e6, 1e9, 1e11)]
    assert shares == sorted(shares) and shares[0] < 0.01


def test_a_ring_is_as_slow_as_the_network_and_within_one_node_there_is_none():
    assert link_bytes_per_second(8, 8, 100.0) == link_bytes_per_second(8, 8, 3200.0) == NVLINK_BYTES_PER_SECOND
    assert link_bytes_per_second(9, 8, 100.0) == 12.5e9
    assert link_bytes_per_second(64, 8, 1e9) == NVLINK_BYTES_PER_SECOND


def test_what_is_hidden_follows_from_stage_precision_and_deepspeeds_settings():
    """At 50 GB/s and a million tokens per step, one micro-batch per rank."""
    overlapped, after = efficiency(preset(*MILLION), 64, 50e9), efficiency(preset(*MILLION, *AFTER), 64, 50e9)
    assert overlapped - after > 0.1
    for other in (["zero.stage=2"], ["training.precision=fp16"]):
        assert efficiency(preset(*MILLION, *other), 64, 50e9) == pytest.approx(after, abs=1e-3)
    stage_2 = preset(*MILLION, "zero.stage=2", "deepspeed={zero_optimization: {overlap_comm: true}}")
    assert after < efficiency(stage_2, 64, 50e9) < overlapped, "hidden, and twice the traffic"
    offloaded = step_traffic(preset("zero.offload_optimizer=true"), preset().stages[0], 64, 450e12)
    assert offloaded.hidden_bytes == 0, "DeepSpeed's other optimizer"


@pytest.mark.parametrize(
    ("overrides", "given", "ratio"),
    [
        ((), "fp32", (4 + 4 / 8) / (2 + 4 / 8)),
        (("zero.stage=2", "deepspeed.zero_optimization={overlap_comm: true}"), "bf16", 2 / 4),
    ],
)
def test_gradients_travel_in_the_type_that_the_user_gives(overrides, given, ratio):
    own, users = preset(*overrides), preset(*overrides, f"deepspeed.communication_data_type={given}")
    before, after = (step_traffic(config, config.stages[0], 8, 450e12).hidden_bytes for config in (own, users))
    assert after / before == pytest.approx(ratio)


def test_stage_2_reduces_after_every_micro_batch_and_stage_1_once():
    many = "training.micro_batch_tokens=16384"
    overlap = "deepspeed={zero_optimization: {overlap_comm: true}}"
    one, two = (preset(many, f"zero.stage={stage}", overlap) for stage in (1, 2))
    first, second = (step_traffic(config, config.stages[0], 64, 450e12) for config in (one, two))
    assert second.hidden_bytes == pytest.approx(4 * first.hidden_bytes * (8 * 63 / 64) / (4 * 7 / 8 * 9 / 8))
    assert second.hiding_seconds == pytest.approx(4 * first.hiding_seconds)


def test_rows_that_only_fill_up_are_lost():
    config = preset("training.global_batch_tokens=65536")
    assert efficiency(config, 96, 1e30) == pytest.approx(128 / 192), "128 rows on 96 ranks, two each"


def test_the_preset_keeps_nine_tenths_at_64_gpus_from_400_gigabits_on():
    lines = list(efficiency_lines(preset(), [8, 64], 8))
    assert [line.split()[:4] for line in lines[1:-1]] == [["8", "1", "65,536", "8"], ["64", "8", "65,536", "1"]]
    slow, usual, fast = (float(share.rstrip("%")) for share in lines[2].split()[4:])
    assert slow < 90 < usual < fast < 100
    assert len(set(lines[1].split()[4:])) == 1, "within one node the network does not count"
    assert "Predicted, not measured: 450 TFLOP/s per GPU" in lines[-1]


def test_batch_sizes_of_a_deepspeed_file_are_those_of_the_runs_own_ranks():
    """They fit 64 ranks, and the table asks about other numbers too."""
    sizes = "train_batch_size: 8192, train_micro_batch_size_per_gpu: 128, gradient_accumulation_steps: 1"
    given = preset(f"deepspeed={{{sizes}}}")
    assert list(efficiency_lines(given, (1, 8, 64, 256), 8)) == list(efficiency_lines(preset(), (1, 8, 64, 256), 8))


def test_fp32_has_no_prediction_from_the_speed_of_bf16():
    (line,) = efficiency_lines(preset("training.precision=fp32"), [64], 8)
    assert line.startswith("No prediction for fp32")


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
