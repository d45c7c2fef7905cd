"""What a start does before its first step, and what becomes of a run whose saves fail."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from data_prep.errors import UserError
from trainer import saving
from trainer.checkpoints.format import TrainState


@pytest.mark.parametrize(
    ("state", "done"),
    [
        (TrainState(step=80, branched_at=80), ["go_back 80", "save", "submit_missed"]),
        (TrainState(step=80, branched_at=80, mlflow_run_id="abc"), ["submit_missed"]),
        (TrainState(step=80), ["submit_missed"]),
    ],
    ids=["the new course's beginning", "later on it", "no new course"],
)
def test_the_registrar_forgets_the_old_course_and_then_takes_what_was_missed(
    state: TrainState, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    registrar = SimpleNamespace(
        go_back=lambda step: did.append(f"go_back {step}"), submit_missed=lambda: did.append("submit_missed")
    )
    monkeypatch.setattr(saving, "save", lambda run, is_end: did.append("save"))
    config = SimpleNamespace(checkpoint=SimpleNamespace(upload_to=None))
    saving.settle(SimpleNamespace(config=config, state=state, registrar=registrar, say=lambda text: None))
    assert did == done
    saving.settle(SimpleNamespace(config=config, state=state, registrar=None, say=lambda text: None))


def run_with(has_checkpoint: bool) -> SimpleNamespace:
    """What a save needs of a run whose policy is to continue."""
    config = SimpleNamespace(checkpoint=SimpleNamespace(on_failed_save="continue"), output_dir="run")
    return SimpleNamespace(
        config=config,
        has_checkpoint=has_checkpoint,
        failed_saves=0,
        state=TrainState(step=80),
        engine=None,
        data=None,
        uploader=None,
        registrar=None,
        say=lambda text: None,
        watchdog=SimpleNamespace(mark=lambda doing: None),
        recorder=SimpleNamespace(restart_clock=lambda: None),
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
    run, taken = run_with(has_checkpoint), 0
    monkeypatch.setattr(saving, "on_disk", lambda run, write: None)
    try:
        for outcome in saves:
            taken += 1
            saved = SimpleNamespace(folder="folder", step=80) if outcome == "o" else None
            monkeypatch.setattr(saving.checkpoint, "save", lambda *_, saved=saved: saved)
            saving.save(run, is_end=False)
    except UserError as error:
        assert "neither was any before it" in str(error) and ends_at == taken
    else:
        assert ends_at is None
