"""Tables: the cells that the csv module of Python reads from a whole file, and what is no table named by its line."""

from __future__ import annotations

import csv
import gzip
import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import Document
from data_prep.config.preparation_config import DocumentSettings
from tests.support.error_codes import coded
from tests.support.reading import SKIP, BadInput, reader_of


def texts(path: Path, settings: DocumentSettings = SKIP) -> list[str]:
    return [document.text for document in reader_of(path, settings)]


def test_rows_become_documents_with_their_fields(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    content = '\ufeffid,text,lang,score\r\n7,"One, ""two""\r\nthree",en,3\r\n\r\n8,four,,\r\n'
    path.write_bytes(gzip.compress(content.encode()))
    settings = DocumentSettings(id_field="id", language_field="lang", metadata_fields=("score", "absent"))
    found = list(reader_of(path, settings))
    assert found == [Document('One, "two"\nthree', "7", language="en", metadata={"score": 3}), Document("four", "8")]


@pytest.mark.parametrize(
    ("cell", "value"),
    [("3", 3), ("-2.5", -2.5), ("1e3", 1000.0), ("007", "007"), ("1,5", "1,5"), ("NaN", "NaN"), ("٣", "٣")],
)
def test_metadata_that_are_numbers_in_json_are_numbers(tmp_path: Path, cell: str, value: object) -> None:
    (tmp_path / "a.tsv").write_text(f"text\tscore\nx\t{cell}\n", encoding="utf-8")
    (document,) = reader_of(tmp_path / "a.tsv", DocumentSettings(metadata_fields=("score",), id_field="score"))
    assert document.id == cell and document.metadata == {"score": cell}, "what is an id too stays text"
    (document,) = reader_of(tmp_path / "a.tsv", DocumentSettings(metadata_fields=("score",)))
    assert document.metadata == {"score": value} and type(document.metadata["score"]) is type(value)


def test_tabs_separate_and_quotation_marks_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b'text\tlabel\r\nHe said "no\t0\r\n"Yes", she said, and left.\t1\nlast\t')
    assert texts(path) == ['He said "no', '"Yes", she said, and left.', "last"]


@pytest.mark.parametrize("header", [b"text,b", b"body,b"])
def test_blank_rows_count_for_nothing_whatever_the_header_is(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(header + b'\nx,1\n\n  \n""\n')
    reader = reader_of(path, SKIP)
    assert len(list(reader)) + reader.dropped.total() == 1


@pytest.mark.fault(row=4, fault="a row is short, no text or binary", required="named by line, or counted by policy")
@pytest.mark.parametrize(
    ("name", "content", "message", "reason"),
    [
        ("a.csv", b"text,b\nx,1\ny\n", "line 3 has 1 cells, and the header has 2", "invalid CSV"),
        ("a.csv", b'text,b\nx,1\n"y\n\n z",1,2\n', "line 3 has 3 cells", "invalid CSV"),
        ("a.csv", b"text,b\nx,1\n\xff,2\n", "line 3 is not UTF-8 in 'text'", "invalid UTF-8"),
        ("a.csv", b"text,b\nx,1\na\0b,2\n", "line 3 is not text: it contains NUL in 'text'", "binary"),
        ("a.csv", b"text,b\nx,1\n,2\n", "line 3 has no text in 'text'", "missing field"),
        ("a.tsv", b"text\tb\nx\t1\n\ny\t2\t3\n", "line 4 has 3 cells", "invalid CSV"),
        ("a.tsv", b'text\tb\nx\t1\n"x\ty"\t1\n', "line 3 has 3 cells.* as CSV", "invalid CSV"),
        ("a.csv", b"body,b\nx,1\n", r"line 1 has no column 'text' \(its columns: body, b\)", "missing field"),
        ("a.csv", b"text;b\nx;1\n", "line 1 has ';' between its cells", "invalid CSV"),
        ("a.tsv", b"b,text\n1,x\n", "line 1 has ',' between its cells", "invalid CSV"),
        ("a.csv", "text,b\nx,1".encode("utf-16"), r"line 1 is not UTF-8", "invalid UTF-8"),
        ("a.csv", b"text,text\nx,1\n", "line 1 has several columns 'text'", "not text"),
    ],
)
def test_a_bad_row_is_named_or_counted(tmp_path: Path, name: str, content: bytes, message: str, reason: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadInput, match=f"{re.escape(str(path))} {message}"):
        texts(path, DocumentSettings())
    reader = reader_of(path, SKIP)
    assert [document.text for document in reader] == (["x"] if "line 1" not in message else [])
    assert reader.dropped == {reason: 1}


@pytest.mark.parametrize("content", [b'text\n"open\n', b'text\nx\n"a"b\n', b"text\na\rb\n", b'text\n"' + b"a\n" * 60])
def test_wrong_quotation_marks_spoil_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    for policy in ("error", "skip"):
        with pytest.raises(BadInput, match=r"a.csv line \d", check=coded("invalid-csv")) as caught:
            texts(path, DocumentSettings(on_bad_input=policy, max_document_bytes=50))
        assert caught.value.spoils_file and caught.value.code == "invalid-csv"


def test_long_rows_are_counted_in_tables_without_quotation_marks(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"text\n" + b"x" * 100 + b"\nshort\n")
    reader = reader_of(path, DocumentSettings(max_document_bytes=50))
    assert [document.text for document in reader] == ["short"] and reader.dropped == {"too many bytes": 1}


def test_an_empty_table_holds_nothing(tmp_path: Path) -> None:
    for content in (b"", b"text\n", b"\xef\xbb\xbftext"):
        (tmp_path / "a.csv").write_bytes(content)
        assert texts(tmp_path / "a.csv", DocumentSettings()) == []


cells = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0\r"), min_size=1).filter(
    lambda text: bool(text.strip())
)


@pytest.mark.long
@given(rows=st.lists(st.tuples(cells, cells), max_size=5))
def test_rows_written_by_the_csv_module_read_back_the_same(
    rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    written = io.StringIO()
    csv.writer(written).writerows([("text", "id"), *rows])
    path.write_bytes(written.getvalue().encode())
    found = list(reader_of(path, DocumentSettings(id_field="id")))
    assert found == [Document(text, name) for text, name in rows]
