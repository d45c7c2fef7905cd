"""What the loss of a process that builds batches means; with a real one that is killed."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client
from multiprocessing.resource_sharer import DupFd
from typing import NoReturn

import pytest
from torch.utils.data import DataLoader

from trainer.data.workers import (
    ReadingStopped,
    describe_lost_worker,
    explain_lost_workers,
    initialize_worker,
    next_or_stop,
)

KILLED = "DataLoader worker (pid 4321) is killed by signal: Killed. "
NO_SHARED_MEMORY = (
    "DataLoader worker (pid 4321) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
    "shared memory. Please try to raise your shared memory limit."
)


def test_a_wait_for_a_batch_ends_with_a_stop_and_else_gives_the_batch_or_its_error() -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("the store is away")

    read = batches()
    assert next_or_stop(read, lambda: True) == 1, "it was there"
    with pytest.raises(OSError, match="away"):
        next_or_stop(read, lambda: True)
    endless: queue.SimpleQueue[int] = queue.SimpleQueue()
    waiting, asked = iter(endless.get, None), iter([False, True])
    with pytest.raises(ReadingStopped):
        next_or_stop(waiting, lambda: next(asked))
    endless.put(0)  # lets the thread end


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (KILLED, ("process 4321 on ", "(Killed)", "memory", "lower data.num_workers=3")),
        (NO_SHARED_MEMORY, ("process 4321 on ", "(Bus error)", "/dev/shm", "lower data.num_workers=3")),
        (
            "DataLoader worker (pid 4321) is killed by signal: Segmentation fault. ",
            ("process 4321 on ", "(Segmentation fault)", "its own message above"),
        ),
        ("DataLoader worker (pid(s) 4321, 4322) exited unexpectedly", ("process 4321, 4322 on ", "memory")),
        (
            "DataLoader worker (pid 4321) exited unexpectedly with exit code 1. Details are lost due to multiprocess",
            ("process 4321 on ", "ended unexpectedly"),
        ),
    ],
    ids=["killed", "shared memory", "crashed", "found when a batch is waited for", "exit code"],
)
def test_a_lost_worker_is_named_with_the_probable_cause_and_the_setting(text: str, parts: tuple[str, ...]) -> None:
    description = describe_lost_worker(RuntimeError(text), rank=5, num_workers=3)
    assert description is not None and description.startswith("a data worker of rank 5 (") and "\n" not in description
    assert [part for part in parts if part not in description] == []


def test_it_is_found_behind_another_error_and_not_in_others() -> None:
    try:
        try:
            raise RuntimeError(KILLED)
        except RuntimeError as error:
            raise RuntimeError("a hook of the backward failed") from error
    except RuntimeError as error:
        assert describe_lost_worker(error, 0, 1) is not None
    assert describe_lost_worker(RuntimeError("Connection closed by peer"), 0, 1) is None


class Ended(Exception):
    """Stands for the end of the process."""


def end(description: str) -> NoReturn:
    raise Ended(description)


def started_loader() -> tuple[Iterator[int], int]:
    """A loader at work, and the process of one of its workers; workers of an earlier loader may still be there."""
    before = {each.pid for each in multiprocessing.active_children()}
    batches = iter(DataLoader(range(1_000_000), batch_size=None, num_workers=2, multiprocessing_context="fork"))
    next(batches)
    pid, *_ = {each.pid for each in multiprocessing.active_children()} - before
    assert pid is not None
    return batches, pid


@pytest.mark.spawn
def test_a_worker_that_is_really_killed_is_recognized_while_the_rank_computes() -> None:
    _alive, pid = started_loader()
    with (
        pytest.raises(Ended, match=rf"rank 1 \(process {pid} on .*data.num_workers=2"),
        explain_lost_workers(1, 2, end),
    ):
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # not in the loader: torch's handler raises wherever the rank is
            sum(range(1000))


@pytest.mark.spawn
@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_a_worker_whose_connection_breaks_before_its_death_is_known_is_recognized(error: Exception) -> None:
    _alive, pid = started_loader()
    with pytest.raises(Ended, match=rf"rank 1 \(process {pid} on .*\(Killed\)"), explain_lost_workers(1, 2, end):
        threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
        raise error


def test_a_broken_connection_to_another_process_is_no_lost_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.workers.LOSS_SECONDS", 0.01)
    with pytest.raises(ConnectionResetError), explain_lost_workers(0, 2, end):
        raise ConnectionResetError(104, "Connection reset by peer")


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="of our own"), explain_lost_workers(0, 2, end):
        raise RuntimeError("a mistake of our own")


@pytest.mark.parametrize(("request_of_rank", "printed"), [(None, False), (("unknown key", 1), True)])
def test_a_worker_prints_nothing_where_the_rank_leaves_in_the_middle_of_a_batch(
    request_of_rank: tuple[str, int] | None, printed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def hand_over() -> None:
        initialize_worker(0)
        batch = DupFd(1)
        (address, _) = batch._id  # type: ignore[attr-defined]
        with Client(address, authkey=multiprocessing.current_process().authkey) as rank:
            if request_of_rank is not None:
                rank.send(request_of_rank)
        batch.detach()  # served once the request above is over
        os._exit(0)

    worker = multiprocessing.get_context("fork").Process(target=hand_over)
    worker.start()
    worker.join(60)
    assert worker.exitcode == 0
    assert ("Traceback" in capfd.readouterr().err) is printed
