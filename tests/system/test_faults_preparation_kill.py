"""Rows 11, 12 and 55 of the fault list: SIGKILL of the command at any moment, of its workers and of their server.

The same command goes on, does nothing twice, and gives the bytes of a run that was never killed.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.data_prep_command import files_of
from tests.support.hub_server import Hub
from tests.support.preparations import read_texts

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.spawn


# Shards of one source each, which are gathered in groups first, and a sidecar beside each of them.
SOURCES_AND_SIDECARS = ("documents.id_field=id", "documents.url_field=url", "deduplication.near=true")


def with_copies(corpus: Path, folder: Path) -> Path:
    """A configuration of the corpus as two sources with budgets, the second with copies of the first."""
    lines = corpus.read_text().splitlines()
    for name, part in (("one", lines[:120]), ("two", lines[100:])):
        rows = [
            {**json.loads(line), "id": number, "url": f"https://{name}/{number}"} for number, line in enumerate(part)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [
        {"name": "one", "input": str(folder / "one.jsonl"), "epochs": 2},
        {"name": "two", "input": str(folder / "two.jsonl"), "weight": 3},
    ]
    path = folder / "sources.yaml"
    path.write_text(json.dumps({"sources": sources}))
    return path


class Run:
    """The command that is killed, in a process group of its own."""

    def __init__(self, corpus: Path, tokenizer: Path, *overrides: str) -> None:
        given = "--config" if corpus.suffix == ".yaml" else "--input"
        self._words = [sys.executable, "-m", "data_prep", "shards", given, str(corpus), "--workers", "2"]
        self._words += ["--tokenizer", str(tokenizer), *overrides]
        self._words += ["shards.min_shards=6", "shards.valid_fraction=0.2", "shards.unit_bytes=2000"]
        self.environment: dict[str, str] = {}

    def to_the_end(self, output: Path) -> float:
        """Run it whole; returns how long it took, in seconds."""
        started_at = time.monotonic()
        assert self.for_seconds(output, 600) == 0
        return time.monotonic() - started_at

    def start(self, output: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._words, "--output", str(output)],
            cwd=REPOSITORY,
            env=os.environ | self.environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def for_seconds(self, output: Path, seconds: float, a_unit: bool = False) -> int:
        """Kill the whole group after that time, if it has not ended; returns the exit status.

        With `a_unit` it is killed when a unit is finished, where that comes later.

        Units that are finished when it starts must stay the files that they are.
        """
        finished = marks(output / ".work")
        process = self.start(output)
        deadline = time.monotonic() + seconds
        while process.poll() is None and (time.monotonic() < deadline or (a_unit and not marks(output / ".work"))):
            now = marks(output / ".work")
            assert not {name for name, mark in now.items() if finished.get(name, mark) != mark}, "done again"
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        errors = process.communicate()[1]
        assert process.returncode in (0, -signal.SIGKILL), errors.decode()
        return process.returncode


FIELDS = {"text_field": "body.text", "url_field": "url", "metadata_fields": ["number"]}


def tables_of(corpus: Path, folder: Path) -> Path:
    """A configuration of the corpus as tables of ten rows, of every format in turn, with every kind of filter."""
    folder.mkdir()
    texts = read_texts(corpus)
    for start in range(0, len(texts), 10):
        rows = [(text, n, f"https://site{n}.org/{start}") for n, text in enumerate(texts[start:][:10])]
        match start // 10 % 4:
            case 0:
                with open(folder / f"{start:04d}.csv", "w", encoding="utf-8", newline="") as file:
                    csv.writer(file).writerows([("body.text", "number", "url"), *rows])
            case 1:
                lines = ["body.text\tnumber\turl", *(f"{' '.join(text.split())}\t{n}\t{url}" for text, n, url in rows)]
                (folder / f"{start:04d}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            case kind:
                table = pa.Table.from_pylist(
                    [{"body": {"text": text}, "number": n, "url": url} for text, n, url in rows]
                )
                if kind == 2:
                    pq.write_table(table, folder / f"{start:04d}.parquet")
                    continue
                with pa.ipc.new_stream(folder / f"{start:04d}.arrow", table.schema) as writer:
                    writer.write_table(table)
    (folder / "leaks.jsonl").write_text(json.dumps({"text": " ".join(texts[42].split()[3:20])}) + "\n")
    filters = [
        {"name": "metadata", "keep": "number >= 1"},
        {"name": "url_blocklist", "domains": ["site3.org"]},
        {"name": "decontamination", "sets": {"leaks": str(folder / "leaks.jsonl")}},
        {"name": "language", "assign": True},
        {"name": "datatrove:PIIFormatter"},
        {"name": "tests.support.filters:drop_fours"},
    ]
    path = folder / "tables.yaml"
    endings = ("csv", "tsv", "parquet", "arrow")
    sources = [{"name": "tables", "input": [str(folder / f"*.{ending}") for ending in endings]}]
    path.write_text(json.dumps({"sources": sources, "documents": {**FIELDS, "filters": filters}}))
    return path


def marks(work: Path) -> dict[str, tuple[int, int]]:
    """Of every finished unit the file and when it was written."""
    found = {}
    with contextlib.suppress(FileNotFoundError):  # the work folder is made, and removed, meanwhile
        for entry in os.scandir(work):
            if entry.name.endswith((".sections", ".done.json")):
                status = entry.stat()
                found[entry.name] = (status.st_ino, status.st_mtime_ns)
    return found


@pytest.mark.fault(
    row=11,
    fault="SIGKILL of the command at 4 random moments, one after another",
    required="the same command ends with byte-identical shards and manifest; finished units not redone",
)
@pytest.mark.parametrize(
    "kind", [pytest.param("lines", marks=pytest.mark.slow), "tables with filters", "sources and sidecars"]
)
def test_row_11_a_run_killed_again_and_again_ends_with_the_bytes_of_one_never_stopped(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, observed: Callable[..., None], kind: str
) -> None:
    run = Run(small_corpus, small_tokenizer)
    if kind == "sources and sidecars":
        run = Run(with_copies(small_corpus, tmp_path), small_tokenizer, *SOURCES_AND_SIDECARS)
    elif kind != "lines":
        folders = [f"keep_dropped={tmp_path / 'dropped'}", f"text_output={tmp_path / 'texts'}"]
        run = Run(tables_of(small_corpus, tmp_path / "tables"), small_tokenizer, *folders)
    duration = run.to_the_end(tmp_path / "whole")
    dropped, texts = (
        ({}, {}) if kind != "tables with filters" else map(files_of, (tmp_path / "dropped", tmp_path / "texts"))
    )
    for name in ("dropped", "texts"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
    generator = random.Random(7)
    num_finished = []
    for moment in range(4):
        seconds = duration * (0.3 + 0.6 * (moment + generator.random()) / 4)
        run.for_seconds(tmp_path / "out", seconds, a_unit=moment == 3)
        num_finished.append(len(marks(tmp_path / "out" / ".work")))
    run.to_the_end(tmp_path / "out")
    assert num_finished[-1] > 0 or (tmp_path / "out" / "manifest.json").exists()
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    if kind == "tables with filters":
        assert files_of(tmp_path / "dropped") == dropped and len(dropped) > 2
        assert files_of(tmp_path / "texts") == texts and len(texts) > 2
        counts = json.loads(dropped["dropped.json"])
        reasons = ("decontamination: leaks", "url_blocklist: domain", "metadata: ", "drop_fours: four")
        assert all(reason in json.dumps(counts) for reason in reasons), counts
    observed(
        f"finished units at the 4 kills: {', '.join(map(str, num_finished))} (0: none yet, or all was made); none was "
        "done again, shards and manifest are byte-identical",
        lost="the work on the units that were not finished",
    )


@pytest.mark.slow
def test_a_run_killed_while_the_hub_answers_ends_with_the_bytes_of_one_never_stopped(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    lines = small_corpus.read_text(encoding="utf-8").splitlines(keepends=True)
    served = tmp_path / "served"
    (served / "data").mkdir(parents=True)
    for start in range(0, len(lines), 20):
        with gzip.open(served / "data" / f"{start:04d}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(lines[start : start + 20])
    names = sorted(path.name for path in (served / "data").iterdir())
    hub = Hub(served)
    try:
        config = tmp_path / "hub.yaml"
        config.write_text(json.dumps({"sources": [{"name": "hub", "input": "hf://datasets/user/tales/data/*.gz"}]}))
        run = Run(config, small_tokenizer)
        run.environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_none"}
        run.to_the_end(tmp_path / "whole")
        hub.held = names[len(names) // 2]
        process = run.start(tmp_path / "out")
        assert hub.is_held.wait(300), "a worker waits for the bytes of the file, and the others finish units"
        deadline = time.monotonic() + 300
        while not marks(tmp_path / "out" / ".work") and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        finished = marks(tmp_path / "out" / ".work")
        assert finished and not (tmp_path / "out" / "manifest.json").exists()
        hub.held = None
        hub.release.set()
        first = len(hub.requests)
        run.to_the_end(tmp_path / "out")
        read = {name for name in names for request in hub.requests[first:] if request.endswith(name)}
    finally:
        hub.release.set()
        hub.server.shutdown()
        hub.server.server_close()
    assert names[len(names) // 2] in read and len(read) <= len(names) - len(finished), "no unit is done again"
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.fault(
    row=12, fault="a worker of the pool killed", required="its units are done again by others, no loss, no double"
)
def test_row_12_a_killed_worker_costs_nothing_but_time(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    run = Run(small_corpus, small_tokenizer)
    run.to_the_end(tmp_path / "whole")
    process = run.start(tmp_path / "out")
    deadline = time.monotonic() + 300
    while not marks(tmp_path / "out" / ".work") and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)  # so that it gives out no unit until one of them is dead
    workers = [
        worker
        for server in psutil.Process(process.pid).children()
        if "forkserver" in " ".join(server.cmdline())
        for worker in server.children()
    ]
    assert len(workers) == 2
    workers[0].kill()
    process.send_signal(signal.SIGCONT)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0 and b"a worker process was killed" in errors
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.fault(
    row=11,
    fault="SIGKILL of the command at 20 random moments over all of it, near-duplicates included",
    required="the same command ends with byte-identical shards and manifest; finished units not redone",
)
def test_row_11_twenty_runs_killed_at_moments_over_the_whole_command_end_alike(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, observed: Callable[..., None]
) -> None:
    run = Run(small_corpus, small_tokenizer, "deduplication.near=true")
    duration = run.to_the_end(tmp_path / "whole")
    expected = files_of(tmp_path / "whole")
    seed = random.SystemRandom().randrange(1 << 32)  # other moments in every run
    print(f"seed of the moments: {seed}")
    generator = random.Random(seed)
    states, num_finished = set(), []
    for moment in range(20):
        output = tmp_path / f"out-{moment}"
        seconds = duration * (moment + generator.random()) / 20
        status = run.for_seconds(output, seconds)
        work = output / ".work"
        states.add((status, bool(list(work.glob("map-*"))), bool(list(work.glob("*.done.json")))))
        num_finished.append(len(marks(work)))
        run.to_the_end(output)
        assert files_of(output) == expected, f"killed after {seconds:.3f} of {duration:.3f} s"
    assert len(states) >= 3, states
    observed(
        f"20 runs killed once each, with {min(num_finished)} to {max(num_finished)} finished units, of which none was "
        f"done again; shards and manifest are byte-identical (seed {seed})",
        lost="the work on the units that were not finished",
    )


def fork_servers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children()
        return [child for child in children if "multiprocessing.forkserver import main" in " ".join(child.cmdline())]
    return []


@pytest.mark.fault(
    row=55,
    fault="the fork server of preparation killed again and again from the start",
    required="no traceback; the work is done again or ends with one line",
)
def test_row_55_a_fork_server_killed_again_and_again_costs_nothing(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, observed: Callable[..., None]
) -> None:
    run = Run(small_corpus, small_tokenizer)
    run.to_the_end(tmp_path / "whole")
    generator = random.Random(3)
    process = run.start(tmp_path / "out")
    num_killed = 0
    while process.poll() is None and num_killed < 9:
        for server in fork_servers_of(process):
            with contextlib.suppress(psutil.Error):
                server.kill()
                num_killed += 1
        time.sleep(0.05 * generator.random())
    errors = process.communicate(timeout=300)[1].decode()
    assert num_killed and "Traceback" not in errors and "Error" not in errors, errors
    assert process.returncode == 0 or (process.returncode == 1 and errors.splitlines()[-1].startswith("error: "))
    run.to_the_end(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    observed(f"killed {num_killed} times: status {process.returncode}, no traceback; the same command makes it whole")
