"""Tasks: reading of cells, encoding of texts, decoding of outputs, scoring of predictions.

Everything else (fits, comparison, prediction) uses only the methods of `Task`. `RegressionTask`, `MultilabelTask`
and `AnswerTask` are in modules of their own, and `EmbeddingTask` too.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from scipy.special import softmax

from data_prep.base.errors import UsageError
from trainer.finetuning.examples import Examples, text_of
from trainer.finetuning.field_formats import not_of_iob2
from trainer.finetuning.scores import classification_scores, tagging_scores
from trainer.finetuning.tables import is_missing
from trainer.inference.preprocessor import IGNORED, Collator, Preprocessor, Row

TaskName = Literal[
    "classification",
    "multilabel_classification",
    "pair_classification",
    "regression",
    "token_classification",
    "question_answering",
    "embedding",
]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
OUTSIDE = "O"
PRINTED_LIST = "the cell has a list as Python prints it, and not as JSON; write it as JSON, or the table as .jsonl"
_PRINTED = re.compile(r"""\[(['"]).*['"]\]""", re.DOTALL)
_WHOLE_NUMBER = re.compile(r"[+-]?\d+\.0")

Output = Mapping[str, np.ndarray]
"""Outputs of the model for one row, without padding: logits (num_labels,) or (length, num_labels), and the like."""
Outputs = Sequence[Output]


@dataclass(frozen=True)
class EncodedExamples:
    """Rows in the order of the examples; an example has one row, or several (windows of a long context)."""

    rows: list[Row]
    example_of_row: list[int]
    num_tokens: list[int]
    """Tokens of each example before truncation, special tokens included."""
    num_truncated: int
    """Number of examples longer than the model takes, which were truncated or are read in several windows."""
    offsets: list[Any] = field(default_factory=list)
    """Positions of the tokens of each row in the text, for tasks that answer with positions."""


@dataclass(frozen=True)
class ExamplePrediction:
    """Prediction for one example; the task defines `label`, and regression has no probability."""

    label: Any
    probability: float | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of a table of predictions."""


Predictions = list[ExamplePrediction]


class Task(ABC):
    """A kind of task, for one set of labels."""

    name: str
    auto_class: str
    """The class of transformers that has the head."""
    metrics: tuple[str, ...]
    """Names of the scores. The first one, of which greater is better, selects between fits by default."""
    example_score: str
    """What `score_example` measures, as the heading of a table."""
    baseline_name = "majority"
    """Name of the yardstick in tables."""
    needs_pair = False
    result_columns: tuple[str, ...] = ("predicted", "probability")
    """Names of the columns that a table of predictions has."""
    of_long_texts = "their ends are not read"
    """What becomes of texts that are longer than the model takes."""
    can_freeze = True
    """Whether a fit may train the head alone."""
    names: tuple[str, ...] = ()
    """The classes in the order of the model's outputs; empty where labels are not classes, or not known yet."""

    def head_options(self) -> dict[str, Any]:
        """Return the settings of the head in config.json: number and names of the labels, and the problem type."""
        return {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
        }

    def configured(self, pooling: str, dimensions: Sequence[int], hidden_size: int) -> Task:
        """Return the task with the settings of vectors, which only `EmbeddingTask` has."""
        return self

    def module(self, model: Any, max_length: int) -> Any:
        """Return the module that a fit trains: the model with its head."""
        return model

    def collator(self, preprocessor: Preprocessor) -> Collator:
        return preprocessor.collate

    def parse_text(self, cell: Any) -> Any:
        """Return the text of a cell, or raise ValueError."""
        return text_of(cell)

    def read_label_column(self, cells: list[Any]) -> list[Any]:
        """Return the cells of the labels, changed where the whole column decides how `parse_label` reads one."""
        return cells

    @abstractmethod
    def parse_label(self, cell: Any, text: Any) -> Any:
        """Return the label of a cell, or raise a ValueError that states what the cell has and what it must have."""

    @abstractmethod
    def encode(self, examples: Examples, preprocessor: Preprocessor) -> EncodedExamples: ...
    @abstractmethod
    def decode(self, outputs: Outputs, encoded: EncodedExamples, examples: Examples) -> Predictions: ...
    @abstractmethod
    def score(self, labels: Sequence[Any], predictions: Sequence[ExamplePrediction]) -> dict[str, float]: ...
    @abstractmethod
    def score_example(self, label: Any, prediction: ExamplePrediction) -> float:
        """Return the score of one example, from 0 to 1, or its error (regression)."""

    @abstractmethod
    def yardstick(self, train: Sequence[Any]) -> tuple[Callable[[Any], Any], str]:
        """Return the yardstick of every score: a function of a text, by training labels alone, and what it predicts."""

    def baseline(self, train: Sequence[Any], examples: Examples) -> Predictions:
        """Return the predictions of the yardstick for examples."""
        guess, _ = self.yardstick(train)
        return [ExamplePrediction(guess(text)) for text in examples.texts]

    def is_constant(self, labels: Sequence[Any], predictions: Sequence[ExamplePrediction]) -> bool:
        """Return whether the predictions are (nearly) the same for every text, although the labels are not."""
        return len(_values(labels)) > 1 and len(_values([prediction.label for prediction in predictions])) == 1

    def constant_label(self, labels: Sequence[Any]) -> str | None:
        """Return the label that all examples have in common, as text; None if there are several."""
        values = _values(labels)
        return str(*values) if len(values) == 1 else None

    def label_warnings(self, train: Sequence[Any]) -> Iterator[str]:
        """Yield sentences about training labels that a fit hardly learns."""
        yield from ()

    def finish(self, model: Any) -> None:  # noqa: B027
        """Change the head of a fitted model so that the outputs are labels without this task; here, nothing."""

    def show_label(self, label: Any) -> str:
        return str(label)

    def describe_labels(self, labels: Sequence[Any]) -> str:
        """Return the labels of a part in a few words: how often each class occurs, or the range of numbers."""
        if labels and isinstance(labels[0], float):
            return f"labels {min(labels):g} to {max(labels):g}"
        if not labels or not isinstance(labels[0], str | list):
            return ""
        flat = [tag for tags in labels for tag in tags] if isinstance(labels[0], list) else labels
        return ", ".join(f"{name!r} {count:,}" for name, count in Counter(flat).most_common(8))


class SequenceTask(Task):
    """One label for each text, or for each pair of texts."""

    auto_class = "AutoModelForSequenceClassification"

    @abstractmethod
    def model_label(self, label: Any) -> float | tuple[float, ...]: ...

    def encode(self, examples: Examples, preprocessor: Preprocessor) -> EncodedExamples:
        rows, lengths = preprocessor.rows(examples.texts, examples.pairs)
        if examples.labels is not None:
            for row, label in zip(rows, examples.labels, strict=True):
                row["labels"] = self.model_label(label)
        return EncodedExamples(rows, list(range(len(rows))), lengths, num_longer(lengths, preprocessor))


class ClassificationTask(SequenceTask):
    """One class for each text, or for each pair of texts."""

    metrics = ("accuracy", "f1", "mcc")
    example_score = "accuracy"

    def __init__(self, names: Sequence[str] = (), pair: bool = False) -> None:
        self.name = "pair_classification" if pair else "classification"
        self.needs_pair = pair
        self.names = tuple(names)
        self.result_columns = (*Task.result_columns, *(f"probability_{name}" for name in names))

    def head_options(self) -> dict[str, Any]:
        return {**super().head_options(), "problem_type": "single_label_classification"}

    def parse_label(self, cell: Any, text: Any) -> str:
        # A file with gaps stores a whole number as 1.0; it is the class "1" in every file format.
        label = text_of(cell).strip()
        return label.removesuffix(".0") if _WHOLE_NUMBER.fullmatch(label) else label

    def model_label(self, label: str) -> int:
        return self.names.index(label)

    def decode(self, outputs: Outputs, encoded: EncodedExamples, examples: Examples) -> Predictions:
        predictions = []
        for output in outputs:
            probabilities = softmax(output["logits"], axis=-1)  # (num_labels,)
            best = int(probabilities.argmax())
            by_class = zip(self.names, probabilities, strict=True)
            columns = {f"probability_{name}": float(value) for name, value in by_class}
            predictions.append(ExamplePrediction(self.names[best], float(probabilities[best]), columns))
        return predictions

    def score(self, labels: Sequence[str], predictions: Sequence[ExamplePrediction]) -> dict[str, float]:
        return classification_scores(labels, [prediction.label for prediction in predictions], self.names)

    def score_example(self, label: str, prediction: ExamplePrediction) -> float:
        return float(label == prediction.label)

    def yardstick(self, train: Sequence[str]) -> tuple[Callable[[Any], Any], str]:
        name = _most_frequent(train)
        return lambda text: name, f"the most frequent training class, {name!r}"


class TokenTask(Task):
    """A tag for each word: entities, parts of speech.

    Words are joined by spaces and read as running text, as in pretraining, and offsets map tokens to words. A word's
    tag is predicted at its first token (Devlin et al. 2018, section 5.3). Its other tokens learn to continue the tag,
    and tokens of the space before it to lead to it, so that the pipeline of transformers, which reads every token,
    finds whole words too.
    """

    name = "token_classification"
    auto_class = "AutoModelForTokenClassification"
    metrics = ("f1", "precision", "recall", "accuracy")
    example_score = "words right"
    result_columns = (*Task.result_columns, "probabilities")

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        # The tag of truncated words, for which there is no prediction.
        self.default = OUTSIDE if OUTSIDE in self.names or not self.names else self.names[0]

    def parse_text(self, cell: Any) -> list[str]:
        items = _items(cell, "words")
        if not items:
            raise ValueError("the text has no word")
        if None in items:
            raise ValueError(f"word {items.index(None) + 1:,} is empty, although it has a place of its own")
        return [text_of(word) for word in items]

    def parse_label(self, cell: Any, text: Any) -> list[str]:
        tags = _items(cell, "tags")
        if len(tags) != len(text):
            raise ValueError(f"{len(tags)} tags for {len(text)} words; each word needs one")
        missing = [number for number, tag in enumerate(tags, start=1) if is_missing(tag)]
        if missing:
            raise ValueError(f"word {missing[0]:,} has no tag; each word needs one, and {OUTSIDE!r} is one")
        return [text_of(tag).strip() for tag in tags]

    def label_warnings(self, train: Sequence[Sequence[str]]) -> Iterator[str]:
        tags = [tag for tags in train for tag in tags]
        odd = not_of_iob2(tags)
        if odd is not None:
            yield (
                f"the tag {odd!r} is not IOB2 (O, or B- or I- with a type), as most others are, so f1, precision and "
                "recall count tags instead of entities; a .conll file is converted"
            )

    def encode(self, examples: Examples, preprocessor: Preprocessor) -> EncodedExamples:
        encoded = preprocessor.tokenizer(
            [" ".join(words) for words in examples.texts],
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=preprocessor.has_token_types,
        )
        rows, first_tokens = [], []
        for number, (words, offsets) in enumerate(zip(examples.texts, encoded["offset_mapping"], strict=True)):
            kept = _kept(len(offsets), preprocessor.max_length)
            at = {token: position for position, token in enumerate(kept)}
            tokens = [(at[token], word) for token, word in _word_of_tokens(words, offsets) if token in at]
            first = {word: position for position, word in reversed(tokens)}
            row = {name: [encoded[name][number][token] for token in kept] for name in encoded if name.endswith("_ids")}
            if examples.labels is not None:
                row["labels"] = [IGNORED] * len(kept)
                for position, word in tokens:
                    tag = examples.labels[number][word]
                    row["labels"][position] = self.names.index(tag if position == first[word] else self._continued(tag))
                for token, word in _spaces_before_words(words, offsets):
                    if token in at:
                        row["labels"][at[token]] = self.names.index(self._before(examples.labels[number][word]))
            rows.append(row)
            first_tokens.append(first)
        lengths = [len(offsets) for offsets in encoded["offset_mapping"]]
        return EncodedExamples(rows, list(range(len(rows))), lengths, num_longer(lengths, preprocessor), first_tokens)

    def _continued(self, tag: str) -> str:
        """Return the tag of a word's tokens after the first one."""
        inside = f"I-{tag[2:]}"
        return inside if tag[:2] == "B-" and inside in self.names else tag

    def _before(self, tag: str) -> str:
        """Return the tag of a space before a word, which is inside an entity if the word continues one."""
        return self.default if tag[:2] == "B-" and self.default == OUTSIDE else tag

    def decode(self, outputs: Outputs, encoded: EncodedExamples, examples: Examples) -> Predictions:
        predictions = []
        for output, first, words in zip(outputs, encoded.offsets, examples.texts, strict=True):
            probabilities = softmax(output["logits"], axis=-1)  # (length, num_labels)
            best = probabilities.argmax(axis=-1)
            tags = [self.names[best[first[word]]] if word in first else self.default for word in range(len(words))]
            sure = [float(probabilities[first[word]].max()) if word in first else 0.0 for word in range(len(words))]
            predictions.append(ExamplePrediction(tags, sum(sure) / len(sure), {"probabilities": sure}))
        return predictions

    def score(self, labels: Sequence[Sequence[str]], predictions: Sequence[ExamplePrediction]) -> dict[str, float]:
        return tagging_scores(labels, [prediction.label for prediction in predictions])

    def score_example(self, label: Sequence[str], prediction: ExamplePrediction) -> float:
        guesses: Sequence[str] = prediction.label
        return sum(tag == guess for tag, guess in zip(label, guesses, strict=True)) / len(label)

    def yardstick(self, train: Sequence[Sequence[str]]) -> tuple[Callable[[Any], Any], str]:
        tag = _most_frequent([tag for tags in train for tag in tags])
        return lambda words: [tag] * len(words), f"the most frequent training tag, {tag!r}"

    def show_label(self, label: Sequence[str]) -> str:
        return " ".join(label)


def choosing_metric(task: Task, requested: str | None) -> str:
    """Return the metric that selects between fits: the requested one, else the first of the task."""
    metric = requested or task.metrics[0]
    if metric not in task.metrics:
        raise UsageError(
            f"--metric {metric!r} cannot choose between fits of {task.name}",
            fix=f"give one of {', '.join(task.metrics)}",
            code="unknown-metric",
        )
    return metric


def _values(labels: Sequence[Any]) -> set[Any]:
    """Return the different labels; for lists of tags, the different tags."""
    return {each for label in labels for each in (label if isinstance(label, list) else [label])}


def _most_frequent(labels: Sequence[str]) -> str:
    """Return the most frequent label; the first one in alphabetical order among equals."""
    return min(Counter(labels).items(), key=lambda item: (-item[1], item[0]))[0]


def num_longer(lengths: Sequence[int], preprocessor: Preprocessor) -> int:
    """Return how many lengths exceed the maximum of the model."""
    return sum(length > preprocessor.max_length for length in lengths)


def _items(cell: Any, what: str) -> list[Any]:
    """Return the items of a list (numpy's for Parquet), or of a text separated by spaces."""
    if isinstance(cell, str):
        return _listed(cell) if is_printed_list(cell) else cell.split()
    if isinstance(cell, np.ndarray):
        return list(cell.tolist())
    if not isinstance(cell, list):
        raise ValueError(f"the cell contains a {type(cell).__name__}, and this task reads a list of {what}, or a text")
    return cell


def _listed(text: str) -> list[str]:
    """Return the list of texts that is written as JSON, as tables of words with spaces have it.

    Raises:
        ValueError: it is not JSON, or has other values.
    """
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        items = [None]
    if not all(isinstance(item, str) for item in items):
        raise ValueError(PRINTED_LIST)
    return list(items)


def is_printed_list(text: str) -> bool:
    """Return whether a text is a list of texts with brackets and quotation marks, as JSON or Python prints it."""
    return _PRINTED.fullmatch(text.strip()) is not None


def _kept(length: int, most: int) -> list[int]:
    """Return the tokens of a sequence that stay after truncation before the closing [SEP]."""
    return list(range(length)) if length <= most else [*range(most - 1), length - 1]


def _word_of_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (token, number of its word) for all tokens except special tokens and spaces.

    A token may begin with the space before its word, so it belongs to the word of its last character.
    """
    word_at = _word_at(words)
    words_of_tokens = [(token, word_at[end - 1]) for token, (begin, end) in enumerate(offsets) if end > begin]
    return [(token, word) for token, word in words_of_tokens if word >= 0]


def _spaces_before_words(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (token, number of the word behind it) for all tokens of a space alone, whose offsets may be empty."""
    word_at = _word_at(words)
    spaces = [
        (token, end) for token, (begin, end) in enumerate(offsets) if end and (begin == end or word_at[end - 1] < 0)
    ]
    return [(token, word_at[end]) for token, end in spaces if end < len(word_at) and word_at[end] >= 0]


def _word_at(words: Sequence[str]) -> list[int]:
    """Return the number of the word at each character of the words joined by spaces; -1 for a space."""
    return [each for number, word in enumerate(words) for each in [*[number] * len(word), -1]]
