"""Checkpoints by step and by time: what is due after a step, and which rank's clock counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.config.run_config import RunConfig
from trainer.distributed.process_group import Ranks
from trainer.loop import train
from trainer.loop.step import GlobalCounts
from trainer.loop.train import what_is_due, wishes


def run_at(
    step: int, rank: int = 0, minutes: float | None = None, saved_at: float = 0.0, asked: bool = False, training=None
):
    config = RunConfig.model_validate(
        {
            "output_dir": "run",
            "data": {"shards": "none"},
            "training": training or {"max_steps": 100, "micro_batch_tokens": 512, "global_batch_tokens": 512},
            "checkpoint": {"every_steps": 30, "every_minutes": minutes},
            "evaluation": {"every_steps": 50},
            "logging": {"every_steps": 20},
        }
    )
    return SimpleNamespace(
        config=config,
        state=SimpleNamespace(step=step),
        ranks=Ranks(rank, 2, 0, torch.device("cpu")),
        saved_at=saved_at,
        stop_signal=SimpleNamespace(asked=asked),
        save_is_deferred=False,
        health=SimpleNamespace(nonfinite=SimpleNamespace(in_streak=False)),
    )


def due(step: int, stop: bool = False, save: bool = False, training: dict[str, Any] | None = None) -> set[str]:
    counts = GlobalCounts(masked=1, pairs=0, tokens=1, unreadable_rows=0, stop=stop, save=save)
    found = what_is_due(run_at(step, training=training), SimpleNamespace(counts=counts, is_nonfinite=False))
    return {name for name, is_due in vars(found).items() if is_due}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (7, set()),
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
    assert due(100, stop=True) == due(100), "all steps are done: nothing was stopped"


def test_by_time_since_the_last_save_by_the_clock_of_rank_0(monkeypatch):
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    assert wishes(run_at(7, minutes=5, saved_at=700.0)).save
    assert not wishes(run_at(7, minutes=5, saved_at=701.0)).save
    assert not wishes(run_at(7, minutes=5, saved_at=0.0, rank=1)).save, "its clock does not count"
    assert not wishes(run_at(7, saved_at=0.0)).save
    assert wishes(run_at(7, rank=1, asked=True)).stop and not wishes(run_at(7)).stop
