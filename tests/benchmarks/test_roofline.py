"""The prediction's arithmetic by hand, and the kernels that it counts beside the formulas of the model's sizes."""

from __future__ import annotations

import functools
import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tests.benchmarks.kernel_trace import Kernel, shapes, trace
from trainer.config.model_settings import ModelSettings
from trainer.model.sizes import flops_per_token

RESULTS = Path(__file__).parent / "results" / "roofline.json"


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("roofline")


@pytest.fixture(params=["bert", "modernbert"])
def config(request: pytest.FixtureRequest) -> ModelSettings:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 96}
    return ModelSettings(family=request.param, vocab_size=500, max_position_embeddings=512, **sizes)


@functools.cache
def kernels_of(config: ModelSettings, compiled: bool) -> list[Kernel]:
    """Of a step of two rows, a few of whose tokens are predicted."""
    return trace(config, shapes(2, 256, 64, 0.125), next_sentence=False, compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True])
def test_products_and_attention_are_those_of_the_formula(config: ModelSettings, compiled: bool) -> None:
    """Eager or compiled, whole rows: what the roofline multiplies is what MFU counts, but for a window's blocks."""
    kernels = kernels_of(config, compiled)
    flops = {kind: sum(k.flops for k in kernels if k.kind == kind) for kind in ("matmul", "attention")}
    attention = 12 * config.hidden_size * 256 * config.num_hidden_layers * 512
    if config.family == "modernbert":
        near, far = config.attention_kinds.count("local"), config.attention_kinds.count("global")
        assert flops_per_token(config, 256, 0.125) * 512 - flops["matmul"] == 12 * 64 * (far * 256 + near * 128) * 512
    else:
        assert flops["matmul"] == flops_per_token(config, 256, 0.125) * 512 - attention
    assert flops["attention"] == attention * 14 / 12, "the backward computes the scores again; 129 + 128 keys: the row"


def test_what_a_kernel_reads_and_writes_is_counted_and_compiling_leaves_fewer(config: ModelSettings) -> None:
    eager, compiled = (
        [kernel for kernel in kernels_of(config, way) if kernel.kind != "matmul"] for way in (False, True)
    )
    gelus = [kernel.num_bytes for kernel in eager if kernel.name == "gelu"]
    values = 512 * config.intermediate_size * 2  # bf16
    assert gelus[:3] == [2 * values] * 3
    assert len(compiled) < 0.8 * len(eager)
    assert sum(kernel.num_bytes for kernel in compiled) < sum(kernel.num_bytes for kernel in eager)


def test_empty_sequences_cost_blocks_in_three_grids_backward_and_scratch(config: ModelSettings) -> None:
    few, many = (trace(config, shapes(2, 256, room, 0.125), False, compiled=False) for room in (2, 102))
    forward, backward = ([k for k in many if k.kind == "attention" and ("backward" in k.name) == way] for way in (0, 1))
    assert {kernel.blocks for kernel in few} == {0}
    assert {kernel.blocks for kernel in forward} == {2 * 2 * 100}, "two blocks of a row, two heads, a hundred sequences"
    assert {kernel.blocks for kernel in backward} == {3 * 2 * 2 * 100}
    assert {kernel.scratch_bytes for kernel in backward} == {4 * (512 + 128 * 102) * 2 * 32}


def test_a_kernel_takes_the_longer_of_computing_and_moving_and_a_launch(roofline: ModuleType) -> None:
    device = roofline.Device(
        matmul_flops=100.0,
        attention=((512, 50.0, 25.0), (1024, 100.0, 50.0)),
        bandwidth=10.0,
        launch_seconds=1.0,
        empty_block_seconds=0.5,
    )
    kernels = [
        Kernel("mm", "matmul", 10, 1000.0),
        Kernel("mm", "matmul", 200, 1000.0),
        Kernel("varlen_attn", "attention", 0, 100.0, blocks=2, keys=257),
        Kernel("varlen_attn_backward", "attention", 0, 100.0, blocks=6, keys=1023),
        Kernel("varlen_attn", "attention", 0, 100.0, keys=8192),
        Kernel("gelu", "elementwise", 30),
    ]
    assert roofline.seconds_by_part(kernels, device) == {
        "matmul": (10.0 + 1.0) + (20.0 + 1.0),
        "attention": (2.0 + 1.0) + (4.0 + 1.0) + (1.0 + 1.0),
        "elementwise": 3.0 + 1.0,
        "empty attention blocks": 4.0,
    }


@pytest.mark.parametrize("config", ["modernbert"], indirect=True)
def test_a_nearer_bound_of_the_longest_sequence_takes_empty_blocks_and_no_work_away(config: ModelSettings) -> None:
    batch = shapes(2, 512, 10, 0.125)
    row, near = (
        [k for k in trace(config, replace(batch, longest_sequence=bound), False, compiled=False) if k.keys]
        for bound in (512, 256)
    )
    assert [(kernel.flops, kernel.keys) for kernel in row] == [(kernel.flops, kernel.keys) for kernel in near]
    assert {kernel.blocks for kernel in row} == {2 * (4 * 10 - 8), 3 * 2 * (4 * 10 - 8)}
    assert {kernel.blocks for kernel in near} == {2 * (2 * 10 - 8), 3 * 2 * (2 * 10 - 8)}
    assert {kernel.keys for kernel in row} == {129 + 128, 512}


def test_the_committed_prediction_is_called_one_and_knows_its_devices_and_lengths() -> None:
    details = json.loads(RESULTS.read_text(encoding="utf-8"))["details"]
    assert details["kind"] == "prediction, not measured"
    assert {"bert_large at 512", "modern_large at 8,192", "modernbert_base at 1,024"} <= details["predictions"].keys()
    assert details["published"]["modernbert_base at 1,024"] == pytest.approx(304_000, rel=1e-3)
    for devices in details["predictions"].values():
        assert devices["H100"]["now"]["tokens_per_second"] < devices["H200"]["now"]["tokens_per_second"]
        for sides in devices.values():
            assert sides["now_slow"]["tokens_per_second"] < sides["now"]["tokens_per_second"]
            assert sides["before"]["tokens_per_second"] <= sides["now"]["tokens_per_second"]
