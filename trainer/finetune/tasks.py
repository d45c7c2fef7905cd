"""What a task is: how its cells are read, its texts encoded, a model's outputs decoded, and predictions scored.

Each kind of task has a module of its own (sequence_tasks, token_task, answer_task) with this shape; everything else
(fitting, comparison, prediction) knows tasks only so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from data_prep.base.errors import UsageError
from trainer.finetune.examples import Examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TaskName = Literal["classification", "pair_classification", "regression", "token_classification", "question_answering"]
IGNORED = -100
"""Label of a place that counts for nothing in transformers' losses."""

Row = dict[str, Any]
"""One input of the model: input_ids and perhaps token_type_ids (length,), and labels as the model takes them."""
Output = Mapping[str, np.ndarray]
"""What the model gave for one row, without padding: logits (num_labels,) or (length, num_labels), and the like."""


@dataclass(frozen=True)
class Preprocessor:
    """A tokenizer, the longest input in tokens, and whether the model tells segments apart."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    has_token_types: bool


@dataclass(frozen=True)
class Encoded:
    """Rows in the order of the examples; an example has one or (windows of a long context) several."""

    rows: list[Row]
    example_of_row: list[int]
    num_tokens: list[int]
    """Of each example, whole, special tokens included."""
    num_truncated: int
    """Examples longer than the model takes: cut, or read in several windows."""
    places: list[Any] = field(default_factory=list)
    """Of each row where its tokens lie in the text, for tasks that answer with places."""


@dataclass(frozen=True)
class Prediction:
    """What a model says of one example. `label` is of the kind of the task's labels; regression has no probability."""

    label: Any
    probability: float | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What more goes into a table of predictions, by column."""


class Task(Protocol):
    """A kind of task, for one set of labels."""

    name: str
    auto_class: str
    """The class of transformers that has the head."""
    metrics: tuple[str, ...]
    """The first chooses between fits; greater is better for it."""
    needs_pair: bool
    example_score: str
    """What `score_example` measures, as the heading of a table."""

    def head_options(self) -> dict[str, Any]:
        """Settings of the head in config.json: number of labels, their names, kind of problem."""
        ...

    def parse_text(self, cell: Any) -> Any: ...
    def parse_label(self, cell: Any, text: Any) -> Any:
        """A label from a cell.

        Raises:
            ValueError: the cell is none; the message says what it holds and what it should.
        """
        ...

    def encode(self, examples: Examples, preprocessor: Preprocessor) -> Encoded: ...
    def decode(self, outputs: Sequence[Output], encoded: Encoded, examples: Examples) -> list[Prediction]: ...
    def score(self, labels: Sequence[Any], predictions: Sequence[Prediction]) -> dict[str, float]: ...
    def score_example(self, label: Any, prediction: Prediction) -> float:
        """How well one example was done, from 0 to 1, or (regression) the error."""
        ...

    def show_label(self, label: Any) -> str: ...


def choosing_metric(task: Task, asked: str | None) -> str:
    """The metric that chooses between fits of the task: the one asked for, else the task's first.

    Raises:
        UsageError: it is none of the task's, or less of it is better.
    """
    metric = asked or task.metrics[0]
    choosing = [name for name in task.metrics if name != "rmse"]  # which is better where it is less
    if metric not in choosing:
        raise UsageError(f"--metric {metric!r} cannot choose fits of {task.name}; take one of {', '.join(choosing)}")
    return metric


def tokenize_rows(
    texts: Sequence[str], pairs: Sequence[str] | None, preprocessor: Preprocessor
) -> tuple[list[Row], list[int], int]:
    """(rows of ids, whole lengths, number cut) of texts or pairs, special tokens included; cut is the longer text."""
    tokenizer = preprocessor.tokenizer
    encoded = tokenizer(list(texts), list(pairs) if pairs is not None else None, return_token_type_ids=True)
    rows: list[Row] = []
    for number, ids in enumerate(encoded["input_ids"]):
        row = {"input_ids": ids, "token_type_ids": encoded["token_type_ids"][number]}
        if len(ids) > preprocessor.max_length:
            pair = pairs[number] if pairs is not None else None
            row = dict(
                tokenizer(
                    texts[number],
                    pair,
                    truncation="longest_first",
                    max_length=preprocessor.max_length,
                    return_token_type_ids=True,
                    return_attention_mask=False,
                )
            )
        if not preprocessor.has_token_types:
            row.pop("token_type_ids")
        rows.append(row)
    lengths = [len(ids) for ids in encoded["input_ids"]]
    return rows, lengths, sum(length > preprocessor.max_length for length in lengths)
