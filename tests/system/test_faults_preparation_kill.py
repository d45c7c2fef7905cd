"""Rows 11 and 12 of the fault list: SIGKILL of the command at any moment, and of its workers.

The same command goes on, does nothing twice, and gives the bytes of a run that was never killed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.data_prep_command import files_of

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.spawn


class Run:
    """The command that is killed, in a process group of its own."""

    def __init__(self, corpus: Path, tokenizer: Path, *overrides: str) -> None:
        self._words = [sys.executable, "-m", "data_prep", "shards", "--input", str(corpus), "--workers", "2"]
        self._words += ["--tokenizer", str(tokenizer), *overrides]
        self._words += ["shards.min_shards=6", "shards.valid_fraction=0.2", "shards.unit_bytes=2000"]

    def to_the_end(self, output: Path) -> float:
        """Run it whole; returns how long it took, in seconds."""
        started_at = time.monotonic()
        assert self.for_seconds(output, 600) == 0
        return time.monotonic() - started_at

    def start(self, output: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self._words, "--output", str(output)],
            cwd=REPOSITORY,
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
def test_row_11_a_run_killed_again_and_again_ends_with_the_bytes_of_one_never_stopped(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path, observed: Callable[..., None]
) -> None:
    run = Run(small_corpus, small_tokenizer)
    duration = run.to_the_end(tmp_path / "whole")
    generator = random.Random(7)
    num_finished = []
    for moment in range(4):
        seconds = duration * (0.3 + 0.6 * (moment + generator.random()) / 4)
        run.for_seconds(tmp_path / "out", seconds, a_unit=moment == 3)
        num_finished.append(len(marks(tmp_path / "out" / ".work")))
    run.to_the_end(tmp_path / "out")
    assert num_finished[-1] > 0 or (tmp_path / "out" / "manifest.json").exists()
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    observed(
        f"finished units at the 4 kills: {', '.join(map(str, num_finished))} (0: none yet, or all was made); none was "
        "done again, shards and manifest are byte-identical",
        lost="the work on the units that were not finished",
    )


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
