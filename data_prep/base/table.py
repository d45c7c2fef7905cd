"""A table of finished text, which renders as plain text, Markdown or HTML; every cell is escaped for its medium."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from data_prep.base.terminal import printable

_MARKDOWN_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$])")


@dataclass(frozen=True)
class Column:
    """The head of a column; numbers are aligned right."""

    name: str
    is_number: bool = True


@dataclass(frozen=True)
class Table:
    """A table; its cells may hold any text of the corpus.

    Attributes:
        note: explains the columns, below the table.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def text(self) -> str:
        """Return lines for a terminal: aligned columns and the note, without the title."""
        cells = [tuple(column.name for column in self.columns), *self.rows]
        cells = [tuple(map(printable, row)) for row in cells]
        lines = aligned(cells, [number for number, column in enumerate(self.columns) if column.is_number])
        return "\n".join([*lines, *([f"({printable(self.note)})"] if self.note else [])])

    def markdown(self) -> str:
        """Return a Markdown table, without title and note."""
        lines = [
            f"| {' | '.join(escape_markdown(column.name) for column in self.columns)} |",
            f"|{'|'.join('---:' if column.is_number else '---' for column in self.columns)}|",
            *(f"| {' | '.join(map(escape_markdown, row))} |" for row in self.rows),
        ]
        return "\n".join(lines)

    def html(self, first_rows: int | None = None) -> str:
        """Return a heading, the table and its note; with `first_rows`, rows beyond them are folded."""
        classes = [' class="number"' if column.is_number else "" for column in self.columns]
        head = "".join(
            f"<th{kind}>{escape_html(column.name)}</th>" for kind, column in zip(classes, self.columns, strict=True)
        )
        parts = [f"<h2>{escape_html(self.title)}</h2>"]
        folded = self.rows if first_rows is None else self.rows[first_rows:]
        if first_rows is not None:
            parts += _html_rows(head, self.rows[:first_rows], classes)
        if first_rows is None or folded:
            table = list(_html_rows(head, folded, classes))
            what = f"{len(folded):,} more rows"
            parts += table if first_rows is None else [f"<details><summary>{what}</summary>", *table, "</details>"]
        if self.note:
            parts.append(f"<p>{escape_html(self.note)}</p>")
        return "\n".join(parts)


def aligned(rows: Sequence[Sequence[str]], of_numbers: Collection[int] = ()) -> list[str]:
    """Return rows as lines whose columns are aligned: to the right those `of_numbers`, which count from 0."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if number in of_numbers else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def escape_markdown(text: str) -> str:
    """Return any text as one line of Markdown that shows as it is, within a table too."""
    line = printable(" ".join(text.split()))
    return _MARKDOWN_SPECIAL.sub(r"\\\1", line).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def escape_html(text: str) -> str:
    """Return any text as HTML that shows as it is, in an attribute too."""
    from html import escape  # with the table of all named characters

    return escape(printable(text), quote=True)


def _html_rows(head: str, rows: tuple[tuple[str, ...], ...], classes: list[str]) -> Iterator[str]:
    yield f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>'
    for row in rows:
        # bdi: a right-to-left name does not turn the row around.
        cells = (f"<td{kind}><bdi>{escape_html(cell)}</bdi></td>" for kind, cell in zip(classes, row, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"
