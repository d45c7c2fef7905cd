"""The labeled data of an experiment: files read, checked, parted in train, valid and test, and encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.base.errors import UserError
from data_prep.base.terminal import counted
from trainer.finetune.answer_task import AnswerTask
from trainer.finetune.examples import (
    Columns,
    Examples,
    alike_but_for_case,
    check_classes_repeat,
    check_known,
    check_pair_column,
    class_names,
    read_examples,
)
from trainer.finetune.sequence_tasks import ClassificationTask, RegressionTask
from trainer.finetune.splits import split
from trainer.finetune.tasks import Encoded, Preprocessor, Task
from trainer.finetune.token_task import TokenTask
from trainer.model.quiet_transformers import quiet_transformers

CUT_FRACTION = 0.1
FEWEST_EXAMPLES = 4


@dataclass(frozen=True)
class Files:
    """The files given; what is missing of valid and test is cut from train, save test where there is a valid."""

    train: Path
    valid: Path | None = None
    test: Path | None = None
    quoting: bool = True


@dataclass(frozen=True)
class Part:
    """Examples, and the same as rows of the model."""

    examples: Examples
    encoded: Encoded


@dataclass(frozen=True)
class TaskData:
    """`test` is None where a valid file was given and no test file: then scores are those of the choice."""

    task: Task
    train: Part
    valid: Part
    test: Part | None
    num_repeated: int
    """Examples of valid and test whose text is in train too."""
    num_swallowing: int = 0
    """Texts of tsv files that hold tabs and line breaks; see `count_swallowing`."""

    @property
    def reported(self) -> Part:
        """What scores are told of."""
        return self.test if self.test is not None else self.valid

    @property
    def parts(self) -> dict[str, Part]:
        named = {"train": self.train, "valid": self.valid, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}


def make_task(name: str, names: Sequence[str] = (), pair: bool = False) -> Task:
    """The task of that name for these classes."""
    if name == "classification":
        return ClassificationTask(names)
    if name == "pair_classification":
        return ClassificationTask(names, pair=True)
    if name == "regression":
        return RegressionTask(pair)
    return TokenTask(names) if name == "token_classification" else AnswerTask()


def task_of_columns(name: str, pair_column: str | None) -> Task:
    """The task of that name, of which no classes are known yet.

    Raises:
        UsageError: it wants another number of texts.
    """
    task = make_task(name, pair=pair_column is not None and name != "pair_classification")
    if name != "regression":
        check_pair_column(name, task.needs_pair, pair_column)
    return task


def read_task(name: str, files: Files, columns: Columns, seed: int) -> tuple[Task, dict[str, Examples]]:
    """The task with the classes of the training examples, and the examples of train, valid and perhaps test.

    Raises:
        UsageError: a column is not there, or the task wants another number of texts.
        UserError: a file cannot be read, labels are missing or of one class, or there are too few examples.
    """
    task = task_of_columns(name, columns.pair)
    given = {"train": files.train, "valid": files.valid, "test": files.test}
    examples = {
        part: read_examples(path, columns, task.parse_text, task.parse_label, files.quoting)
        for part, path in given.items()
        if path is not None
    }
    labels = examples["train"].labels or []
    if isinstance(task, ClassificationTask):
        check_classes_repeat(labels, files.train)
    if isinstance(task, RegressionTask) and len(set(labels)) < 2:
        raise UserError(
            f"{files.train} has the same number in every row of column {columns.label!r}, so there is nothing to "
            "learn; take another --label-column"
        )
    if isinstance(task, ClassificationTask | TokenTask):
        names = class_names(_flat(labels), files.train)
        for part in set(examples) - {"train"}:
            check_known(_flat(examples[part].labels or []), names, given[part] or files.train)
        task = make_task(name, names)
    examples = cut(examples, labels if isinstance(task, ClassificationTask) else [0] * len(labels), seed)
    if len(examples["train"]) < FEWEST_EXAMPLES or not all(len(part) for part in examples.values()):
        sizes = ", ".join(f"{len(part):,} for {part_name}" for part_name, part in examples.items())
        raise UserError(
            f"{files.train} holds too few examples ({sizes} after the cut); give more, or --valid of its own"
        )
    return task, {part: examples[part] for part in ("train", "valid", "test") if part in examples}


def cut(examples: dict[str, Examples], groups: Sequence[Any], seed: int) -> dict[str, Examples]:
    """Cut from train what is missing; `groups` are the classes of train, each cut in proportion."""
    missing = [part for part in ("valid", "test") if part not in examples and "valid" not in examples]
    parts = split(groups, [CUT_FRACTION] * len(missing), seed)
    whole = examples["train"]
    return {
        **examples,
        "train": whole.take(parts[0]),
        **{part: whole.take(numbers) for part, numbers in zip(missing, parts[1:], strict=True)},
    }


def count_swallowing(files: Files, examples: dict[str, Examples]) -> int:
    """Texts of tsv files that look like several rows: an unpaired quotation mark ends at the next one, rows later."""
    given = {part: getattr(files, part) or files.train for part in examples}
    texts = (text for part, some in examples.items() if given[part].suffix == ".tsv" for text in some.texts)
    return sum(isinstance(text, str) and "\t" in text and "\n" in text for text in texts) if files.quoting else 0


def encode_task(task: Task, examples: dict[str, Examples], preprocessor: Preprocessor) -> TaskData:
    """Encode every part."""
    with quiet_transformers():  # it warns of texts that are longer than the model takes; they are counted
        parts = {part: Part(some, task.encode(some, preprocessor)) for part, some in examples.items()}
    seen = set(map(_key, *_texts(examples["train"])))
    repeated = sum(
        key in seen for part, some in examples.items() if part != "train" for key in map(_key, *_texts(some))
    )
    return TaskData(task, parts["train"], parts["valid"], parts.get("test"), repeated)


def data_lines(data: TaskData, max_length: int) -> Iterator[str]:
    """What the parts hold, for people."""
    for name, part in data.parts.items():
        yield f"{name:<6}{len(part.examples):>9,} examples  {_classes(part.examples.labels or [])}"
    cut_off = sum(part.encoded.num_truncated for part in data.parts.values())
    if cut_off:
        what = "read in windows of" if isinstance(data.task, AnswerTask) else "cut at"
        yield f"{counted(cut_off, 'text')} longer than the model takes, {what} {max_length} tokens"
    if data.num_swallowing:
        yield (
            f"warning: {counted(data.num_swallowing, 'text')} with tabs and line breaks, as where an unpaired "
            "quotation mark swallows the rows after it; if the marks are plain characters, add --no-quoting"
        )
    if data.num_repeated:
        yield f"warning: {counted(data.num_repeated, 'example')} of valid and test with the text of a training example"
    for group in alike_but_for_case(data.task.names if isinstance(data.task, ClassificationTask | TokenTask) else ()):
        shown = ", ".join(map(repr, group))
        yield f"warning: the classes {shown} differ in capitals only; if they are one, write it alike in every row"


def _classes(labels: Sequence[Any]) -> str:
    if labels and isinstance(labels[0], float):
        return f"labels {min(labels):g} to {max(labels):g}"
    if not labels or not isinstance(labels[0], str | list):
        return ""
    counts = Counter(_flat(labels)).most_common(8)
    return ", ".join(f"{name!r} {count:,}" for name, count in counts)


def _flat(labels: Sequence[Any]) -> list[str]:
    return [tag for tags in labels for tag in tags] if labels and isinstance(labels[0], list) else list(labels)


def _texts(examples: Examples) -> tuple[list[Any], list[str]]:
    return examples.texts, examples.pairs if examples.pairs is not None else [""] * len(examples)


def _key(text: Any, pair: str) -> tuple[str, str]:
    return (text if isinstance(text, str) else " ".join(text)), pair
