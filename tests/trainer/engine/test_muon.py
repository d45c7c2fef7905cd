"""Muon against plain per-matrix implementations, and on several ranks against one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.flat_partitions import flat_fragments, flat_part
from tests.support.threaded_ranks import ThreadedRanks
from trainer.distributed.process_group import Ranks
from trainer.engine import whole_parameters
from trainer.engine.fragments import Fragment, Partition, undivided
from trainer.engine.muon import Muon, orthogonalized
from trainer.engine.whole_parameters import choose_owners

SHAPES = {"wide": (6, 16), "stacked": (24, 8), "grouped": (12, 8), "tall": (20, 5), "embedding": (9, 4)}
STACKED = {"wide": (6,), "stacked": (8, 8, 8), "grouped": (8, 2, 2), "tall": (20,)}
RATE, BETAS, EPS, DECAY, MOMENTUM = 0.02, (0.9, 0.95), 1e-6, 0.1, 0.95
STEPS = 4


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def muon_of(matrices: list[torch.Tensor], others: list[torch.Tensor], dtype: torch.dtype = torch.float32) -> Muon:
    groups = [
        {"params": matrices, "weight_decay": DECAY, "orthogonal": True},
        {"params": others, "weight_decay": DECAY, "orthogonal": False},
    ]
    return Muon(groups, lr=RATE, betas=BETAS, eps=EPS, momentum=MOMENTUM, dtype=dtype)


def trained(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Weights after the steps on one rank."""
    model = torch.nn.ParameterDict(tensors_of(0))
    optimizer = muon_of([model[name] for name in STACKED], [model["embedding"]], dtype)
    optimizer.attach(replace(undivided(model, optimizer), hidden_matrices=STACKED))
    for step in range(STEPS):
        for name, gradient in tensors_of(1 + step).items():
            model[name].grad = gradient
        optimizer.step()
    assert set(optimizer.state[model["wide"]]) == {"momentum"}
    assert set(optimizer.state[model["embedding"]]) == {"step", "exp_avg", "exp_avg_sq"}
    return {name: weight.detach() for name, weight in model.items()}


def trained_by_torch(optimizer_class: type, name: str, **options: object) -> torch.Tensor:
    """A weight after the same steps with an optimizer of torch, each of its stacked matrices a parameter."""
    parts = [torch.nn.Parameter(part) for part in tensors_of(0)[name].split(STACKED.get(name, SHAPES[name][:1]))]
    optimizer = optimizer_class(parts, lr=RATE, weight_decay=DECAY, **options)
    for step in range(STEPS):
        for part, gradient in zip(parts, tensors_of(1 + step)[name].split([*map(len, parts)]), strict=True):
            part.grad = gradient.clone()
        optimizer.step()
    return torch.cat(parts).detach()


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    return x


@pytest.mark.parametrize("name", STACKED)
def test_in_fp32_a_matrix_is_updated_as_the_formulas_say_to_1e_6(name):
    weights = list(tensors_of(0)[name].double().split(STACKED[name]))
    momenta = [torch.zeros_like(weight) for weight in weights]
    for step in range(STEPS):
        for number, gradient in enumerate(tensors_of(1 + step)[name].double().split(STACKED[name])):
            momenta[number] = MOMENTUM * momenta[number] + (1 - MOMENTUM) * gradient
            direction = newton_schulz(MOMENTUM * momenta[number] + (1 - MOMENTUM) * gradient)
            scale = 0.2 * math.sqrt(max(direction.shape))
            weights[number] = weights[number] * (1 - RATE * DECAY) - RATE * scale * direction
    torch.testing.assert_close(trained()[name].double(), torch.cat(weights), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", STACKED)
def test_in_bf16_a_matrix_is_updated_as_by_torchs_muon(name):
    """torch.optim.Muon iterates in bf16, too; a step moves an element by about 0.2 x RATE.

    The same operations differ by kernels alone: 1% of a step. From the iterations in fp32 theirs are 5% of a step away.
    """
    expected = trained_by_torch(torch.optim.Muon, name, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    for dtype, share in ((torch.bfloat16, 0.01), (torch.float32, 0.05)):
        distance = (trained(dtype)[name] - expected).square().mean().sqrt()
        assert distance < share * 0.2 * RATE


def test_the_other_parameters_are_updated_by_adamw_bit_by_bit():
    expected = trained_by_torch(torch.optim.AdamW, "embedding", betas=BETAS, eps=EPS, fused=True)
    assert torch.equal(trained()["embedding"], expected)


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16), (1, 32, 32)])
def test_singular_values_come_near_1(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 1e-3
    values = torch.linalg.svdvals(orthogonalized(matrices))
    assert values.min() > 0.2 and values.max() < 1.3 and 0.7 < values.median() < 1.2
    assert not orthogonalized(torch.zeros(shape)).any(), "a step without gradient moves nothing"


def equal_fragments(flat: torch.Tensor, states: object, ranks: Ranks) -> list[Fragment]:
    """Every parameter in equal parts, padded at the end, as at ZeRO 3."""
    fragments, offset = [], 0
    for name, shape in ((name, SHAPES[name]) for name in STACKED):
        part = -(-math.prod(shape) // ranks.world_size)
        start = min(ranks.rank * part, math.prod(shape))
        stop = min(start + part, math.prod(shape))
        fragments.append(Fragment(name, start, stop, start, stop, flat, offset, part - (stop - start), states))
        offset += part
    return fragments


def equal_part(tensors: dict[str, torch.Tensor], ranks: Ranks) -> torch.Tensor:
    return torch.cat([flat_part({name: tensor}, ranks) for name, tensor in tensors.items()])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_several_ranks_update_matrices_bit_by_bit_as_one(zero_stage, world_size, monkeypatch):
    group = ThreadedRanks(world_size, (whole_parameters,), monkeypatch)

    def train(ranks: Ranks) -> dict[str, tuple[int, torch.Tensor]]:
        cut = equal_part if zero_stage == 3 else flat_part
        flat = torch.nn.Parameter(cut({name: tensors_of(0)[name] for name in STACKED}, ranks))
        optimizer = muon_of([flat], [torch.nn.Parameter(torch.ones(1))])
        shapes = {name: SHAPES[name] for name in STACKED}
        if zero_stage == 3:
            held = equal_fragments(flat, optimizer.state, ranks)
        else:
            held = flat_fragments(shapes, flat, optimizer.state, ranks)
        optimizer.attach(Partition(held, [flat], shapes, STACKED, shared_by=ranks))
        for step in range(STEPS):
            flat.grad = cut({name: tensors_of(1 + step)[name] for name in STACKED}, ranks)
            optimizer.step()
        return {fragment.name: (fragment.start, fragment.read_owned("weight")) for fragment in held}

    found = {name: torch.full((math.prod(SHAPES[name]),), torch.nan) for name in STACKED}
    for of_rank in group.run(train):
        for name, (start, values) in of_rank.items():
            found[name][start : start + len(values)] = values
    for name, weight in trained().items():
        if name in STACKED:
            assert torch.equal(found[name].view(SHAPES[name]), weight), name


def test_whole_matrices_stay_where_they_are_and_split_ones_go_to_the_rank_with_the_least_work():
    shapes = {"a": (4, 4), "b": (4, 4), "c": (4, 4), "d": (2, 2)}
    parts = [{"a": (0, 16), "b": (0, 9)}, {"b": (9, 16), "c": (0, 16), "d": (0, 3)}, {"d": (3, 4), "a": (16, 16)}]
    loads = [0, 0, 0]
    assert choose_owners(parts, shapes, loads) == {"a": 0, "b": 1, "c": 1, "d": 2}
    assert loads == [64, 128, 8]
