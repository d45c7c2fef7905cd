"""`hf://datasets/...`: a data set on the Hub, read by huggingface_hub from a server that stands in for it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.hub_server import Hub

REPOSITORY = Path(__file__).resolve().parents[3]
READ = """
import json, sys
from data_prep.config.preparation_config import PreparationConfig, Source
from data_prep.documents.input_files import find_inputs
from tests.support.reading import readers_of

config = PreparationConfig(sources=(Source(name="hub", input=tuple(sys.argv[1:])),))
files = find_inputs(config)
texts = [document.text for reader in readers_of(config) for document in reader]
print(json.dumps({"files": [[file.url, file.bytes, file.stamp] for file in files], "texts": texts}))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "data/en").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Tales")
    (tmp_path / "data/one.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    pq.write_table(pa.table({"text": ["three", "four"], "id": [3, 4]}), tmp_path / "data/en/part.parquet")
    hub = Hub(tmp_path)
    yield hub
    hub.server.shutdown()


def read(endpoint: str, *patterns: str, offline: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": offline, "HF_TOKEN": "hf_none"}
    environment["CLOZEWORKS_RETRY_SECONDS"] = "1"
    command = [sys.executable, "-c", READ, *patterns]
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.long
def test_files_and_patterns_of_a_data_set_are_read(hub: Hub) -> None:
    place = "hf://datasets/user/tales"
    done = read(hub.url, f"{place}/data/*.jsonl.gz", f"{place}/data/en/part.parquet")
    assert done.returncode == 0, done.stderr + "\n".join(hub.requests)
    found = json.loads(done.stdout)
    assert [url for url, _, _ in found["files"]] == [f"{place}/data/en/part.parquet", f"{place}/data/one.jsonl.gz"]
    assert sorted(found["texts"]) == ["four", "one", "three", "two"]
    assert not any(stamp.endswith("None") for _, _, stamp in found["files"]), "a changed file is noticed"


@pytest.mark.long
def test_a_missing_repository_or_file_is_a_clear_error(hub: Hub) -> None:
    for pattern in ("hf://datasets/user/tales/data/absent.jsonl", "hf://datasets/user/tales/other/*.jsonl"):
        done = read(hub.url, pattern)
        assert done.returncode != 0 and "no input file matches" in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "is_retried"), [(None, True), pytest.param(503, True, marks=pytest.mark.slow), (401, False)]
)
def test_a_hub_that_is_away_or_busy_is_retried_and_named(hub: Hub, status: int | None, is_retried: bool) -> None:
    hub.status = status
    endpoint = "http://127.0.0.1:9" if status is None else hub.url
    done = read(endpoint, "hf://datasets/user/tales/data/one.jsonl.gz")
    assert done.returncode == 1, done.stdout
    last = done.stderr.splitlines()[-1]
    assert "hf://datasets/user/tales/data/one.jsonl.gz" in last and "UserError" in last, done.stderr
    assert ("; retrying in" in done.stderr) == is_retried, done.stderr


def test_offline_mode_is_named_at_once(hub: Hub) -> None:
    done = read(hub.url, "hf://datasets/user/tales/data/one.jsonl.gz", offline="1")
    assert done.returncode == 1 and "retrying" not in done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr.splitlines()[-1] and not hub.requests, done.stderr
