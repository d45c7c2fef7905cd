"""Leases in an object store: they exclude like locks, are renewed, expire with their holder, and are lost loudly."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from data_prep.base.errors import UserError
from data_prep.storage import leases, remote_files, storage
from tests.support.error_codes import coded
from tests.support.fault_proxy import Fault, run_proxy
from tests.support.s3_server import S3Bucket

ROOT = Path(__file__).resolve().parents[3]
ME = f"process {os.getpid()} on {socket.gethostname()}"
SHORT_LEASE_SECONDS = 1.0

_PROGRAM = """
import sys, time
from data_prep.storage import leases
from data_prep.storage import storage
from tests.support.error_codes import coded
leases.LEASE_SECONDS = float(sys.argv[3])
leases._machine_mark = lambda: sys.argv[4]
with storage.hold_lock(sys.argv[1], sys.argv[2]) as lock:
    print("held", flush=True)
    while True:
        time.sleep(0.05)
        lock.check()
"""


@pytest.fixture(autouse=True)
def frequent_renewals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leases that do not expire within a test, and are renewed five times a second."""
    monkeypatch.setattr(leases, "LEASE_SECONDS", 20.0)
    monkeypatch.setattr(leases, "_RENEWALS_A_LEASE", 100)
    yield
    storage.configure({})


@pytest.fixture
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_SECONDS", SHORT_LEASE_SECONDS)
    monkeypatch.setattr(leases, "_RENEWALS_A_LEASE", 4)


@pytest.fixture
def folder(s3_bucket: S3Bucket) -> str:
    return f"{s3_bucket.url}/out"


def start(
    folder: str, name: str = "", machine: str = "another machine", lease_seconds: float = SHORT_LEASE_SECONDS
) -> subprocess.Popen[str]:
    """A process that takes the lock and keeps it, with a short lease."""
    command = [sys.executable, "-c", _PROGRAM, folder, name, str(lease_seconds), machine]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextmanager
def another_process_holds(folder: str, *arguments: Any) -> Iterator[subprocess.Popen[str]]:
    process = start(folder, *arguments)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def refused(folder: str, name: str = "") -> str:
    with pytest.raises(UserError, check=coded("folder-locked")) as caught, storage.hold_lock(folder, name):
        pass
    return str(caught.value)


@pytest.mark.long
def test_the_whole_folder_and_ranges_exclude_each_other_as_locally(folder: str, s3_bucket: S3Bucket) -> None:
    with storage.hold_lock(folder) as lock:
        lock.check()
        assert f"another command ({ME}) is using {folder}" in refused(folder)
        assert ME in refused(folder, "range-001-of-002")
    with storage.hold_lock(folder, "range-001-of-002"), storage.hold_lock(folder, "range-002-of-002"):
        assert ME in refused(folder, "range-002-of-002") and ME in refused(folder)
    assert s3_bucket.objects() == {}


@pytest.mark.parametrize(
    ("name", "other"), [("range-001-of-002", ".lock.json"), ("", ".lock-range-001-of-002.json")], ids=["part", "whole"]
)
def test_a_lease_taken_since_the_first_listing_is_noticed(
    folder: str, s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch, name: str, other: str
) -> None:
    lease, others = leases.Lease, list[leases.Lease]()

    def after_another(url: str, where: str) -> leases.Lease:
        others.append(lease(f"{folder}/{other}", where))
        return lease(url, where)

    monkeypatch.setattr(leases, "Lease", after_another)
    assert ME in refused(folder, name)
    assert list(s3_bucket.objects()) == [f"out/{other}"], "its own lease is given back, the other stays"
    others[0].check()
    others[0].release()


def test_a_store_without_conditional_writes_is_locked_too() -> None:
    folder = "memory://bucket/out"
    with storage.hold_lock(folder, "range-001-of-002"):
        assert ME in refused(folder, "range-001-of-002") and ME in refused(folder)
    assert storage.list_names(folder) == []


def test_a_lease_is_renewed_for_as_long_as_it_is_held(folder: str, s3_bucket: S3Bucket) -> None:
    with storage.hold_lock(folder) as lock:
        deadline = time.monotonic() + 20
        while not (values := json.loads(s3_bucket.objects()["out/.lock.json"]))["renewals"]:
            assert time.monotonic() < deadline, "it is never renewed"
            time.sleep(0.1)
        lock.check()
    assert values["renewals"] >= 1 and values["pid"] == os.getpid() and values["lease_seconds"] == 20


@pytest.mark.long
@pytest.mark.spawn
def test_the_lease_of_a_holder_killed_on_this_machine_is_taken_at_once(folder: str) -> None:
    with another_process_holds(folder, "", leases._machine_mark(), 60.0) as holder:
        assert f"process {holder.pid} on" in refused(folder)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        began = time.monotonic()
        with storage.hold_lock(folder):
            assert time.monotonic() - began < 30


@pytest.mark.long
@pytest.mark.spawn
def test_the_lease_of_another_machine_is_taken_when_it_is_no_longer_renewed(
    folder: str, s3_bucket: S3Bucket, capsys: pytest.CaptureFixture[str]
) -> None:
    with another_process_holds(folder, "range-001-of-002", "another machine", 4.0) as holder:
        assert f"process {holder.pid} on" in refused(folder)
        assert "up to 4 s" in capsys.readouterr().err
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        began = time.monotonic()
        with storage.hold_lock(folder):
            assert time.monotonic() - began >= 4.0
    assert s3_bucket.objects() == {}


@pytest.mark.long
@pytest.mark.spawn
def test_one_of_several_processes_takes_the_lease_of_a_dead_holder(folder: str, s3_bucket: S3Bucket) -> None:
    dead = {"owner": "0", "pid": 1, "host": "gone", "machine": "gone", "lease_seconds": SHORT_LEASE_SECONDS}
    storage.write_bytes(f"{folder}/.lock.json", json.dumps(dead).encode())
    processes = [start(folder, lease_seconds=5.0) for _ in range(3)]
    end = time.monotonic() + 30
    while sum(process.poll() is not None for process in processes) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    holders = [process for process in processes if process.poll() is None]
    assert len(holders) == 1
    assert json.loads(s3_bucket.objects()["out/.lock.json"])["pid"] == holders[0].pid
    for process in processes:
        process.kill()
        _, errors = process.communicate()
        assert process is holders[0] or f"process {holders[0].pid} on" in errors.splitlines()[-1]


@pytest.mark.long
@pytest.mark.spawn
def test_a_holder_that_was_suspended_stops_when_another_took_its_lease(folder: str) -> None:
    with another_process_holds(folder) as holder:
        holder.send_signal(signal.SIGSTOP)
        with storage.hold_lock(folder) as lock:
            holder.send_signal(signal.SIGCONT)
            _, errors = holder.communicate(timeout=20)
            lock.check()
        assert holder.returncode == 1
        assert re.search(rf"was lost: ({ME} took it over|it could not be renewed)", errors.splitlines()[-1])


def test_a_lease_that_was_removed_is_lost(folder: str) -> None:
    with storage.hold_lock(folder) as lock:
        storage.remove(f"{folder}/.lock.json")
        deadline = time.monotonic() + 20
        with pytest.raises(UserError, match=r"s3://.*/out was lost: it was removed", check=coded("lock-lost")):
            while time.monotonic() < deadline:
                lock.check()
                time.sleep(0.05)


def test_a_lease_that_cannot_be_renewed_in_time_is_lost(folder: str, s3_bucket: S3Bucket, short_leases: None) -> None:
    with run_proxy(s3_bucket.endpoint) as proxy:
        storage.configure({s3_bucket.url: {"endpoint_url": proxy.endpoint}})
        with storage.hold_lock(folder) as lock:
            proxy.faults = [Fault("refuse")]
            time.sleep(1.5 * SHORT_LEASE_SECONDS)
            with pytest.raises(UserError, check=coded("lock-lost")):
                lock.check()
            proxy.faults.clear()


def test_a_lost_answer_does_not_lock_out_the_holder_itself(folder: str, s3_bucket: S3Bucket) -> None:
    with run_proxy(s3_bucket.endpoint) as proxy:
        storage.configure({s3_bucket.url: {"endpoint_url": proxy.endpoint}})
        proxy.faults = [fault := Fault("lose_answer", times=2, concerns=lambda request: request.method == "PUT")]
        with storage.hold_lock(folder) as lock:
            lock.check()
        assert fault.happened == 2 and s3_bucket.objects() == {}


def test_a_read_only_folder_is_reported_before_any_work(folder: str, s3_bucket: S3Bucket) -> None:
    with run_proxy(s3_bucket.endpoint) as proxy:
        storage.configure({s3_bucket.url: {"endpoint_url": proxy.endpoint}})
        writes = Fault("refuse", status=403, code="AccessDenied", concerns=lambda request: request.method == "PUT")
        proxy.faults = [writes]
        with pytest.raises(UserError, check=coded("permission-denied")), storage.hold_lock(folder):
            pass


def test_an_unreadable_lease_is_taken_when_it_no_longer_changes(folder: str, short_leases: None) -> None:
    remote_files.write_bytes(f"{folder}/.lock.json", b"half of a le")
    with storage.hold_lock(folder) as lock:
        lock.check()


def test_giving_a_lease_back_does_not_wait_long_for_a_store_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = leases.Lease("memory://down/.lock.json", "memory://down")
    waited: list[float | None] = []

    def is_down(url: str, seconds: float | None = None) -> None:
        waited.append(seconds)
        raise UserError("the store is down")

    lease._released.set()
    lease._thread.join()
    monkeypatch.setattr(leases, "_read", is_down)
    lease.release()
    assert waited == [leases.LEASE_SECONDS / leases._RENEWALS_A_LEASE]
