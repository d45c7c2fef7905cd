"""Parquet: the same documents as a whole-table read, whatever the type, the row groups and the cuts between units."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import Document
from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.documents import BadInput
from data_prep.storage import parquet
from data_prep.storage.hashing_files import RangeHashingFile
from tests.support.compressions import COMPRESS
from tests.support.error_codes import coded
from tests.support.peak_memory import read_in_a_process
from tests.support.reading import DEFAULTS, SKIP, digest_of, read_and_count, reader_of, units_of

TEXTS = [f"document {number} é 漢字 🙂 " + "x" * (number * 37 % 400) for number in range(200)]


def write(path: Path, table: pa.Table | dict[str, Any], **options: Any) -> Path:
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return path


def read(path: Path, settings: DocumentSettings = DEFAULTS, unit_bytes: int = 1 << 30) -> list[Document]:
    units = units_of(path, settings, unit_bytes)
    return [document for unit in units for document in reader_of(unit, settings)]


def texts(path: Path, settings: DocumentSettings = DEFAULTS, unit_bytes: int = 1 << 30) -> list[str]:
    return [document.text for document in read(path, settings, unit_bytes)]


def dropped(path: Path, settings: DocumentSettings = SKIP) -> Counter[str]:
    return read_and_count(path, settings)[1]


@pytest.mark.parametrize("codec", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize("use_dictionary", [True, False])
@pytest.mark.parametrize(
    "column_type",
    [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
def test_every_kind_of_text_column_is_read(
    tmp_path: Path, column_type: pa.DataType, use_dictionary: bool, codec: str
) -> None:
    column = pa.array([*TEXTS, *TEXTS[:50]]).cast(column_type)
    path = write(
        tmp_path / "a.parquet",
        {"id": list(range(250)), "text": column},
        row_group_size=70,
        use_dictionary=use_dictionary,
        compression=codec,
    )
    assert texts(path) == [*TEXTS, *TEXTS[:50]]
    assert texts(path, unit_bytes=1) == [*TEXTS, *TEXTS[:50]]


@pytest.mark.long
@given(
    lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=60),
    row_group_size=st.integers(1, 70),
    unit_bytes=st.integers(1, 40_000),
)
@settings(max_examples=60, deadline=None)
def test_units_hold_every_row_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], row_group_size: int, unit_bytes: int
) -> None:
    documents = [f"{number} " + "x" * length for number, length in enumerate(lengths)]
    path = write(tmp_path_factory.mktemp("units") / "a.parquet", {"text": documents}, row_group_size=row_group_size)
    units = units_of(path, unit_bytes=unit_bytes)
    assert texts(path, unit_bytes=unit_bytes) == documents
    assert sum(unit.bytes for unit in units) == path.stat().st_size and all(unit.bytes >= 0 for unit in units)
    assert all(unit.whole == (len(units) == 1) for unit in units)


def test_real_text_equals_a_whole_table_read(tmp_path: Path, corpora: Path) -> None:
    with gzip.open(corpora / "pack_small.jsonl.gz", "rt", encoding="utf-8") as file:
        expected = [json.loads(line)["text"] for line in file]
    path = write(tmp_path / "a.parquet", {"source": ["x"] * len(expected), "text": expected}, row_group_size=300)
    assert pq.read_table(path)["text"].to_pylist() == expected
    assert texts(path, unit_bytes=1 << 20) == expected
    assert len(units_of(path, unit_bytes=1 << 20)) > 3


def test_the_language_comes_from_its_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"lang": ["fr", None, ""], "body": ["un", "deux", "trois"]})
    settings = DocumentSettings(language_field="lang", text_field="body")
    expected = [Document("un", language="fr"), Document("deux"), Document("trois")]
    assert read(path, settings) == expected
    assert read(path, DocumentSettings(language_field="tongue", text_field="body"))[0] == Document("un")


@pytest.mark.fault(row=9, fault="Parquet has no column of text", required="it names the columns")
@pytest.mark.parametrize(
    ("table", "message", "reason"),
    [
        ({"body": ["x"] * 3, "id": [1, 2, 3]}, r"has no column 'text' \(its columns: body, id\)", "missing field"),
        ({"text": [1, 2, 3]}, r"has int64 in column 'text', not text \(its columns: text int64\)", "not text"),
        ({"text": [["a"], ["b"], []]}, r"has list<.*> in column 'text', not text", "not text"),
        ({"text": [{"a": "x"}] * 3}, r"has struct<a: string> in column 'text', not text", "not text"),
    ],
)
def test_a_file_without_a_column_of_text_is_named_with_those_it_has(
    tmp_path: Path, table: dict[str, Any], message: str, reason: str
) -> None:
    path = write(tmp_path / "a.parquet", table)
    with pytest.raises(BadInput, match=f"a.parquet {message}.*documents.on_bad_input=skip") as caught:
        read(path)
    assert caught.value.reason == reason
    assert dropped(path) == {reason: 3}


def test_two_columns_with_the_name_of_the_text_are_refused(tmp_path: Path) -> None:
    columns = [pa.array(["a", "b"]), pa.array(["c", "d"])]
    path = write(tmp_path / "a.parquet", pa.Table.from_arrays(columns, names=["text", "text"]))
    with pytest.raises(BadInput, match="a.parquet.*'text'", check=coded("not-text")):
        read(path)
    assert dropped(path) == {"not text": 2}


def test_a_nested_field_is_read_by_its_path(tmp_path: Path) -> None:
    rows = [{"text": "x", "meta": {"url": "u", "score": 1.5}}, {"text": "y", "meta": None}]
    path = write(tmp_path / "a.parquet", {"doc": pa.array(rows), "plain": pa.array(["a", "b"])})
    settings = DocumentSettings(text_field="doc.text", url_field="doc.meta.url", metadata_fields=("doc.meta.score",))
    found = read(path, settings)
    assert found == [Document("x", url="u", metadata={"doc.meta.score": 1.5}), Document("y")]
    digests = [digest_of(unit, settings) for unit in units_of(path)]
    assert digests != [digest_of(unit, DocumentSettings(text_field="plain")) for unit in units_of(path)]
    with pytest.raises(BadInput, match="'doc.body'", check=coded("missing-field")):
        read(path, DocumentSettings(text_field="doc.body"))


def test_a_bad_row_is_named_by_its_number_in_the_file_or_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [text.encode() for text in TEXTS]
    path = write(tmp_path / "a.parquet", {"text": pa.array([*rows, None, b"\xff\xfe", b"last"])}, row_group_size=50)
    with pytest.raises(BadInput, match="a.parquet row 201.*'text'", check=coded("missing-field")):
        texts(path, unit_bytes=1)
    assert texts(path, SKIP) == [*TEXTS, "last"]
    assert dropped(path) == {"missing field": 1, "invalid UTF-8": 1}
    told = capfd.readouterr().err
    assert "a.parquet: 1 left out, invalid UTF-8 (the first: row 202 is not UTF-8 (byte 0))" in told


def test_a_column_of_only_null_is_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"text": pa.nulls(4)})
    assert dropped(path) == {"missing field": 4}


def test_a_text_over_the_limit_is_dropped_and_reported_under_either_policy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["é" * 50, "é" * 51, "x" * 500, "short"]})
    for policy in ("error", "skip"):
        limited = DocumentSettings(on_bad_input=policy, max_document_bytes=100)
        assert dropped(path, limited) == {"too many bytes": 2} and texts(path, limited) == ["é" * 50, "short"]
    told = capfd.readouterr().err.splitlines()[0]
    assert told.startswith("warning: ")
    assert told.endswith("a.parquet: 2 left out, longer than documents.max_document_bytes=100 (the longest: 500 bytes)")


@pytest.mark.fault(row=9, fault="Parquet is empty or has no row", required="it holds no document")
def test_an_empty_file_holds_no_document(tmp_path: Path) -> None:
    zero, no_row = tmp_path / "zero.parquet", write(tmp_path / "none.parquet", {"text": pa.array([], pa.string())})
    zero.write_bytes(b"")
    for path in (zero, no_row):
        (unit,) = units_of(path)
        assert unit.whole and texts(path) == [] and dropped(path) == {}


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize("length", [5, 11, 5_000, -8, -1])
def test_a_file_that_is_cut_short_is_damaged(tmp_path: Path, length: int, policy: str) -> None:
    path = write(tmp_path / "cut.parquet", {"text": TEXTS}, compression="none")
    path.write_bytes(path.read_bytes()[:length])
    footer = rf"damaged or cut short in its footer, which ends at byte {path.stat().st_size} \("
    with pytest.raises(BadInput, match=f"cut.parquet.*{footer}", check=coded("damaged-file")) as caught:
        read(path, DocumentSettings(on_bad_input=policy))
    assert caught.value.spoils_file and caught.value.reason == "damaged file"
    (unit,) = units_of(path)
    assert digest_of(unit, DEFAULTS) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("codec", ["snappy", "zstd", "gzip"])
def test_damage_within_a_row_group_is_found_and_the_others_are_read(tmp_path: Path, codec: str) -> None:
    path = write(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=100, compression=codec, use_dictionary=False)
    data = bytearray(path.read_bytes())
    column = pq.read_metadata(path).row_group(1).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    first, second = (reader_of(unit, SKIP) for unit in units_of(path, unit_bytes=1))
    assert [document.text for document in first] == TEXTS[:100]
    with pytest.raises(BadInput, match="in row group 2 of 2, rows 101 to 200", check=coded("damaged-file")) as caught:
        list(second)
    assert caught.value.spoils_file
    with pytest.raises(BadInput, match="row group 2 of 2, rows 101 to 200", check=coded("damaged-file")):
        read(path)


def test_page_checksums_are_checked_where_there_are_any(tmp_path: Path) -> None:
    table = pa.table({"text": ["a plain text of some length"] * 3})
    path = write(
        tmp_path / "a.parquet",
        table,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    )
    data = path.read_bytes()
    path.write_bytes(data.replace(b"a plain text", b"a pLain text", 1))
    with pytest.raises(BadInput, match="a.parquet", check=coded("damaged-file")):
        read(path)


def test_a_file_that_is_not_what_its_ending_says_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.parquet"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(BadInput, match="lines.parquet", check=coded("wrong-ending")) as caught:
        read(path)
    assert caught.value.reason == "wrong ending" and caught.value.spoils_file
    disguised = write(tmp_path / "a.parquet", {"text": TEXTS}).rename(tmp_path / "disguised.jsonl")
    with pytest.raises(BadInput, match="disguised.jsonl", check=coded("wrong-ending")):
        read(disguised)


def test_a_text_that_begins_like_a_parquet_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("PAR1 is four bytes")
    assert texts(tmp_path / "a.txt") == ["PAR1 is four bytes"]


def test_reading_and_asking_give_the_same_digest(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"id": list(range(200)), "text": TEXTS}, row_group_size=50)
    digests = {}
    for unit in units_of(path, unit_bytes=1):
        reader = reader_of(unit, DEFAULTS)
        list(reader)
        assert reader.sha256 == digest_of(unit, DEFAULTS)
        digests[unit.start] = reader.sha256
    assert len(set(digests.values())) == 4
    write(path, {"id": list(range(200)), "text": [*TEXTS[:-1], "other"]}, row_group_size=50)
    changed = [unit.start for unit in units_of(path, unit_bytes=1) if digest_of(unit, DEFAULTS) != digests[unit.start]]
    assert changed == [3]


def test_only_the_columns_wanted_are_read(tmp_path: Path) -> None:
    class Counting(io.BytesIO):
        num_bytes = 0

        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size)
            self.num_bytes += len(data)
            return data

    blob = [bytes([number % 256]) * 50_000 for number in range(200)]
    path = write(tmp_path / "a.parquet", {"blob": blob, "text": TEXTS}, compression="none", use_dictionary=False)
    file = Counting(path.read_bytes())
    hashing = RangeHashingFile(file, "a.parquet")
    rows = parquet.ParquetRows(hashing)
    hashing.hash_ranges(rows.column_ranges(["text"]))
    assert len(list(rows.values(["text"]))) == 200 and hashing.hexdigest()
    assert file.num_bytes < 500_000 < len(file.getvalue())


def test_a_disk_that_fails_is_no_damage_of_the_file(tmp_path: Path) -> None:
    class Failing(io.BytesIO):
        fails = False

        def read(self, size: int | None = -1, /) -> bytes:
            if self.fails:
                raise OSError(5, "Input/output error")
            return super().read(size)

    path = write(tmp_path / "a.parquet", {"text": TEXTS})
    file = Failing(path.read_bytes())
    rows = parquet.ParquetRows(RangeHashingFile(file, "a.parquet"))
    file.fails = True
    with pytest.raises(UserError, match="a.parquet", check=coded("unreadable-file")):
        list(rows.values(["text"]))


@pytest.mark.long
@pytest.mark.spawn
def test_a_huge_row_group_is_read_in_small_batches(tmp_path: Path) -> None:
    path = tmp_path / "huge.parquet"
    text = "lorem ipsum " * 8_000
    schema = pa.schema([("text", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False) as writer:
        writer.write_table(pa.table({"text": [f"{number} {text}" for number in range(4000)]}), row_group_size=1 << 20)
    assert pq.read_metadata(path).num_row_groups == 1
    plain_bytes = pq.read_metadata(path).row_group(0).total_byte_size
    reading = read_in_a_process(path)
    assert reading.num_documents == 4000 and plain_bytes > 380e6
    assert reading.peak_bytes < 400e6  # about 310 MB, and as much for a group four times as large; 500 MB with it whole


@pytest.mark.fault(row=3, fault="compressed Parquet is cut", required="nothing of it is used")
@pytest.mark.parametrize("compression", [name for name in COMPRESS if name])
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_compressed_file_is_one_unit_and_one_cut_short_is_damaged(
    tmp_path: Path, compression: str, policy: str
) -> None:
    plain = write(tmp_path / "a.parquet", {"text": TEXTS}, row_group_size=50).read_bytes()
    path = tmp_path / f"a.parquet{compression}"
    path.write_bytes(COMPRESS[compression](plain))
    (unit,) = units_of(path, unit_bytes=1)
    reader = reader_of(unit, DEFAULTS)
    assert [document.text for document in reader] == TEXTS
    assert reader.sha256 == digest_of(unit, DEFAULTS) == hashlib.sha256(path.read_bytes()).hexdigest()
    refused = DocumentSettings(on_bad_input=policy)
    name = f"a.parquet{compression}"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadInput, match=rf"{name}.*after [\d,]+ bytes", check=coded("damaged-file")) as cut:
        read(path, refused)
    path.write_bytes(COMPRESS[compression](plain[:-20]))
    with pytest.raises(BadInput, match=f"{name}.*footer", check=coded("damaged-file")) as no_footer:
        read(path, refused)
    path.write_bytes(COMPRESS[compression](b'{"text": "x"}\n'))
    with pytest.raises(BadInput, match=rf"\S+{name}", check=coded("wrong-ending")) as lines:
        read(path, refused)
    assert cut.value.spoils_file and no_footer.value.spoils_file and lines.value.spoils_file


@pytest.mark.parametrize("compression", [name for name in COMPRESS if name])
def test_an_empty_compressed_file_holds_no_document(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.parquet{compression}"
    for data in (b"", COMPRESS[compression](b"")):
        path.write_bytes(data)
        assert texts(path) == []


def test_a_full_disk_under_the_content_is_no_damage_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet.gz"
    path.write_bytes(gzip.compress(write(tmp_path / "a.parquet", {"text": TEXTS}).read_bytes()))
    with pytest.MonkeyPatch.context() as patch, open("/dev/full", "w+b") as full:
        patch.setattr("tempfile.TemporaryFile", lambda: full)
        with pytest.raises(UserError, match="a.parquet.gz", check=coded("temporary-folder-full")) as caught:
            texts(path, SKIP)
    assert not isinstance(caught.value, BadInput)


def test_a_row_group_of_a_negative_number_of_rows_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", {"text": ["a"]})
    groups = [SimpleNamespace(num_rows=5), SimpleNamespace(num_rows=-2)]
    metadata = SimpleNamespace(row_group=groups.__getitem__, num_row_groups=2)
    footer = SimpleNamespace(schema_arrow=[], metadata=metadata)
    monkeypatch.setattr(pq, "ParquetFile", lambda *arguments, **options: footer)
    with open(path, "rb") as file, pytest.raises(parquet.DamagedTable, match="negative number of rows"):
        parquet.ParquetRows(RangeHashingFile(file, str(path)))
