"""Tables as tsv, csv, jsonl and parquet: read by the names of columns, and written so that they read back the same.
Files of `field_formats.py` are read as tables too.

pandas splits rows at a lone carriage return and drops lines that have only spaces; other programs split at more
characters. So written cells with any of them are quoted, and every tsv and csv is read again before it appears.
"""

from __future__ import annotations

import csv
import io
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from shlex import quote
from typing import Any

import numpy
import pandas

from data_prep.base.errors import UsageError, UserError
from data_prep.base.terminal import json_line
from data_prep.storage import storage
from data_prep.storage.parquet import DamagedTable, read_whole
from trainer.finetuning.field_formats import FAULTS, read_conll, read_lines, read_squad

SEPARATORS = {".tsv": "\t", ".csv": ","}
SUFFIXES = (*SEPARATORS, ".jsonl", ".parquet")
READERS = {".json": read_squad, ".conll": read_conll, ".txt": read_lines}
"""Functions that read further formats, which are not written."""
REPEATED = "repeated"
"""Key of a table's `attrs`: the column names that its file has more than once, of which pandas renames all but one."""
_UNNAMED_INDEX = re.compile(r"__index_level_\d+__")
_QUOTED = re.compile(r'["\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]|^\s|\s\Z')


def read_table(path: Path, quoting: bool = True, header: bool = True, ragged: bool = False) -> pandas.DataFrame:
    """Read a whole table without a byte order mark; cells of tsv and csv stay text, and an empty cell is "".

    Args:
        quoting: whether quotation marks of tsv and csv enclose cells; without it, they are plain characters.
        header: whether the first line of tsv and csv names the columns; without it, their names are "1", "2", ...
        ragged: accept rows of tsv and csv that are shorter or longer than the first one, without quoting: missing
            cells are empty, and extra cells are dropped, as Python's `csv.DictReader` does.
    """
    try:
        check_readable(path)
        if path.suffix == ".parquet":
            return _read_parquet(path)
        text = _utf8_text(path)
        if not text.strip():
            raise UsageError(f"{path} is empty", fix="give a table", code="no-examples")
        if path.suffix == ".jsonl":  # pandas would read "2020", which can be a class name, as a date or a number
            return pandas.DataFrame(list(json_objects(text.split("\n"), path)), dtype=object)
        if path.suffix in READERS:
            return READERS[path.suffix](text)
        separator = SEPARATORS[path.suffix]
        return _read_ragged(text, separator, header) if ragged else _read_separated(text, separator, quoting, header)
    except (OSError, ValueError, RecursionError) as error:  # reading errors of pandas and pyarrow are ValueErrors
        is_quoted = quoting and path.suffix in SEPARATORS
        unquoted = "; if it has unpaired quotation marks, add --no-quoting" if is_quoted else ""
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} cannot be read as a {path.suffix[1:]} table ({reason})",
            fix=getattr(error, "fix", f"correct the file{unquoted}"),
            code="unreadable-table",
        ) from None


def column(table: pandas.DataFrame, name: str, path: Path, option: str) -> list[Any]:
    """Return the cells of a column as Python values; errors name `path`, and the option that gave the name.

    A fault of `field_formats.py` counts for labels only.
    """
    if name not in table.columns:
        there = ", ".join(str(column) for column in table.columns)
        raise UsageError(
            f"{path} has no column {name!r}; its columns: {there}{_other_separator(table)}",
            fix=f"give one of them with {option}",
            code="unknown-column",
        )
    if name in table.attrs.get(REPEATED, ()):
        raise UsageError(f"{path} has several columns named {name!r}", fix="rename all but one", code="repeated-column")
    if option == "--label-column" and name in table.attrs.get(FAULTS, {}):
        reason, fix = table.attrs[FAULTS][name]
        raise UsageError(f"{path}, {reason}", fix=fix, code="invalid-cell")
    return table[name].tolist()


def check_suffix(path: Path, suffixes: Sequence[str] = SUFFIXES) -> None:
    """Refuse a file of an unsupported type."""
    if path.suffix not in suffixes:
        raise UsageError(
            f"{path} is not a supported table",
            fix=f"give a name that ends in {', '.join(suffixes)}",
            code="unsupported-file-type",
        )


def check_readable(path: Path) -> None:
    """Refuse a file that does not exist or has an unsupported type, before any work."""
    check_suffix(path, (*SUFFIXES, *READERS))
    if not path.exists():
        raise UsageError(f"{path} does not exist", fix="give the path of a table", code="missing-path")


def check_columns(
    path: Path, names: Mapping[str, Any], quoting: bool = True, header: bool = True, ragged: bool = False
) -> None:
    """Refuse a table that lacks a column or has several of its name; `names` are by option, and None is skipped."""
    named = {option: name for option, name in names.items() if isinstance(name, str)}
    if named:
        table = read_table(path, quoting, header, ragged)
        for option, name in named.items():
            column(table, name, path, option)


def has_quoted_cells(path: Path) -> bool:
    """Return whether a cell of a tsv or csv file begins with a quotation mark."""
    separator = SEPARATORS.get(path.suffix, "").encode()
    return bool(separator) and re.search(rb'(?:^|\n|%b)"' % separator, path.read_bytes()) is not None


def is_missing(cell: Any) -> bool:
    """Return whether a cell is empty text, null, or NaN."""
    if isinstance(cell, str):
        return not cell.strip()
    return cell is None or (isinstance(cell, float) and cell != cell)


def write_table(table: pandas.DataFrame, path: Path, quoting: bool = True) -> None:
    """Write a table atomically in the format of the file's extension.

    Lists of words in tsv and csv become text with spaces, and other lists JSON.

    Args:
        quoting: whether quotation marks enclose cells of tsv and csv that need it; without it they are plain
            characters, and cells with separators or line ends are refused.

    Raises:
        UserError: the file cannot be written, or would not read back as the same table.
    """
    content = check_table_can_be_written(table, path, quoting)
    with storage.local_write(path) as partial, open(partial, "wb") as file:
        file.write(content)


def check_table_can_be_written(table: pandas.DataFrame, path: Path, quoting: bool = True) -> bytes:
    """Return what `write_table` would write.

    Raises:
        UserError: the format of the file cannot express the table.
    """
    check_suffix(path)
    fix = "write .parquet instead" if path.suffix == ".jsonl" else "write .jsonl instead"
    try:
        if repeated := _repeated(map(str, table.columns)):
            fix = "rename all but one of them"
            raise ValueError(f"it has several columns named {repeated[0]!r}")
        if path.suffix == ".parquet":
            return table.to_parquet(None, index=False)
        if path.suffix == ".jsonl":
            names = [str(name) for name in table.columns]
            rows = (dict(zip(names, map(_json_value, cells), strict=True)) for cells in _rows(table))
            return "".join(f"{json_line(row)}\n" for row in rows).encode("utf-8")
        return _separated(table, SEPARATORS[path.suffix], quoting).encode("utf-8")
    except (ValueError, TypeError, OverflowError) as error:  # also of pyarrow, for a column of several types
        reason = " ".join(str(error).split())[:200]
        fix = "write .parquet instead" if isinstance(error, UnicodeDecodeError) else fix  # binary cells
        raise UserError(f"{path} cannot hold this table ({reason})", fix=fix, code="table-not-writable") from None


def _read_separated(text: str, separator: str, quoting: bool, header: bool = True) -> pandas.DataFrame:
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
        table.columns = pandas.Index(_numbers(table.shape[1]))
        return table
    first = pandas.read_csv(io.StringIO(text), header=None, nrows=1, **options)
    table.attrs[REPEATED] = _repeated(name for name in first.iloc[0].tolist() if name)
    return table


def _read_ragged(text: str, separator: str, header: bool) -> pandas.DataFrame:
    """Return rows of any number of cells, truncated or padded to the number of the first one."""
    rows = [line.split(separator) for line in text.replace("\r\n", "\n").split("\n") if line]
    width = len(rows[0])
    rows = [[*row[:width], *[""] * (width - len(row))] for row in rows]
    names = rows.pop(0) if header else _numbers(width)
    table = pandas.DataFrame(rows, columns=names, dtype=object)
    table.attrs[REPEATED] = _repeated(names)
    return table


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
    table.attrs[REPEATED] = _repeated(table.columns)
    return table


def _utf8_text(path: Path) -> str:
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


def json_objects(lines: Iterable[str], path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of every line that is not empty.

    Lines end at line feeds alone: other line separators can be part of a string.

    Raises:
        UserError: a line is not an object, or names a field twice.
    """

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise ValueError(f"it names {_repeated(name for name, _ in pairs)[0]!r} twice")
        return values

    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=unique)
            if not isinstance(value, dict):
                raise ValueError(f"it is a {type(value).__name__}")
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number:,}, is not a JSON object ({error})",
                fix="correct the line: one object, with each column named once",
                code="invalid-json-line",
            ) from None
        yield value


def _numbers(count: int) -> list[str]:
    return [str(number) for number in range(1, count + 1)]


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _other_separator(table: pandas.DataFrame) -> str:
    """Return a hint if a whole line was read as one column."""
    only = str(table.columns[0]) if len(table.columns) == 1 else ""
    for sign, name in {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "bars"}.items():
        if sign in only:
            return f" (the columns seem to be separated by {name}; save it as .tsv with tabs or .csv with commas)"
    return ""


def _separated(table: pandas.DataFrame, separator: str, quoting: bool) -> str:
    """Return the text of a tsv or csv file.

    Raises:
        ValueError: the text would not read back as the same table.
    """
    rows = [[_text(cell) for cell in cells] for cells in ([*table.columns], *_rows(table))]
    unquoted = "" if quoting else " without quotation marks around cells (--no-quoting)"

    def written(cell: str) -> str:
        if not quoting or (cell and separator not in cell and not _QUOTED.search(cell)):
            return cell
        return '"' + cell.replace('"', '""') + '"' if cell or table.shape[1] == 1 else cell

    text = "".join(separator.join(map(written, cells)) + "\n" for cells in rows)
    try:
        table = _read_separated(text, separator, quoting)
        lines = [[str(name) for name in table.columns], *table.to_numpy().tolist()]
    except (ValueError, pandas.errors.ParserError) as error:
        raise ValueError(f"it would not read back{unquoted}: {error}") from None
    for number, (cells, again) in enumerate(zip(rows, lines, strict=False)):
        if cells != again:
            changed = next((cell for cell, other in zip(cells, again, strict=False) if cell != other), "")
            part = f"row {number:,}" if number else "the names of the columns"
            raise ValueError(f"{changed[:80]!r} of {part} would read back as another text{unquoted}")
    if len(lines) != len(rows):
        raise ValueError(f"its {len(rows) - 1:,} rows would read back as {len(lines) - 1:,}{unquoted}")
    return text


def _rows(table: pandas.DataFrame) -> Iterator[tuple[Any, ...]]:
    """Yield the cells of each row as Python values."""
    return zip(*(table.iloc[:, number].tolist() for number in range(table.shape[1])), strict=True)


def _json_value(cell: Any) -> Any:
    """Return a cell as a value of JSON; a missing one is null.

    Raises:
        TypeError, ValueError: JSON cannot express it.
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
    """Return a cell of tsv and csv: lists (also numpy's, of Parquet) are joined by spaces, a missing cell is empty.

    A list of anything but words, which spaces would not part again, is JSON.
    """
    value = _json_value(cell)
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        words = [*map(_text, value)]
        if all(len(word.split()) == 1 for word in words):
            return " ".join(words)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False)
    return "" if value is None else str(value)
