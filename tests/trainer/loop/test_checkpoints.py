"""What a start does before its first step, and what becomes of saves that fail or fall on a step that is not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.checkpoint.format import TrainState
from trainer.data.sample_range import SampleRange
from trainer.distributed.process_group import Ranks
from trainer.loop import checkpoints as module
from trainer.loop.checkpoints import Checkpoints, Due, Progress
from trainer.metrics.health import NonFiniteSteps

ALONE = Ranks(0, 1, 0, torch.device("cpu"))


class Saving:
    """Checkpoints of a run whose policy is to continue after a failed save, and what they warn of."""

    def __init__(self, follower: Any = None) -> None:
        self.warnings: list[str] = []
        settings = SimpleNamespace(on_failed_save="continue", upload_to=None)
        stage = SimpleNamespace(first_step=0)
        config: Any = SimpleNamespace(checkpoint=settings, output_dir="run", branch=None, stage_of=lambda step: stage)
        engine: Any = SimpleNamespace(ranks=ALONE)
        reporter: Any = SimpleNamespace(
            info=lambda text: None, warn=self.warnings.append, note=lambda event, values: None
        )
        data: Any = None
        self.checkpoints = Checkpoints(config, engine, data, reporter, lambda doing: None, follower=follower)


@pytest.mark.parametrize(
    ("state", "done"),
    [
        (TrainState(step=80, branched_at=80), ["go_back 80", "save", "submit"]),
        (TrainState(step=80, branched_at=80, mlflow_run_id="abc"), ["submit"]),
        (TrainState(step=80), ["submit"]),
    ],
    ids=["the start of a branch", "later on it", "no branch"],
)
def test_the_follower_forgets_the_old_branch_and_then_does_what_was_missed(
    state: TrainState, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    follower = SimpleNamespace(go_back=lambda step: did.append(f"go_back {step}"), submit=lambda: did.append("submit"))
    monkeypatch.setattr(Checkpoints, "save", lambda owner, state, progress, is_end: did.append("save") or progress)
    progress = Progress(NonFiniteSteps(20))
    assert Saving(follower).checkpoints.finish_previous_start(state, progress) == progress
    assert did == done
    Saving().checkpoints.finish_previous_start(state, progress)


@pytest.mark.parametrize("is_evaluated_later", [False, True])
def test_a_saved_checkpoint_is_followed_unless_the_run_evaluates_it_first(
    is_evaluated_later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[bool] = []
    monkeypatch.setattr(module.writer, "save", lambda *given, **_: SimpleNamespace(step=given[2].step, folder=tmp_path))
    saving = Saving(SimpleNamespace(submit=lambda: submitted.append(True)))
    progress = Progress(NonFiniteSteps(20), evaluation_is_due=is_evaluated_later)
    saving.checkpoints.save(TrainState(step=8), progress, is_end=False)
    assert submitted == ([] if is_evaluated_later else [True])


EIGHT = TrainState(step=8)


DEFERRED = Due(log=False, evaluation=False, save=False, deferred_save=True, stop=False, end=False)


def in_streak(saved_step: int | None) -> Progress:
    """The progress of a run whose steps 7 and 8 were not finite."""
    nonfinite = NonFiniteSteps(max_in_a_row=20)
    for step in (7, 8):
        samples = SampleRange(stage=0, epoch=0, first=16 * step, stop=16 * step + 16)
        nonfinite = nonfinite.after(step, samples, (float("nan"), 0.0))
    return Progress(nonfinite, saved_step=saved_step)


def test_a_deferred_save_is_made_up_and_reported_once_with_the_last_good_checkpoint() -> None:
    saving, progress = Saving(), in_streak(saved_step=6)
    for _ in range(3):
        progress = saving.checkpoints.save_if_due(DEFERRED, EIGHT, progress)
    assert progress.save_is_deferred
    (warning,) = saving.warnings
    assert "the last good checkpoint is run/checkpoints/step-00000006" in warning


def test_a_run_that_ends_in_a_streak_fails_and_says_from_where_it_can_be_finished() -> None:
    with pytest.raises(UserError) as raised:
        Saving().checkpoints.save_if_due(replace(DEFERRED, end=True), EIGHT, in_streak(saved_step=6))
    for part in ("run/checkpoints/step-00000006", "--resume-from 6 --skip-samples 112:144 --skip-epoch 0"):
        assert part in str(raised.value)


def test_a_stop_in_a_streak_defers_nothing() -> None:
    progress = in_streak(saved_step=6)
    stopping = replace(DEFERRED, stop=True, end=True)
    assert Saving().checkpoints.save_if_due(stopping, EIGHT, progress) is progress


def test_without_a_checkpoint_none_is_named() -> None:
    with pytest.raises(UserError, check=coded("nonfinite-steps"), match="no checkpoint exists") as raised:
        Saving().checkpoints.save_if_due(replace(DEFERRED, end=True), EIGHT, in_streak(saved_step=None))
    assert "--resume-from" not in str(raised.value)


@pytest.mark.parametrize(
    ("has_checkpoint", "saves", "ends_at"),
    [
        (False, "xx", 2),
        (False, "xoxxx", None),
        (False, "oxxx", None),
        (True, "xxx", None),
    ],
    ids=["none was ever saved", "the second was", "the first was", "it was resumed from one"],
)
def test_a_run_without_any_checkpoint_ends_at_its_second_failed_save_whatever_the_policy(
    has_checkpoint: bool, saves: str, ends_at: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, taken = Saving(), 0
    progress = Progress(NonFiniteSteps(20), saved_step=40 if has_checkpoint else None)
    try:
        for outcome in saves:
            taken += 1
            saved = SimpleNamespace(folder="folder", step=80) if outcome == "o" else None
            monkeypatch.setattr(module.writer, "save", lambda *_, saved=saved, **__: saved)
            progress = saving.checkpoints.save(TrainState(step=80), progress, is_end=False)
    except UserError as error:
        assert "nor was any before it" in str(error) and ends_at == taken
    else:
        assert ends_at is None
