"""Contract 5 at scale: the mean of gradients on 8, 64 and 512 simulated ranks, beside sums in float64.

All ranks are in this process: each takes its step of `average` in turn, and their all-to-alls meet in `Network`.

Gradients leave in buckets while the backward goes on; then each rank has the means of the elements that it owns. That
ranks train as plain PyTorch is tested in test_contract5.py.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainer.distributed import gradient_reduction
from trainer.distributed.gradient_reduction import (
    Level,
    OverlappedReduction,
    Route,
    average,
    cut_into_buckets,
    norm_of_parts,
    ranks_per_node,
    sizes_to_owners,
)
from trainer.distributed.process_group import Ranks

BF16, FP32 = torch.bfloat16, torch.float32
BUCKETS = ((2_500, 4_099), (0, 2_500))
"""Of 4,099 numbers, which neither 8, 64 nor 512 divides."""


class Peers(NamedTuple):
    """A group as one of its ranks sees it."""

    members: tuple[int, ...]
    rank: int


class Network:
    """All-to-alls of simulated ranks: what one waits for has been sent by all."""

    def __init__(self) -> None:
        self.meetings: dict[Any, dict[int, tuple[torch.Tensor, list[int]]]] = defaultdict(dict)
        self.calls: Counter[Peers] = Counter()
        self.bytes: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By rank, what each collective sends to others and receives from them."""

    def all_to_all_single(
        self, received: torch.Tensor, sent: torch.Tensor, to_here: Any, from_here: Any, group: Peers, async_op: bool
    ) -> SimpleNamespace:
        assert async_op
        size, own = len(group.members), group.members.index(group.rank)
        sizes = from_here or [len(sent) // size] * size
        arriving = to_here or [len(received) // size] * size
        self.bytes[group.rank].append((sum(sizes) - sizes[own], sum(arriving) - arriving[own]))
        meeting = self.meetings[group.members, self.calls[group]]
        self.calls[group] += 1
        meeting[own] = sent, [0, *itertools.accumulate(sizes)]

        def wait() -> None:
            senders = (meeting[other] for other, count in enumerate(arriving) if count)
            pieces = [sent[ends[own] : ends[own + 1]] for sent, ends in senders]
            received.copy_(torch.cat(pieces) if pieces else received)

        return SimpleNamespace(wait=wait)


def routes(world_size: int, per_node: int) -> list[Route]:
    everyone = tuple(range(world_size))
    found = []
    for rank in everyone:
        all_ranks = Level(Peers(everyone, rank), world_size)
        levels: tuple[Level, ...] = (all_ranks,)
        if 1 < per_node < world_size:
            node, across = everyone[rank // per_node * per_node :][:per_node], everyone[rank % per_node :: per_node]
            levels = (Level(Peers(node, rank), per_node), Level(Peers(across, rank), len(across)))
        found.append(Route(rank, all_ranks, levels))
    return found


def averaged(gradients: torch.Tensor, per_node: int, dtype: torch.dtype) -> tuple[torch.Tensor, Network]:
    """The mean of (ranks, n) gradients, (n,), as the owners of its parts hold it."""
    network = Network()
    world_size, size = gradients.shape
    padding = -size % (2 * world_size)  # DeepSpeed's
    flats = [torch.cat([each, torch.zeros(padding)]) for each in gradients]
    part = (size + padding) // world_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_to_all_single", network.all_to_all_single)
        for start, stop in BUCKETS:
            steps = [average(flats[route.rank], start, stop, route, dtype) for route in routes(world_size, per_node)]
            while [None for each in steps if next(each, steps) is None]:
                pass
    for rank, flat in enumerate(flats):
        changed = (flat[:size] != gradients[rank]).nonzero()
        assert ((changed >= rank * part) & (changed < (rank + 1) * part)).all(), "only what the rank owns"
    owned = torch.cat([flat[rank * part : (rank + 1) * part] for rank, flat in enumerate(flats)])
    assert not owned[size:].any()
    return owned[:size], network


def drawn(world_size: int, signal: float) -> torch.Tensor:
    """(world_size, n): what ranks agree on, times `signal`, and noise of each."""
    generator = torch.Generator().manual_seed(world_size)
    size = BUCKETS[0][1]
    noise = torch.randn(world_size, size, generator=generator)
    return noise + signal * torch.randn(size, generator=generator)


@functools.cache
def averaged_in_bf16(world_size: int, per_node: int) -> tuple[torch.Tensor, Network]:
    return averaged(drawn(world_size, 1.0), per_node, BF16)


def error(values: torch.Tensor, exact: torch.Tensor) -> float:
    return float((values.double() - exact).norm() / exact.norm())


WORLDS = [(8, 8), (8, 4), (64, 1), (64, 8), *(pytest.param(512, each, marks=pytest.mark.slow) for each in (1, 8))]


@pytest.mark.parametrize(("world_size", "per_node"), WORLDS)
def test_the_error_is_that_of_one_rounding_of_each_ranks_contribution(world_size, per_node):
    gradients = drawn(world_size, 1.0)
    exact = gradients.double().mean(0)
    once = error(gradients.to(BF16).double().mean(0), exact)
    found, _ = averaged_in_bf16(world_size, per_node)
    assert error(found, exact) < once * 1.001 < 2e-3
    largest = (gradients.to(BF16).double() - gradients).abs().mean(0)
    assert ((found - exact).abs() <= largest + 1e-6).all(), "of every number"


@pytest.mark.parametrize(("world_size", "per_node"), WORLDS[:4])
def test_values_sent_in_fp32_are_summed_within_its_rounding(world_size, per_node):
    """Sums of one micro-batch are bf16 already; and everything may travel in fp32."""
    gradients = drawn(world_size, 1.0)
    for dtype, unrounded in ((BF16, gradients.to(BF16).float()), (FP32, gradients)):
        found, _ = averaged(unrounded, per_node, dtype)
        assert error(found, unrounded.double().mean(0)) < 1e-6


@pytest.mark.parametrize(("world_size", "per_node"), WORLDS)
def test_bytes_sent_and_received_per_rank_and_bucket(world_size, per_node):
    _, network = averaged_in_bf16(world_size, per_node)
    nodes = world_size // per_node if 1 < per_node < world_size else 1
    first = world_size if nodes == 1 else per_node
    part = -(-BUCKETS[0][1] // (2 * world_size)) * 2
    collectives = 2 if nodes == 1 else 3
    for number, (start, stop) in enumerate(BUCKETS):
        piece = -(-(stop - start) // world_size)
        for rank in range(world_size):
            exchanges = network.bytes[rank][number * collectives :][:collectives]
            of_pieces = [2 * piece * nodes * (first - 1), 4 * piece * (nodes - 1)][: collectives - 1]
            assert exchanges[:-1] == [(size, size) for size in of_pieces], "every rank sends as much as it receives"
            sent, received = exchanges[-1]
            assert sent <= 4 * piece and received <= 4 * part
    assert all(len(exchanges) == collectives * len(BUCKETS) for exchanges in network.bytes.values())


@given(start=st.integers(0, 40), size=st.integers(1, 60), world_size=st.integers(1, 9), padding=st.integers(0, 20))
def test_every_sum_goes_to_its_owner_once(start, size, world_size, padding):
    part = -(-(start + size + padding) // world_size)
    sizes = [sizes_to_owners(start, start + size, part, rank, world_size) for rank in range(world_size)]
    assert sum(sum(sent) for sent, _ in sizes) == size
    for sender, receiver in itertools.product(range(world_size), repeat=2):
        assert sizes[sender][0][receiver] == sizes[receiver][1][sender]


@pytest.mark.parametrize(
    ("local_ranks", "expected"),
    [([0], 1), ([0, 1], 1), ([0, 1, 0, 1], 2), ([0, 0, 0], 1), ([0, 1, 0], 1), ([0, 0, 1, 1], 1), ([0, 1, 2, 0], 1)],
)
def test_nodes_are_used_where_all_of_several_have_equally_many_neighboring_ranks(local_ranks, expected, monkeypatch):
    monkeypatch.setattr(gradient_reduction, "gather_objects", lambda *_: local_ranks)
    assert ranks_per_node(Ranks(0, len(local_ranks), 0, torch.device("cpu"))) == expected


def test_the_norm_is_that_of_all_ranks_parts(monkeypatch):
    parts = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    other = torch.tensor(12.0**2, dtype=torch.float64)
    monkeypatch.setattr(gradient_reduction, "all_reduce_sum", lambda squares, ranks: squares + other)
    norm = norm_of_parts(parts, Ranks(0, 2, 0, torch.device("cpu")))
    assert norm.dtype == FP32 and float(norm) == 13.0
    many = torch.randn(300_000, generator=torch.Generator().manual_seed(1))
    norm = norm_of_parts([many], Ranks(0, 2, 0, torch.device("cpu")))
    assert float(norm) == pytest.approx(float((many.double().square().sum() + other).sqrt()), rel=1e-6)
    parts[0][1] = torch.nan
    assert norm_of_parts(parts, Ranks(0, 2, 0, torch.device("cpu"))).isnan()


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
