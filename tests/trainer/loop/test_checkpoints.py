"""What a start does before its first step, and what becomes of saves that fail or fall on a step that is not finite."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.checkpoint.format import TrainState
from trainer.data.sample_range import SampleRange
from trainer.loop import saving
from trainer.loop.run import Progress
from trainer.metrics.health import NonFiniteSteps


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
    monkeypatch.setattr(saving, "save", lambda run, state, progress, is_end: did.append("save") or progress)
    config = SimpleNamespace(checkpoint=SimpleNamespace(upload_to=None), branch=None)
    progress = Progress(NonFiniteSteps(20))
    run = SimpleNamespace(config=config, follower=follower, log=lambda text: None)
    assert saving.finish_previous_start(run, state, progress) == progress
    assert did == done
    run.follower = None
    saving.finish_previous_start(run, state, progress)


@pytest.mark.parametrize("is_evaluated_later", [False, True])
def test_a_saved_checkpoint_is_followed_unless_the_run_evaluates_it_first(
    is_evaluated_later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[bool] = []
    monkeypatch.setattr(saving.writer, "save", lambda *given, **_: SimpleNamespace(step=given[2].step, folder=tmp_path))
    monkeypatch.setattr(saving, "on_disk", lambda run, write: None)
    run = run_that_continues()
    run.follower = SimpleNamespace(submit=lambda: submitted.append(True))
    progress = Progress(NonFiniteSteps(20), evaluation_is_due=is_evaluated_later)
    saving.save(run, TrainState(step=8), progress, is_end=False)
    assert submitted == ([] if is_evaluated_later else [True])


EIGHT = TrainState(step=8)


def in_streak(saved_step: int | None) -> tuple[SimpleNamespace, Progress, list[str]]:
    """A run whose steps 7 and 8 were not finite, its progress, and what it warns of."""
    nonfinite, warnings = NonFiniteSteps(max_in_a_row=20), []
    for step in (7, 8):
        samples = SampleRange(stage=0, epoch=0, first=16 * step, stop=16 * step + 16)
        nonfinite = nonfinite.after(step, samples, (float("nan"), 0.0))
    run = SimpleNamespace(
        config=SimpleNamespace(output_dir="run"),
        warn=warnings.append,
    )
    return run, Progress(nonfinite, saved_step=saved_step), warnings


def test_a_deferred_save_is_made_up_and_reported_once_with_the_last_good_checkpoint() -> None:
    run, progress, warnings = in_streak(saved_step=6)
    for _ in range(3):
        progress = saving.defer_save(run, EIGHT, progress, is_last=False)
    assert progress.save_is_deferred
    assert len(warnings) == 1 and "the last good checkpoint is run/checkpoints/step-00000006" in warnings[0]


def test_a_run_that_ends_in_a_streak_fails_and_says_from_where_it_can_be_finished() -> None:
    run, progress, _ = in_streak(saved_step=6)
    with pytest.raises(UserError) as raised:
        saving.defer_save(run, EIGHT, progress, is_last=True)
    for part in ("run/checkpoints/step-00000006", "--resume-from 6 --skip-samples 112:144 --skip-epoch 0"):
        assert part in str(raised.value)


def test_without_a_checkpoint_none_is_named() -> None:
    run, progress, _ = in_streak(saved_step=None)
    with pytest.raises(UserError, check=coded("nonfinite-steps"), match="no checkpoint exists") as raised:
        saving.defer_save(run, EIGHT, progress, is_last=True)
    assert "--resume-from" not in str(raised.value)


def run_that_continues() -> SimpleNamespace:
    """What a save needs of a run whose policy is to continue."""
    config = SimpleNamespace(checkpoint=SimpleNamespace(on_failed_save="continue"), output_dir="run")
    return SimpleNamespace(
        config=config,
        engine=None,
        sources={},
        data=None,
        uploader=None,
        follower=None,
        log=lambda text: None,
        watchdog=SimpleNamespace(mark=lambda doing: None),
    )


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
    run, taken = run_that_continues(), 0
    progress = Progress(NonFiniteSteps(20), saved_step=40 if has_checkpoint else None)
    monkeypatch.setattr(saving, "on_disk", lambda run, write: None)
    try:
        for outcome in saves:
            taken += 1
            saved = SimpleNamespace(folder="folder", step=80) if outcome == "o" else None
            monkeypatch.setattr(saving.writer, "save", lambda *_, saved=saved, **__: saved)
            progress = saving.save(run, TrainState(step=80), progress, is_end=False)
    except UserError as error:
        assert "nor was any before it" in str(error) and ends_at == taken
    else:
        assert ends_at is None
