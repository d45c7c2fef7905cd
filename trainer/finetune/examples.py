"""Labeled examples: what a file holds in the columns that a task asks for, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError, UserError
from trainer.finetune.labeled_tables import column, is_missing, read_table


@dataclass(frozen=True)
class Columns:
    """Names of the columns; `pair` is the second text, or the question of question answering."""

    text: str
    pair: str | None
    label: str


@dataclass(frozen=True)
class Examples:
    """Columns of equal length. A text is a string, or the list of its words; labels are the task's own."""

    texts: list[Any]
    pairs: list[str] | None
    labels: list[Any] | None

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, numbers: Sequence[int]) -> Examples:
        """Those of the given places, in that order."""
        return Examples(
            [self.texts[number] for number in numbers],
            [self.pairs[number] for number in numbers] if self.pairs is not None else None,
            [self.labels[number] for number in numbers] if self.labels is not None else None,
        )


def read_examples(
    path: Path,
    columns: Columns,
    parse_text: Callable[[Any], Any],
    parse_label: Callable[[Any, Any], Any] | None,
    quoting: bool = True,
) -> Examples:
    """The examples of a file; `parse_label(cell, text)` is None where labels are not wanted.

    Raises:
        UsageError: a column is not there.
        UserError: the file holds no row, or a cell that is empty or none of the task; the first is named by its row.
    """
    table = read_table(path, quoting)
    if len(table) == 0:
        raise UserError(f"{path} holds no row; give a table with examples")
    texts = _parsed(column(table, columns.text, path, "--text-column"), parse_text, path, columns.text)
    pairs = None
    if columns.pair is not None:
        pairs = _parsed(column(table, columns.pair, path, "--pair-column"), text_of, path, columns.pair)
    if parse_label is None:
        return Examples(texts, pairs, None)
    cells = list(zip(column(table, columns.label, path, "--label-column"), texts, strict=True))
    labels = _parsed(
        cells, lambda cell: parse_label(*cell), path, columns.label, missing=lambda cell: is_missing(cell[0])
    )
    return Examples(texts, pairs, labels)


def text_of(cell: Any) -> str:
    """A cell as a text; a number is the text of its digits.

    Raises:
        ValueError: the cell holds something else, or half a character.
    """
    if isinstance(cell, float) and cell != cell:
        raise ValueError("NaN stands where a text should")
    if isinstance(cell, bytes):
        cell = cell.decode("utf-8")
    if not isinstance(cell, (str, int, float)):
        kind = "list" if hasattr(cell, "__len__") and not isinstance(cell, dict) else type(cell).__name__
        raise ValueError(f"the cell holds a {kind}, and this task reads a text")
    text = str(cell)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the text holds half a surrogate pair, which is no character")
    return text


def class_names(labels: Sequence[str], path: Path) -> tuple[str, ...]:
    """The classes in a fixed order: numbers by size, then names by alphabet.

    Raises:
        UserError: there is only one.
    """
    names = sorted(set(labels), key=lambda name: (0, float(name), name) if _is_number(name) else (1, 0.0, name))
    if len(names) < 2:
        raise UserError(
            f"{path} holds one class only ({names[0]!r}), so there is nothing to tell apart; give examples of "
            "others too, or another --label-column"
        )
    return tuple(names)


def check_classes_repeat(labels: Sequence[str], path: Path) -> None:
    """Refuse labels of which most stand once only: numbers or texts that were taken for classes.

    Raises:
        UserError: with a few of them.
    """
    classes = sorted(set(labels))
    if len(classes) > 2 and 2 * len(classes) > len(labels):
        raise UserError(
            f"{path} holds {len(classes):,} classes for {len(labels):,} examples ({', '.join(classes[:5])}, ...), so "
            "most are seen once and cannot be learned; take --task regression for numbers, or another --label-column"
        )


def alike_but_for_case(names: Sequence[str]) -> list[list[str]]:
    """Classes that would be one if upper and lower case were the same."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.casefold(), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def check_known(labels: Sequence[str], names: Sequence[str], path: Path) -> None:
    """Refuse labels that the training examples do not have.

    Raises:
        UserError: naming them.
    """
    unknown = sorted(set(labels) - set(names))
    if unknown:
        raise UserError(
            f"{path} holds labels that the training examples lack: {', '.join(unknown[:5])}; those have "
            f"{', '.join(names[:20])}"
        )


def _parsed(
    cells: Sequence[Any],
    parse: Callable[[Any], Any],
    path: Path,
    name: str,
    missing: Callable[[Any], bool] = is_missing,
) -> list[Any]:
    empty = [row for row, cell in enumerate(cells, start=1) if missing(cell)]
    if empty:
        raise UserError(
            f"{path} has {len(empty):,} rows of {len(cells):,} with nothing in column {name!r}, the first of them row "
            f"{empty[0]:,}; fill them in or take them out"
        )
    values = []
    for row, cell in enumerate(cells, start=1):
        try:
            values.append(parse(cell))
        except (ValueError, TypeError, OverflowError) as error:
            raise UserError(f"{path}, row {row:,}, column {name!r}: {error}; mend the row or take it out") from None
    return values


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def check_pair_column(task: str, needs_pair: bool, pair: str | None) -> None:
    """Refuse a pair column where the task takes none, and its absence where the task needs one."""
    if needs_pair and pair is None:
        raise UsageError(f"--task {task} reads two texts; name the second one's column by --pair-column")
    if not needs_pair and pair is not None:
        raise UsageError(f"--task {task} reads one text; leave --pair-column out, or take another task")
