"""One optimizer step against an engine that records what it is asked; with real engines: test_contract5.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.data.batch import IGNORED, Batch
from trainer.distributed.process_group import Ranks
from trainer.loop import step as module
from trainer.loop.step import Counting, GlobalCounts, StepRequests, StepResult, take_step
from trainer.metrics.throughput import WorkClock
from trainer.objectives.objective import StageObjectives, seed_micro_batch
from trainer.objectives.pretraining import PretrainingModel

CPU = torch.device("cpu")
SIZES = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 16}


def micro_batch(masked: int, pairs: int, tokens: int = 6, unreadable: int = 0) -> Batch:
    """One row of 8 positions with so many predictions, pairs and tokens."""
    return Batch(
        input_ids=torch.arange(8).lt(tokens) * 9,
        position_ids=torch.zeros(8, dtype=torch.int64),
        token_type_ids=torch.zeros(8, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 8], dtype=torch.int32),
        masked_positions=torch.zeros(4, dtype=torch.int64),
        labels=torch.tensor([7] * masked + [IGNORED] * (4 - masked)),
        cls_positions=torch.zeros(2, dtype=torch.int64),
        next_sentence_labels=torch.tensor([1] * pairs + [IGNORED] * (2 - pairs)),
        sequence_length=8,
        num_unreadable_rows=unreadable,
    )


class RecordingEngine:
    """The loss of micro-batch n is `weight` times (10, 1) to the n, masked and pairs; notes every call."""

    was_step_applied = True

    def __init__(self) -> None:
        self.weight = torch.ones((), requires_grad=True)
        self.calls: list[tuple[Any, ...]] = []
        self.draws: list[float] = []

    def set_learning_rate(self, learning_rate: float) -> None:
        self.calls.append(("learning rate", learning_rate))

    def forward(self, batch: Batch, *, objectives: Any) -> Any:
        self.calls.append(("forward", batch.num_masked))
        self.draws.append(float(torch.rand(())))
        mlm, pair = 2.0 * batch.num_masked, 3.0 * batch.num_pairs
        output = {
            "masked_lm": {"loss": self.weight * mlm},
            "sentence_pairs": {"loss": self.weight * pair, "accuracy": torch.tensor(batch.num_pairs)},
        }
        return {name: output[name] for name in objectives}

    def backward(self, loss: torch.Tensor, is_last_micro_batch: bool) -> None:
        self.calls.append(("backward", round(loss.item(), 5), is_last_micro_batch))

    def step(self) -> float:
        self.calls.append(("step",))
        return 0.5


OBJECTIVES = PretrainingModel(ModelSettings(**SIZES), objectives_of("next_sentence")).objectives
BOTH = StageObjectives(OBJECTIVES, {"masked_lm": 1.0, "sentence_pairs": 1.0})


def take(
    engine: RecordingEngine,
    *batches: Batch,
    world_size: int = 1,
    step: int = 6,
    first: int = 0,
    objectives: StageObjectives = BOTH,
) -> StepResult:
    global_batch: Any = SimpleNamespace(micro_batches=batches, first_slice=first)
    ranks = Ranks(0, world_size, 0, CPU)
    mark = lambda doing: engine.calls.append(("mark", doing))  # noqa: E731
    counts = Counting(global_batch, objectives, ranks).counts
    return take_step(engine, global_batch, counts, objectives, step, 0.25, 3, ranks, WorkClock(CPU), mark)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to the sums over ranks, of which another one holds (5, 1, 10, 4) and asks for a checkpoint."""
    events: list[str] = []

    def begin(values: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
        events.append("begun")
        total = values + torch.tensor([5, 1, 10, 4, 0, 1, 0, 0])
        return lambda: events.append("waited for") or total

    monkeypatch.setattr(module, "begin_sum_on_hosts", begin)
    return events


def test_a_step_trains_each_micro_batch_and_updates_once() -> None:
    engine = RecordingEngine()
    result = take(engine, micro_batch(3, 2), micro_batch(1, 0))
    assert engine.calls == [
        ("learning rate", 0.25),
        ("mark", "step 7: micro-batch 0"),
        ("forward", 3),
        ("backward", 6 / 4 + 6 / 2, False),
        ("mark", "step 7: micro-batch 1"),
        ("forward", 1),
        ("backward", 2 / 4, True),
        ("mark", "step 7: update"),
        ("step",),
    ]
    assert BOTH.columns == (("masked_lm", "loss"), ("sentence_pairs", "loss"), ("sentence_pairs", "accuracy"))
    assert result.sums.tolist() == [8.0, 6.0, 2.0] and result.weights == BOTH.weights
    assert result.sums.dtype == torch.float64 and not result.sums.requires_grad
    assert result.applied and not result.is_nonfinite and result.grad_norm == 0.5


def test_the_loss_is_divided_by_the_counts_of_all_ranks_and_multiplied_by_their_number(sums: list[str]) -> None:
    engine = RecordingEngine()
    result = take(engine, micro_batch(3, 2, tokens=5, unreadable=1), world_size=3)
    assert ("backward", round((6 / (3 + 5) + 6 / (2 + 1)) * 3, 5), True) in engine.calls
    counts = result.counts
    assert counts == GlobalCounts({"masked_lm": 8, "sentence_pairs": 3}, tokens=15, unreadable_rows=5)


def test_counts_and_requests_are_summed_once_and_waited_for_when_they_are_needed(sums: list[str]) -> None:
    counting = Counting(None, BOTH, Ranks(0, 2, 0, CPU), StepRequests(stop=True))
    assert sums == ["begun"]
    assert counting.requests == StepRequests(stop=True, save=True)
    assert counting.counts.predictions == {"masked_lm": 5, "sentence_pairs": 1}
    assert sums == ["begun", "waited for"]


def test_one_rank_counts_its_own_micro_batches_and_requests() -> None:
    global_batch: Any = SimpleNamespace(micro_batches=(micro_batch(1, 0, tokens=2), micro_batch(0, 2, tokens=7)))
    for name in ("stop", "save", "log", "fail"):
        counting = Counting(global_batch, BOTH, Ranks(0, 1, 0, CPU), StepRequests(**{name: True}))
        assert counting.counts == GlobalCounts({"masked_lm": 1, "sentence_pairs": 2}, tokens=9, unreadable_rows=0)
        assert counting.requests == StepRequests(**{name: True})


def test_a_batch_without_predictions_is_consumed_without_a_forward_or_an_update() -> None:
    engine = RecordingEngine()
    result = take(engine, micro_batch(0, 0), micro_batch(0, 0))
    assert engine.calls == [("learning rate", 0.25)]
    assert result.counts.is_empty and not result.applied and not result.is_nonfinite
    assert (result.sums.tolist(), result.grad_norm) == ([0, 0, 0], 0)


@pytest.mark.parametrize(("masked", "pairs"), [(1, 0), (0, 1)])
def test_a_batch_of_predictions_or_of_pairs_alone_is_trained(masked: int, pairs: int) -> None:
    engine = RecordingEngine()
    result = take(engine, micro_batch(masked, pairs))
    assert not result.counts.is_empty and result.applied
    assert ("backward", 2.0 * masked + 3.0 * pairs, True) in engine.calls


def test_the_loss_is_weighted_and_what_a_stage_leaves_out_is_neither_counted_nor_computed() -> None:
    engine = RecordingEngine()
    weighted = StageObjectives(OBJECTIVES, {"sentence_pairs": 0.5, "masked_lm": 4.0})
    take(engine, micro_batch(3, 2), objectives=weighted)
    assert ("backward", 4.0 * 6 / 3 + 0.5 * 6 / 2, True) in engine.calls
    alone = StageObjectives(OBJECTIVES, {"masked_lm": 1.0})
    result = take(engine, micro_batch(3, 2), objectives=alone)
    assert ("backward", 6 / 3, True) in engine.calls and result.sums.tolist() == [6.0, 0.0, 0.0]
    assert result.counts.predictions == {"masked_lm": 3, "sentence_pairs": 0} and result.weights == {"masked_lm": 1.0}
    assert not take(engine, micro_batch(0, 2), objectives=alone).applied, "nothing that the stage trains"


def test_a_step_that_was_not_applied_is_nonfinite() -> None:
    engine = RecordingEngine()
    engine.was_step_applied = False
    assert take(engine, micro_batch(1, 0)).is_nonfinite


def test_dropout_depends_on_seed_step_and_number_of_the_micro_batch_alone() -> None:
    one_rank = RecordingEngine()
    take(one_rank, *[micro_batch(1, 0)] * 4)
    second_of_two = RecordingEngine()
    take(second_of_two, *[micro_batch(1, 0)] * 2, first=2)
    assert second_of_two.draws == one_rank.draws[2:] and len(set(one_rank.draws)) == 4
    next_step = RecordingEngine()
    take(next_step, micro_batch(1, 0), step=7)
    draws = {one_rank.draws[0], next_step.draws[0]}
    for key in ((3, 6, 0), (4, 6, 0), (3, 6, 1)):
        seed_micro_batch(*key)
        draws.add(float(torch.rand(())))
    assert len(draws) == 4, "of seeds (3, 6, 0), (3, 7, 0), (4, 6, 0) and (3, 6, 1)"
