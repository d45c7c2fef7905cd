"""Gradients leave in buckets while the backward goes on; what a rank owns is their mean over ranks then.

How a bucket is averaged: test_gradient_exchange.py. That ranks then train as plain PyTorch: test_contract5.py.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.distributed import gradient_reduction
from trainer.distributed.gradient_reduction import Level, OverlappedReduction, Route, cut_into_buckets

WIDTH, LAYERS = 4, 5
ROUTE = Route(0, Level(None, 2), (Level(None, 2),))


@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=2),
    bucket_elements=st.integers(1, 20),
)
def test_every_gradient_is_in_one_bucket_of_at_most_the_size(sizes, bucket_elements):
    groups = [([nn.Parameter(torch.zeros(size)) for size in group], torch.zeros(sum(group) + 3)) for group in sizes]
    order = [parameter for parameters, _ in groups for parameter in parameters]
    buckets = cut_into_buckets(groups, order, bucket_elements)
    for bucket in buckets:
        size = bucket.stop - bucket.start
        assert size == sum(parameter.numel() for parameter in bucket.parameters)
        assert size <= bucket_elements or len(bucket.parameters) == 1
        bucket.flat[bucket.start : bucket.stop] += 1
    assert sorted(map(id, order)) == sorted(id(p) for bucket in buckets for p in bucket.parameters)
    for group, (_, flat) in zip(sizes, groups, strict=True):
        assert flat.tolist() == [1.0] * sum(group) + [0.0] * 3, "the padding behind the parameters is not sent"
    number_of = {id(parameter): number for number, parameter in enumerate(order)}
    lasts = [min(number_of[id(parameter)] for parameter in bucket.parameters) for bucket in buckets]
    assert lasts == sorted(lasts, reverse=True), "as the backward completes them"


class Toy:
    """Linear layers whose fp32 gradients are summed in flat buffers as DeepSpeed does it, weights and biases apart."""

    def __init__(self, monkeypatch) -> None:
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS)))
        self.events: list[str] = []
        self.sent: list[torch.Tensor] = []
        self.most_under_way = self.under_way = 0
        parameters = list(self.layers.parameters())
        groups = []
        for members in (parameters[::2], parameters[1::2]):
            flat = torch.zeros(sum(parameter.numel() for parameter in members))
            parts = flat.split([parameter.numel() for parameter in members])
            for parameter, part in zip(members, parts, strict=True):
                parameter.register_post_accumulate_grad_hook(lambda p, part=part: self.add(p, part))
            groups.append((members, flat))
        self.flats = [flat for _, flat in groups]
        monkeypatch.setattr(gradient_reduction, "average", self.average)
        self.reduction = OverlappedReduction(
            cut_into_buckets(groups, parameters, LAYERS * WIDTH), torch.bfloat16, ROUTE
        )
        for number, layer in enumerate(self.layers):
            layer.weight.register_post_accumulate_grad_hook(lambda _, n=number: self.events.append(f"gradient {n}"))

    def add(self, parameter: nn.Parameter, part: torch.Tensor) -> None:
        assert parameter.grad is not None
        part += parameter.grad.view(-1).float()
        parameter.grad = None

    def average(self, flat: torch.Tensor, start: int, stop: int, route: Route, dtype: torch.dtype) -> Iterator[None]:
        """Two collectives; the other rank has three times this one's gradient."""
        assert (route, dtype) == (ROUTE, torch.bfloat16)
        self.events.append(f"send {stop - start}")
        self.sent.append(flat[start:stop].clone())
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        yield
        yield
        self.under_way -= 1
        flat[start:stop] *= 2.0

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
    assert (toy.most_under_way, toy.under_way) == (3, 0), "of six buckets, one for each step of two collectives"


def test_nothing_is_sent_before_the_last_micro_batch_and_then_the_sum_of_all(monkeypatch):
    toy = Toy(monkeypatch)
    toy.backward()
    assert not toy.sent
    before = torch.cat(toy.flats)
    toy.reduction.begin()
    toy.backward()
    toy.reduction.finish()
    torch.testing.assert_close(torch.cat(toy.flats), 2 * before * (1 + 3) / 2)


def test_parameters_without_gradient_are_reduced_too(monkeypatch):
    """Other ranks may have a gradient of it, and all start the same collectives."""
    toy = Toy(monkeypatch)
    toy.reduction.begin()
    toy.backward(first_layer=2)
    toy.reduction.finish()
    assert sum(map(len, toy.sent)) == sum(map(len, toy.flats))


@pytest.mark.long
def test_a_destroyed_reduction_leaves_no_gradients_in_memory():
    """A sweep of the benchmark builds one engine after another in a process."""
    parameter = nn.Parameter(torch.zeros(WIDTH))
    buckets = cut_into_buckets([([parameter], torch.zeros(WIDTH))], [parameter], WIDTH)
    reduction = OverlappedReduction(buckets, torch.float32, ROUTE)
    references = [weakref.ref(parameter), weakref.ref(buckets[0])]
    reduction.destroy()
    del parameter, buckets, reduction
    gc.collect()
    assert [reference() for reference in references] == [None, None]
