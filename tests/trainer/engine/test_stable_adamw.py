"""StableAdamW against the formulas of its paper, parameter by parameter in float64, on one rank and in parts."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.flat_partitions import flat_fragments, flat_part
from tests.support.threaded_ranks import ThreadedRanks
from trainer.distributed.process_group import Ranks
from trainer.engine import stable_adamw
from trainer.engine.fragments import Partition, whole_parameters
from trainer.engine.stable_adamw import StableAdamW

SHAPES = {"matrix": (5, 3), "bias": (5,), "last": (7,)}
RATE, BETAS, EPS, DECAY = 0.05, (0.9, 0.95), 1e-6, 0.3
STEPS = 4


def initial() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    """The third step's are 100 times as large, which is what the clipping is for; one element never has any."""
    generator = torch.Generator().manual_seed(step)
    found = {
        name: torch.randn(shape, generator=generator) * (100 if step == 2 else 1) for name, shape in SHAPES.items()
    }
    found["bias"][0] = 0.0
    return found


def trained_by_formula() -> tuple[dict[str, torch.Tensor], set[str]]:
    """Weights after the steps, and the parameters that were clipped in any."""
    weights = {name: weight.double() for name, weight in initial().items()}
    means = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    squares = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    clipped = set()
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            g, time = gradient.double(), step + 1
            means[name] = BETAS[0] * means[name] + (1 - BETAS[0]) * g
            squares[name] = BETAS[1] * squares[name] + (1 - BETAS[1]) * g**2
            mean, square = means[name] / (1 - BETAS[0] ** time), squares[name] / (1 - BETAS[1] ** time)
            rms = math.sqrt((g**2 / square.clamp(min=EPS**2)).mean())
            clipped |= {name} if rms > 1.2 else set()
            rate = RATE / max(1.0, rms)
            weights[name] -= rate * DECAY * weights[name] + rate * mean / (square.sqrt() + EPS)
    return weights, clipped


def optimizer_of(tensors: list[torch.nn.Parameter]) -> StableAdamW:
    """Of whole parameters."""
    optimizer = StableAdamW([{"params": tensors, "weight_decay": DECAY}], lr=RATE, betas=BETAS, eps=EPS)
    optimizer.attach(whole_parameters(torch.nn.ParameterList(tensors), optimizer))
    return optimizer


def test_one_rank_updates_as_the_formulas_say():
    weights = {name: torch.nn.Parameter(weight) for name, weight in initial().items()}
    optimizer = optimizer_of(list(weights.values()))
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            weights[name].grad = gradient
        optimizer.step()
    expected, clipped = trained_by_formula()
    assert clipped == set(SHAPES)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.detach().double(), expected[name], rtol=1e-6, atol=1e-6)


def test_a_parameter_without_gradient_stays():
    weight, other = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = optimizer_of([weight, other])
    optimizer.step()
    other.grad = torch.ones(2)
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0] and other[0] < 1.0


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_clipping_is_that_of_the_whole_parameter_however_ranks_hold_its_parts(world_size, monkeypatch):
    """Parameters end to end in equal flat partitions, as at ZeRO 1 and 2; borders lie inside of parameters."""
    group = ThreadedRanks(world_size, (stable_adamw,), monkeypatch)

    def train(ranks: Ranks) -> torch.Tensor:
        flat = torch.nn.Parameter(flat_part(initial(), ranks))
        optimizer = optimizer_of([flat])
        held = flat_fragments(SHAPES, flat, optimizer.state, ranks)
        optimizer.attach(Partition(held, [flat], SHAPES, shared_by=ranks))
        for step in range(STEPS):
            flat.grad = flat_part(gradients(step), ranks)
            optimizer.step()
        return flat.detach()

    expected, _ = trained_by_formula()
    whole = torch.cat([weight.reshape(-1) for weight in expected.values()])
    found = torch.cat(group.run(train))[: len(whole)]
    torch.testing.assert_close(found.double(), whole, rtol=1e-6, atol=1e-6)
