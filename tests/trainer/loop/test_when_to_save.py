"""Checkpoints by step and by time: what is due after a step, and which rank's clock counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.toy_run import tiny_config
from trainer.checkpoint.format import TrainState
from trainer.config.run_config import RunConfig
from trainer.data.workers import ReadingStopped
from trainer.distributed.process_group import Ranks
from trainer.loop import training_loop
from trainer.loop.run import Progress
from trainer.loop.step import GlobalCounts, StepRequests
from trainer.loop.training_loop import requests_of, what_is_due
from trainer.metrics.health import NonFiniteSteps


def saving_at(minutes: float | None = None, training: dict[str, Any] | None = None) -> RunConfig:
    return tiny_config(
        model={"max_position_embeddings": 512},
        training={"max_steps": None if training else 100, **(training or {})},
        checkpoint={"every_steps": 30, "every_minutes": minutes},
        evaluation={"every_steps": 50},
        logging={"every_steps": 20},
    )


def due(step: int, stop: bool = False, save: bool = False, training: dict[str, Any] | None = None) -> set[str]:
    counts = GlobalCounts(masked=1, pairs=0, tokens=1, unreadable_rows=0, stop=stop, save=save)
    result = SimpleNamespace(counts=counts, is_nonfinite=False)
    found = what_is_due(saving_at(training=training), TrainState(step=step), Progress(NonFiniteSteps(20)), result)
    return {name for name, is_due in vars(found).items() if is_due}


def requests(rank: int = 0, minutes: float | None = None, saved_at: float = 0.0, asked: bool = False) -> StepRequests:
    run = SimpleNamespace(
        config=saving_at(minutes),
        ranks=Ranks(rank, 2, 0, torch.device("cpu")),
        stop_signal=SimpleNamespace(asked=asked),
    )
    return requests_of(run, Progress(NonFiniteSteps(20), saved_at=saved_at))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (1, {"log"}),
        (7, set()),
        (10, {"log"}),
        (20, {"log"}),
        (30, {"log", "save"}),
        (50, {"log", "evaluation"}),
        (100, {"log", "evaluation", "save", "end"}),
    ],
)
def test_by_step(step, expected):
    assert due(step) == expected


@pytest.mark.parametrize(("step", "expected"), [(25, {"log"}), (26, set()), (65, {"log"}), (70, set())])
def test_no_interval_reaches_over_the_end_of_a_stage(step, expected):
    """The rows of an interval are all as long as those of the stage that it ends in."""
    batches = {"micro_batch_tokens": 512, "global_batch_tokens": 512}
    stages = [
        {"sequence_length": 128 * 2**number, "steps": steps, **batches} for number, steps in enumerate((25, 40, 35))
    ]
    assert due(step, training={"stages": stages}) == expected


def test_a_wish_of_any_rank_saves_and_a_stop_saves_and_ends():
    assert due(7, save=True) == {"log", "save"}
    assert due(7, stop=True) == {"log", "save", "stop", "end"}
    assert due(100, stop=True) == due(100) | {"stop"}, "its evaluation is left to the next start"


def test_by_time_since_the_last_save_by_the_clock_of_rank_0(monkeypatch):
    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    assert requests(minutes=5, saved_at=700.0).save
    assert not requests(minutes=5, saved_at=701.0).save
    assert not requests(minutes=5, saved_at=0.0, rank=1).save, "its clock does not count"
    assert not requests(saved_at=0.0).save
    assert requests(rank=1, asked=True).stop and not requests().stop


@pytest.mark.parametrize("last_logged", [3, 5])
def test_a_stop_before_a_batch_was_read_logs_and_saves_the_step_before_it(last_logged, monkeypatch):
    did, state = [], TrainState(step=5, last_logged_step=last_logged)
    dropped = SimpleNamespace(counts=SimpleNamespace(unread=True))

    def reading_stopped(batches: object) -> None:
        raise ReadingStopped

    def note(name: str, result: object) -> None:
        monkeypatch.setattr(training_loop, name, lambda *arguments: did.append(name) or result)

    progress = Progress(NonFiniteSteps(3))
    note("complete_evaluation", (progress, False))
    note("GlobalBatches", SimpleNamespace(epoch_of=lambda state: 0.5))
    note("step", dropped)
    note("log", (state, progress))
    note("save_stopped", progress)
    note("state_of_checkpoint", "")
    note("report_stop", None)
    clock = SimpleNamespace(fetch=reading_stopped)
    run: Any = SimpleNamespace(
        config=saving_at(),
        recorder=SimpleNamespace(clock=clock),
        watchdog=SimpleNamespace(mark=lambda doing: None),
    )
    assert training_loop.training_loop(run, state, progress) == ("stopped", state, progress)
    logged = ["log"] if last_logged < 5 else []
    first = ["complete_evaluation", "GlobalBatches", "step"]
    assert did == [*first, *logged, "save_stopped", "state_of_checkpoint", "report_stop"]
