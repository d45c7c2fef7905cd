"""What a comparison shows people: the variants by the metric that chose."""

from __future__ import annotations

import pytest

from trainer.finetuning.comparison import score_lines
from trainer.finetuning.experiment import Fit, VariantResult


def result(variant: str, **scores: float) -> VariantResult:
    return VariantResult(variant, 1e-3, {}, (Fit(variant, 0, 1e-3, (), 1, 1.0, {}, scores, []),))


@pytest.mark.parametrize(("metric", "order"), [("accuracy", ["full", "frozen"]), ("f1", ["frozen", "full"])])
def test_the_variant_that_is_best_by_the_chosen_metric_stands_first(metric: str, order: list[str]) -> None:
    results = [result("frozen", accuracy=0.7, f1=0.6), result("full", accuracy=0.8, f1=0.5)]
    yardstick = ("majority", {"accuracy": 0.5, "f1": 0.25})
    lines = list(score_lines(results, ("accuracy", "f1"), metric, "test", yardstick))
    assert [line.split()[0] for line in lines[2:]] == [*order, "majority"]
    assert lines[-1].split() == ["majority", "-", "0.5000", "0.2500"]
