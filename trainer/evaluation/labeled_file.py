"""A file of examples that fitted models are scored on, each by the columns of its training data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted, listed
from trainer.finetuning.examples import Columns, Examples, read_examples
from trainer.finetuning.fitted_model import FittedModel, read_facts, read_fitted_task
from trainer.finetuning.task_data import check_has_pair, with_own_labels
from trainer.finetuning.tasks import Task

_MEANS = {"question_answering": "f1"} | dict.fromkeys(
    ("classification", "pair_classification", "multilabel_classification"), "accuracy"
)
"""By task the metric that is the mean of `Task.score_example`."""


@dataclass(frozen=True)
class LabeledFile:
    """A file, and its columns; those that are None are the columns of the training data."""

    path: Path
    text_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    quoting: bool | None = None


@dataclass(frozen=True)
class LabeledScores:
    """The scores of a fitted model on a file."""

    scores: dict[str, float]
    by_example: dict[str, np.ndarray]
    """(num_examples,) float64 for each metric that is a mean over examples."""
    examples_sha256: str
    """Digest of the texts and labels as the model's task reads them."""
    warnings: tuple[str, ...]


def read_file(data: LabeledFile, folder: Path, task: Task) -> Examples:
    """Read the examples for a fitted model; without `label_column` they have no labels.

    Rows with an empty or invalid cell are left out and counted.

    Raises:
        UserError: the file cannot be read, or has labels that the model does not have.
    """
    facts = read_facts(folder)
    columns = Columns(
        data.text_column or (facts.text_column if facts else "text"),
        data.pair_column or (facts.pair_column if facts else None),
        data.label_column or "",
    )
    check_has_pair(task, columns.pair, f"a model for {_spaced(task.name)}")
    quoting = data.quoting if data.quoting is not None else facts is None or facts.quoting
    parse = task.parse_label if data.label_column else None
    examples = read_examples(
        data.path, columns, task.parse_text, parse, quoting, skip_bad=True, read_label_column=task.read_label_column
    )
    return with_own_labels(task, examples, data.path)


def check_one_task(folders: Mapping[str, Path]) -> None:
    """Refuse fitted models whose scores do not compare, before any is loaded; `folders` has them by name.

    Raises:
        UsageError: one is of another task than the first one, or has other labels.
    """
    named = iter(folders.items())
    first_name, first_folder = next(named)
    first = read_fitted_task(first_folder)
    for name, folder in named:
        task = read_fitted_task(folder)
        if task.name != first.name:
            raise UsageError(
                f"{name} was fine-tuned for {_spaced(task.name)}, and {first_name} for {_spaced(first.name)}, so their "
                "scores do not compare",
                fix="compare models of one task",
                code="other-task",
            )
        if others := {*task.names} ^ {*first.names}:
            raise UsageError(
                f"{name} and {first_name} were fine-tuned for different labels ({listed(sorted(others))}: only one of "
                "them has each), so their scores do not compare",
                fix="compare models that were fine-tuned for the same labels",
                code="other-labels",
            )


def score_file(data: LabeledFile, folder: Path, task: Task) -> LabeledScores:
    """Score a fitted model on the labels of a file, as `task` scores, which all models of a comparison share.

    Raises:
        UserError: the file or the model cannot be read, or they do not fit.
    """
    fitted, facts = FittedModel.load(folder), read_facts(folder)
    if data.label_column is None:
        data = replace(data, label_column=facts.label_column if facts else "label")
    examples = read_file(data, folder, fitted.task)
    labels = examples.labels
    assert labels is not None, "the file has a column of labels"
    predictions, num_long = fitted.predict(examples)
    each = np.array([task.score_example(label, one) for label, one in zip(labels, predictions, strict=True)])
    read = json.dumps([examples.texts, examples.pairs, labels], default=str)
    warnings = [*examples.warnings("no score")]
    if num_long:
        warnings.append(
            f"warning: {num_long:,} of {counted(len(examples), 'text')} longer than {fitted.preprocessor.max_length:,} "
            f"tokens: {fitted.task.of_long_texts}"
        )
    metric = _MEANS.get(task.name)
    return LabeledScores(
        task.score(labels, predictions),
        {} if metric is None else {metric: each},
        hashlib.sha256(read.encode(errors="surrogatepass")).hexdigest(),
        tuple(warnings),
    )


def _spaced(task: str) -> str:
    return task.replace("_", " ")
