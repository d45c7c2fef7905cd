"""What a comparison shows people: the variants by the metric that chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from trainer.finetuning.comparison import score_lines, yardstick_warnings
from trainer.finetuning.examples import Examples
from trainer.finetuning.experiment import Fit, VariantResult
from trainer.finetuning.task_data import Part, TaskData, make_task
from trainer.finetuning.tasks import EncodedExamples, ExamplePrediction


def fit_of(variant: str, scores: dict[str, float], predicted: Sequence[Any] = ()) -> Fit:
    return Fit(variant, 0, 1e-3, (), 1, 1.0, {}, scores, [ExamplePrediction(label) for label in predicted])


def result(variant: str, **scores: float) -> VariantResult:
    return VariantResult(variant, 1e-3, {}, (fit_of(variant, scores),))


@pytest.mark.parametrize(("metric", "order"), [("accuracy", ["full", "frozen"]), ("f1", ["frozen", "full"])])
def test_the_variant_that_is_best_by_the_chosen_metric_stands_first(metric: str, order: list[str]) -> None:
    results = [result("frozen", accuracy=0.7, f1=0.6), result("full", accuracy=0.8, f1=0.5)]
    yardstick = ("majority", {"accuracy": 0.5, "f1": 0.25})
    lines = list(score_lines(results, ("accuracy", "f1"), metric, "test", yardstick))
    assert [line.split()[0] for line in lines[2:]] == [*order, "majority"]
    assert lines[-1].split() == ["majority", "-", "0.5000", "0.2500"]


SAME, WORSE = "warning: full: the predictions are nearly the same", "warning: full is not better than"


@pytest.mark.parametrize(
    ("task", "metric", "score", "yardstick", "predicted", "starts", "end"),
    [
        ("classification", "accuracy", 0.8, 0.5, "ab", [], ""),
        ("classification", "accuracy", 0.5, 0.5, "aa", [SAME, WORSE], "accuracy 0.5000 and 0.5000"),
        ("classification", "mcc", -0.1, 0.0, "ab", [WORSE], "mcc -0.1000 and 0.0000"),
        ("regression", "rmse", 0.4, 0.9, (1.0, 2.0), [], ""),
        ("regression", "rmse", 0.9, 0.4, (1.0, 2.0), [WORSE], "rmse 0.9000 and 0.4000"),
        (
            "regression",
            "spearman",
            0.9,
            0.4,
            (1.0, 2.0),
            [WORSE],
            "rmse 0.9000 and 0.4000; --metric rmse selects by it",
        ),
    ],
)
def test_a_fit_that_learned_nothing_is_warned_of(
    task: str, metric: str, score: float, yardstick: float, predicted: Sequence[Any], starts: list[str], end: str
) -> None:
    examples = Examples(["one", "two"], None, ["a", "b"] if task == "classification" else [1.0, 2.0])
    data = TaskData(make_task(task, ["a", "b"]), Any, {"valid": Part(examples, EncodedExamples([], [], [], 0))})
    compared = "rmse" if task == "regression" else metric  # which notices a wrong scale
    found = list(
        yardstick_warnings(
            [result("full", **{compared: score})],
            [fit_of("full", {}, predicted)],
            data,
            metric,
            {compared: yardstick},
        )
    )
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == starts
    assert not found or found[-1].endswith(end)
