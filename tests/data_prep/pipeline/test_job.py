"""What the tasks of a preparation share goes to a process once, by every executor."""

from __future__ import annotations

import multiprocessing.connection
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep import Document, Tokenizer
from data_prep.executors.executors import Executor, ProcessExecutor, shared
from tests.support.preparations import Planned, filter_settings, planned, write_texts

NUM_FILES, NUM_ENTRIES = 1_000, 200_000


class Listed:
    """A filter with a long list, which notes each process that reads its list."""

    version = "1"

    def __init__(self, notes: Path) -> None:
        self.notes, self.domains = notes, {f"{number}.example.org" for number in range(NUM_ENTRIES)}

    def __call__(self, document: Document) -> str | None:
        return "listed" if document.text in self.domains else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with open(self.notes, "a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for number in range(NUM_FILES):
        write_texts(folder / f"{number:04d}.jsonl", [f"The text of file {number}.", f"{number}.example.org"])
    return folder


def plan_of(files: Path, tokenizer: Tokenizer, notes: Path) -> tuple[Planned, int]:
    """A preparation of a unit for each file, and the bytes of its filter."""
    entry = filter_settings(Listed(notes))
    assert entry.function is not None
    source = {"input": str(files / "*.jsonl"), "filters": [entry]}
    plan = planned({"web": source}, tokenizer, shards={"unit_bytes": 50, "min_shards": 1})
    assert len(plan.plan.units) == NUM_FILES
    return plan, len(entry.function.payload)


def make_and_count(plan: Planned, output: Path, executor: Executor, notes: Path) -> Counter[str]:
    """How often each process read the list of the filter while the data set was made."""
    notes.write_text("")
    manifest = plan.make(output, executor)
    assert manifest.sources[0].documents == sum(manifest.sources[0].dropped.values()) == NUM_FILES
    return Counter(notes.read_text().split())


@pytest.mark.long
@pytest.mark.spawn
def test_a_long_list_of_a_filter_goes_to_each_of_two_processes_once_for_a_thousand_files(
    files: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, payload_bytes = plan_of(files, tokenizer, tmp_path / "notes")
    assert payload_bytes > 10 * NUM_ENTRIES
    sent, send_bytes = [], multiprocessing.connection.Connection.send_bytes

    def counting(connection: Any, data: bytes, *arguments: Any) -> None:
        sent.append(len(data))
        send_bytes(connection, data, *arguments)

    monkeypatch.setattr(multiprocessing.connection.Connection, "send_bytes", counting)
    with ProcessExecutor(2) as executor:
        processes = make_and_count(plan, tmp_path / "out", executor, tmp_path / "notes")
    assert len(processes) == 2 and set(processes.values()) == {1}
    assert len(sent) > NUM_FILES and sum(length > payload_bytes for length in sent) == 2
    assert sum(sent) < 2 * payload_bytes + 20_000 * NUM_FILES
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"199999.example" in path.read_bytes()]


def is_listed(listed: Listed, number: int) -> str | None:
    return listed(Document(f"{number}.example.org"))


@pytest.mark.long
@pytest.mark.spawn
def test_the_job_of_a_thousand_units_goes_to_each_dask_worker_once(tmp_path: Path) -> None:
    import distributed

    from data_prep.executors.dask_executor import DaskExecutor

    task = shared(is_listed, Listed(tmp_path / "notes"))
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        DaskExecutor(cluster.scheduler_address) as executor,
    ):
        assert [result for _, result in executor.run(task, range(NUM_FILES))] == ["listed"] * NUM_FILES
    processes = Counter((tmp_path / "notes").read_text().split())
    assert set(processes.values()) == {1}
    assert 1 <= len(processes.keys() - {str(os.getpid())}) <= 2, "besides the scheduler, which runs in this process"
