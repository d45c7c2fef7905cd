"""Tables written as tsv, csv, jsonl and parquet: what is written reads back as the same rows and texts, or is refused.

pandas splits rows at a lone carriage return and drops lines that hold only spaces; other programs split at more
characters. So cells with any of them are quoted, and every tsv and csv is read again before it appears.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pandas

from data_prep.base.errors import UserError
from data_prep.base.terminal import json_line
from data_prep.storage import storage
from trainer.finetuning.labeled_tables import check_suffix, read_separated

_QUOTED = re.compile(r'["\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]|^\s|\s\Z')


def write_table(table: pandas.DataFrame, path: Path, quoting: bool = True) -> None:
    """Write a table atomically in the format of the file's extension; lists in tsv and csv become text with spaces.

    Args:
        quoting: whether quotation marks enclose cells of tsv and csv that need it; without it they are plain
            characters, and cells with separators or line ends are refused.

    Raises:
        UserError: the file cannot be written, or would not read back as the same table.
    """
    content = _content(table, path, quoting)
    with storage.local_write(path) as partial, open(partial, "wb") as file:
        file.write(content)


def check_table_can_be_written(table: pandas.DataFrame, path: Path, quoting: bool = True) -> None:
    """Check before any work that `write_table` can write a table.

    Raises:
        UserError: the format of the file cannot hold it.
    """
    _content(table, path, quoting)


def _content(table: pandas.DataFrame, path: Path, quoting: bool) -> bytes:
    """Return the content of the file."""
    check_suffix(path)
    fix = "write .parquet instead" if path.suffix == ".jsonl" else "write .jsonl instead"
    try:
        if repeated := [str(name) for name, count in Counter(map(str, table.columns)).items() if count > 1]:
            fix = "rename all but one of them"
            raise ValueError(f"it has several columns named {repeated[0]!r}")
        if path.suffix == ".parquet":
            return table.to_parquet(None, index=False)
        if path.suffix == ".jsonl":
            text = "".join(_json_lines(table))
        else:
            text = _separated(table, "\t" if path.suffix == ".tsv" else ",", quoting)
        return text.encode("utf-8")
    except (
        ValueError,
        TypeError,
        OverflowError,
    ) as error:  # also of pyarrow, for a column with values of several types
        reason = " ".join(str(error).split())[:200]
        fix = "write .parquet instead" if isinstance(error, UnicodeDecodeError) else fix  # binary cells
        raise UserError(f"{path} cannot hold this table ({reason})", fix=fix, code="table-not-writable") from None


def _json_lines(table: pandas.DataFrame) -> Iterator[str]:
    names = [str(name) for name in table.columns]
    for cells in _rows(table):
        yield json_line(dict(zip(names, map(_json_value, cells), strict=True))) + "\n"


def _separated(table: pandas.DataFrame, separator: str, quoting: bool) -> str:
    """Return the text of a tsv or csv file."""
    rows = [[_text(cell) for cell in cells] for cells in ([*table.columns], *_rows(table))]

    def written(cell: str) -> str:
        if not quoting or (cell and separator not in cell and not _QUOTED.search(cell)):
            return cell
        return '"' + cell.replace('"', '""') + '"' if cell or table.shape[1] == 1 else cell

    text = "".join(separator.join(map(written, cells)) + "\n" for cells in rows)
    try:
        table = read_separated(text, separator, quoting)
        lines = [[str(name) for name in table.columns], *table.to_numpy().tolist()]
    except (ValueError, pandas.errors.ParserError) as error:
        raise ValueError(f"it would not read back{_unquoted(quoting)}: {error}") from None
    for number, (cells, again) in enumerate(zip(rows, lines, strict=False)):
        if cells != again:
            changed = next((cell for cell, other in zip(cells, again, strict=False) if cell != other), "")
            part = f"row {number:,}" if number else "the names of the columns"
            raise ValueError(f"{changed[:80]!r} of {part} would read back as another text{_unquoted(quoting)}")
    if len(lines) != len(rows):
        raise ValueError(f"its {len(rows) - 1:,} rows would read back as {len(lines) - 1:,}{_unquoted(quoting)}")
    return text


def _unquoted(quoting: bool) -> str:
    return "" if quoting else " without quotation marks around cells (--no-quoting)"


def _rows(table: pandas.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Yield the cells of each row as Python values."""
    return zip(*(table.iloc[:, number].tolist() for number in range(table.shape[1])), strict=True)


def _json_value(cell: Any) -> Any:
    """Return a cell as a value of JSON; a missing one is null.

    Raises:
        TypeError, ValueError: JSON cannot hold it.
    """
    if isinstance(cell, numpy.ndarray | numpy.generic):
        cell = cell.tolist()
    if isinstance(cell, dict):
        return {str(name): _json_value(value) for name, value in cell.items()}
    if isinstance(cell, list | tuple):
        return [_json_value(value) for value in cell]
    if isinstance(cell, str | bool | int) or cell is None:
        return cell
    if pandas.isna(cell):
        return None
    if isinstance(cell, bytes):
        return cell.decode("utf-8")
    if hasattr(cell, "isoformat"):  # dates and times
        return cell.isoformat()
    return str(cell) if isinstance(cell, Decimal) else cell


def _text(cell: Any) -> str:
    """Return a cell of tsv and csv: lists (also numpy's, of Parquet) are joined by spaces, a missing cell is empty."""
    value = _json_value(cell)
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)
