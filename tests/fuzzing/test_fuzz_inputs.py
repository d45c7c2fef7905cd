"""Input JSONL and tables after damage: the documents that they truly hold, or a refusal."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data_prep.config.preparation_config import DocumentSettings
from tests.fuzzing.mutations import HOSTILE_JSON, fuzz, mutated_bytes, mutated_document
from tests.fuzzing.watching import read_or_refuse, temporary_folder
from tests.support.reading import read_and_count

SKIP = DocumentSettings(on_bad_input="skip", max_document_bytes=100_000)
STOP = DocumentSettings(max_document_bytes=100_000)
OBJECTS = [
    {"text": "One sentence. Another.\n\nA paragraph.", "source": {"name": "tales", "year": 1901}},
    {"text": "Ünïcode 漢字 🙂", "tags": ["a", "b"]},
    {"text": "third"},
]
LINES = [json.dumps(values, ensure_ascii=number == 0).encode() for number, values in enumerate(OBJECTS)]
MAX_UNITS = 500
"""Each opens the file again."""
MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"PAR1\x15", b"PARE", b"ARROW1\0\0")
ARROW_STREAM = re.compile(rb"\xff{4}(?!\0{4}).{4}.", re.DOTALL)


def read(path: Path, settings: DocumentSettings, unit_bytes: int = 1 << 20) -> tuple[list[str], Counter[str]]:
    return read_and_count(path, settings, max(unit_bytes, path.stat().st_size // MAX_UNITS))


def said_by(content: bytes) -> tuple[list[str], int]:
    """The texts of a JSONL file and the number of its lines that hold none, by the plainest reading."""
    texts, num_bad = [], 0
    for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        if line.strip():
            try:
                assert len(line) <= SKIP.max_document_bytes
                text = json.loads(line.decode())["text"]
                assert isinstance(text, str)
                texts.append(text)
            except (ValueError, KeyError, TypeError, IndexError, AssertionError, RecursionError):
                num_bad += 1
    return texts, num_bad


damaged_lines = st.lists(
    st.sampled_from(LINES)
    | st.sampled_from(OBJECTS).flatmap(mutated_document)
    | st.sampled_from(HOSTILE_JSON).map(str.encode),
    min_size=1,
    max_size=4,
).map(b"\n".join)


@fuzz(250)
@given(content=damaged_lines | mutated_bytes(b"\n".join(LINES)), unit_bytes=st.sampled_from((40, 1 << 20)))
def test_of_damaged_lines_every_whole_document_is_read(
    content: bytes, unit_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("lines") / "input.jsonl"
    path.write_bytes(content)
    texts, num_bad = said_by(content)
    for settings in (SKIP, STOP):
        found = read_or_refuse(lambda settings=settings: read(path, settings, unit_bytes), path.parent)
        if is_of_another_kind(content):
            assert found is None, "a file of another kind is refused as a whole"
        elif found is None:
            assert settings is STOP and num_bad, f"refused, with {len(texts)} lines that hold a text"
        else:
            assert found[0] == texts and found[1].total() == num_bad


def is_of_another_kind(content: bytes) -> bool:
    """JSON over several lines, by the first line that holds anything, or what begins as a compressed file or Parquet.

    A bracket alone on its line, or the beginning of an array of objects, is no line of JSON lines.
    """
    lines = content.removeprefix(b"\xef\xbb\xbf").strip().splitlines() or [b""]
    first = b"".join(lines[0].split())
    return (
        first in (b"[", b"{")
        or first.startswith(b"[{")
        or content.startswith(MAGIC)
        or bool(ARROW_STREAM.match(content))
    )


@pytest.mark.parametrize(
    "content",
    [
        *(b"[", b"{", b" [ \n", b"\xef\xbb\xbf\n{\r\n", b"[{}]", b'[\t{"text": "x"},\n', b'{\n"text": "x"}\n'),
        *(magic + bytes(8) for magic in (b"\x1f\x8b", b"BZh91AY&SY", b"\xfd7zXZ\0", b"(\xb5/\xfd", b"PAR1\x15")),
    ],
)
def test_a_file_of_another_kind_gives_no_document(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(content)
    assert is_of_another_kind(content)
    assert read_or_refuse(lambda: read(tmp_path / "input.jsonl", SKIP), tmp_path) is None


@pytest.mark.parametrize("first", [b"[]", b"[1, 2]", b"{}", b'{"te', b"[[", b'["text"]', b"{[", b"\x1f", b"BZ", b"PA"])
def test_a_bad_first_line_does_not_cost_the_lines_after_it(first: bytes, tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(b"\n".join([first, *LINES]))
    assert not is_of_another_kind(first)
    found = read_or_refuse(lambda: read(tmp_path / "input.jsonl", SKIP), tmp_path)
    assert found is not None and found[0] == [values["text"] for values in OBJECTS] and found[1].total() == 1


@fuzz(250)
@given(data=st.data())
def test_a_damaged_gzip_file_is_refused_or_gives_what_it_holds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    written = data.draw(mutated_bytes(gzip.compress(b"\n".join(LINES), mtime=0)))
    path = tmp_path_factory.mktemp("gzip") / "input.jsonl.gz"
    path.write_bytes(written)
    found = read_or_refuse(lambda: read(path, SKIP), path.parent, temporary_folder())
    if found is not None and written:
        texts, num_bad = said_by(gzip.decompress(written))  # which raises where the file is damaged
        assert found[0] == texts and found[1].total() == num_bad


@fuzz(250)
@given(data=st.data())
def test_a_damaged_zstandard_file_is_refused_or_gives_what_it_holds(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = zstandard.ZstdCompressor(write_checksum=data.draw(st.booleans())).compress(b"\n".join(LINES))
    written = data.draw(mutated_bytes(whole))
    path = tmp_path_factory.mktemp("zstandard") / "input.jsonl.zst"
    path.write_bytes(written)
    found = read_or_refuse(lambda: read(path, SKIP), path.parent, temporary_folder())
    if found is not None:
        reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(written), read_across_frames=True)
        texts, num_bad = said_by(reader.read())
        assert found[0] == texts and found[1].total() == num_bad


CSV = 'text,id\r\nplain,1\n"quoted, ""twice""\nover lines",2\nÜnïcode 漢字 🙂,3\n\n"",4\n'.encode()
TSV = b'text\tid\nsays "yes\t1\r\n"no", he said\t2\n\nlast\t3'


def table_of(content: bytes, is_csv: bool) -> tuple[list[str], int] | None:
    """The texts of a table and how many rows hold none, by the plainest reading; None where it is no table."""
    text = content.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape").replace("\r\n", "\n")
    lines = re.findall("[^\n]*\n|[^\n]+", text)
    try:
        rows = list(csv.reader(lines, strict=True)) if is_csv else [line.rstrip("\n").split("\t") for line in lines]
    except csv.Error:
        return None
    rows = rows[:1] + [row for row in rows[1:] if row and (len(row) > 1 or row[0].strip())]
    if not rows:
        return [], 0
    names = [name.strip() for name in rows[0]]
    if names.count("text") != 1:
        return [], len(rows) - 1
    found = [row[names.index("text")] for row in rows[1:] if len(row) == len(names)]
    is_text = [
        bool(text.strip()) and text.encode(errors="replace").decode() == text and "\0" not in text for text in found
    ]
    texts = [text for text, is_so in zip(found, is_text, strict=True) if is_so]
    return texts, len(rows) - 1 - len(texts)


@fuzz(250)
@given(data=st.data(), ending=st.sampled_from((".csv", ".tsv")))
def test_of_a_damaged_table_every_whole_row_is_read(
    data: st.DataObject, ending: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = data.draw(mutated_bytes(CSV if ending == ".csv" else TSV))
    path = tmp_path_factory.mktemp("tables") / f"input{ending}"
    path.write_bytes(content)
    expected = table_of(content, ending == ".csv")
    found = read_or_refuse(lambda: read(path, SKIP), path.parent)
    if expected is None or content.startswith(MAGIC) or ARROW_STREAM.match(content):
        assert found is None, "what is no table is refused as a whole"
    else:
        assert found is not None and found[0] == expected[0]
        assert found[1].total() == expected[1], "every row is read or counted"
