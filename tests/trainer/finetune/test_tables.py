"""Tables of every format give the same cells, and what cannot be read is told with the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest

from data_prep.errors import UsageError, UserError
from trainer.finetune.tables import column, is_missing, read_table, write_table

ROWS = {"text": ["a cat", 'said "no"', "été"], "label": ["1", "0", "1"]}


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl", ".parquet"])
def test_what_is_written_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"table{suffix}"
    write_table(pandas.DataFrame(ROWS), path)
    table = read_table(path)
    assert {name: table[name].tolist() for name in table.columns} == ROWS


def test_a_byte_order_mark_and_unpaired_quotation_marks_are_text_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "mrpc.tsv"
    path.write_bytes('\ufeffQuality\t#1 String\n1\t" The pie\n0\tsaid " no\n'.encode())
    table = read_table(path, quoting=False)
    assert column(table, "Quality", path, "--label-column") == ["1", "0"]
    assert column(table, "#1 String", path, "--text-column") == ['" The pie', 'said " no']


def test_classes_of_jsonl_are_not_taken_for_dates_and_lists_stay_lists(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    path.write_text(json.dumps({"date": "2020-01-01", "tags": ["O", "B-X"]}) + "\n")
    table = read_table(path)
    assert table["date"].tolist() == ["2020-01-01"] and table["tags"].tolist() == [["O", "B-X"]]


def test_na_is_a_word_and_not_a_missing_cell(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("text,label\nNA,null\n,x\n")
    table = read_table(path)
    assert table["text"].tolist() == ["NA", ""] and table["label"].tolist() == ["null", "x"]
    assert [is_missing(cell) for cell in ("", "  ", None, float("nan"), 0, "0", [])] == [True] * 4 + [False] * 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("table.tsv", 'a\tb\n"x\ty\n', "--no-quoting"),
        ("table.jsonl", "{broken\n", "cannot be read as a jsonl"),
        ("table.parquet", "no parquet", "cannot be read as a parquet"),
        ("empty.csv", "", "cannot be read"),
    ],
)
def test_a_file_that_is_no_table_is_told(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_table(path)


def test_wrong_names_are_answered_with_those_that_are_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must end in .tsv, .csv"):
        read_table(tmp_path / "table.xlsx")
    with pytest.raises(UserError, match="no file"):
        read_table(tmp_path / "table.csv")
    with pytest.raises(UsageError, match="--text-column must name one of those there: text, label"):
        column(pandas.DataFrame(ROWS), "sentence", Path("t.csv"), "--text-column")
