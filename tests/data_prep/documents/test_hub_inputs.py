"""`hf://datasets/...`: a data set on the Hub, read by huggingface_hub from a server that stands in for it."""

from __future__ import annotations

import gzip
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
READ = """
import json, sys
from data_prep.config.preparation_config import PreparationConfig, Source
from data_prep.documents.documents import DocumentReader
from data_prep.documents.input_files import find_inputs, find_units

config = PreparationConfig(sources=(Source(name="hub", input=tuple(sys.argv[1:])),))
files = find_inputs(config)
readers = [DocumentReader(unit, config.documents, source="hub") for unit in find_units(files, config)]
texts = [document.text for reader in readers for document in reader]
print(json.dumps({"files": [[file.url, file.bytes, file.stamp] for file in files], "texts": texts}))
"""


class Hub:
    """What the Hub answers for one data set: its files and folders, and their bytes by range."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[str] = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.requests.append(f"GET {self.path}")
                path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
                if path.startswith("/datasets/user/tales/resolve/"):
                    self._file(folder / path.split("/", 6)[6])
                elif path.startswith("/api/datasets/user/tales/tree/"):
                    below = folder / (path.split("/", 7) + [""])[7]
                    self._answer([_entry(item, folder) for item in sorted(below.iterdir())] if below.is_dir() else None)
                elif path.startswith("/api/datasets/user/tales"):
                    self._answer({"id": "user/tales", "sha": COMMIT, "siblings": [], "private": False, "tags": []})
                else:
                    self._answer(None)

            do_HEAD = do_GET

            def do_POST(self) -> None:
                hub.requests.append(f"POST {self.path}")
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = urllib.parse.parse_qs(body) if not body.startswith("{") else json.loads(body)
                found = [folder / name for name in form["paths"]]
                self._answer([_entry(item, folder) for item in found if item.exists()])

            def _file(self, path: Path) -> None:
                if not path.is_file():
                    self._answer(None)
                    return
                data = path.read_bytes()
                start, stop = 0, len(data)
                if wanted := self.headers.get("Range"):
                    first, _, last = wanted.removeprefix("bytes=").partition("-")
                    start, stop = int(first), min(int(last or len(data)) + 1, len(data))
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(stop - start))
                self.send_header("ETag", '"x"')
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data[start:stop])

            def _answer(self, values: Any) -> None:
                data = json.dumps(values if values is not None else {"error": "not found"}).encode()
                self.send_response(200 if values is not None else 404)
                if values is None:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


def _entry(path: Path, folder: Path) -> dict[str, Any]:
    name = path.relative_to(folder).as_posix()
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "d" * 40, "size": 0}
    return {"type": "file", "path": name, "oid": f"{path.stat().st_size:040x}", "size": path.stat().st_size}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "data/en").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Tales")
    (tmp_path / "data/one.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    pq.write_table(pa.table({"text": ["three", "four"], "id": [3, 4]}), tmp_path / "data/en/part.parquet")
    hub = Hub(tmp_path)
    yield hub
    hub.server.shutdown()


def read(hub: Hub, *patterns: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_none"}
    command = [sys.executable, "-c", READ, *patterns]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)


def test_files_and_patterns_of_a_data_set_are_read(hub: Hub) -> None:
    place = "hf://datasets/user/tales"
    done = read(hub, f"{place}/data/*.jsonl.gz", f"{place}/data/en/part.parquet")
    assert done.returncode == 0, done.stderr + "\n".join(hub.requests)
    found = json.loads(done.stdout)
    assert [url for url, _, _ in found["files"]] == [f"{place}/data/en/part.parquet", f"{place}/data/one.jsonl.gz"]
    assert sorted(found["texts"]) == ["four", "one", "three", "two"]
    assert not any(stamp.endswith("None") for _, _, stamp in found["files"]), "a changed file is noticed"


def test_what_is_not_there_is_a_paragraph(hub: Hub) -> None:
    for pattern in ("hf://datasets/user/tales/data/absent.jsonl", "hf://datasets/user/tales/other/*.jsonl"):
        done = read(hub, pattern)
        assert done.returncode != 0 and "no input file matches" in done.stderr.splitlines()[-1], done.stderr
