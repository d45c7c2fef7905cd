"""A worker process that runs one unit at a time, and the pipe to it; workers share nothing, so none can block another.

Not `concurrent.futures`: its queues need named semaphores, for which a killed resource tracker prints tracebacks, and
when the fork server is killed it leaves workers behind and may wait for them forever.

A worker does not import the `__main__` module of its parent: a script needs no `if __name__ == "__main__"`, and
functions that a script or notebook defines travel by value.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import multiprocessing.spawn
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from data_prep.base import progress
from data_prep.base.environment import environment_now
from data_prep.base.garbage import collect_rarely
from data_prep.executors.worker_server import START_METHOD, start_worker_server
from data_prep.storage import storage

# Starting a process may raise these when the fork server was killed.
_NOT_STARTED = (EOFError, ConnectionError, FileNotFoundError)
# Sending to or receiving from a killed process raises these; a process killed while it sends raises a bare OSError.
_LOST = (EOFError, OSError)

_SERVER_END_SECONDS = 0.2  # from when a killed server closes its pipes until the system reports its end

_starting = threading.Lock()


class WorkerLost(Exception):
    """A worker or the fork server was killed."""


def ready_workers(workers: Sequence[Worker]) -> list[Worker]:
    """Wait until a busy worker has a result or was killed; return all such workers."""
    while True:
        found = multiprocessing.connection.wait([worker.connection for worker in workers if worker.is_busy])
        if ready := [worker for worker in workers if worker.connection in found and worker.receive()]:
            return ready


class _Traceback(Exception):
    """The worker's traceback of an error; set as the cause of that error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Packed(NamedTuple):
    """A task, pickled once for all workers and units; another task has another number."""

    number: int
    data: bytes

    @classmethod
    def of(cls, task: object) -> Packed:
        return cls(next(_numbers), _dumps(task))


_numbers = itertools.count()


class Worker:
    """The parent's end of a worker, which is idle or runs one unit.

    Attributes:
        is_busy: it runs a unit, or was killed with one.
        number: number of the unit; None if the result is ignored.
    """

    def __init__(self) -> None:
        """Start the process.

        Raises:
            WorkerLost: the fork server was killed meanwhile.
        """
        start_worker_server()
        context: Any = multiprocessing.get_context(START_METHOD)  # its type has no Process
        self.connection, theirs = context.Pipe()
        self.is_busy = False
        self.number: int | None = None
        self._task: int | None = None
        self._answer: Any = None
        arguments = (theirs, storage.options(), environment_now())
        process = context.Process(target=_serve, args=arguments, daemon=True)
        is_lost = False
        try:
            with _without_main_module():
                process.start()
        except _NOT_STARTED:
            is_lost = True
        finally:
            theirs.close()
        if is_lost:
            # Outside the handler: its traceback holds the pipe by which a process that was forked after all notices
            # that its parent dropped it.
            self._wait_for_end()
            time.sleep(_SERVER_END_SECONDS)
            raise WorkerLost
        self._process = process

    def begin(self, task: Packed, number: int | None, unit: object) -> None:
        """Have the idle worker run `task(unit)`; if it was killed, `result` raises `WorkerLost`.

        The task goes to the worker with its first unit, and stays there until it gets another one.
        """
        self.is_busy, self.number = True, number
        new_task, self._task = (b"" if self._task == task.number else task.data), task.number
        # With every unit: a worker may outlive a preparation, and the next one has another login.
        data = pickle.dumps((new_task, _dumps(unit), storage.options(), environment_now()))
        with contextlib.suppress(*_LOST):
            self.connection.send_bytes(data)

    def receive(self) -> bool:
        """Take what the worker sent; return whether it is the outcome of its task, or it was killed."""
        try:
            self._answer = self.connection.recv()
        except _LOST:
            self._answer = None
        if isinstance(self._answer, int):
            progress.add_begun(self, self._answer)
            return False
        return True

    def result(self) -> Any:
        """Return the result of the task, which was received; the outcome of a unit without a number is ignored.

        Raises:
            WorkerLost: the process was killed.
            Exception: what the task raised.
        """
        progress.unit_ended(self)
        if self._answer is None:
            raise WorkerLost
        (value, error, trace), self._answer = self._answer, None
        number, self.number, self.is_busy = self.number, None, False
        if error is not None and number is not None:
            raise error from _Traceback(trace)
        return value

    def end(self, at_once: bool) -> None:
        """End the process, after its task unless `at_once`, and wait for its end."""
        progress.unit_ended(self)
        if at_once:
            self._process.kill()
        else:
            with contextlib.suppress(*_LOST):
                self.connection.send(None)
            self._wait_for_end()
        self._process.join()
        # A killed fork server reports nothing: join returns, and a process that was not killed here ends when the pipe
        # closes by which it watches its parent.
        self._process.close()
        self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Wait until the far end of the pipe is closed: the only sign of the end of a process that is not our child."""
        if self.connection.closed:
            return
        with contextlib.suppress(*_LOST):
            while True:
                self.connection.recv_bytes()
        self.connection.close()


def _serve(connection: Connection, options: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]) -> None:
    """Run tasks from the pipe until None arrives or the parent is gone."""
    _begin(options, environment)
    progress.report_to(connection.send)
    task: list[Callable[[Any], Any]] = []
    with contextlib.suppress(*_LOST):
        while (work := connection.recv()) is not None:
            new_task, unit, *current = work
            _enter(*current)
            outcome = _outcome(task, new_task, unit)
            try:
                connection.send(outcome)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                connection.send((None, RuntimeError(f"the result of a unit cannot be pickled: {error}"), outcome[2]))


def _enter(options: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]) -> None:
    """Take over the parent's options of stores, and its environment: the fork server keeps the one of its start."""
    if environment_now() != environment:
        os.environ.clear()
        os.environ.update(environment)
    if storage.options() != options:
        storage.configure(options)


def _outcome(task: list[Callable[[Any], Any]], new_task: bytes, unit: bytes) -> tuple[Any, BaseException | None, str]:
    """Run the task, of which the worker keeps one; return its result, or its error and traceback."""
    try:
        if new_task:
            task[:] = [pickle.loads(new_task)]  # noqa: S301 - of the parent process
        return task[0](pickle.loads(unit)), None, ""  # noqa: S301
    except BaseException as error:  # noqa: BLE001 - every error goes to the caller
        return None, error, traceback.format_exc()


def _begin(options: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]) -> None:
    """Leave Ctrl-C to the parent, and end with it, also in the middle of a task."""
    collect_rarely()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _enter(options, environment)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _dumps(work: object) -> bytes:
    """Pickle a task or a unit; by value where something in it is defined in `__main__` or has no name."""
    try:
        data = pickle.dumps(work)
    except (pickle.PicklingError, AttributeError, TypeError):
        data = b"__main__"
    if b"__main__" in data:
        import cloudpickle  # takes 50 ms

        data = cloudpickle.dumps(work)
    return data


@contextlib.contextmanager
def _without_main_module() -> Iterator[None]:
    """Start processes that do not import the `__main__` module, which may be a script that calls `prepare`."""
    with _starting:
        describe = multiprocessing.spawn.get_preparation_data

        def describe_without_main(name: str, *arguments: Any) -> dict[str, object]:
            described: dict[str, object] = describe(name, *arguments)
            return {key: value for key, value in described.items() if not key.startswith("init_main_from")}

        multiprocessing.spawn.get_preparation_data = describe_without_main
        try:
            yield
        finally:
            multiprocessing.spawn.get_preparation_data = describe
