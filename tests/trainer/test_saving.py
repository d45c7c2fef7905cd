"""What a start does before its first step: a new course begins, and what earlier starts did not register is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
