"""Gradients leave in buckets while the backward goes on; what arrives is their mean over ranks.

That two and three ranks then train as plain PyTorch and bitwise as with DeepSpeed's own reduction: test_contract5.py.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.distributed.overlapped_reduction import OverlappedReduction, cut_into_buckets

WIDTH, LAYERS = 4, 5


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=2),
    bucket_elements=st.integers(1, 20),
)
def test_every_gradient_is_in_one_bucket_of_at_most_the_size(sizes, bucket_elements):
    groups = [([nn.Parameter(torch.zeros(size)) for size in group], torch.zeros(sum(group) + 3)) for group in sizes]
    order = [parameter for parameters, _ in groups for parameter in parameters]
    buckets = cut_into_buckets(groups, order, bucket_elements)
    for bucket in buckets:
        assert len(bucket.gradients) == sum(parameter.numel() for parameter in bucket.parameters)
        assert len(bucket.gradients) <= bucket_elements or len(bucket.parameters) == 1
        bucket.gradients += 1
    assert sorted(map(id, order)) == sorted(id(p) for bucket in buckets for p in bucket.parameters)
    for group, (_, flat) in zip(sizes, groups, strict=True):
        assert flat.tolist() == [1.0] * sum(group) + [0.0] * 3, "the padding behind the parameters is not sent"
    number_of = {id(parameter): number for number, parameter in enumerate(order)}
    lasts = [min(number_of[id(parameter)] for parameter in bucket.parameters) for bucket in buckets]
    assert lasts == sorted(lasts, reverse=True), "as the backward completes them"


class Toy:
    """Linear layers whose fp32 gradients are summed in flat buffers as DeepSpeed does it, weights and biases apart."""

    def __init__(self, monkeypatch, world_size: int = 2, dtype=torch.float32, predivide: float = 1.0) -> None:
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS)))
        self.events: list[str] = []
        self.sent: list[torch.Tensor] = []
        parameters = list(self.layers.parameters())
        groups = []
        for members in (parameters[::2], parameters[1::2]):
            flat = torch.zeros(sum(parameter.numel() for parameter in members))
            parts = flat.split([parameter.numel() for parameter in members])
            for parameter, part in zip(members, parts, strict=True):
                parameter.register_post_accumulate_grad_hook(lambda p, part=part: self.add(p, part))
            groups.append((members, flat))
        self.flats = [flat for _, flat in groups]
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: world_size)
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)
        self.reduction = OverlappedReduction(
            cut_into_buckets(groups, parameters, LAYERS * WIDTH), dtype, None, predivide
        )
        for number, layer in enumerate(self.layers):
            layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: self.events.append(f"gradient {n}"))

    def add(self, parameter: nn.Parameter, part: torch.Tensor) -> None:
        assert parameter.grad is not None
        part += parameter.grad.view(-1).float()
        parameter.grad = None

    def all_reduce(self, tensor: torch.Tensor, group: object, async_op: bool) -> object:
        """The other rank has three times this one's gradient."""
        assert async_op
        self.events.append(f"send {tensor.numel()}")
        self.sent.append(tensor.clone())
        return SimpleNamespace(wait=lambda: tensor.mul_(4.0))

    def backward(self, first_layer: int = 0) -> None:
        self.layers[first_layer:](torch.ones(3, WIDTH, dtype=torch.bfloat16)).square().sum().backward()


def test_a_bucket_leaves_before_the_gradients_of_earlier_layers_are_computed(monkeypatch):
    toy = Toy(monkeypatch)
    toy.reduction.begin()
    toy.backward()
    toy.reduction.finish()
    weights = [event for event in toy.events if event != f"send {LAYERS * WIDTH}"]
    assert weights == [what for n in reversed(range(LAYERS)) for what in (f"send {WIDTH**2}", f"gradient {n}")]
    assert sum(map(len, toy.sent)) == sum(map(len, toy.flats))


def test_nothing_is_sent_before_the_last_micro_batch_and_then_the_sum_of_all(monkeypatch):
    toy = Toy(monkeypatch)
    toy.backward()
    assert not toy.sent
    before = torch.cat(toy.flats)
    toy.reduction.begin()
    toy.backward()
    toy.reduction.finish()
    torch.testing.assert_close(torch.cat(toy.flats), 2 * before * (1 + 3) / 2)


def test_what_the_loss_does_not_depend_on_is_reduced_too(monkeypatch):
    """Other ranks may have a gradient of it, and all start the same all-reduces."""
    toy = Toy(monkeypatch)
    toy.reduction.begin()
    toy.backward(first_layer=2)
    toy.reduction.finish()
    assert sum(map(len, toy.sent)) == sum(map(len, toy.flats))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("predivide", [1.0, 2.0, 8.0])
def test_gradients_travel_in_the_type_asked_for_and_come_back_as_their_mean(monkeypatch, dtype, predivide):
    toy = Toy(monkeypatch, world_size=8, dtype=dtype, predivide=predivide)
    toy.backward()
    gradients = torch.cat(toy.flats)
    toy.reduction.begin()
    toy.reduction.finish()
    assert {tensor.dtype for tensor in toy.sent} == {dtype}
    largest = max(float(tensor.abs().max()) for tensor in toy.sent)
    assert largest * predivide == pytest.approx(float(gradients.abs().max()), rel=4e-3)
    torch.testing.assert_close(torch.cat(toy.flats), gradients * 4 / 8, rtol=1e-2, atol=0)


def test_a_destroyed_reduction_leaves_no_gradients_in_memory(monkeypatch):
    """A sweep of the benchmark builds one engine after another in a process."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    parameter = nn.Parameter(torch.zeros(WIDTH))
    buckets = cut_into_buckets([([parameter], torch.zeros(WIDTH))], [parameter], WIDTH)
    reduction = OverlappedReduction(buckets, torch.float32, None)
    references = [weakref.ref(parameter), weakref.ref(buckets[0])]
    reduction.destroy()
    del parameter, buckets, reduction
    gc.collect()
    assert [reference() for reference in references] == [None, None]
