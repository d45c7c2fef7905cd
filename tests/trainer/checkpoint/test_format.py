"""What is read of a checkpoint's state, also of one that an earlier release wrote."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from trainer.checkpoint.format import TrainState


def test_the_nulls_that_stand_for_what_was_not_finite_are_left_out():
    state = TrainState.model_validate_json('{"step": 2, "evaluation": {"valid/mlm_loss": 7, "valid/perplexity": null}}')
    assert state == TrainState(step=2, evaluation={"valid/mlm_loss": 7.0})


@pytest.mark.parametrize("damaged", ['["valid/mlm_loss"]', '{"valid/mlm_loss": "low"}', "null"])
def test_an_evaluation_of_another_kind_is_damage(damaged):
    with pytest.raises(ValidationError, match="evaluation"):
        TrainState.model_validate_json(f'{{"step": 2, "evaluation": {damaged}}}')
