"""Where a run starts: what is said about a changed end of the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.toy_run import tiny_config
from trainer.checkpoint.format import TrainState
from trainer.config.run_config import RunConfig
from trainer.data.sample_range import Branch
from trainer.loop.start import Start, rate_jump


def ending_after(steps: int, first: dict[str, Any] | None = None) -> RunConfig:
    """Two stages: the first has the run's linear decay or one of its own, the second is constant."""
    constant = {"name": "warmup_stable_decay", "decay_steps": 0, "decay_ratio": 0.0, "warmup_ratio": 0.0}
    stages = [{"steps": 100, **(first or {})}, {"steps": steps - 100, "schedule": constant}]
    return tiny_config(
        training={"max_steps": steps, "stages": stages}, schedule={"name": "linear", "warmup_ratio": 0.0}
    )


def start_of(config: RunConfig, branch: Branch | None = None) -> Start:
    saved: Any = SimpleNamespace(saved=SimpleNamespace(config=config.model_dump(mode="json")), step=30)
    return Start(saved, branch)


@pytest.mark.parametrize(
    ("start", "now", "warns"),
    [
        (start_of(ending_after(200)), ending_after(1200), True),  # of the rates of the stage that goes on
        (start_of(ending_after(200)), ending_after(200), False),
        (start_of(ending_after(200), Branch(200, run="other")), ending_after(1200), False),
        (start_of(ending_after(200)), ending_after(1200, {"schedule": {"name": "linear"}}), False),
        (Start(), ending_after(1200), False),
    ],
    ids=["longer", "as before", "another run's", "a schedule of the stage", "new"],
)
def test_a_learning_rate_that_jumps_because_the_run_is_longer_is_warned_of(
    start: Start, now: RunConfig, warns: bool
) -> None:
    warning = rate_jump(start, now, TrainState(step=30))
    assert (warning is not None) is warns
    assert warning is None or "changed from 200 to 1200" in warning
