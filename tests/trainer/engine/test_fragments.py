"""Fragments of every ZeRO stage, over DeepSpeed's own records as plain objects; with DeepSpeed: test_checkpoint.py."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.engine.fragments import (
    Fragment,
    base_optimizer,
    fragments,
    parameter_shapes,
    refresh_model_weights,
    set_optimizer_steps,
)

KINDS = ("weight", "exp_avg", "exp_avg_sq")
SHAPES = {"weight": (5, 3), "bias": (5,), "last": (7,)}


def a_module() -> nn.Module:
    module = nn.Module()
    for number, (name, shape) in enumerate(SHAPES.items()):
        module.register_parameter(name, nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape)))
        getattr(module, name).number = number
    module.register_parameter("frozen", nn.Parameter(torch.zeros(2), requires_grad=False))
    return module


def state_of(tensor: torch.Tensor, steps: int = 3) -> dict[str, torch.Tensor]:
    return {"exp_avg": tensor.detach() + 100, "exp_avg_sq": tensor.detach() + 200, "step": torch.tensor(float(steps))}


def replicated(rank: int, world_size: int) -> tuple[nn.Module, Any]:
    module = a_module()
    return module, SimpleNamespace(state={p: state_of(p) for p in module.parameters() if p.requires_grad})


def flattened(rank: int, world_size: int) -> tuple[nn.Module, Any]:
    """All parameters end to end, of which each rank holds an equal range; behind one element of another group."""
    module = a_module()
    whole = torch.cat([parameter.detach().view(-1) for name, parameter in module.named_parameters() if name in SHAPES])
    part = -(-len(whole) // world_size)
    flat = nn.Parameter(torch.cat([torch.tensor([-1.0]), whole[rank * part : (rank + 1) * part]]))
    at = 0
    for name in SHAPES:
        parameter: Any = getattr(module, name)
        start, stop = max(rank * part - at, 0), min((rank + 1) * part - at, parameter.numel())
        parameter._hp_mapping = None
        if start < stop:
            parameter._hp_mapping = SimpleNamespace(
                param_group_index=1,
                lp_fragment_address=SimpleNamespace(start=start, numel=stop - start),
                hp_fragment_address=SimpleNamespace(start=1 + at + start - rank * part, numel=stop - start),
            )
        at += parameter.numel()
    groups = [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [flat]}]
    return module, SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups, state={flat: state_of(flat)}))


def partitioned(rank: int, world_size: int) -> tuple[nn.Module, Any]:
    """Each parameter in equal parts, padded at the end with 9; the biases in a sub-group of their own."""
    module = a_module()
    flats: list[list[torch.Tensor]] = [[], []]
    positions = {}
    for number, name in enumerate(SHAPES):
        parameter: Any = getattr(module, name)
        sub_group, numel = int(parameter.dim() == 1), parameter.numel()
        part = -(-numel // world_size)
        padded = torch.cat([parameter.detach().view(-1), torch.full((part * world_size - numel,), 9.0)])
        offset = sum(map(len, flats[sub_group]))
        positions[number] = (sub_group, offset, part)
        flats[sub_group].append(padded[rank * part : (rank + 1) * part])
        parameter.ds_shape, parameter.ds_numel = parameter.shape, numel
        parameter.partition_numel = lambda part=part: part
    groups = [nn.Parameter(torch.cat(parts)) for parts in flats]
    optimizer = SimpleNamespace(state={flat: state_of(flat) for flat in groups})
    return module, SimpleNamespace(
        grad_position=positions,
        get_param_id=lambda parameter: parameter.number,
        fp32_partitioned_groups_flat=groups,
        optimizer=optimizer,
    )


MAKERS = {0: replicated, 1: flattened, 2: flattened, 3: partitioned}


def fragments_of_ranks(zero_stage: int, world_size: int) -> Iterator[Fragment]:
    for rank in range(world_size):
        module, optimizer = MAKERS[zero_stage](rank, world_size)
        yield from fragments(module, optimizer, zero_stage, rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("zero_stage", MAKERS)
def test_the_ranks_own_every_element_once_at_its_position(zero_stage: int, world_size: int) -> None:
    found = {(kind, name): [torch.nan] * torch.Size(shape).numel() for name, shape in SHAPES.items() for kind in KINDS}
    for fragment in fragments_of_ranks(zero_stage, world_size):
        assert fragment.kinds == KINDS
        assert fragment.start <= fragment.owned_start <= fragment.owned_stop <= fragment.stop
        for kind in KINDS:
            values = found[kind, fragment.name]
            owned = slice(fragment.owned_start, fragment.owned_stop)
            assert all(value != value for value in values[owned]), "owned twice"
            values[owned] = fragment.read_owned(kind).tolist()
    for (kind, name), values in found.items():
        first = {"weight": 0, "exp_avg": 100, "exp_avg_sq": 200}[kind]
        assert values == list(range(first, first + len(values))), (kind, name)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("zero_stage", MAKERS)
def test_written_elements_are_read_back_and_padding_becomes_0(zero_stage: int, world_size: int) -> None:
    for fragment in fragments_of_ranks(zero_stage, world_size):
        numel = fragment.stop - fragment.start
        values = -torch.arange(1.0, numel + 1)
        half = numel // 2
        for kind in KINDS:
            fragment.write(kind, fragment.start + half, values[half:])
            fragment.write(kind, fragment.start, values[:half])
            assert fragment.view(kind)[:numel].tolist() == values.tolist()
            assert not fragment.view(kind)[numel:].any()
            fragment.view(kind)[numel:] = 5.0
            fragment.fill(kind, 0.25)
            assert (fragment.view(kind)[:numel] == 0.25).all()
            assert not fragment.view(kind)[numel:].any()


@pytest.mark.parametrize("world_size", [3, 8])
def test_at_stage_3_fragments_end_with_the_parameter_and_some_views_have_padding(world_size: int) -> None:
    found = list(fragments_of_ranks(3, world_size))
    assert len(found) == world_size * len(SHAPES), "every rank has a part of every parameter, be it padding alone"
    padding = [len(f.view("weight")) - (f.stop - f.start) for f in found]
    assert min(padding) == 0 < max(padding)


def test_the_shapes_are_whole_and_of_trainable_parameters() -> None:
    assert parameter_shapes(a_module()) == SHAPES
    module = a_module()
    parameter: Any = module.weight
    parameter.ds_shape = torch.Size((50, 3))  # at stage 3 the tensor itself is empty
    assert parameter_shapes(module)["weight"] == (50, 3)


@pytest.mark.parametrize("zero_stage", MAKERS)
def test_the_number_of_updates_is_set_in_all_parts(zero_stage: int) -> None:
    _, optimizer = MAKERS[zero_stage](0, 1)
    base = optimizer if zero_stage == 0 else optimizer.optimizer
    assert base_optimizer(optimizer, zero_stage) is base
    base.state[torch.zeros(1)] = {"momentum": torch.zeros(1)}
    set_optimizer_steps(optimizer, zero_stage, 17)
    assert {int(state["step"]) for state in base.state.values() if "step" in state} == {17}


def test_the_weights_of_the_forward_are_refreshed_as_each_stage_does_after_an_update() -> None:
    calls: list[Any] = []
    note = calls.append
    persistent = [SimpleNamespace(all_gather=lambda parameters: note(("gather", len(parameters))))] * 2
    optimizer = SimpleNamespace(
        update_lp_params=lambda: note("update"),
        _partition_all_parameters=lambda: note("partition"),
        _reassign_or_swap_out_partitioned_parameters=lambda group: note(("group", group)),
        fp16_groups=[0, 0, 0],
        persistent_parameters=persistent,
    )
    expected = {
        0: [],
        1: ["update"],
        2: ["update"],
        3: ["partition", ("group", 0), ("group", 1), ("group", 2), ("gather", 2)],
    }
    for zero_stage, calls_of_stage in expected.items():
        calls.clear()
        refresh_model_weights(optimizer, zero_stage)
        assert calls == calls_of_stage
    optimizer.persistent_parameters = []
    refresh_model_weights(optimizer, 3)
    assert calls[-1] == ("group", 2)
