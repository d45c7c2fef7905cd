"""Labeled examples: the columns of a file that a task reads, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.terminal import counted
from trainer.finetuning.tables import SEPARATORS, column, has_quoted_cells, is_missing, read_table

_EMPTY = "the cell is empty"
_SHOWN_ROWS = 10


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
    bad_rows: dict[int, str] = field(default_factory=dict)
    """Numbers, from 1 on, of the rows of the file that `skip_bad` left out, each with the reason."""
    is_quoted_tsv: bool = False
    """Whether they are of a tsv file in which quotation marks enclose cells."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, numbers: Sequence[int]) -> Examples:
        """Return the examples with these numbers, in this order."""
        return replace(
            self,
            texts=[self.texts[number] for number in numbers],
            pairs=None if self.pairs is None else [self.pairs[number] for number in numbers],
            labels=None if self.labels is None else [self.labels[number] for number in numbers],
            num_incomplete=0,
            bad_rows={},
        )

    @property
    def num_swallowing(self) -> int:
        """Number of texts that look like several rows: an unpaired quotation mark swallows rows."""
        texts = [*self.texts, *(self.pairs or [])] if self.is_quoted_tsv else []
        return sum(isinstance(text, str) and "\t" in text and "\n" in text for text in texts)

    def warnings(self, lacking: str) -> Iterator[str]:
        """Yield warnings about rows that look joined or were left out; `lacking` is the effect, such as "no vector"."""
        if self.bad_rows:
            first, reason = next(iter(self.bad_rows.items()))
            yield f"warning: {lacking} for {listed_rows([*self.bad_rows])} (row {first:,}, {reason})"
        if self.num_swallowing:
            yield swallowing_warning(self.num_swallowing)


def read_examples(
    path: Path,
    columns: Columns,
    parse_text: Callable[[Any], Any],
    parse_label: Callable[[Any, Any], Any] | None,
    quoting: bool = True,
    header: bool = True,
    skip_incomplete: bool = False,
    skip_bad: bool = False,
    read_label_column: Callable[[list[Any]], list[Any]] = list,
    offers_skipping: bool = False,
) -> Examples:
    """Read the examples of a file; `parse_label(cell, text)` is None if labels are not needed.

    `read_label_column` changes all cells of the labels before they are parsed.

    `quoting` and `header` are as in `read_table`. `skip_incomplete` accepts ragged rows and skips those with an empty
    cell. `skip_bad` leaves out every row that has an empty or invalid cell, as long as there are others, and with
    `offers_skipping` the error for such rows names the option that does.
    """
    table = read_table(path, quoting, header, ragged=skip_incomplete and path.suffix in SEPARATORS)
    num_rows = len(table)
    if skip_incomplete:
        named = [columns.text, columns.pair, columns.label if parse_label is not None else None]
        for name in (each for each in named if each in table.columns):
            table = table[[not is_missing(cell) for cell in table[name]]]
    if len(table) == 0:
        raise UsageError(f"{path} has no rows", fix="give a table with examples", code="no-examples")
    numbers = [int(index) + 1 for index in table.index]
    bad: dict[int, str] = {}

    def parsed(
        name: str,
        option: str,
        parse: Callable[..., Any],
        *others: Sequence[Any],
        read: Callable[[list[Any]], list[Any]] = list,
    ) -> list[Any]:
        cells = read(column(table, name, path, option))
        values: list[Any] = []
        wrong: dict[int, str] = {}
        for row, arguments in zip(numbers, zip(cells, *others, strict=True), strict=True):
            value = None
            try:
                if is_missing(arguments[0]):
                    raise ValueError(_EMPTY)
                value = parse(*arguments) if row not in bad else None
            except (ValueError, TypeError, OverflowError) as error:
                wrong[row] = str(error)
            values.append(value)
        if wrong and (not skip_bad or len(bad | wrong) == len(numbers)):
            raise _bad_cells(path, name, wrong, len(numbers), quoting, offers_skipping)
        bad.update({row: f"column {name!r}: {reason}" for row, reason in wrong.items() if row not in bad})
        return values

    texts = parsed(columns.text, "--text-column", parse_text)
    pairs = parsed(columns.pair, "--pair-column", text_of) if columns.pair is not None else None
    labels = None
    if parse_label is not None:
        labels = parsed(columns.label, "--label-column", parse_label, texts, read=read_label_column)
    examples = Examples(texts, pairs, labels, is_quoted_tsv=quoting and path.suffix == ".tsv")
    if bad:
        examples = examples.take([index for index, row in enumerate(numbers) if row not in bad])
    return replace(examples, num_incomplete=num_rows - len(table), bad_rows=dict(sorted(bad.items())))


def _bad_cells(
    path: Path, name: str, wrong: dict[int, str], num_rows: int, quoting: bool, offers_skipping: bool
) -> UsageError:
    """Return the error for cells of a column; `wrong` has the reason by row."""
    skipped = ", or skip such rows with --on-bad-row skip" if offers_skipping and len(wrong) < num_rows else ""
    empty = [row for row, reason in wrong.items() if reason == _EMPTY]
    if empty:
        unquoted = "; if quotation marks are plain characters, add --no-quoting"
        return UsageError(
            f"{path} has {counted(len(empty), 'row')} of {num_rows:,} without a value in column {name!r}: "
            f"{listed_rows(empty)}",
            fix=f"fill them in or remove them{skipped}{unquoted if quoting and has_quoted_cells(path) else ''}",
            code="empty-cells",
        )
    first, *others = wrong
    also = f"; {listed_rows(others)} cannot be read either" if others else ""
    return UsageError(
        f"{path}, row {first:,}, column {name!r}: {wrong[first]}{also}",
        fix=f"correct the rows or remove them{skipped}" if others else f"correct the row or remove it{skipped}",
        code="invalid-cell",
    )


def listed_rows(rows: Sequence[int]) -> str:
    """Return the numbers of rows as text: the first ones, and how many more there are."""
    shown = ", ".join(f"{row:,}" for row in rows[:_SHOWN_ROWS])
    more = f" and {len(rows) - _SHOWN_ROWS:,} more" if len(rows) > _SHOWN_ROWS else ""
    return f"row{'s' if len(rows) > 1 else ''} {shown}{more}"


def swallowing_warning(num_swallowing: int) -> str:
    """Return the warning about texts that `Examples.num_swallowing` counts."""
    return (
        f"warning: {counted(num_swallowing, 'text')} with tabs and line breaks: an unpaired quotation mark "
        "may have joined rows; if quotation marks are plain characters, add --no-quoting"
    )


def text_of(cell: Any) -> str:
    """Return a cell as text; a number becomes its digits.

    Raises:
        ValueError: the cell is something else, or contains a lone surrogate.
    """
    if isinstance(cell, float) and cell != cell:
        raise ValueError("the cell is NaN, and this task reads a text")
    if isinstance(cell, bytes):
        cell = cell.decode("utf-8")
    if not isinstance(cell, (str, int, float)):
        kind = "list" if hasattr(cell, "__len__") and not isinstance(cell, dict) else type(cell).__name__
        raise ValueError(f"the cell contains a {kind}, and this task reads a text")
    text = str(cell)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the text contains half a surrogate pair, which is not a character")
    return text
