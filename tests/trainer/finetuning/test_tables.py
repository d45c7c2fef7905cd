"""Tables of every format give the same cells, read back as they were written, and are refused with the fix."""

from __future__ import annotations

import csv
import json
import resource
from pathlib import Path

import pandas
import pyarrow.parquet
import pytest

from data_prep.base.errors import UsageError, UserError
from tests.support.error_codes import coded
from trainer.finetuning.tables import (
    check_readable,
    check_table_can_be_written,
    column,
    is_missing,
    read_table,
    write_table,
)

SUFFIXES = (".tsv", ".csv", ".jsonl", ".parquet")
ROWS = {"text": ["a cat", 'said "no"', "été"], "label": ["1", "0", "1"]}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_written_table_is_read_back(tmp_path: Path, suffix: str) -> None:
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


def test_lists_of_parquet_are_words_in_a_tsv(tmp_path: Path) -> None:
    pandas.DataFrame({"words": [["a", "cat"]], "tags": [["O", "B-X"]]}).to_parquet(tmp_path / "table.parquet")
    write_table(read_table(tmp_path / "table.parquet"), tmp_path / "table.tsv")
    assert (tmp_path / "table.tsv").read_text() == "words\ttags\na cat\tO B-X\n"


def test_a_list_that_spaces_would_not_part_again_is_json_in_a_tsv(tmp_path: Path) -> None:
    answers = [{"text": "The cat", "answer_start": 0}, {"text": "cat", "answer_start": 4}]
    lists = {
        "answers": answers,
        "words": ["New York", "rain"],
        "odd": ["10\u00a0000"],
        "blank": ["", "b"],
        "tags": ["O"],
    }
    write_table(pandas.DataFrame({name: [value] for name, value in lists.items()}), tmp_path / "table.tsv")
    (row,) = read_table(tmp_path / "table.tsv").to_dict("records")
    assert row.pop("tags") == "O"
    assert {name: json.loads(cell) for name, cell in row.items()} == {name: lists[name] for name in row}


def test_rows_of_parquet_keep_their_order_with_any_stored_index(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    table = pandas.DataFrame(ROWS, index=[2, 0, 1])
    for name, columns in ((None, ["text", "label"]), ("id", ["text", "label", "id"]), ("text", ["text", "label"])):
        table.rename_axis(name).to_parquet(path)
        found = read_table(path)
        assert found.index.tolist() == [0, 1, 2] and found.columns.tolist() == columns
        assert found["text"].tolist() == ROWS["text"]


def test_parquet_with_other_bytes_than_were_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    for has_checksums, other in ((True, b"cut"), (False, b"\xff\xff\xff")):
        table = pyarrow.table({"text": ["a cat"], "label": ["1"]})
        options = {"use_dictionary": False, "write_statistics": False, "write_page_checksum": has_checksums}
        pyarrow.parquet.write_table(table, path, compression="none", **options)
        data = path.read_bytes()
        assert read_table(path)["text"].tolist() == ["a cat"] and data.count(b"cat") == 1
        path.write_bytes(data.replace(b"cat", other))
        with pytest.raises(UserError, check=coded("unreadable-table")):
            read_table(path)


@pytest.mark.parametrize(
    "noted", ["", "[" * 100_000, '{"index_columns": 5}', '{"columns": [], "index_columns": ["x"]}']
)
def test_pandas_metadata_in_parquet_changes_nothing(tmp_path: Path, noted: str) -> None:
    table = pyarrow.table({**ROWS, "__index_level_0__": [2, 0, 1]}, metadata={"pandas": noted})
    pyarrow.parquet.write_table(table, tmp_path / "table.parquet")
    found = read_table(tmp_path / "table.parquet")
    assert {name: found[name].tolist() for name in found} == ROWS


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
        ("table.jsonl", '{"text": "a"}\n{broken\n', "line 2, is not a JSON object"),
        ("table.jsonl", "[" * 100_000, "line 1, is not a JSON object"),
        ("table.jsonl", '[{"text": "a"}]', "line 1, .*list"),
        ("table.jsonl", '{"text": "a", "text": "b"}', "line 1, .* names 'text' twice"),
        ("table.parquet", "no parquet", "cannot be read as a parquet"),
        ("empty.csv", "", "is empty"),
        ("empty.jsonl", "\n", "is empty"),
        ("more.tsv", "text\tlabel\na cat\t1\t\na dog\t0\t\n", "rows have more cells than the first line has names"),
    ],
)
def test_a_file_that_is_no_table_is_reported(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_table(path)


def test_missing_files_types_and_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=".tsv, .csv", check=coded("unsupported-file-type")):
        read_table(tmp_path / "table.xlsx")
    with pytest.raises(UserError, check=coded("missing-path")):
        read_table(tmp_path / "table.csv")
    with pytest.raises(UsageError, match="text, label.*--text-column", check=coded("unknown-column")):
        column(pandas.DataFrame(ROWS), "sentence", Path("t.csv"), "--text-column")


def test_a_file_in_another_encoding_is_reported_with_line_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("text,label\nsummer,1\nété,0\n".encode("latin-1"))
    with pytest.raises(UserError, match="line 3, .*0xe9.*iconv -f latin1 .*latin.csv", check=coded("table-not-utf8")):
        read_table(path)
    path.write_bytes("text,label\nété,0\n".encode("utf-16"))
    with pytest.raises(UserError, match="iconv -f utf-16"):
        read_table(path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text("text,label,label\na,0,1\n")
    table = read_table(path)
    assert column(table, "text", path, "--text-column") == ["a"]
    with pytest.raises(UserError, match="'label'", check=coded("repeated-column")):
        column(table, "label", path, "--label-column")


def test_two_parquet_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pyarrow.parquet.write_table(pyarrow.table([["a"], ["b"], ["1"]], names=["text", "text", "label"]), path)
    table = read_table(path)
    assert column(table, "label", path, "--label-column") == ["1"]
    with pytest.raises(UserError, match="'text'", check=coded("repeated-column")):
        column(table, "text", path, "--text-column")


def test_a_file_with_other_separators_is_reported_by_its_one_column(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("text;label\na;0\n")
    with pytest.raises(UsageError, match="text;label .* semicolons", check=coded("unknown-column")):
        column(read_table(path), "text", path, "--text-column")


def test_values_that_parquet_cannot_store_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=coded("table-not-writable")):
        write_table(pandas.DataFrame({"mixed": ["a", 1]}, dtype=object), tmp_path / "table.parquet")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_table_that_cannot_be_written_whole_leaves_the_old_one(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"said{suffix}"
    write_table(pandas.DataFrame(ROWS), path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(UserError, match="said.* cannot be written.*File too large"):
            write_table(pandas.DataFrame({"text": [f"text {number}" for number in range(9999)]}), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_read_as_a_table_is_reported_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "some.csv").touch()
    check_readable(tmp_path / "some.csv")
    with pytest.raises(UserError, match="none.csv", check=coded("missing-path")):
        check_readable(tmp_path / "none.csv")
    with pytest.raises(UsageError, check=coded("unsupported-file-type")):
        check_readable(tmp_path / "some.xlsx")


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
