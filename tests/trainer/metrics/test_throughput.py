from __future__ import annotations

import time

import pytest
import torch

from trainer import load_config
from trainer.metrics.throughput import (
    Interval,
    RankWork,
    WorkClock,
    data_sheet_flops,
    flops_per_position,
    peak_flops,
    slow_rank,
)

CPU = torch.device("cpu")


def interval(*work: tuple[float, float]) -> Interval:
    ranks = tuple(RankWork(data, forward, 1000 + number) for number, (data, forward) in enumerate(work))
    return Interval(num_steps=10, seconds=20.0, tokens=40_000, rows=10 * 32, ranks=ranks)


def test_the_interval_reports_speed_waiting_the_slowest_rank_and_the_largest_memory():
    config = load_config("tiny_cpu")
    metrics = interval((1.0, 4.0), (5.0, 6.0)).metrics(config.stages[0], flops_per_position=1e6, peak_flops=1e9)
    assert metrics["train/tokens_per_second"] == 2000
    assert metrics["train/seconds_per_step"] == 2
    assert metrics["train/data_wait_share"] == 0.25
    assert metrics["train/slowest_rank"] == 1 and metrics["train/slowest_rank_seconds"] == pytest.approx(1.1)
    assert metrics["train/peak_memory_bytes"] == 1001
    # 2,048 positions a step in 2 seconds on two devices
    assert metrics["train/mfu"] == pytest.approx(2048 / 2 * 1e6 / (2 * 1e9))


def test_without_a_peak_there_is_no_mfu():
    config = load_config("tiny_cpu")
    assert peak_flops(config, CPU) is None
    assert "train/mfu" not in interval((1.0, 1.0)).metrics(config.stages[0], 1e6, None)
    given = load_config("tiny_cpu", ["logging.peak_flops_per_device=5e10"])
    assert peak_flops(given, CPU) == 5e10


def test_operations_a_place_follow_the_documented_formula():
    config = load_config("bert_large")
    assert flops_per_position(config, config.stages[0]) == pytest.approx(1.992e9, rel=1e-3)


def test_a_causal_stage_computes_the_head_for_all_tokens_and_half_of_the_attention():
    config = load_config("bert_large", ["objectives=[{name: causal}]", "data.sentence_pairs=none"])
    (stage,), model = config.stages, config.model
    masked = load_config("bert_large", ["data.sentence_pairs=none"])
    more = 0.85 * 6 * (model.hidden_size**2 + model.hidden_size * model.padded_vocab_size)
    less = 6 * model.num_hidden_layers * model.hidden_size * stage.sequence_length
    expected = flops_per_position(masked, masked.stages[0]) + more - less
    assert flops_per_position(config, stage) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "precision", "flops"),
    [
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "fp16", 121e12),
        ("NVIDIA H200", "fp32", None),
        ("another", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA H200 NVL", "bf16", 835e12),
        ("NVIDIA GH200 480GB", "bf16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-PCIE-16GB", "fp16", 112e12),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA GB200", "bf16", None),
        ("NVIDIA RTX A1000", "bf16", None),
    ],
)
def test_known_devices_have_the_peak_of_their_data_sheet(name, precision, flops):
    assert data_sheet_flops(name, precision) == flops


def test_a_rank_that_takes_much_longer_than_the_others_is_found():
    assert slow_rank([1.0, 1.1, 2.0, 0.9], 1.5) == 2
    assert slow_rank([1.0, 1.1, 1.2, 0.9], 1.5) is None
    assert slow_rank([1.0, 2.0], 1.5) == 1 and slow_rank([5.0], 1.5) is None


def test_the_clock_adds_up_waiting_and_forwards_until_it_is_read():
    clock = WorkClock(CPU)

    def slow_batches():
        time.sleep(0.05)
        yield "batch"

    started_at = time.perf_counter()
    assert clock.fetch(slow_batches()) == "batch"
    with clock.forward():
        time.sleep(0.02)
    data, forward = clock.read()
    assert data >= 0.05 and forward >= 0.02 and data + forward <= time.perf_counter() - started_at
    assert clock.read() == (0.0, 0.0)
