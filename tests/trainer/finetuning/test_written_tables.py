"""Tables that are written: pandas and this project read back the same rows and texts, or the table is refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pandas
import pyarrow.parquet
import pytest

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.finetuning.labeled_tables import read_table
from trainer.finetuning.written_tables import check_table_can_be_written, write_table

CONTROLS = [*map(chr, range(32)), "\x7f", "\x80", "\x85", "\x9f", "\u2028", "\u2029", "\ufeff", "\r\n", "\n\r"]
TEXTS = [
    *(f"a{character}b" for character in CONTROLS),
    *CONTROLS,
    *(
        '"',
        '"a',
        'a"',
        '""',
        "a,b",
        "a\tb",
        "'a'",
        "\\",
        "\\n",
        "#",
        " a",
        "a ",
        " ",
        "",
        "NA",
        "null",
        "None",
        "1",
        "007",
    ),
]
SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")


def read_by_pandas(path: Path, quoting: int = csv.QUOTE_MINIMAL) -> list[list[str]]:
    if path.suffix == ".parquet":
        return pandas.read_parquet(path).to_numpy().tolist()
    if path.suffix == ".jsonl":
        return pandas.read_json(path, lines=True, dtype=False, convert_dates=False).to_numpy().tolist()
    separator = "\t" if path.suffix == ".tsv" else ","
    table = pandas.read_csv(path, sep=separator, dtype=str, keep_default_na=False, quoting=quoting)
    return table.to_numpy().tolist()


@pytest.mark.fault(
    row="71",
    fault="tables with control characters and line separators",
    required="what is written reads back the same, or is refused",
)
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("columns", [1, 2])
def test_a_written_table_reads_back_as_the_same_texts(tmp_path: Path, suffix: str, columns: int) -> None:
    path = tmp_path / f"table{suffix}"
    rows = [[text, f"x{text}"][:columns] for text in TEXTS]
    table = pandas.DataFrame(rows, columns=["a\rb", "\u2028c"][:columns], dtype=object)
    write_table(table, path)
    assert read_by_pandas(path) == rows
    again = read_table(path)
    assert again.to_numpy().tolist() == rows and list(again.columns) == list(table.columns)
    if suffix in (".tsv", ".csv"):
        with open(path, encoding="utf-8", newline="") as file:
            assert list(csv.reader(file, delimiter="\t" if suffix == ".tsv" else ","))[1:] == rows
    if suffix == ".jsonl":
        assert len(path.read_text().splitlines()) == len(rows)


@pytest.mark.parametrize("suffix", [".tsv", ".csv"])
def test_without_quoting_quotation_marks_are_written_as_they_are(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table{suffix}"
    rows = [['"so good', 'a"b'], ['"', "fine"], ["\u2028", "'"]]
    write_table(pandas.DataFrame(rows, columns=["text", "other"], dtype=object), path, quoting=False)
    assert read_table(path, quoting=False).to_numpy().tolist() == rows
    assert read_by_pandas(path, csv.QUOTE_NONE) == rows
    assert '"so good' in path.read_text().splitlines()[1]


@pytest.mark.parametrize("text", ["a\rb", "a\nb", "a\tb", "\r"])
def test_without_quoting_a_cell_that_would_split_is_refused(tmp_path: Path, text: str) -> None:
    table = pandas.DataFrame({"text": [text], "label": ["x"]}, dtype=object)
    for write in (write_table, check_table_can_be_written):
        with pytest.raises(UserError, match="--no-quoting", check=coded("table-not-writable")):
            write(table, tmp_path / "table.tsv", quoting=False)
    assert not list(tmp_path.iterdir())


def test_numbers_keep_all_their_digits_and_missing_cells_stay_missing(tmp_path: Path) -> None:
    table = pandas.DataFrame({"sure": [0.1234567890123456, float("nan")], "tags": [["a", "b"], None]})
    write_table(table, tmp_path / "table.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert lines == [{"sure": 0.1234567890123456, "tags": ["a", "b"]}, {"sure": None, "tags": None}]
    write_table(table, tmp_path / "table.csv")
    assert read_table(tmp_path / "table.csv").to_numpy().tolist() == [["0.1234567890123456", "a b"], ["", ""]]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_several_columns_of_one_name_are_refused(tmp_path: Path, suffix: str) -> None:
    table = pandas.DataFrame([["a", "b"]], columns=["text", "text"])
    with pytest.raises(UserError, match="'text'", check=coded("table-not-writable")):
        write_table(table, tmp_path / f"table{suffix}")


def test_whole_numbers_stay_whole_where_one_is_missing(tmp_path: Path) -> None:
    wanted = {"id": [2**53 + 1, None], "facts": [{"n": 1}, None]}
    pyarrow.parquet.write_table(pyarrow.table(wanted), tmp_path / "read.parquet")
    table = read_table(tmp_path / "read.parquet")
    for suffix in SUFFIXES:
        write_table(table, tmp_path / f"table{suffix}")
        found = read_table(tmp_path / f"table{suffix}").to_dict("list")
        is_text = suffix in (".tsv", ".csv")
        assert found == ({"id": [str(2**53 + 1), ""], "facts": ['{"n": 1}', ""]} if is_text else wanted)


@pytest.mark.parametrize(
    ("suffix", "cells"),
    [
        (".csv", ["\ud800"]),
        (".parquet", ["\ud800"]),
        (".parquet", [1, "x"]),
        (".parquet", [10**23]),
        (".jsonl", [float("inf")]),
        (".jsonl", [b"\xff"]),
        (".tsv", [b"\xff"]),
    ],
)
def test_a_refused_table_can_be_written_as_the_error_says(tmp_path: Path, suffix: str, cells: list[object]) -> None:
    table = pandas.DataFrame({"text": pandas.Series(cells, dtype=object)})
    with pytest.raises(UserError, match="cannot hold", check=coded("table-not-writable")) as refused:
        write_table(table, tmp_path / f"table{suffix}")
    other = tmp_path / f"table{refused.value.fix.split()[1]}"
    write_table(table, other)
    assert read_table(other)["text"].tolist() == cells
