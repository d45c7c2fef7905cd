"""Labeled examples: the columns of a file that a task reads, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted
from trainer.finetuning.labeled_tables import column, has_quoted_cells, is_missing, read_table


@dataclass(frozen=True)
class Columns:
    """Names of the columns; `pair` is the second text, or the question of question answering."""

    text: str
    pair: str | None
    label: str


@dataclass(frozen=True)
class Examples:
    """Columns of equal length. A text is a string or a list of words; the task defines the labels."""

    texts: list[Any]
    pairs: list[str] | None
    labels: list[Any] | None
    num_incomplete: int = 0
    """Rows of the file that were skipped because a cell was empty."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, numbers: Sequence[int]) -> Examples:
        """Return the examples with these numbers, in this order."""
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
    header: bool = True,
    skip_incomplete: bool = False,
) -> Examples:
    """Read the examples of a file; `parse_label(cell, text)` is None if labels are not needed.

    `header` is as in `read_table`. `skip_incomplete` accepts ragged rows and skips those with an empty cell.

    Raises:
        UsageError: a column is missing, the file has no rows, or a cell is empty or invalid for the task; the error
            names the first one.
        UserError: the file cannot be read.
    """
    table = read_table(path, quoting, header, ragged=skip_incomplete and path.suffix in (".tsv", ".csv"))
    num_rows = len(table)
    if skip_incomplete:
        named = [columns.text, columns.pair, columns.label if parse_label is not None else None]
        for name in (each for each in named if each in table.columns):
            table = table[[not is_missing(cell) for cell in table[name]]]
    num_incomplete = num_rows - len(table)
    if len(table) == 0:
        raise UsageError(
            f"{path} has no rows",
            fix="give a table with examples",
            code="no-examples",
        )

    def parsed(name: str, option: str, parse: Callable[..., Any], *others: Sequence[Any]) -> list[Any]:
        cells = column(table, name, path, option)
        empty = [row for row, cell in enumerate(cells, start=1) if is_missing(cell)]
        if empty:
            unquoted = "; if quotation marks are plain characters, add --no-quoting"
            raise UsageError(
                f"{path} has {len(empty):,} rows of {len(cells):,} without a value in column {name!r}, "
                f"the first of them row {empty[0]:,}",
                fix=f"fill them in or remove them{unquoted if quoting and has_quoted_cells(path) else ''}",
                code="empty-cells",
            )
        values = []
        for row, arguments in enumerate(zip(cells, *others, strict=True), start=1):
            try:
                values.append(parse(*arguments))
            except (ValueError, TypeError, OverflowError) as error:
                raise UsageError(
                    f"{path}, row {row:,}, column {name!r}: {error}",
                    fix="correct the row or remove it",
                    code="invalid-cell",
                ) from None
        return values

    texts = parsed(columns.text, "--text-column", parse_text)
    pairs = parsed(columns.pair, "--pair-column", text_of) if columns.pair is not None else None
    labels = parsed(columns.label, "--label-column", parse_label, texts) if parse_label is not None else None
    return Examples(texts, pairs, labels, num_incomplete)


def count_swallowing(path: Path, examples: Examples, quoting: bool = True) -> int:
    """Count texts of a tsv file that look like several rows: an unpaired quotation mark swallows rows."""
    if not quoting or path.suffix != ".tsv":
        return 0
    texts = [*examples.texts, *(examples.pairs or [])]
    return sum(isinstance(text, str) and "\t" in text and "\n" in text for text in texts)


def swallowing_warning(num_swallowing: int) -> str:
    """Return the warning about texts that `count_swallowing` counts."""
    return (
        f"warning: {counted(num_swallowing, 'text')} with tabs and line breaks: an unpaired quotation mark "
        "may have joined rows; if quotation marks are plain characters, add --no-quoting"
    )


def text_of(cell: Any) -> str:
    """Return a cell as text; a number becomes its digits.

    Raises:
        ValueError: the cell holds something else, or a lone surrogate.
    """
    if isinstance(cell, float) and cell != cell:
        raise ValueError("the cell is NaN, and this task reads a text")
    if isinstance(cell, bytes):
        cell = cell.decode("utf-8")
    if not isinstance(cell, (str, int, float)):
        kind = "list" if hasattr(cell, "__len__") and not isinstance(cell, dict) else type(cell).__name__
        raise ValueError(f"the cell holds a {kind}, and this task reads a text")
    text = str(cell)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the text holds half a surrogate pair, which is not a character")
    return text
