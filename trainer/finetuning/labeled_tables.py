"""Tables from files: tsv, csv, jsonl and parquet, read by the names of their columns."""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

import pandas

from data_prep.base.errors import UsageError, UserError
from data_prep.storage.parquet import DamagedTable, read_whole

SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")
_UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
REPEATED = "repeated"
"""Key of a table's `attrs`: the column names that its file has more than once, of which pandas renames all but one."""


def read_table(path: Path, quoting: bool = True, header: bool = True, ragged: bool = False) -> pandas.DataFrame:
    """Read a whole table; cells of tsv and csv stay text, and an empty cell is "".

    Args:
        quoting: whether quotation marks of tsv and csv enclose cells; without it, they are plain characters.
        header: whether the first line of tsv and csv names the columns; without it, their names are "1", "2", ...
        ragged: accept rows of tsv and csv that are shorter or longer than the first one, without quoting: missing
            cells are empty, and extra cells are dropped, as Python's `csv.DictReader` does.

    A byte order mark is dropped.
    """
    try:
        check_readable(path)
        if path.suffix == ".parquet":
            return _read_parquet(path)
        text = _utf8_text(path)
        if not text.strip():
            raise UsageError(f"{path} is empty", fix="give a table", code="no-examples")
        # No guessing of dates or numbers: "2020" can be a class name.
        if path.suffix == ".jsonl":
            return pandas.DataFrame(list(_json_lines(text, path)), dtype=object)
        separator = "\t" if path.suffix == ".tsv" else ","
        return _read_ragged(text, separator, header) if ragged else read_separated(text, separator, quoting, header)
    except (OSError, ValueError) as error:  # reading errors of pandas and pyarrow are ValueErrors
        is_quoted = quoting and path.suffix in (".tsv", ".csv")
        unquoted = "; if it has unpaired quotation marks, add --no-quoting" if is_quoted else ""
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} cannot be read as a {path.suffix[1:]} table ({reason})",
            fix=f"correct the file{unquoted}",
            code="unreadable-table",
        ) from None


def read_separated(text: str, separator: str, quoting: bool, header: bool = True) -> pandas.DataFrame:
    """Return the table of a text as pandas reads it, all cells as text.

    Raises:
        ValueError: it is not such a table.
    """
    how = csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE
    options: dict[str, Any] = {"sep": separator, "dtype": str, "keep_default_na": False, "quoting": how}
    options["index_col"] = False  # else rows with one cell too many silently shift all columns by one
    with warnings.catch_warnings():
        warnings.simplefilter("error", pandas.errors.ParserWarning)
        try:
            first_line: Any = "infer" if header else None
            table: pandas.DataFrame = pandas.read_csv(io.StringIO(text), header=first_line, **options)
        except pandas.errors.ParserWarning:
            raise ValueError("its rows have more cells than the first line has names") from None
    if not header:
        table.columns = pandas.Index([str(number) for number in range(1, table.shape[1] + 1)])
        return table
    first = pandas.read_csv(io.StringIO(text), header=None, nrows=1, **options)
    table.attrs[REPEATED] = _repeated([name for name in first.iloc[0].tolist() if name])
    return table


def column(table: pandas.DataFrame, name: str, path: Path, option: str) -> list[Any]:
    """Return the cells of a column as Python values."""
    if name not in table.columns:
        there = ", ".join(str(column) for column in table.columns)
        raise UsageError(
            f"{path} has no column {name!r}; its columns: {there}{_other_separator(table)}",
            fix=f"give one of them with {option}",
            code="unknown-column",
        )
    if name in table.attrs.get(REPEATED, ()):
        raise UsageError(f"{path} has several columns named {name!r}", fix="rename all but one", code="repeated-column")
    return table[name].tolist()


def check_readable(path: Path) -> None:
    """Refuse a file that does not exist or has an unsupported type, before any work."""
    check_suffix(path)
    if not path.exists():
        raise UsageError(f"{path} does not exist", fix="give the path of a table", code="missing-path")


def check_columns(
    path: Path, names: Mapping[str, Any], quoting: bool = True, header: bool = True, ragged: bool = False
) -> None:
    """Check that a table has the columns, given by the options that name them; None is skipped.

    Raises:
        UsageError: a column is missing, or several have its name.
        UserError: the table cannot be read.
    """
    named = {option: name for option, name in names.items() if isinstance(name, str)}
    if named:
        table = read_table(path, quoting, header, ragged)
        for option, name in named.items():
            column(table, name, path, option)


def check_suffix(path: Path) -> None:
    """Refuse a file of an unsupported type."""
    if path.suffix not in SUFFIXES:
        raise UsageError(
            f"{path} is not a supported table",
            fix=f"give a name that ends in {', '.join(SUFFIXES)}",
            code="unsupported-file-type",
        )


def has_quoted_cells(path: Path) -> bool:
    """Return whether a cell of a tsv or csv file begins with a quotation mark."""
    separator = {".tsv": b"\t", ".csv": b","}.get(path.suffix)
    return separator is not None and re.search(rb'(?:^|\n|%b)"' % separator, path.read_bytes()) is not None


def is_missing(cell: Any) -> bool:
    """Return whether a cell is empty text, null, or NaN."""
    if isinstance(cell, str):
        return not cell.strip()
    return cell is None or (isinstance(cell, float) and cell != cell)


def _read_parquet(path: Path) -> pandas.DataFrame:
    """Read the rows in their order; pandas would join rows by the index that a Parquet file was saved with.

    The types and index that pandas stores in the file are ignored: an index with a name is a column, any other is left
    out.
    """
    try:
        arrow_table = read_whole(path)
    except DamagedTable as error:
        raise ValueError(str(error)) from None
    kept = [index for index, name in enumerate(arrow_table.column_names) if not _UNNAMED_INDEX.fullmatch(name)]
    # Whole numbers stay whole where one is missing: as floats, an id beyond 2**53 would become its neighbor.
    table: pandas.DataFrame = arrow_table.select(kept).replace_schema_metadata().to_pandas(integer_object_nulls=True)
    table.attrs[REPEATED] = _repeated(table.columns.tolist())
    return table


def _utf8_text(path: Path) -> str:
    """Return the file's text without a byte order mark."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        source = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
        raise UserError(
            f"{path}, line {line:,}, is not UTF-8 text (byte 0x{data[error.start]:02x})",
            fix=f"convert it, for instance with: iconv -f {source} -t utf-8 {quote(str(path))} (with its own encoding)",
            code="table-not-utf8",
        ) from None


def _json_lines(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the object of every line that is not empty."""

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError(f"it names {_repeated([name for name, _ in pairs])[0]!r} twice")
        return values

    for number, line in enumerate(text.split("\n"), start=1):  # other line separators can be part of a string
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=once)
            if not isinstance(value, dict):
                raise ValueError(f"it is a {type(value).__name__}")
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number:,}, is not a JSON object ({error})",
                fix="correct the line: one object, with each column named once",
                code="invalid-json-line",
            ) from None
        yield value


def _read_ragged(text: str, separator: str, header: bool) -> pandas.DataFrame:
    """Return rows of any number of cells, truncated or padded to the number of the first one."""
    rows = [line.split(separator) for line in text.replace("\r\n", "\n").split("\n") if line]
    width = len(rows[0])
    rows = [[*row[:width], *[""] * (width - len(row))] for row in rows]
    names = rows.pop(0) if header else [str(number) for number in range(1, width + 1)]
    table = pandas.DataFrame(rows, columns=names, dtype=object)
    table.attrs[REPEATED] = _repeated(names)
    return table


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _other_separator(table: pandas.DataFrame) -> str:
    """Return a hint if a whole line was read as one column."""
    only = str(table.columns[0]) if len(table.columns) == 1 else ""
    for sign, name in {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "bars"}.items():
        if sign in only:
            return f" (the columns seem to be separated by {name}; save it as .tsv with tabs or .csv with commas)"
    return ""
