"""What counts as the same prediction of two graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from trainer.evaluation.int8_agreement import equal_predictions
from trainer.finetuning.task_data import make_task
from trainer.finetuning.tasks import ExamplePrediction


@pytest.mark.parametrize(
    ("task", "first", "second", "expected"),
    [
        ("classification", ["x", "y", "x"], ["x", "x", "x"], (2, 3, "rows")),
        ("token_classification", [["x", "y"], ["x"]], [["x", "x"], ["x"]], (2, 3, "words")),
        # The standard deviation of 0, 2, 4 and 6 is 2.24: a tenth of it is allowed.
        ("regression", [0.0, 2.0, 4.0, 6.0], [0.22, 2.0, 4.23, 5.0], (2, 4, "numbers")),
        ("regression", [1.0, 1.0], [1.0, 1.001], (1, 2, "numbers")),
    ],
)
def test_equal_predictions(
    task: str, first: Sequence[Any], second: Sequence[Any], expected: tuple[int, int, str]
) -> None:
    one, other = ([ExamplePrediction(label) for label in labels] for labels in (first, second))
    assert equal_predictions(make_task(task, ("x", "y")), one, other) == expected
