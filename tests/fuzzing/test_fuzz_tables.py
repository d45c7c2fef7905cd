"""Labeled tables of fine-tuning after damage: every row as it stands in the file, or a refusal; no crash."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing.mutations import HOSTILE_JSON, fuzz, mutated_bytes, mutated_document
from tests.fuzzing.sealed import sealed_parquet
from tests.fuzzing.test_fuzz_parquet import damaged_page, read_in_processes
from tests.fuzzing.watching import read_or_refuse
from trainer.finetuning.examples import Columns, read_examples
from trainer.finetuning.tasks import ClassificationTask

ROWS = [
    {"text": "The old cat, 漢字 🙂, crossed the river.", "label": "1.0", "words": ["a", "b"]},
    {"text": 'It said "no", and it rained.', "label": "no", "words": []},
    {"text": "2020", "label": 1, "words": None},
]
LINES = [json.dumps(row, ensure_ascii=number == 0).encode() for number, row in enumerate(ROWS)]
SEPARATED = (
    "text{0}label{0}more\n"
    "The old cat crossed{0}1.0{0}x\r\n"
    '"It said ""no""{0} and it\nrained"{0}no{0}\n'
    "\n"
    "2020{0}1\n"
    "é 漢字{0}no{0}\n"
)
TABLE = pandas.DataFrame(
    {
        "text": [f"Row {number}: the old cat, 漢字 🙂, crossed the river." for number in range(8)],
        "label": ["yes", "no"] * 4,
        "number": [1.0, None] * 4,
    },
    index=pandas.Index(range(10, 18), name="id"),
)
_READ_MANY = """
import json
import sys
from pathlib import Path

import pyarrow

from tests.fuzzing.watching import read_or_refuse
from trainer.finetuning.examples import Columns, read_examples, text_of


def read(path):
    examples = read_examples(path, Columns("text", None, "label"), text_of, lambda cell, text: text_of(cell))
    return list(zip(examples.texts, examples.labels, strict=True))


pyarrow.allocate_buffer(1)  # which takes a gigabyte of addresses, once, more than is allowed while we watch
for path in sorted(Path(sys.argv[1]).iterdir())[int(sys.argv[2]) :]:
    print(path.name, flush=True)
    print(json.dumps(read_or_refuse(lambda: read(path), path)), flush=True)
print("done")
"""

Rows = list[tuple[str, str]]


def read(path: Path, quoting: bool = True) -> Rows:
    task = ClassificationTask()
    examples = read_examples(path, Columns("text", None, "label"), task.parse_text, task.parse_label, quoting)
    assert examples.labels is not None
    return list(zip(examples.texts, examples.labels, strict=True))


def as_text(cell: Any) -> str:
    """A cell by the plainest reading; a `ValueError` where it is none."""
    if not isinstance(cell, (str, int, float)) or (isinstance(cell, float) and math.isnan(cell)):
        raise ValueError("no text")
    str(cell).encode()
    if not str(cell).strip():
        raise ValueError("empty")
    return str(cell)


def as_label(cell: Any) -> str:
    text = as_text(cell).strip()
    is_whole = (
        text.endswith(".0") and text[:-2].lstrip("+-").isdecimal() and len(text[:-2].lstrip("+-")) >= len(text) - 3
    )
    return text.removesuffix(".0") if is_whole else text


def said_by_lines(content: bytes) -> Rows | None:
    """The rows of a file of JSON lines; None where it has to be refused."""

    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a name twice")
        return dict(pairs)

    try:
        lines = content.decode("utf-8-sig").split("\n")
        rows = [json.loads(line, object_pairs_hook=once) for line in lines if line.strip()]
        return [(as_text(row["text"]), as_label(row["label"])) for row in rows] or None
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None


def said_by_separated(content: bytes, separator: str, quoting: bool) -> Rows | None:
    """The same of a table of separated cells, as Python's own module reads them."""
    try:
        file = io.StringIO(content.decode("utf-8-sig").removeprefix("\ufeff"), newline="")  # pandas takes one off too
        how = csv.QUOTE_MINIMAL if quoting else csv.QUOTE_NONE
        rows = [row for row in csv.reader(file, delimiter=separator, quoting=how) if row and not is_blank(row)]
        names = rows[0]
        places = [names.index(name) for name in ("text", "label")]
        if max(map(len, rows)) > len(names) or names.count("text") > 1 or names.count("label") > 1:
            return None
        text, label = places
        return [(as_text(row[text]), as_label(row[label])) for row in rows[1:]] or None
    except (ValueError, IndexError, csv.Error):
        return None


def is_blank(row: list[str]) -> bool:
    """Whether a line holds white space alone."""
    return len(row) == 1 and row[0] != "" and not row[0].strip(" \t")


damaged_lines = st.lists(
    st.sampled_from(LINES)
    | st.sampled_from(ROWS).flatmap(mutated_document)
    | st.sampled_from(HOSTILE_JSON).map(str.encode),
    min_size=1,
    max_size=4,
).map(b"\n".join)


@fuzz(100)
@given(content=damaged_lines | mutated_bytes(b"\n".join(LINES)))
def test_damaged_lines_are_refused_or_read_as_they_stand(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "train.jsonl"
    path.write_bytes(content)
    found = read_or_refuse(lambda: read(path), path.parent)
    assert found == said_by_lines(content)


@fuzz(100)
@given(data=st.data(), suffix=st.sampled_from((".csv", ".tsv")), quoting=st.booleans())
def test_damaged_separated_cells_are_refused_or_read_as_they_stand(
    data: st.DataObject, suffix: str, quoting: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    separator = "\t" if suffix == ".tsv" else ","
    content = data.draw(mutated_bytes(SEPARATED.format(separator).encode()))
    path = tmp_path_factory.mktemp("cells") / f"train{suffix}"
    path.write_bytes(content)
    found = read_or_refuse(lambda: read(path, quoting), path.parent)
    if not quoting or is_well_quoted(content, separator):
        assert found == said_by_separated(content, separator, quoting)


def is_well_quoted(content: bytes, separator: str) -> bool:
    """Whether quotation marks stand around cells, and doubled within such ones (RFC 4180); of others readers differ."""
    cell = rf"""(?:"(?:[^"]|"")*+"|[^"\r\n{separator}]*+)"""
    return (
        re.fullmatch(rf"(?:{cell}(?:{separator}{cell})*+(?:\r?\n|\r|\Z))*+", content.decode("utf-8-sig", "replace"))
        is not None
    )


@pytest.mark.parametrize(
    ("suffix", "content"),
    [
        (".csv", "text,label\na,b,c\nd,e,f\n"),
        (".csv", "text,label\na\0b,1\nc,2\n"),
        (".csv", 'text,label\r\na,"2\r\n3"\r\r"b",2'),
        (".csv", "\ufeff\ntext,more,more,label\na,,,b\n"),
        (".tsv", "text\tlabel\na, b\tNA\n \nnull\t1e5\n"),
        (".tsv", "text\tlabel\tlabel\na\tb\tc\n"),
        (".jsonl", '{"text": "a", "label": 1}\n{"text": "b", "text": "c", "label": 2}'),
        (".jsonl", '{"text": "a\u2028b", "label": true}\r\n\n{"label": -2.0, "text": 1e999}'),
        (".jsonl", '{"text": "a"}\n{"label": 1}'),
    ],
)
def test_made_up_tables_are_refused_or_read_as_they_stand(suffix: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / f"train{suffix}"
    path.write_bytes(content.encode())
    separator = "\t" if suffix == ".tsv" else ","
    said = said_by_lines if suffix == ".jsonl" else lambda data: said_by_separated(data, separator, True)
    assert read_or_refuse(lambda: read(path), tmp_path) == said(content.encode())


@st.composite
def sealed_pandas(draw: st.DrawFn, data: bytes) -> bytes:
    """The file with something else in what pandas has noted of its columns and its index."""
    table = pq.read_table(io.BytesIO(data))
    noted = draw(mutated_document(json.loads(table.schema.metadata[b"pandas"])))
    file = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({b"pandas": noted}), file)
    return file.getvalue()


def test_whole_tables_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(LINES))
    assert [label for _, label in read(tmp_path / "train.jsonl")] == ["1", "no", "1"]
    for suffix, separator in ((".csv", ","), (".tsv", "\t")):
        (tmp_path / f"train{suffix}").write_text(SEPARATED.format(separator), encoding="utf-8", newline="")
        content = (tmp_path / f"train{suffix}").read_bytes()
        assert [label for _, label in read(tmp_path / f"train{suffix}")] == ["1", "no", "1", "no"]
        for quoting in (True, False):
            found = read(tmp_path / f"train{suffix}", quoting)
            assert found == said_by_separated(content, separator, quoting) and len(found) == 5 - quoting


def parquet(**options: Any) -> bytes:
    """The table as pandas writes it, with its own record of types and index in the footer."""
    file = io.BytesIO()
    TABLE.to_parquet(file, row_group_size=4, write_page_checksum=True, **options)
    return file.getvalue()


@pytest.mark.spawn
def test_damaged_parquet_is_refused_or_whole_rows_are_read_and_nothing_crashes(tmp_path: Path) -> None:
    wholes = [parquet(compression="none", use_dictionary=False), parquet(compression="zstd")]
    written: dict[str, bytes] = {f"whole-{number}.parquet": data for number, data in enumerate(wholes)}

    @fuzz(130)
    @given(data=st.sampled_from(wholes).flatmap(lambda whole: mutated_bytes(whole) | sealed_parquet(whole)))
    def damage(data: bytes) -> None:
        written[f"damaged-{len(written):06d}.parquet"] = data

    @fuzz(30)
    @given(data=st.sampled_from(wholes).flatmap(lambda whole: sealed_pandas(whole)))
    def damage_pandas(data: bytes) -> None:
        written[f"pandas-{len(written):06d}.parquet"] = data

    @fuzz(30)
    @given(data=st.sampled_from(wholes).flatmap(damaged_page))
    def damage_page(data: bytes) -> None:
        written[f"page-{len(written):06d}.parquet"] = data

    damage()
    damage_pandas()
    damage_page()
    for name, data in written.items():
        (tmp_path / name).write_bytes(data)
    found = read_in_processes(tmp_path, _READ_MANY)
    assert found.keys() == written.keys() and len(found) > 150
    expected = [list(row) for row in zip(TABLE["text"], TABLE["label"], strict=True)]
    for name, rows in found.items():
        if name.startswith("whole"):
            assert rows == expected
        elif name.startswith("page"):
            assert rows is None, f"{tmp_path / name}: a changed page is read"
        elif name.startswith("pandas"):
            assert rows is None or rows == expected, f"{tmp_path / name}"
