"""The server of worker processes is started early, and only where workers are wanted."""

from __future__ import annotations

import multiprocessing.forkserver
import subprocess
import sys

import pytest

from data_prep.executors import worker_server
from data_prep.executors.worker_server import needs_workers


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("shards --input a --output b", True),
        ("merge --input a --output b --workers 12", True),
        ("shards --workers=2", True),
        ("shards --workers 1 --input a", False),
        ("shards --input a --workers=1", False),
        ("shards --help", False),
        ("shards --executor dask --scheduler tcp://a:1", False),
        ("verify out", False),
        ("", False),
    ],
)
def test_workers_are_wanted_by_commands_that_use_several(
    line: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_server, "default_num_workers", lambda: 2)
    assert needs_workers(line.split()) is wanted


def test_one_core_starts_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_server, "default_num_workers", lambda: 1)
    assert not needs_workers(["shards", "--input", "a"])


@pytest.mark.spawn
def test_the_server_module_imports_little() -> None:
    code = "import sys, data_prep.executors.worker_server; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert not {"numpy", "pydantic", "fsspec", "sentencepiece", "pyarrow"} & set(output.split())


@pytest.mark.parametrize(("module", "wanted"), [("json.tool", ["json.tool"]), (None, None)])
def test_the_server_imports_the_named_or_the_already_imported_modules(
    module: str | None, wanted: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[str]] = []
    monkeypatch.setattr(worker_server, "START_METHOD", "forkserver")
    monkeypatch.setattr(multiprocessing.forkserver, "set_forkserver_preload", told.append)
    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", lambda: None)
    worker_server.start_worker_server(module)
    (names,) = told
    if wanted is not None:
        assert names == wanted
    else:
        assert worker_server.__name__ in names and all(name.startswith("data_prep.") for name in names)


def test_the_default_number_of_workers_is_the_number_of_usable_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_server.os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert worker_server.default_num_workers() == 3
    monkeypatch.delattr(worker_server.os, "sched_getaffinity")  # as on macOS
    for cores, expected in ((6, 6), (None, 1)):
        monkeypatch.setattr(worker_server.os, "cpu_count", lambda cores=cores: cores)
        assert worker_server.default_num_workers() == expected
