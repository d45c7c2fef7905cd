"""Rows 72 and 73: web servers that do less than others, and columns whose values JSON has no type for."""

from __future__ import annotations

import datetime
import gzip
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DocumentSettings, PreparationConfig, Source
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.reading import readers_of

LINES = b"".join(json.dumps({"text": f"text {number}"}).encode() + b"\n" for number in range(2_000))


class Web(http.server.BaseHTTPRequestHandler):
    """A server of LINES whose abilities are its attributes; it ignores ranges."""

    protocol_version = "HTTP/1.1"
    states_length: ClassVar[bool] = True
    encoding: ClassVar[str] = ""
    body: ClassVar[bytes] = LINES
    gets: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self._answer(b"")

    def do_GET(self) -> None:
        self.gets.append(self.headers.get("Accept-Encoding", ""))
        self._answer(gzip.compress(self.body) if self.encoding else self.body)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        if self.states_length:
            self.send_header("Content-Length", str(len(body or self.body)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        if self.encoding:
            self.send_header("Content-Encoding", self.encoding)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Web, "gets", [])

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a reader that saw that it gets no range, and went

    server = Server(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/a"
    server.shutdown()
    server.server_close()


def read_all(url: str, **settings: Any) -> list[str]:
    documents = DocumentSettings(**settings)
    values = {"sources": [Source(name="web", input=(url,))], "documents": documents}
    config = PreparationConfig.model_validate({**values, "shards": {"unit_bytes": 10_000}})
    return [document.text for reader in readers_of(config) for document in reader]


@pytest.mark.fault(
    row="72", fault="a web server without ranges", required="every file is fetched once, whatever its size"
)
@pytest.mark.parametrize("name", ["jsonl", "jsonl.gz", "parquet"])
def test_row_72_a_server_without_ranges_is_asked_for_a_file_once(
    web: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if name == "parquet":
        pq.write_table(pa.table({"text": [f"text {n}" for n in range(2_000)]}), tmp_path / "a", row_group_size=100)
        monkeypatch.setattr(Web, "body", (tmp_path / "a").read_bytes())
    if name == "jsonl.gz":
        monkeypatch.setattr(Web, "body", gzip.compress(LINES))
    assert read_all(f"{web}.{name}") == [f"text {number}" for number in range(2_000)]
    probes = 0 if name == "jsonl.gz" else 1  # whether it can be read in parts; its body is not received
    assert Web.gets == ["identity"] * (1 + probes)


@pytest.mark.fault(
    row="72",
    fault="a web server without length, or with a Content-Encoding",
    required="one clear error before any work",
)
@pytest.mark.parametrize(("states_length", "encoding"), [(False, ""), (True, "gzip"), (False, "gzip")])
def test_row_72_a_server_without_a_length_is_refused(
    web: str, states_length: bool, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Web, "states_length", states_length)
    monkeypatch.setattr(Web, "encoding", encoding)
    with pytest.raises(UserError, check=coded("unknown-size"), match=r"a\.jsonl"):
        read_all(f"{web}.jsonl")


TIMES = {
    "day": (pa.array([0, 2_932_897], pa.int32()).cast(pa.date32()), ["1970-01-01", "10000-01-01"]),
    "seconds": (
        pa.array([0, 253_402_300_800]).cast(pa.timestamp("s")),
        ["1970-01-01T00:00:00", "10000-01-01T00:00:00"],
    ),
    "nanoseconds": (
        pa.array([1, 1_000_000_000]).cast(pa.timestamp("ns")),
        ["1970-01-01T00:00:00.000000001", "1970-01-01T00:00:01"],
    ),
    "zone": (
        pa.array([0, 1_500]).cast(pa.timestamp("ms", "Nowhere/Town")),
        ["1970-01-01T00:00:00+00:00", "1970-01-01T00:00:01.500000+00:00"],
    ),
    "clock": (pa.array([0, 1]).cast(pa.time64("ns")), ["00:00:00", "00:00:00.000000001"]),
    "lasting": (pa.array([90_000, -1]).cast(pa.duration("ms")), ["PT90S", "-PT0.001S"]),
    "unsigned": (pa.array([(1 << 64) - 1, (1 << 64) - 2], pa.uint64()), [str((1 << 64) - 1), str((1 << 64) - 2)]),
    "hash": (pa.array([b"\xff\x00", b"ff"], pa.binary(2)), ["ff00", "6666"]),
}


@pytest.mark.fault(
    row="73", fault="dates, times, uint64 and hashes as ids", required="the same text in every format and installation"
)
@pytest.mark.parametrize("has_pandas", [True, False])
@pytest.mark.parametrize("kind", TIMES)
def test_row_73_ids_of_any_type_are_the_same_everywhere(
    kind: str, has_pandas: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_pandas:
        monkeypatch.setitem(sys.modules, "pandas", None)
    column, expected = TIMES[kind]
    table = pa.table({"text": ["a", "b"], "id": column, "url": column, "more": column})
    pq.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "a.feather")
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    rows = [{"text": "a", "id": expected[0], "url": expected[0]}, {"text": "b", "id": expected[1], "url": expected[1]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.csv").write_text("\n".join(["text,id,url", *(",".join(row.values()) for row in rows)]))
    settings = DocumentSettings(id_field="id", url_field="url", metadata_fields=("more",))
    for path in sorted(tmp_path.iterdir()):
        documents = read(path, settings)
        assert [document.id for document in documents] == [document.url for document in documents] == expected, path
        if path.suffix not in (".jsonl", ".csv"):
            assert [str(document.metadata["more"]) for document in documents] == expected, path


def read(path: Path, settings: DocumentSettings) -> list[Any]:
    config = PreparationConfig(sources=(Source(name="own", input=(str(path),)),), documents=settings)
    readers = readers_of(config)
    found = [document for reader in readers for document in reader]
    dropped = [reason for reader in readers for reason in reader.dropped.elements()]
    return [*found, *dropped]


@pytest.mark.fault(
    row="73", fault="ids that are not UTF-8", required="each is a counted bad row, so no two of them become equal"
)
@pytest.mark.parametrize("field", ["id_field", "url_field", "metadata_fields"])
def test_row_73_bytes_that_are_no_text_are_counted_and_never_replaced(tmp_path: Path, field: str) -> None:
    values = [b"\xff\x01", b"\xff\x02", "caf\xe9".encode()]
    table = pa.table({"text": ["a", "b", "c"], "x": values})
    nested = pa.table({"text": ["a", "b", "c"], "x": [[value] for value in values]})
    settings = DocumentSettings.model_validate(
        {field: ["x"] if field == "metadata_fields" else "x", "on_bad_input": "skip"}
    )
    for each in (table, nested) if field == "metadata_fields" else (table,):
        pq.write_table(each, tmp_path / "a.parquet")
        feather.write_feather(each, tmp_path / "a.feather")
        for path in (tmp_path / "a.parquet", tmp_path / "a.feather"):
            document, *dropped = read(path, settings)
            assert document.text == "c" and dropped == ["invalid UTF-8"] * 2


def test_dates_inside_lists_and_objects_are_text(tmp_path: Path) -> None:
    day = datetime.date(2026, 5, 1)
    rows = {"text": ["a", "b"], "more": [{"days": [day, None], "at": {"day": day}}, None]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    first, second = read(tmp_path / "a.parquet", DocumentSettings(metadata_fields=("more",)))
    assert first.metadata == {"more": {"days": ["2026-05-01", None], "at": {"day": "2026-05-01"}}}
    assert second.metadata == {}


def test_parquet_files_that_were_joined_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"] * 100}), tmp_path / "a.parquet", write_page_index=True)
    assert len(read(tmp_path / "a.parquet", DocumentSettings())) == 100
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "joined.parquet").write_bytes(data + data)
    with pytest.raises(UserError, match="joined", check=coded("damaged-file")):
        read(tmp_path / "joined.parquet", DocumentSettings())


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.tsv"])
def test_lines_that_end_with_only_carriage_returns_are_named(tmp_path: Path, name: str) -> None:
    content = {"a.jsonl": b'{"text": "a"}\r{"text": "b"}\r', "a.csv": b"text,b\ra,1\r", "a.tsv": b"text\tb\ra\t1\r"}
    (tmp_path / name).write_bytes(content[name])
    with pytest.raises(UserError, check=coded("carriage-returns")):
        read(tmp_path / name, DocumentSettings())
    (tmp_path / "a.txt").write_bytes(b"one\r\rtwo\r")
    assert read(tmp_path / "a.txt", DocumentSettings())
    with pytest.raises(UserError, check=coded("carriage-returns")):
        read(tmp_path / "a.txt", DocumentSettings(txt_documents="blank_lines"))


def test_a_second_header_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,a\nid,text\n2,b\n")
    skip = DocumentSettings(on_bad_input="skip")
    assert [getattr(each, "text", each) for each in read(path, skip)] == ["a", "b", "repeated header"]
    with pytest.raises(UserError, match="line 3 repeats the header", check=coded("repeated-header")):
        read(path, DocumentSettings())
    path.write_text("id,text\n1,a\ntext,id\nb,2\n")
    with pytest.raises(UserError, match="another order", check=coded("repeated-header")):
        read(path, skip)
    path.write_text("id,text\n1,a\nid,text,lang\n2,b,en\n")
    with pytest.raises(UserError, match="header of another table", check=coded("invalid-csv")):
        read(path, DocumentSettings())


def test_local_files_are_cut_as_before(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    assert storage.gives_ranges(str(tmp_path / "a.jsonl"))
    assert len(read_all(str(tmp_path / "a.jsonl"))) == 2_000
