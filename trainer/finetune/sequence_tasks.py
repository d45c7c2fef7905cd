"""Tasks with one answer a text or pair: its class, or a number."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.finetune.examples import Examples, text_of
from trainer.finetune.scores import classification_scores, regression_scores
from trainer.finetune.tasks import Encoded, Output, Prediction, Preprocessor, tokenize_rows

LARGEST_LABEL = float(np.finfo(np.float32).max)
_WHOLE_NUMBER = re.compile(r"[+-]?\d+\.0")


class ClassificationTask:
    """One class for each text, or for each pair of texts."""

    auto_class = "AutoModelForSequenceClassification"
    metrics: tuple[str, ...] = ("accuracy", "f1", "mcc")
    example_score = "accuracy"

    def __init__(self, names: Sequence[str] = (), pair: bool = False) -> None:
        self.name = "pair_classification" if pair else "classification"
        self.needs_pair = pair
        self.names = tuple(names)

    def head_options(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
            "problem_type": "single_label_classification",
        }

    def parse_text(self, cell: Any) -> str:
        return text_of(cell)

    def parse_label(self, cell: Any, text: Any) -> str:
        # A whole number that a file with gaps holds as 1.0 is the class "1", whatever the file's format.
        label = text_of(cell).strip()
        return label.removesuffix(".0") if _WHOLE_NUMBER.fullmatch(label) else label

    def encode(self, examples: Examples, preprocessor: Preprocessor) -> Encoded:
        rows, lengths, num_truncated = tokenize_rows(examples.texts, examples.pairs, preprocessor)
        if examples.labels is not None:
            for row, label in zip(rows, examples.labels, strict=True):
                row["labels"] = self.names.index(label)
        return Encoded(rows, list(range(len(rows))), lengths, num_truncated)

    def decode(self, outputs: Sequence[Output], encoded: Encoded, examples: Examples) -> list[Prediction]:
        predictions = []
        for output in outputs:
            probabilities = softmax(output["logits"])  # (num_labels,)
            best = int(probabilities.argmax())
            columns = {
                f"probability_{name}": float(value) for name, value in zip(self.names, probabilities, strict=True)
            }
            predictions.append(Prediction(self.names[best], float(probabilities[best]), columns))
        return predictions

    def score(self, labels: Sequence[str], predictions: Sequence[Prediction]) -> dict[str, float]:
        return classification_scores(labels, [prediction.label for prediction in predictions], self.names)

    def score_example(self, label: str, prediction: Prediction) -> float:
        return float(label == prediction.label)

    def show_label(self, label: str) -> str:
        return label


class RegressionTask:
    """One number for each text, or for each pair of texts."""

    name = "regression"
    auto_class = "AutoModelForSequenceClassification"
    metrics: tuple[str, ...] = ("spearman", "pearson", "rmse")
    example_score = "error"

    def __init__(self, pair: bool = False) -> None:
        self.needs_pair = pair

    def head_options(self) -> dict[str, Any]:
        return {"num_labels": 1, "problem_type": "regression"}

    def parse_text(self, cell: Any) -> str:
        return text_of(cell)

    def parse_label(self, cell: Any, text: Any) -> float:
        try:
            value = float(cell)
        except (TypeError, ValueError):
            raise ValueError(f"{cell!r} is no number, and regression needs one") from None
        except OverflowError:
            value = math.inf
        if not abs(value) <= LARGEST_LABEL:
            raise ValueError(f"{cell!r:.40} is not finite as a float32, and regression needs a finite number")
        return value

    def encode(self, examples: Examples, preprocessor: Preprocessor) -> Encoded:
        rows, lengths, num_truncated = tokenize_rows(examples.texts, examples.pairs, preprocessor)
        if examples.labels is not None:
            for row, label in zip(rows, examples.labels, strict=True):
                row["labels"] = float(label)
        return Encoded(rows, list(range(len(rows))), lengths, num_truncated)

    def decode(self, outputs: Sequence[Output], encoded: Encoded, examples: Examples) -> list[Prediction]:
        return [Prediction(float(output["logits"][0])) for output in outputs]

    def score(self, labels: Sequence[float], predictions: Sequence[Prediction]) -> dict[str, float]:
        return regression_scores(labels, [prediction.label for prediction in predictions])

    def score_example(self, label: float, prediction: Prediction) -> float:
        difference: float = label - prediction.label
        return abs(difference)

    def show_label(self, label: float) -> str:
        return f"{label:.3f}"


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: np.ndarray = shifted / shifted.sum(axis=-1, keepdims=True)
    return probabilities
