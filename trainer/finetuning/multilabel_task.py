"""Multi-label classification: any number of classes for each text, each decided by itself.

The loss is transformers' (binary cross-entropy of every class); a class counts as predicted from a probability of
`THRESHOLD` on.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.special import expit

from trainer.finetuning.examples import Examples, text_of
from trainer.finetuning.scores import multilabel_scores
from trainer.finetuning.tables import is_missing
from trainer.finetuning.tasks import (
    PRINTED_LIST,
    EncodedExamples,
    ExamplePrediction,
    Outputs,
    Predictions,
    SequenceTask,
    Task,
    is_printed_list,
)

THRESHOLD = 0.5


class MultilabelTask(SequenceTask):
    """The classes of each text, as a list in the order of `names`; it may be empty."""

    name = "multilabel_classification"
    metrics = ("f1", "f1_macro", "accuracy")
    example_score = "all classes right"

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        self.result_columns = (*Task.result_columns, *(f"probability_{name}" for name in names))

    def head_options(self) -> dict[str, Any]:
        return {**super().head_options(), "problem_type": "multi_label_classification"}

    def read_label_column(self, cells: list[Any]) -> list[Any]:
        """Split all texts at commas if one of them has a comma, so that a class alone may contain spaces too.

        Texts with a list in JSON, which `predict` writes for classes with spaces, become the list.
        """
        cells = [_json_list(cell) for cell in cells]
        texts = [isinstance(cell, str) and not is_missing(cell) and not is_printed_list(cell) for cell in cells]
        if not any("," in cell for cell, is_text in zip(cells, texts, strict=True) if is_text):
            return cells
        return [cell.split(",") if is_text else cell for cell, is_text in zip(cells, texts, strict=True)]

    def parse_label(self, cell: Any, text: Any) -> list[str]:
        """Parse a list of classes, or a text with commas between them, or else with spaces."""
        if isinstance(cell, str):
            if is_printed_list(cell):
                raise ValueError(PRINTED_LIST)
            cell = cell.split("," if "," in cell else None)
        if isinstance(cell, np.ndarray):
            cell = cell.tolist()
        if not isinstance(cell, list):
            raise ValueError(f"the cell contains a {type(cell).__name__}, and this task reads a list of classes")
        if any(is_missing(each) for each in cell):
            raise ValueError("one of the classes is empty")
        classes = [text_of(each).strip() for each in cell]
        if len(set(classes)) < len(classes):
            raise ValueError("a class is there twice")
        return classes

    def model_label(self, label: Sequence[str]) -> tuple[float, ...]:
        return tuple(float(name in label) for name in self.names)  # a list would be padded as labels of tokens are

    def decode(self, outputs: Outputs, encoded: EncodedExamples, examples: Examples) -> Predictions:
        predictions = []
        for output in outputs:
            probabilities = expit(output["logits"].astype(np.float64))  # (num_labels,)
            chosen = [name for name, value in zip(self.names, probabilities, strict=True) if value >= THRESHOLD]
            columns = {f"probability_{name}": float(each) for name, each in zip(self.names, probabilities, strict=True)}
            least_sure = float(np.maximum(probabilities, 1.0 - probabilities).min())
            predictions.append(ExamplePrediction(chosen, least_sure, columns))
        return predictions

    def score(self, labels: Sequence[Sequence[str]], predictions: Sequence[ExamplePrediction]) -> dict[str, float]:
        return multilabel_scores(labels, [prediction.label for prediction in predictions], self.names)

    def score_example(self, label: Sequence[str], prediction: ExamplePrediction) -> float:
        return float(set(label) == set(prediction.label))

    def yardstick(self, train: Sequence[Sequence[str]]) -> tuple[Callable[[Any], Any], str]:
        counts = Counter(name for label in train for name in label)
        most = max(counts.values(), default=0)
        common = sorted(name for name, count in counts.items() if 2 * count > len(train) or count == most)
        return lambda text: common, f"the most frequent training classes, {', '.join(map(repr, common))}"

    def is_constant(self, labels: Sequence[Any], predictions: Sequence[ExamplePrediction]) -> bool:
        return self.constant_label(labels) is None and len({tuple(each.label) for each in predictions}) == 1

    def constant_label(self, labels: Sequence[Any]) -> str | None:
        values = {tuple(sorted(label)) for label in labels}
        return self.show_label(*values) if len(values) == 1 else None

    def show_label(self, label: Sequence[str]) -> str:
        return ", ".join(label) or "(no class)"


def _json_list(cell: Any) -> Any:
    """Return the list of a text in JSON; anything else unchanged."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            return json.loads(cell)
        except (ValueError, RecursionError):
            return cell  # a class that begins like JSON
    return cell
