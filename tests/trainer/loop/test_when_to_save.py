"""Checkpoints and log lines by step and by time: what is due after a step, and which rank's clock counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.toy_run import tiny_config
from trainer.checkpoint.format import TrainState
from trainer.config.run_config import RunConfig
from trainer.distributed.process_group import Ranks
from trainer.loop import training_loop
from trainer.loop.checkpoints import Progress
from trainer.loop.step import StepRequests
from trainer.loop.training_loop import requests_of, what_is_due
from trainer.metrics.health import NonFiniteSteps


def saving_at(
    minutes: float | None = None, training: dict[str, Any] | None = None, seconds: float | None = None
) -> RunConfig:
    return tiny_config(
        model={"max_position_embeddings": 512},
        training={"max_steps": None if training else 100, **(training or {})},
        checkpoint={"every_steps": 30, "every_minutes": minutes},
        evaluation={"every_steps": 50},
        logging={"every_steps": 20, "every_seconds": seconds},
    )


def due(step: int, training: dict[str, Any] | None = None, seconds: float | None = None, **requests: bool) -> set[str]:
    config, result = saving_at(training=training, seconds=seconds), SimpleNamespace(is_nonfinite=False)
    progress = Progress(NonFiniteSteps(20))
    found = what_is_due(config, TrainState(step=step), progress, result, StepRequests(**requests))
    return {name for name, is_due in vars(found).items() if is_due}


def requests(
    rank: int = 0,
    minutes: float | None = None,
    saved_at: float = 0.0,
    asked: bool = False,
    seconds: float | None = None,
    logged_at: float = 0.0,
) -> StepRequests:
    run = SimpleNamespace(
        config=saving_at(minutes, seconds=seconds),
        ranks=Ranks(rank, 2, 0, torch.device("cpu")),
        stop_signal=SimpleNamespace(is_requested=asked),
        reporter=SimpleNamespace(logged_at=logged_at),
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


@pytest.mark.parametrize(
    ("step", "log", "expected"), [(1, False, {"log"}), (10, False, {"log"}), (20, False, set()), (21, True, {"log"})]
)
def test_seconds_between_log_lines_replace_steps(step, log, expected):
    assert due(step, seconds=30.0, log=log) == expected


def test_a_line_is_due_by_the_clock_of_rank_0_and_never_by_default(monkeypatch):
    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    assert requests(seconds=30.0, logged_at=970.0).log and not requests(seconds=30.0, logged_at=971.0).log
    assert not requests(seconds=30.0, rank=1).log and not requests().log


def test_by_time_since_the_last_save_by_the_clock_of_rank_0(monkeypatch):
    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    assert requests(minutes=5, saved_at=700.0).save
    assert not requests(minutes=5, saved_at=701.0).save
    assert not requests(minutes=5, saved_at=0.0, rank=1).save, "its clock does not count"
    assert not requests(saved_at=0.0).save
    assert requests(rank=1, asked=True).stop and not requests().stop
