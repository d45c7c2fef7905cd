"""StableAdamW against the formulas of its paper, parameter by parameter in float64, on one rank and in parts, and
against itself written operator by operator, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.flat_partitions import flat_fragments, flat_part
from tests.support.threaded_ranks import ThreadedRanks
from trainer import load_config
from trainer.distributed.process_group import Ranks
from trainer.engine import stable_adamw
from trainer.engine.fragments import Partition, undivided
from trainer.engine.optimizer import parameter_groups
from trainer.engine.stable_adamw import StableAdamW
from trainer.objectives.pretraining import PretrainingModel

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
    optimizer.attach(undivided(torch.nn.ParameterList(tensors), optimizer))
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


class OneByOne(StableAdamW):
    """As of commit a83ab877: every operator on one fragment."""

    def attach(self, partition: Partition) -> None:
        super().attach(partition)
        self.partition, self.all_numbers = partition, {name: n for n, name in enumerate(partition.shapes)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        updated = [(group, t) for group in self.param_groups for t in group["params"] if t.grad is not None]
        sums = torch.zeros_like(self._sizes, device=updated[0][1].device)
        for group, tensor in updated:
            state = self.state[tensor]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
            state["step"] += 1
            beta1, beta2 = (stable_adamw._debiased(beta, int(state["step"])) for beta in group["betas"])
            state["exp_avg"].lerp_(tensor.grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(tensor.grad, tensor.grad, value=1 - beta2)
            for fragment in (f for f in self.partition.fragments if f.held_in is tensor):
                mean_squares = fragment.range_of(state["exp_avg_sq"]).clamp(min=group["eps"] ** 2)
                ratios = fragment.range_of(tensor.grad).square() / mean_squares
                sums[self.all_numbers[fragment.name]] = ratios.sum()
        divisors = (sums / self._sizes.to(sums.device)).sqrt_().clamp_(min=1.0)
        for group, tensor in updated:
            for fragment in (f for f in self.partition.fragments if f.held_in is tensor):
                rate = group["lr"] / divisors[self.all_numbers[fragment.name]]
                update = fragment.range_of(self.state[tensor]["exp_avg_sq"]).sqrt().add_(group["eps"])
                torch.div(fragment.range_of(self.state[tensor]["exp_avg"]), update, out=update)
                weight = fragment.range_of(tensor)
                weight.mul_(1 - rate * group["weight_decay"]).sub_(update.mul_(rate))


BIGGER = {"matrix": (67, 129), "norm": (129,), "other": (31, 67), "last": (7,), "scalar": (1,)}
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])])
@pytest.mark.parametrize("held", ["whole", "first half", "last half", "padding"])
def test_bits_are_those_of_one_operator_at_a_time(held: str, device: str):
    """Whole parameters as at ZeRO 0, and partitions of two groups as at ZeRO 1, one of which may be padding alone.

    On CUDA nobody knows the bits yet, and a run there has an entry of `numerics` about these kernels: a difference
    within rounding is reported, not an error.
    """
    number = {"whole": None, "first half": 0, "last half": 1, "padding": 2}[held]
    groups = [["matrix", "other"], ["norm", "last", "scalar"]]
    results = []
    for kind in (StableAdamW, OneByOne):
        generator = torch.Generator().manual_seed(7)
        values = {name: torch.randn(shape, generator=generator) for name, shape in BIGGER.items()}
        ranks = Ranks(number or 0, 3 if held == "padding" else 2, 0, torch.device("cpu"))

        def parts(
            of: dict[str, torch.Tensor], number: int | None = number, ranks: Ranks = ranks
        ) -> list[list[torch.Tensor]]:
            if number is None:
                return [[of[name].to(device) for name in names] for names in groups]
            behind = torch.zeros(300 if ranks.world_size == 3 else 0)
            return [[flat_part({n: of[n] for n in names} | {"": behind}, ranks).to(device)] for names in groups]

        tensors = [[torch.nn.Parameter(part) for part in of_group] for of_group in parts(values)]
        made = [{"params": t, "weight_decay": decay} for t, decay in zip(tensors, (DECAY, 0.0), strict=True)]
        optimizer = kind(made, lr=RATE, betas=BETAS, eps=EPS)
        every = [tensor for of_group in tensors for tensor in of_group]
        if number is None:
            optimizer.attach(undivided(torch.nn.ParameterList(every), optimizer))
        else:
            fragments = [
                fragment
                for names, (flat,) in zip(groups, tensors, strict=True)
                for fragment in flat_fragments({n: BIGGER[n] for n in names}, flat, optimizer.state, ranks)
            ]
            optimizer.attach(Partition(fragments, every, BIGGER))
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            scale = 100 if step == 2 else 1
            found = {name: torch.randn(shape, generator=generator) * scale for name, shape in BIGGER.items()}
            for tensor, gradient in zip(every, [g for of_group in parts(found) for g in of_group], strict=True):
                tensor.grad = gradient
            optimizer.step()
        results.append([*every, *(optimizer.state[t][name] for t in every for name in ("exp_avg", "exp_avg_sq"))])
    assert held != "padding" or not results[0][1].any(), "the small group is padding on the last rank"
    if not all(torch.equal(*pair) for pair in zip(*results, strict=True)):
        torch.testing.assert_close(results[0], results[1])
        largest = max(float((mine - other).abs().max()) for mine, other in zip(*results, strict=True))
        assert device == "cuda", f"bits differ, by {largest:.1e} at most"
        pytest.xfail(f"bits of StableAdamW's foreach kernels differ, by {largest:.1e} at most")


class Counted(TorchDispatchMode):
    """Operators; and of those on the parameters' device, which are kernels there, the launches and bytes.

    A `_foreach_` operator is one launch, or one per tensor where the other list has other shapes.
    """

    VIEWS = frozenset("view slice select unbind split_with_sizes detach alias".split())

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.launches = self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operators += 1
        name, is_meta = func.overloadpacket.__name__, lambda leaf: torch.is_tensor(leaf) and leaf.is_meta
        read = {id(leaf): leaf for leaf in tree_leaves(args) if is_meta(leaf)}
        if name in self.VIEWS or not read:
            return result
        written = [leaf for leaf in tree_leaves(args[0] if result is None else result) if is_meta(leaf)]
        self.num_bytes += 4 * sum(leaf.numel() for leaf in [*read.values(), *written])
        other = args[1] if name.startswith("_foreach") and len(args) > 1 else None
        is_slow = isinstance(other, list | tuple) and is_meta(other[0]) and other[0].shape != args[0][0].shape
        self.launches += len(other) if is_slow else 1
        return result


@pytest.mark.parametrize(
    ("kind", "operators", "launches"),
    [pytest.param(OneByOne, 4177, 2319, marks=pytest.mark.long), (StableAdamW, 220, 392)],
)
def test_a_step_of_bert_base_takes_few_operators_beside_a_sum_per_parameter(
    kind: type[StableAdamW], operators: int, launches: int
):
    """At ZeRO 1 on one rank. Tensors without values: who reads one, as a wait for the device would, gets an error."""
    with torch.device("meta"):
        model = PretrainingModel(load_config("bert_base").model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups, rank = parameter_groups(model, DECAY), Ranks(0, 1, 0, torch.device("cpu"))
    held = [{names[parameter]: parameter.detach() for parameter in group["params"]} for group in groups]
    flats = [torch.nn.Parameter(flat_part(tensors, rank)) for tensors in held]
    made = [group | {"params": [flat]} for group, flat in zip(groups, flats, strict=True)]
    optimizer = kind(made, lr=RATE, betas=BETAS, eps=EPS)
    parts = zip(held, flats, strict=True)
    fragments = [f for of, flat in parts for f in flat_fragments({n: shapes[n] for n in of}, flat, {}, rank)]
    optimizer.attach(Partition(fragments, flats, shapes))
    for flat in flats:
        flat.grad = torch.empty_like(flat)
    optimizer.step()
    with Counted() as counted:
        optimizer.step()
    assert (len(fragments), counted.operators, counted.launches) == (154, operators, launches)
    assert counted.num_bytes / sum(flat.numel() for flat in flats) == pytest.approx(120, rel=1e-3)
