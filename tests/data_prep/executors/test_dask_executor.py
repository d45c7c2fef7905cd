"""The Dask executor with a real scheduler and real workers: the same bytes as one process, whoever is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import Tokenizer, prepare, train_tokenizer, verify
from data_prep.base.errors import UsageError, UserError
from data_prep.config.preparation_config import FilterSettings
from data_prep.executors import dask_executor
from data_prep.executors.dask_executor import DaskExecutor
from data_prep.storage import storage
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.living_data_sets import document_ids, remove
from tests.support.preparations import Planned, load_filters, planned
from tests.support.reading import BadInput

REPOSITORY = Path(__file__).resolve().parents[3]
OVERRIDES = ["shards.min_shards=3", "shards.valid_fraction=0.1", "shards.unit_bytes=2000"]
NOT_IMPORTABLE = "filter-not-importable"

pytestmark = pytest.mark.spawn


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """A Dask process of its own, as a user starts it on another machine."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def start_worker(scheduler: str, folder: Path) -> subprocess.Popen[bytes]:
    options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--death-timeout", "60")
    return start("distributed.cli.dask_worker", scheduler, *options, "--local-directory", str(folder))


def _address(file: Path, scheduler: subprocess.Popen[bytes]) -> str:
    """What the scheduler writes down, which may be there in part for a moment."""
    deadline = time.monotonic() + 180
    while True:
        try:
            address: str = json.loads(file.read_text())["address"]
            return address
        except (OSError, ValueError):
            assert scheduler.poll() is None and time.monotonic() < deadline, "the scheduler does not start"
            time.sleep(0.05)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a scheduler without workers."""
    file = tmp_path_factory.mktemp("dask") / "scheduler.json"
    process = start("distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
    try:
        yield _address(file, process)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def workers(scheduler: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two workers of the scheduler."""
    folder = tmp_path_factory.mktemp("workers")
    processes = [start_worker(scheduler, folder) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def plan_of(corpus: Path, tokenizer: Tokenizer, *overrides: str) -> Planned:
    return planned(corpus, tokenizer, *OVERRIDES, *overrides)


def lack_the_filter(unit: int) -> None:
    """Fail as on a worker whose PYTHONPATH lacks the module of a filter."""
    load_filters([FilterSettings(name=f"my_filters:keep{unit}")])


def configured_prefixes(unit: int) -> tuple[int, list[str], int]:
    return unit, list(storage.options()), os.getpid()


def test_a_missing_scheduler_and_missing_workers_are_reported(scheduler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_executor, "CONNECT_SECONDS", 0.5)
    monkeypatch.setattr(dask_executor, "WORKER_SECONDS", 0.2)
    with pytest.raises(UserError, match="tcp://127.0.0.1:9 ", check=coded("no-scheduler")):
        DaskExecutor("tcp://127.0.0.1:9")
    with pytest.raises(UsageError, match="nonsense://x", check=coded("malformed-address")):
        DaskExecutor("nonsense://x")
    monkeypatch.setattr(dask_executor, "CONNECT_SECONDS", 20)
    with pytest.raises(UserError, match=scheduler, check=coded("no-workers")):
        DaskExecutor(scheduler)


@pytest.mark.long
@pytest.mark.fault(
    row=12,
    fault="one of two Dask workers killed half-way",
    required="its units are done again by others, no loss, no double",
)
def test_row_12_half_of_the_dask_workers_killed_half_way_gives_the_bytes_of_one_process(
    small_corpus: Path, tokenizer: Tokenizer, scheduler: str, workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    plan_of(small_corpus, tokenizer, f"text_output={tmp_path / 'one-texts'}").make(tmp_path / "one")
    plan = plan_of(small_corpus, tokenizer, f"text_output={tmp_path / 'texts'}")
    work, done_at_the_kill = tmp_path / "out" / ".work", []

    def kill_one() -> None:
        while len(done := list(work.glob("map-*.sections"))) < 3:
            time.sleep(0.001)
        done_at_the_kill.append(len(done))
        workers[0].send_signal(signal.SIGKILL)

    with DaskExecutor(scheduler) as executor:
        executor._client.wait_for_workers(2, timeout=60)
        killer = threading.Thread(target=kill_one)
        killer.start()
        plan.make(tmp_path / "out", executor)
        killer.join()
    assert workers[0].wait(10) == -signal.SIGKILL and workers[1].poll() is None
    assert 3 <= done_at_the_kill[0] < len(plan.plan.units)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")
    assert files_of(tmp_path / "texts") == files_of(tmp_path / "one-texts")


class KillsAfterFirst(DaskExecutor):
    """Kills a worker when the first unit of a run is done, so that its results and running units are lost."""

    def __init__(self, scheduler: str, processes: list[subprocess.Popen[bytes]]) -> None:
        super().__init__(scheduler)
        self._processes = processes
        self._client.wait_for_workers(2, timeout=60)

    def run(self, task: Callable[[Any], Any], units: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        for number, pair in enumerate(super().run(task, units)):
            if number == 0 and len(units) > 1 and self._processes:
                self._processes.pop().send_signal(signal.SIGKILL)
            yield pair


@pytest.fixture
def two_workers(scheduler: str, tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two workers of a test's own, of which it may kill one."""
    processes = [start_worker(scheduler, tmp_path / "dask") for _ in range(2)]
    yield list(processes)
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.fault(
    row=12,
    fault="a Dask worker killed during tokenizer, merge, verify or remove",
    required="another worker repeats its units and lost results: the same bytes as one process",
)
@pytest.mark.parametrize(
    "command", ["merge", "remove", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tokenizer", "verify"))]
)
def test_row_12_a_dask_worker_killed_in_any_command_costs_nothing(
    small_corpus: Path,
    tokenizer: Tokenizer,
    scheduler: str,
    two_workers: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    command: str,
) -> None:
    settings = {"shards": {"min_shards": 3, "valid_fraction": 0.1, "unit_bytes": 20_000}}
    if command == "tokenizer":
        train_tokenizer(small_corpus, output=tmp_path / "one", vocab_size=600, config=settings, num_workers=1)
    elif command == "merge":
        plan = plan_of(small_corpus, tokenizer, "deduplication.near=true")
        plan.make(tmp_path / "one")
        for number in (1, 2):
            plan.make_range(number, 2, tmp_path / "two")
    else:
        prepare(small_corpus, tokenizer=tokenizer, output=tmp_path / "one", config=settings, num_workers=1)
        shutil.copytree(tmp_path / "one", tmp_path / "two")
    ids = np.array(document_ids(tmp_path / "two")[::3], np.uint64) if command == "remove" else None
    with KillsAfterFirst(scheduler, two_workers) as executor:
        if command == "tokenizer":
            train_tokenizer(small_corpus, output=tmp_path / "two", vocab_size=600, config=settings, executor=executor)
        elif command == "merge":
            plan.merge(tmp_path / "two", executor)
        elif command == "verify":
            assert verify(tmp_path / "two", executor=executor).num_documents == 200
        else:
            assert ids is not None
            remove(tmp_path / "two", ids=ids, executor=executor)
            remove(tmp_path / "one", ids=ids)
    assert len(two_workers) == 1, "one was killed"
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


def test_a_tokenizer_in_a_store_is_not_trained_on_other_machines(small_corpus: Path) -> None:
    class Elsewhere:
        def run(self, task: object, units: object) -> Iterator[tuple[object, object]]:
            raise AssertionError

        def __enter__(self) -> Elsewhere:
            return self

        def __exit__(self, *error: object) -> None: ...

    with pytest.raises(UsageError, match="memory://t", check=coded("output-not-shared")):
        train_tokenizer(small_corpus, output="memory://t", vocab_size=600, executor=Elsewhere())  # type: ignore[arg-type]


def test_errors_keep_their_class_and_workers_get_the_storage_options(
    small_corpus: Path, tokenizer: Tokenizer, scheduler: str, workers: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    corpus = tmp_path / "bad.jsonl"
    corpus.write_bytes(small_corpus.read_bytes() + b'{"text": 5}\n')
    with DaskExecutor(scheduler) as executor:
        with pytest.raises(BadInput, match="bad.jsonl line 201 has a number for 'text'"):
            plan_of(corpus, tokenizer).make(tmp_path / "out", executor)
        assert not (tmp_path / "out" / "manifest.json").exists()
        with pytest.raises(UserError, match="on a Dask worker.*my_filters.*PYTHONPATH", check=coded(NOT_IMPORTABLE)):
            list(executor.run(lack_the_filter, [1]))
        storage.configure({"s3://somewhere": {"profile": "research"}})
        try:
            found = sorted(result for _, result in executor.run(configured_prefixes, [3, 1, 2]))
        finally:
            storage.configure({})
    assert [unit for unit, _, _ in found] == [1, 2, 3]
    assert all(prefixes == ["s3://somewhere"] and pid != os.getpid() for _, prefixes, pid in found)


@pytest.mark.long
def test_relative_paths_are_resolved_where_the_command_runs(
    small_corpus: Path,
    tokenizer: Tokenizer,
    scheduler: str,
    workers: list[subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The workers run in another folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(small_corpus, "corpus.jsonl")
    (tmp_path / "questions.txt").write_text("one two three four five six seven eight nine ten eleven twelve thirteen")
    filters = [{"name": "decontamination", "sets": "questions.txt"}]
    with DaskExecutor(scheduler) as executor:
        train_tokenizer("corpus.jsonl", output="tokenizer", vocab_size=600, executor=executor, filters=filters)
        prepare("corpus.jsonl", tokenizer="tokenizer", output="out", executor=executor, filters=filters)
    assert verify("out").num_documents == 200
