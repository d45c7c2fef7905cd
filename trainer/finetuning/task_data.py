"""Labeled data of an experiment: read, checked, split into train, valid and test, and encoded."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted
from data_prep.storage import storage
from trainer.finetuning.answer_task import AnswerTask
from trainer.finetuning.embedding_task import EmbeddingTask
from trainer.finetuning.examples import Columns, Examples, read_examples, swallowing_warning
from trainer.finetuning.field_formats import as_scheme_of
from trainer.finetuning.multilabel_task import MultilabelTask
from trainer.finetuning.regression_task import RegressionTask
from trainer.finetuning.tasks import ClassificationTask, EncodedExamples, ExamplePrediction, Task, TokenTask
from trainer.inference.preprocessor import Preprocessor
from trainer.model.quiet_transformers import quiet_transformers

CUT_FRACTION = 0.1
FEWEST_EXAMPLES = 4


@dataclass(frozen=True)
class Files:
    """The given files; missing valid and test data are split off train, but no test data if a valid file is given."""

    train: Path
    valid: Path | None = None
    test: Path | None = None
    quoting: bool = True
    header: bool = True
    """Whether the first line of tsv and csv names the columns; without it, their names are "1", "2", ..."""
    skip_incomplete: bool = False
    """Skip and count the rows of tsv and csv that lack a cell, which are an error otherwise."""
    skip_bad: bool = False
    """Skip and count the rows that have an empty or invalid cell, which are an error otherwise."""
    offers_skipping: bool = False
    """Name the option that skips them in this error."""

    @property
    def given(self) -> dict[str, Path]:
        named = {"train": self.train, "valid": self.valid, "test": self.test}
        return {part: path for part, path in named.items() if path is not None}

    def examples_sha256(self, part: str, split_seed: int) -> str:
        """Return a digest of a part: of its file, or of the training file and the seed that split the part off."""
        if part in self.given:
            return storage.sha256_of(self.given[part])
        how = " by context" if self.has_contexts else ""
        return hashlib.sha256(f"{storage.sha256_of(self.train)} {part} {split_seed}{how}".encode()).hexdigest()

    @property
    def has_contexts(self) -> bool:
        """Whether the training file is SQuAD's json, which has several questions for a context.

        Parts are then split off by context, so that no context is in two of them; questions in tables are split one by
        one, as in earlier releases.
        """
        return self.train.suffix == ".json"


@dataclass(frozen=True)
class Part:
    """Labeled examples, and their rows for the model."""

    examples: Examples
    encoded: EncodedExamples

    @property
    def labels(self) -> list[Any]:
        return self.examples.labels or []


@dataclass(frozen=True)
class TaskData:
    """The parts `train`, `valid` and, unless only a valid file was given, `test`."""

    task: Task
    preprocessor: Preprocessor
    parts: dict[str, Part]

    @property
    def scored_on(self) -> str:
        """Part that the reported scores are computed on: test, or valid if there is no test."""
        return "test" if "test" in self.parts else "valid"

    @property
    def reported(self) -> Part:
        return self.parts[self.scored_on]

    @property
    def train_labels(self) -> list[Any]:
        return self.parts["train"].labels

    def baseline(self, part: str) -> list[ExamplePrediction]:
        """Return the predictions of the task's yardstick for a part."""
        return self.task.baseline(self.train_labels, self.parts[part].examples)

    def baseline_scores(self, part: str) -> dict[str, float]:
        return self.task.score(self.parts[part].labels, self.baseline(part))

    @property
    def reported_baseline(self) -> dict[str, float]:
        return self.baseline_scores(self.scored_on)

    @property
    def num_examples(self) -> dict[str, int]:
        return {name: len(part.examples) for name, part in self.parts.items()}


def make_task(name: str, names: Sequence[str] = (), pair: bool = False) -> Task:
    """Return the task of this name for the classes `names`; only regression and embedding read `pair`."""
    if name in ("classification", "pair_classification"):
        return ClassificationTask(names, pair=name == "pair_classification")
    if name == "regression":
        return RegressionTask(pair)
    if name == "embedding":
        return EmbeddingTask(pair)
    if name == "multilabel_classification":
        return MultilabelTask(names)
    return TokenTask(names) if name == "token_classification" else AnswerTask()


def task_of_columns(name: str, pair_column: str | None) -> Task:
    """Return the task of this name without its classes, or refuse a missing or unexpected column of pairs."""
    task = make_task(name, pair=pair_column is not None)
    check_has_pair(task, pair_column, f"--task {name}")
    if not task.needs_pair and pair_column is not None:
        raise UsageError(
            f"--task {name} reads one text, and --pair-column is given",
            fix="leave --pair-column out, or give another task",
            code="unexpected-pair-column",
        )
    return task


def check_has_pair(task: Task, pair_column: str | None, what: str) -> None:
    """Refuse a missing column of pairs; `what` reads it."""
    if task.needs_pair and pair_column is None:
        raise UsageError(
            f"{what} reads two texts, and --pair-column is missing",
            fix="give the column of the second text with --pair-column",
            code="missing-pair-column",
        )


def read_task(name: str, files: Files, columns: Columns, seed: int) -> tuple[Task, dict[str, Examples]]:
    """Return the task with the classes of the training examples, and the examples of train, valid and, if any, test."""
    task = task_of_columns(name, columns.pair)
    examples = {
        part: read_examples(
            path,
            columns,
            task.parse_text,
            task.parse_label,
            files.quoting,
            files.header,
            files.skip_incomplete,
            files.skip_bad,
            task.read_label_column,
            files.offers_skipping,
        )
        for part, path in files.given.items()
    }
    return divide(task, examples, files, columns.label, seed)


def divide(
    task: Task, examples: dict[str, Examples], files: Files, label_column: str, seed: int
) -> tuple[Task, dict[str, Examples]]:
    """Return the task with the classes of the training examples, and the examples with the parts that files lack."""
    labels = examples["train"].labels or []
    if isinstance(task, ClassificationTask):
        _check_classes_repeat(labels, files.train)
    if isinstance(task, RegressionTask) and len(set(labels)) < 2:
        raise UsageError(
            f"{files.train} has the same number in every row of column {label_column!r}",
            fix="give another --label-column",
            code="nothing-to-learn",
        )
    if isinstance(task, ClassificationTask | TokenTask | MultilabelTask):
        task = make_task(task.name, class_names(_flat(labels), files.train))
        others = {
            part: with_own_labels(task, examples[part], files.given[part]) for part in examples if part != "train"
        }
        examples = {**examples, **others}
    by_context = files.has_contexts and isinstance(task, AnswerTask)
    groups = labels if isinstance(task, ClassificationTask) else [0] * len(labels)
    examples = _cut_missing(examples, groups, seed, by_context)
    if len(examples["train"]) < FEWEST_EXAMPLES or not all(len(part) for part in examples.values()):
        sizes = ", ".join(f"{len(part):,} for {part_name}" for part_name, part in examples.items())
        raise UsageError(
            f"{files.train} has too few examples ({sizes} after the split{' by context' if by_context else ''})",
            fix=f"give more {'contexts' if by_context else 'examples'}, or a --valid file",
            code="too-few-examples",
        )
    if isinstance(task, RegressionTask):
        task = task.standardized(examples["train"].labels or [])
    return task, {part: examples[part] for part in ("train", "valid", "test") if part in examples}


def encode_task(task: Task, examples: dict[str, Examples], preprocessor: Preprocessor) -> TaskData:
    with quiet_transformers():  # it warns of texts that exceed the maximum length; they are counted here
        parts = {part: Part(some, task.encode(some, preprocessor)) for part, some in examples.items()}
    return TaskData(task, preprocessor, parts)


def class_names(labels: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return the classes in a fixed order: numbers by size, then names alphabetically."""
    names = sorted(set(labels), key=lambda name: (0, float(name), name) if _is_number(name) else (1, 0.0, name))
    if len(names) < 2:
        raise UsageError(
            f"{path} has only one class ({names[0]!r})",
            fix="add examples of other classes, or give another --label-column",
            code="nothing-to-learn",
        )
    return tuple(names)


def split(groups: Sequence[Hashable], fractions: Sequence[float], seed: int) -> list[list[int]]:
    """Split the numbers 0 to len(groups) - 1 into the remainder, which comes first, and one part for each fraction.

    Each group (a class) is shuffled and cut on its own; fractions of an example are carried to the next group, so that
    the sizes of the parts are exact within one example. Every number is in exactly one part.
    """
    members_of: dict[Hashable, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        members_of[group].append(number)
    draw = random.Random(seed)
    parts: list[list[int]] = [[] for _ in range(len(fractions) + 1)]
    owed = [0.0] * len(fractions)
    for group in sorted(members_of, key=str):
        members = members_of[group]
        draw.shuffle(members)
        start = 0
        for part, fraction in enumerate(fractions):
            owed[part] += fraction * len(members)
            taken = min(round(owed[part]), len(members) - start - 1)  # one of each group is left for training
            taken = max(taken, 0)
            owed[part] -= taken
            parts[part + 1] += members[start : start + taken]
            start += taken
        parts[0] += members[start:]
    return [sorted(part) for part in parts]


def _split_contexts(contexts: Sequence[str], fractions: Sequence[float], seed: int) -> list[list[int]]:
    """Split as `split` does, but all numbers of a context into one part; each part has a context if there are three."""
    numbers_of: dict[str, list[int]] = defaultdict(list)
    for number, context in enumerate(contexts):
        numbers_of[context].append(number)
    numbers = list(numbers_of.values())
    parts = split([0] * len(numbers), [max(fraction, 1 / len(numbers)) for fraction in fractions], seed)
    return [sorted(number for place in part for number in numbers[place]) for part in parts]


def data_lines(data: TaskData) -> Iterator[str]:
    """Yield lines that describe the parts."""
    for name, part in data.parts.items():
        yield f"{name:<6}{len(part.examples):>9,} examples  {data.task.describe_labels(part.labels)}"
    num_truncated = sum(part.encoded.num_truncated for part in data.parts.values())
    if num_truncated:
        num_texts, most = sum(len(part.examples) for part in data.parts.values()), data.preprocessor.max_length
        long, how = f"{num_truncated:,} of {counted(num_texts, 'text')} longer than", data.task.of_long_texts
        if data.preprocessor.is_shortened:
            yield f"{long} the {most:,} tokens of --max-length: {how}; a larger --max-length keeps more"
        else:
            yield f"{long} the model's pretraining length of {most:,} tokens: {how}"
    if num_incomplete := sum(part.examples.num_incomplete for part in data.parts.values()):
        yield f"skipped {counted(num_incomplete, 'row')} with an empty text, pair or label"
    for name, part in data.parts.items():
        if bad := part.examples.bad_rows:
            first, reason = next(iter(bad.items()))
            yield f"skipped {counted(len(bad), 'row')} of the file of {name}, the first one {first:,} ({reason})"
    if num_swallowing := sum(part.examples.num_swallowing for part in data.parts.values()):
        yield swallowing_warning(num_swallowing)
    seen = set(_keys(data.parts["train"].examples))
    others = [part.examples for name, part in data.parts.items() if name != "train"]
    if num_repeated := sum(key in seen for some in others for key in _keys(some)):
        yield f"warning: {counted(num_repeated, 'example')} of valid and test with the text of a training example"
    yield from (f"warning: {text}" for text in data.task.label_warnings(data.train_labels))
    for name, part in data.parts.items():
        constant = data.task.constant_label(part.labels)
        if constant is not None:
            effect = {
                "train": "a fit learns nothing else",
                "valid": "scores of valid cannot tell learning rates and epochs apart; the loss selects them",
                "test": "the reported scores cannot tell fits apart",
            }
            yield f"warning: every label of {name} is {constant}, so {effect[name]}"
    for folded, number in Counter(map(str.casefold, data.task.names)).items():
        if number > 1:
            names = ", ".join(repr(name) for name in data.task.names if name.casefold() == folded)
            yield f"warning: the classes {names} differ only in capitals; if they are one class, use one spelling"


def _cut_missing(
    examples: dict[str, Examples], groups: Sequence[Any], seed: int, by_context: bool
) -> dict[str, Examples]:
    """Split missing parts off train; `groups` are the classes of the training examples, each split in proportion.

    With `by_context` the contexts are split instead, and each part has all questions of its contexts.
    """
    missing = [part for part in ("valid", "test") if part not in examples and "valid" not in examples]
    if not missing:
        return examples
    whole = examples["train"]
    fractions = [CUT_FRACTION] * len(missing)
    left, *parts = _split_contexts(whole.texts, fractions, seed) if by_context else split(groups, fractions, seed)
    kept = replace(whole.take(left), num_incomplete=whole.num_incomplete, bad_rows=whole.bad_rows)
    cut = {part: whole.take(numbers) for part, numbers in zip(missing, parts, strict=True)}
    return {**examples, "train": kept, **cut}


def _check_classes_repeat(labels: Sequence[str], path: Path) -> None:
    """Refuse labels most of which occur once: they are numbers or texts that were read as classes."""
    classes = sorted(set(labels))
    if len(classes) > 2 and 2 * len(classes) > len(labels):
        raise UsageError(
            f"{path} has {len(classes):,} classes for {len(labels):,} examples "
            f"({', '.join(classes[:5])}, ...), so most classes have one example",
            fix="use --task regression for numbers, or give another --label-column",
            code="too-many-classes",
        )


def with_own_labels(task: Task, examples: Examples, path: Path) -> Examples:
    """Return the examples with tags in the scheme of the task's (`as_scheme_of`), or refuse labels it does not have."""
    if not task.names or not examples.labels:
        return examples
    if isinstance(task, TokenTask):
        examples = replace(examples, labels=[*as_scheme_of(task.names, examples.labels)])
    _check_known(_flat(examples.labels or []), task.names, path)
    return examples


def _check_known(labels: Sequence[str], names: Sequence[str], path: Path) -> None:
    """Refuse labels that the training examples do not have."""
    unknown = sorted(set(labels) - set(names))
    if unknown:
        raise UsageError(
            f"{path} has labels that the training examples lack: {', '.join(unknown[:5])}; training has "
            f"{', '.join(names[:20])}",
            fix="correct the labels, or add training examples of these classes",
            code="unknown-label",
        )


def _flat(labels: Sequence[Any]) -> list[str]:
    return [tag for tags in labels for tag in tags] if labels and isinstance(labels[0], list) else list(labels)


def _keys(examples: Examples) -> Iterator[tuple[str, str]]:
    """Yield text and pair of each example."""
    pairs = examples.pairs if examples.pairs is not None else [""] * len(examples)
    for text, pair in zip(examples.texts, pairs, strict=True):
        yield (text if isinstance(text, str) else " ".join(text)), pair


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False
