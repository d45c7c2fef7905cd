"""Locks on a local folder: one command, or several ranges of it, and none that outlives its holder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep.base.errors import UserError
from data_prep.storage import locks, storage
from tests.support.error_codes import coded

ROOT = Path(__file__).resolve().parents[3]
ME = f"process {os.getpid()} on {socket.gethostname()}"


@contextmanager
def another_process_holds(folder: Path, name: str = "") -> Iterator[subprocess.Popen]:
    program = (
        "import sys, time; from data_prep.storage import storage\n"
        "with storage.hold_lock(sys.argv[1], sys.argv[2]):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(folder), name]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def refused(folder: Path, name: str = "") -> str:
    """The message for a command that wants the lock."""
    with pytest.raises(UserError, check=coded("folder-locked")) as caught, storage.hold_lock(folder, name):
        pass
    return str(caught.value)


def test_a_second_holder_is_refused_and_the_first_is_named(tmp_path: Path) -> None:
    with storage.hold_lock(tmp_path) as lock:
        lock.check()
        assert f"another command ({ME}) is using {tmp_path}" in refused(tmp_path)
    with storage.hold_lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_short_lock_is_waited_for_up_to_a_fifth_of_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    with ExitStack() as first:
        first.enter_context(storage.hold_lock(tmp_path))
        monkeypatch.setattr(locks, "time", SimpleNamespace(sleep=waits.append))
        assert ME in refused(tmp_path) and waits == [0.05] * 4
        released = SimpleNamespace(sleep=lambda seconds: waits.append(seconds) or len(waits) < 8 or first.close())
        monkeypatch.setattr(locks, "time", released)
        with storage.hold_lock(tmp_path):
            assert waits == [0.05] * 8, "the last attempt finds it free"


def test_ranges_of_one_array_run_together_and_the_same_range_does_not(tmp_path: Path) -> None:
    with storage.hold_lock(tmp_path, "range-001-of-003"), storage.hold_lock(tmp_path, "range-002-of-003"):
        assert ME in refused(tmp_path, "range-002-of-003")
    assert os.listdir(tmp_path) == []


def test_the_whole_folder_and_a_range_exclude_each_other(tmp_path: Path) -> None:
    with storage.hold_lock(tmp_path, "range-002-of-003"):
        assert f"(range-002-of-003, {ME})" in refused(tmp_path)
    with storage.hold_lock(tmp_path):
        assert f"({ME})" in refused(tmp_path, "range-002-of-003")
    assert os.listdir(tmp_path) == []


@pytest.mark.spawn
@pytest.mark.parametrize("name", ["", "range-001-of-002"])
def test_the_lock_of_a_killed_holder_is_free(name: str, tmp_path: Path) -> None:
    with another_process_holds(tmp_path, name) as holder:
        assert f"process {holder.pid} on" in refused(tmp_path, name)
        assert f"process {holder.pid} on" in refused(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        for again in (name, ""):
            with storage.hold_lock(tmp_path, again):
                pass
    assert os.listdir(tmp_path) == []


@pytest.mark.spawn
def test_a_forked_child_that_outlives_a_killed_holder_does_not_keep_its_lock(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from data_prep.storage import storage\n"
        "with storage.hold_lock(sys.argv[1]):\n"
        "    child = os.fork()\n"
        "    if child: print(child, flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            assert f"process {process.pid} on" in refused(tmp_path)
            process.kill()
            process.wait()
            with storage.hold_lock(tmp_path):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_one_of_many_holds_the_lock_and_short_ranges_block_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, most = [0], [0]

    def want_whole(_: int) -> bool:
        try:
            with storage.hold_lock(tmp_path / "whole"):
                held[0] += 1
                most[0] = max(most[0], held[0])
                time.sleep(0.002)
                held[0] -= 1
                return True
        except UserError:
            return False

    def want_range(number: int) -> None:
        for _ in range(20):
            with storage.hold_lock(tmp_path / "ranges", f"range-{number}"):
                pass

    with ThreadPoolExecutor(8) as pool:
        assert any(pool.map(want_whole, range(40))) and most[0] == 1
        monkeypatch.setattr(locks, "_ATTEMPTS", 200)  # on a busy machine a thread may be kept from a core for long
        list(pool.map(want_range, range(8)))


@pytest.mark.parametrize("when", [1, 2])
def test_a_lock_whose_file_is_taken_away_meanwhile_is_taken_again(
    when: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, stat = [], Path.stat

    def vanishing(path: Path, **options: bool) -> os.stat_result:
        if path.name == locks.LOCK_NAME:
            looks.append(path)
            if len(looks) == when:
                path.unlink()
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", vanishing)
    with storage.hold_lock(tmp_path):
        monkeypatch.undo()
        assert looks and (tmp_path / locks.LOCK_NAME).is_file()


def test_a_folder_that_cannot_be_written_is_reported_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(UserError, check=coded("unwritable-file")), storage.hold_lock(tmp_path / "file"):
        pass


def test_a_file_system_without_locks_gives_a_warning_and_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with storage.hold_lock(tmp_path):
        pass
    assert "has no locks (No locks available)" in capsys.readouterr().err
