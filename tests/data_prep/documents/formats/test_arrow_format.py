"""Arrow: what the library `datasets` saves is read row by row, and what was cut short is noticed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import feather

from data_prep import Document
from data_prep.base.errors import UsageError
from data_prep.config.preparation_config import DocumentSettings
from tests.support.compressions import COMPRESS
from tests.support.error_codes import coded
from tests.support.reading import SKIP, BadInput, files_of_input, reader_of, units_of

TABLE = pa.table(
    {"doc": [{"text": f"text {number}"} for number in range(50)], "number": list(range(50)), "note": ["x", None] * 25}
)
SETTINGS = DocumentSettings(text_field="doc.text", id_field="number", metadata_fields=("note",))
EXPECTED = [
    Document(f"text {number}", str(number), metadata={} if number % 2 else {"note": "x"}) for number in range(50)
]


def arrow(table: pa.Table = TABLE, kind: Any = pa.ipc.new_stream) -> bytes:
    sink = pa.BufferOutputStream()
    with kind(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read(path: Path, settings: DocumentSettings = SETTINGS) -> list[Document]:
    reader = reader_of(path, settings)
    documents = list(reader)
    assert reader.sha256
    return documents


@pytest.mark.parametrize("kind", [pa.ipc.new_stream, pa.ipc.new_file])
def test_both_kinds_of_arrow_files_give_their_rows(tmp_path: Path, kind: Any) -> None:
    (tmp_path / "a.arrow").write_bytes(arrow(kind=kind))
    (tmp_path / "a.arrow.gz").write_bytes(gzip.compress(arrow(kind=kind)))
    assert read(tmp_path / "a.arrow") == read(tmp_path / "a.arrow.gz") == EXPECTED


def test_a_folder_that_datasets_saved_stands_for_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    for name, part in zip(names, (TABLE.slice(0, 25), TABLE.slice(25)), strict=True):
        (folder / name).write_bytes(arrow(part))
    files = files_of_input(str(folder))
    assert files == [str(folder / name) for name in names]
    assert [document for file in files for document in read(Path(file))] == EXPECTED
    (folder / "state.json").write_text(json.dumps({"_data_files": [], "_indices_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(UsageError, check=coded("dataset-with-indices")):
        files_of_input(str(folder))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    with pytest.raises(UsageError, check=coded("dataset-of-splits"), match="saved|train"):
        files_of_input(str(tmp_path))


@pytest.mark.fault(row=3, fault="an Arrow stream is cut short", required="named, and nothing of it is used")
@pytest.mark.long
def test_a_stream_that_was_cut_short_or_damaged_is_refused(tmp_path: Path) -> None:
    whole = arrow()
    path = tmp_path / "a.arrow"
    for stop in (*range(1, len(whole), 7), len(whole) - 8):  # the last lacks only the mark of the end
        path.write_bytes(whole[:stop])
        with pytest.raises(BadInput, match=r"a\.arrow is") as caught:
            read(path)
        assert caught.value.spoils_file


@pytest.mark.parametrize("compression", [name for name in COMPRESS if name])
def test_a_compressed_stream_that_was_cut_short_is_refused(tmp_path: Path, compression: str) -> None:
    path = tmp_path / f"a.arrow{compression}"
    path.write_bytes(COMPRESS[compression](arrow())[:-100])
    with pytest.raises(BadInput, match="a.arrow", check=coded("damaged-file")) as caught:
        read(path)
    assert caught.value.spoils_file


def test_bytes_are_text_if_they_are_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(arrow(pa.table({"text": [b"caf\xc3\xa9", b"caf\xe9"], "note": [b"\xff", b""]})))
    with pytest.raises(BadInput, match="row 2.*'text'", check=coded("invalid-utf-8")):
        read(path, DocumentSettings())
    settings = DocumentSettings(on_bad_input="skip", metadata_fields=("note",))
    assert read(path, settings) == []
    path.write_bytes(arrow(pa.table({"text": [b"caf\xc3\xa9", b"x"], "note": [b"\xc3\xa9", b"\xff"]})))
    assert read(path, settings) == [Document("café", metadata={"note": "é"})]


def joined(*tables: pa.Table) -> bytes:
    return b"".join(map(arrow, tables))


def test_streams_that_were_joined_give_all_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(joined(TABLE.slice(0, 20), TABLE.slice(20, 0), TABLE.slice(20)))
    assert read(path) == EXPECTED
    (tmp_path / "a.arrow.gz").write_bytes(
        gzip.compress(arrow(TABLE.slice(0, 7))) + gzip.compress(arrow(TABLE.slice(7)))
    )
    assert read(tmp_path / "a.arrow.gz") == EXPECTED
    other = TABLE.rename_columns(["doc", "number", "other"])
    path.write_bytes(joined(other, TABLE))
    (unit,) = units_of(path, unit_bytes=10)
    reader = reader_of(unit, SKIP)
    with pytest.raises(BadInput, match="other columns or types", check=coded("damaged-file")):
        list(reader)


@pytest.mark.parametrize("kind", [pa.ipc.new_stream, pa.ipc.new_file])
@pytest.mark.parametrize("rest", [b"\0", b"x", b"\xff\xff\xff\xff", bytes(64), b"ARROW1", arrow(kind=pa.ipc.new_file)])
def test_bytes_after_the_end_are_refused(tmp_path: Path, kind: Any, rest: bytes) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(arrow(kind=kind) + rest)
    with pytest.raises(BadInput, match="its end, after row 50", check=coded("damaged-file")) as caught:
        read(path)
    assert caught.value.spoils_file


def test_feather_is_an_arrow_file(tmp_path: Path) -> None:
    feather.write_feather(TABLE, tmp_path / "a.feather", compression="zstd")
    assert read(tmp_path / "a.feather") == EXPECTED
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(200))
    with pytest.raises(BadInput, check=coded("wrong-ending")):
        read(tmp_path / "old.feather")


def test_other_formats_and_missing_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(b'{"text": "x"}\n')
    with pytest.raises(BadInput, check=coded("wrong-ending")):
        read(path)
    path.rename(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_bytes(arrow())
    with pytest.raises(BadInput, check=coded("wrong-ending"), match="an Arrow file"):
        read(tmp_path / "a.jsonl")
    path.write_bytes(arrow())
    with pytest.raises(BadInput, match="'text'", check=coded("missing-field")):
        read(path, DocumentSettings())
    (unit,) = units_of(path, unit_bytes=10)
    reader = reader_of(unit, SKIP)
    assert list(reader) == [] and reader.dropped == {"missing field": 50}
    with pytest.raises(BadInput, match="row 2.*'note'", check=coded("missing-field")):
        read(path, DocumentSettings(text_field="note"))


@pytest.mark.parametrize("state", ['{"_data_files": [{}]}', '{"_data_files": null}', '{"_data_files": ["a"]}', "["])
def test_a_folder_of_a_damaged_data_set_is_refused(tmp_path: Path, state: str) -> None:
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(UsageError, check=coded("damaged-dataset")):
        files_of_input(tmp_path)
