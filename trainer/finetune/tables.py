"""Tables from files: tsv, csv, jsonl and parquet, read and written by the names of their columns."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pandas

from data_prep.errors import UsageError, UserError

SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")


def read_table(path: Path, quoting: bool = True) -> pandas.DataFrame:
    """The whole table; cells of tsv and csv are text as it stands, an empty one is "".

    `quoting` False takes quotation marks of tsv and csv for ordinary characters. A byte order mark is left out.

    Raises:
        UsageError: the file's ending is of no table.
        UserError: the file is not there, or is no such table.
    """
    check_suffix(path)
    try:
        if path.suffix == ".parquet":
            return pandas.read_parquet(path)
        if path.suffix == ".jsonl":
            # No guessing of dates or numbers: "2020" is a class name as good as any.
            text = path.read_text(encoding="utf-8-sig")
            return pandas.read_json(_lines(text), lines=True, dtype=False, convert_dates=False)
        return pandas.read_csv(
            path,
            sep="\t" if path.suffix == ".tsv" else ",",
            dtype=str,
            keep_default_na=False,
            quoting=csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE,
            encoding="utf-8-sig",
        )
    except FileNotFoundError:
        raise UserError(f"there is no file {path}; give the path of a table") from None
    except (OSError, ValueError) as error:  # pandas' and pyarrow's errors of reading are ValueErrors
        unquoted = (
            ""
            if path.suffix not in (".tsv", ".csv") or not quoting
            else "; where it has unpaired quotation marks, add --no-quoting"
        )
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} cannot be read as a {path.suffix[1:]} table ({reason}); mend the file{unquoted}"
        ) from None


def column(table: pandas.DataFrame, name: str, path: Path, option: str) -> list[Any]:
    """The cells of a column as Python values.

    Raises:
        UsageError: there is no such column.
    """
    if name not in table.columns:
        there = ", ".join(str(column) for column in table.columns)
        raise UsageError(f"{path} has no column {name!r}; {option} must name one of those there: {there}")
    return table[name].tolist()


def write_table(table: pandas.DataFrame, path: Path) -> None:
    """Write in the format that the file's ending names; lists become text joined by spaces in tsv and csv.

    Raises:
        UserError: the file cannot be written.
    """
    check_suffix(path)
    try:
        if path.suffix == ".parquet":
            table.to_parquet(path, index=False)
        elif path.suffix == ".jsonl":
            table.to_json(path, orient="records", lines=True, force_ascii=False)
        else:
            flat = table.map(lambda cell: " ".join(map(str, cell)) if isinstance(cell, (list, tuple)) else cell)
            flat.to_csv(path, sep="\t" if path.suffix == ".tsv" else ",", index=False)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); give another file") from None


def check_suffix(path: Path) -> None:
    """Refuse a file whose ending names no table."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path} is no table that can be read or written; its name must end in {', '.join(SUFFIXES)}")


def is_missing(cell: Any) -> bool:
    """Whether a cell holds nothing: empty text, null, or not a number."""
    if isinstance(cell, str):
        return not cell.strip()
    return cell is None or (isinstance(cell, float) and cell != cell)


def _lines(text: str) -> Any:
    import io

    return io.StringIO(text)
