from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.retention import superfluous_steps
from trainer.config.run_settings import CheckpointSettings

STEPS = dict.fromkeys((10, 20, 30, 40, 50))


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"keep_last": 1}, {50}),
        ({"keep_last": 2}, {40, 50}),
        ({"keep_last": 1, "keep_every_steps": 20}, {20, 40, 50}),
        ({"keep_last": 9}, {10, 20, 30, 40, 50}),
    ],
)
def test_the_newest_and_every_so_many_stay(settings, left):
    assert set(STEPS) - superfluous_steps(STEPS, 50, CheckpointSettings(**settings)) == left


def test_the_best_stay_by_their_metric_and_of_equals_the_newer():
    losses = {10: 2.0, 20: 1.0, 30: 1.0, 40: 3.0, 50: None}
    by_loss = CheckpointSettings(keep_last=1, keep_best=2)
    assert superfluous_steps(losses, 50, by_loss) == {10, 40}
    assert superfluous_steps(losses, 50, by_loss.model_copy(update={"keep_best": 1})) == {10, 20, 40}
    by_accuracy = CheckpointSettings(keep_last=1, keep_best=1, best_metric="valid/mlm_accuracy")
    assert superfluous_steps(losses, 50, by_accuracy) == {10, 20, 30}


def test_a_course_that_was_left_goes():
    assert superfluous_steps(STEPS, 30, CheckpointSettings(keep_last=2, keep_every_steps=10)) == {40, 50}


@given(st.dictionaries(st.integers(0, 99), st.none() | st.floats(0, 9)), st.integers(0, 99), st.integers(1, 4))
def test_the_newest_never_goes_and_so_many_are_left(complete, newest, keep_last):
    complete |= {newest: None}
    left = set(complete) - superfluous_steps(complete, newest, CheckpointSettings(keep_last=keep_last))
    assert newest in left and max(left) == newest
    assert len(left) == min(keep_last, sum(step <= newest for step in complete))
