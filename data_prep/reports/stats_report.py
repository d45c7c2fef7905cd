"""The statistics of a data set as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from data_prep.base.terminal import printable
from data_prep.reports.stats import Statistics
from data_prep.reports.tables import (
    Table,
    language_table,
    length_table,
    piece_table,
    source_table,
    split_table,
    step_table,
)

_BAR_CHARACTERS = 40
_SHOWN_PIECES = 20


def stats_report(statistics: Statistics) -> Iterator[str]:
    """Describe a data set, a line each; whatever the corpus holds, no line acts on the terminal."""
    manifest = statistics.manifest
    tokenizer = manifest.tokenizer
    yield printable(f"{statistics.folder}  (version {manifest.version}, digest {manifest.digest[:16]})")
    yield f"tokenizer {tokenizer.fingerprint[:16]}, {tokenizer.vocab_size:,} pieces, {tokenizer.token_dtype}"
    languages = language_table(manifest)
    shown = (split_table(manifest), source_table(manifest), languages, step_table(manifest), length_table(statistics))
    for table in shown:
        if table is not None:
            yield ""
            yield from table_lines(table)
    yield ""
    yield from _histogram(statistics)
    yield ""
    pieces = piece_table(statistics)
    frequent = ", ".join(f"{piece} {share}" for _, _, piece, _, share in pieces.rows[:_SHOWN_PIECES])
    yield printable(f"most frequent pieces: {frequent}")
    yield pieces.note


def table_lines(table: Table) -> Iterator[str]:
    """The table with its columns aligned, its note below it, and no title."""
    cells = [tuple(column.name for column in table.columns), *table.rows]
    cells = [tuple(map(printable, row)) for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        yield "  ".join(
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns, strict=True)
        ).rstrip()
    if table.note:
        yield f"({printable(table.note)})"


def _histogram(statistics: Statistics) -> Iterator[str]:
    yield "documents by length in tokens"
    bins = statistics.document_lengths.bins()
    most = max((item.num for item in bins), default=1)
    for low, high, num in bins:
        yield f"{low:>10,} to {high:<10,}{num:>14,} {'#' * round(_BAR_CHARACTERS * num / most)}".rstrip()
