"""What the first state of a branch is, and how a rerun finds that it is on its branch."""

from __future__ import annotations

import pytest

from data_prep.base.errors import UserError
from trainer.checkpoint.format import TrainState
from trainer.data.sample_range import Branch
from trainer.loop.start import begun, is_on


def test_a_branch_is_recorded_in_the_state_and_found_again():
    state = TrainState(step=7, epoch=2, next_sample=70, mlflow_run_id="old")
    branch = Branch(7, ((75, 80), (90, 95)))
    new = begun(state, branch)
    assert [str(r) for r in new.skipped_samples] == ["stage 0 epoch 2 samples 75:80", "stage 0 epoch 2 samples 90:95"]
    assert new.mlflow_run_id is None and new.step == 7
    later = new.model_copy(update={"step": 20, "mlflow_run_id": "new"})
    assert is_on(later, branch) and not is_on(state, branch)
    assert not is_on(later, Branch(7, ((75, 81),))) and not is_on(later, Branch(6, branch.skip))


def test_samples_that_are_over_cannot_be_skipped():
    state = TrainState(step=7, epoch=1, next_sample=70)
    with pytest.raises(UserError, match="60:70 of epoch 1 lies before sample 70 of epoch 1, where step 7 ends"):
        begun(state, Branch(7, ((60, 70),)))
    with pytest.raises(UserError, match="80:90 of epoch 0 lies before sample 70 of epoch 1"):
        begun(state, Branch(7, ((80, 90),), epoch=0))


def test_samples_of_a_later_epoch_than_the_checkpoints_can_be_skipped():
    state = TrainState(step=7, epoch=1, next_sample=70)
    branch = Branch(7, ((3, 9),), epoch=2)
    new = begun(state, branch)
    assert [str(r) for r in new.skipped_samples] == ["stage 0 epoch 2 samples 3:9"]
    assert is_on(new, branch) and not is_on(new, Branch(7, ((3, 9),), epoch=1))


def test_the_epoch_of_skipped_samples_is_that_of_the_log_in_a_later_stage():
    state = TrainState(step=7, stage=1, epoch=4, first_epoch=3, next_sample=70)
    (same,) = begun(state, Branch(7, ((70, 72),))).skipped_samples
    assert (same.epoch, same.shown_epoch) == (4, 1)
    branch = Branch(7, ((3, 9),), epoch=2)
    new = begun(state, branch)
    assert [(str(r), r.epoch) for r in new.skipped_samples] == [("stage 1 epoch 2 samples 3:9", 5)]
    assert is_on(new, branch) and not is_on(new, Branch(7, ((3, 9),), epoch=5))
    with pytest.raises(UserError, match="60:70 of epoch 1 lies before sample 70 of epoch 1"):
        begun(state, Branch(7, ((60, 70),)))
