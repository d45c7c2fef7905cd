"""Regression: one number for each text, or for each pair of texts.

A fit learns standardized labels, (label - mean) / deviation over the training examples, so that the usual learning
rates suit labels of any scale and offset. The saved head contains mean and deviation: the model alone predicts labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from data_prep.base.errors import UserError
from trainer.finetuning.examples import Examples
from trainer.finetuning.scores import regression_scores
from trainer.finetuning.tasks import EncodedExamples, ExamplePrediction, Outputs, Predictions, SequenceTask

LARGEST_LABEL = float(np.finfo(np.float32).max)
FEWEST_STEPS = 100
"""Representable float32 numbers in one deviation of the labels; with fewer, rounding hides what a fit could learn."""
OUTLIER_SHARE = 0.5
"""One label with more than this share of the labels' variance determines the scale of all."""


class RegressionTask(SequenceTask):
    """A number for each text. `mean` and `deviation` are those of the training labels; for a saved model, 0 and 1."""

    name = "regression"
    metrics = ("spearman", "pearson", "rmse")
    example_score = "error"
    result_columns = ("predicted",)
    baseline_name = "mean"

    def __init__(self, pair: bool = False, mean: float = 0.0, deviation: float = 1.0) -> None:
        self.needs_pair = pair
        self.mean, self.deviation = mean, deviation

    def standardized(self, labels: Sequence[float]) -> RegressionTask:
        mean, deviation = mean_and_deviation(labels)
        return RegressionTask(self.needs_pair, mean, deviation or 1.0)

    def head_options(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def parse_label(self, cell: Any, text: Any) -> float:
        try:
            if isinstance(cell, bool) or (isinstance(cell, str) and "_" in cell):
                raise ValueError  # which Python reads as a number
            value = float(cell)
        except (TypeError, ValueError):
            raise ValueError(f"{cell!r} is not a number, and regression needs one") from None
        except OverflowError:
            value = math.inf
        if not abs(value) <= LARGEST_LABEL:
            raise ValueError(f"{cell!r:.40} is not finite as a float32, and regression needs a finite number")
        return value

    def model_label(self, label: float) -> float:
        return (label - self.mean) / self.deviation

    def decode(self, outputs: Outputs, encoded: EncodedExamples, examples: Examples) -> Predictions:
        return [ExamplePrediction(self._label(float(output["logits"][0]))) for output in outputs]

    def finish(self, model: Any) -> None:
        """Put mean and deviation into the last layer of the head."""
        import torch

        layer = last_layer(model)
        with torch.no_grad():
            layer.weight.mul_(self.deviation)
            layer.bias.copy_(layer.bias.double() * self.deviation + self.mean)

    def score(self, labels: Sequence[float], predictions: Sequence[ExamplePrediction]) -> dict[str, float]:
        return regression_scores(labels, [prediction.label for prediction in predictions])

    def score_example(self, label: float, prediction: ExamplePrediction) -> float:
        difference: float = label - prediction.label
        return abs(difference)

    def yardstick(self, train: Sequence[float]) -> tuple[Callable[[Any], Any], str]:
        mean, _ = mean_and_deviation(train)
        return lambda text: mean, f"the mean of the training labels, {self.show_label(mean)}"

    def is_constant(self, labels: Sequence[float], predictions: Sequence[ExamplePrediction]) -> bool:
        """Return whether the deviation of the predictions is less than a tenth of that of the labels."""
        _, of_labels = mean_and_deviation(labels)
        _, of_predictions = mean_and_deviation([prediction.label for prediction in predictions])
        return of_predictions < 0.1 * of_labels

    def label_warnings(self, train: Sequence[float]) -> Iterator[str]:
        mean, deviation = mean_and_deviation(train)
        largest = max(map(abs, train))
        if 0.0 < deviation < FEWEST_STEPS * float(np.spacing(np.float32(largest))):
            yield (
                f"the labels are as large as {largest:g} and differ by about {deviation:g}, which float32 hardly "
                "represents; subtract an offset from them, or give them another unit"
            )
        farthest = max(train, key=lambda label: abs(label - mean))
        if len(train) > 2 and ((farthest - mean) / (deviation or 1.0)) ** 2 > OUTLIER_SHARE * len(train):
            yield (
                f"one training label, {farthest:g}, causes most of the variance of all {len(train):,}, so a fit "
                "hardly learns the differences of the others; correct or remove it if it is a mistake"
            )

    def show_label(self, label: float) -> str:
        return f"{label:.6g}"

    def _label(self, output: float) -> float:
        """Return the label for an output of the fit, rounded as the saved model rounds it."""
        label = output * self.deviation + self.mean
        return float(np.float32(max(-LARGEST_LABEL, min(label, LARGEST_LABEL))))


def mean_and_deviation(labels: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation; a deviation of 0 means that all labels are equal, however small they are."""
    values = np.asarray(labels, np.float64)
    middle = float(values.min() / 2 + values.max() / 2)
    scale = float(np.abs(values - middle).max())  # squares of tiny and of huge differences leave float64's range
    if scale == 0.0:
        return float(values[0]), 0.0
    relative = (values - middle) / scale
    return middle + scale * float(relative.mean()), scale * float(relative.std())


def last_layer(model: Any) -> Any:
    """Return the linear layer whose output is the one number of the head."""
    import torch

    encoder = f"{model.base_model_prefix}."
    layers = [
        module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.startswith(encoder) and module.out_features == 1
    ]
    if not layers or layers[-1].bias is None:
        raise UserError(
            f"the head of a {type(model).__name__} has no last layer with a bias, which regression needs",
            fix="use --task classification, or another model",
            code="regression-not-supported",
        )
    return layers[-1]
