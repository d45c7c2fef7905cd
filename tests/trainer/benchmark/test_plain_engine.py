from __future__ import annotations

import copy

import torch
from torch import nn

from trainer.benchmark.plain_engine import PlainEngine
from trainer.config.training_settings import OptimizerSettings
from trainer.engine.optimizer import build_optimizer

SETTINGS = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1)
CPU = torch.device("cpu")


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))


def batches(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, 5, generator=generator) for _ in range(2)]


def test_fp32_trains_as_the_plain_loop_with_accumulation_and_clipping() -> None:
    model = make_model()
    expected = copy.deepcopy(model)
    optimizer = build_optimizer(expected, SETTINGS)
    engine = PlainEngine(model, SETTINGS, CPU, gradient_clipping=0.1)
    for step in range(3):
        for rows in batches(step):
            engine.backward(engine.forward(rows).square().sum())
            expected(rows).square().sum().backward()
        wanted = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
        assert wanted > 0.1, "clipping is never active"
        torch.testing.assert_close(engine.step(), wanted)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(dict(model.named_parameters()), dict(expected.named_parameters()))


def test_bf16_keeps_updates_that_are_too_small_for_bf16() -> None:
    model = nn.Linear(4, 1, bias=False)
    nn.init.ones_(model.weight)
    engine = PlainEngine(model, OptimizerSettings(weight_decay=0.0), CPU, torch.bfloat16)
    engine.set_learning_rate(1e-4)  # bf16 has steps of 1/256 below 1
    for _ in range(40):
        engine.backward(engine.forward(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
        engine.step()
    assert model.weight.dtype == torch.bfloat16
    assert (model.weight < 1.0).all(), "40 updates of 0.0001 add up in the fp32 master weights"


def test_preparing_changes_nothing() -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    engine = PlainEngine(model, SETTINGS, CPU, torch.bfloat16)
    engine.warmup_step(lambda: engine.forward(batches(0)[0].bfloat16()).float().sum())
    engine.step()
    torch.testing.assert_close(
        {name: weight.float() for name, weight in model.state_dict().items()}, before, rtol=1e-2, atol=1e-2
    )
    assert all(weight.grad is None for weight in model.parameters())
