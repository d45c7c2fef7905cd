"""Reports: variants are sorted by the metric that selected, and fits that learned nothing are warned of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from trainer.finetuning.examples import Examples
from trainer.finetuning.experiment import Fit, VariantResult
from trainer.finetuning.report import Comparison
from trainer.finetuning.task_data import Part, TaskData, make_task
from trainer.finetuning.tasks import EncodedExamples, ExamplePrediction


def result(variant: str, predicted: Sequence[Any] = (), **scores: float) -> VariantResult:
    one = Fit(variant, 0, 1e-3, (), 1, 1.0, {"loss": 1.0, **scores}, scores, [*map(ExamplePrediction, predicted)])
    return VariantResult(variant, 1e-3, {}, (one,))


def data_of(task: str, labels: Sequence[Any]) -> TaskData:
    """The same examples, of any texts, for training and scoring."""
    part = Part(Examples(["text"] * len(labels), None, [*labels]), EncodedExamples([], [], [8] * len(labels), 0))
    return TaskData(make_task(task, ["a", "b"]), Any, {"train": part, "valid": part})


@pytest.mark.parametrize(("metric", "order"), [("accuracy", ["full", "frozen"]), ("f1", ["frozen", "full"])])
def test_the_variant_that_is_best_by_the_chosen_metric_stands_first(metric: str, order: list[str]) -> None:
    results = [result("frozen", accuracy=0.7, f1=0.6, mcc=0.0), result("full", accuracy=0.8, f1=0.5, mcc=0.0)]
    lines = list(Comparison(data_of("classification", "abb"), metric, results).score_lines())
    assert [line.split()[0] for line in lines[2:]] == [*order, "majority"]
    assert lines[-1].split() == ["majority", "-", "0.6667", "0.8000", "0.0000"]


def test_texts_of_one_length_are_one_group() -> None:
    fitted = result("full", "abba", accuracy=1.0, f1=1.0, mcc=1.0)
    lines = list(Comparison(data_of("classification", "abba"), "accuracy", [fitted]).lines())
    assert [line.split() for line in lines if "8 to 8" in line] == [["8", "to", "8", "4", "1.0000", "0.5000"]]


SAME, WORSE = "warning: full: the predictions are nearly the same", "warning: full is not better than"


@pytest.mark.parametrize(
    ("task", "metric", "score", "predicted", "starts", "end"),
    [
        ("classification", "accuracy", 0.8, "ab", [], ""),
        ("classification", "accuracy", 0.5, "aa", [SAME, WORSE], "accuracy 0.5000 and 0.5000"),
        ("classification", "mcc", -0.1, "ab", [WORSE], "mcc -0.1000 and 0.0000"),
        ("regression", "rmse", 0.4, (1.0, 2.0), [], ""),
        ("regression", "rmse", 0.9, (1.0, 2.0), [WORSE], "rmse 0.9000 and 0.5000"),
        ("regression", "spearman", 0.9, (1.0, 2.0), [WORSE], "rmse 0.9000 and 0.5000; --metric rmse selects by it"),
    ],
)
def test_a_fit_that_learned_nothing_is_warned_of(
    task: str, metric: str, score: float, predicted: Sequence[Any], starts: list[str], end: str
) -> None:
    data = data_of(task, "ab" if task == "classification" else [1.0, 2.0])
    compared = "rmse" if task == "regression" else metric  # which notices a wrong scale
    given = result("full", predicted, **{metric: 1.0, compared: score})
    found = list(Comparison(data, metric, [given]).yardstick_warnings())
    assert [line[: len(start)] for line, start in zip(found, starts, strict=True)] == starts
    assert not found or found[-1].endswith(end)


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ({"scratch": 0.75, "full": 0.5}, "scratch has the best valid accuracy (scratch 0.7500, full 0.5000)"),
        ({"scratch": 0.5, "full": 0.75}, None),
        ({"full": 0.5, "scratch": 0.5}, None),  # the first one is kept
        ({"scratch": 0.5}, None),  # nothing else was asked for
    ],
)
def test_a_saved_model_that_has_nothing_of_the_encoder_is_warned_of(
    scores: dict[str, float], chosen: str | None
) -> None:
    results = [result(variant, "ab", accuracy=score, f1=1.0, mcc=1.0) for variant, score in scores.items()]
    lines = list(Comparison(data_of("classification", "ab"), "accuracy", results).lines())
    assert [line for line in lines if "random weights" in line] == [
        line for line in lines if chosen is not None and line.startswith(f"warning: {chosen}")
    ]
    assert len([line for line in lines if "random weights" in line]) == (chosen is not None)
