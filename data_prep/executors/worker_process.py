"""A process that does units one at a time, and the pipe to it: nothing is shared with others, so none can block them.

Not `concurrent.futures`: its queues need named semaphores, for which the resource tracker prints tracebacks once it was
killed, and where the fork server is killed it leaves workers behind and may wait for them without end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from data_prep.executors.worker_server import START_METHOD, start_worker_server
from data_prep.storage import storage

# What starting a process may raise where the server that forks it was killed.
_NOT_STARTED = (EOFError, ConnectionError, FileNotFoundError)
# What speaking to a process may raise where it was killed; where it was sending, that is a bare OSError.
_LOST = (EOFError, OSError)

_SERVER_END_SECONDS = 0.2  # from when a killed server closes its pipes until the system says that it is gone


class WorkerLost(Exception):
    """A worker, or the server that forks workers, was killed."""


def ready_workers(workers: Sequence[Worker]) -> list[Worker]:
    """Wait until one of the workers that are busy has a result, or was killed; returns those that have, or were."""
    ready = multiprocessing.connection.wait([worker.connection for worker in workers if worker.is_busy])
    return [worker for worker in workers if worker.connection in ready]


class _Traceback(Exception):
    """Where in the worker an error was raised; the cause of that error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Worker:
    """The near end of a worker; it is idle or has one task.

    Attributes:
        is_busy: it has a unit, or was killed with one.
        number: that of the unit, or None where nobody asks for the result.
    """

    def __init__(self) -> None:
        """Start the process.

        Raises:
            WorkerLost: the server was killed meanwhile.
        """
        start_worker_server()
        context: Any = multiprocessing.get_context(START_METHOD)  # its type has no Process
        self.connection, theirs = context.Pipe()
        self.is_busy = False
        self.number: int | None = None
        arguments = (theirs, storage.options(), dict(os.environ))
        process = context.Process(target=_serve, args=arguments, daemon=True)
        is_lost = False
        try:
            process.start()
        except _NOT_STARTED:
            is_lost = True
        finally:
            theirs.close()
        if is_lost:
            # Out of the handler, whose traceback holds the pipe by which a process that was forked all the same sees
            # that nobody wants it.
            self._wait_for_end()
            time.sleep(_SERVER_END_SECONDS)
            raise WorkerLost
        self._process = process

    def begin(self, task: object, number: int | None, unit: object) -> None:
        """Have the idle worker do `task(unit)`; if it was killed, `result` raises `WorkerLost`."""
        self.is_busy, self.number = True, number
        with contextlib.suppress(*_LOST):
            self.connection.send((task, unit))

    def result(self) -> Any:
        """What the task returned; waits for it. What becomes of a unit without a number is not looked at.

        Raises:
            WorkerLost: the process was killed.
            Exception: what the task raised.
        """
        try:
            value, error, trace = self.connection.recv()
        except _LOST:
            raise WorkerLost from None
        number, self.number, self.is_busy = self.number, None, False
        if error is not None and number is not None:
            raise error from _Traceback(trace)
        return value

    def end(self, at_once: bool) -> None:
        """End the process, after its task unless `at_once`, and wait until it is gone."""
        if at_once:
            self._process.kill()
        else:
            with contextlib.suppress(*_LOST):
                self.connection.send(None)
            self._wait_for_end()
        self._process.join()
        # Where the server was killed it reports nothing: join returns, and a process that was not killed here ends once
        # the pipe is closed by which it watches its parent.
        self._process.close()
        self._wait_for_end()

    def _wait_for_end(self) -> None:
        """Wait until nobody holds the pipe's far end, which a process that is no child of ours tells by that alone."""
        if self.connection.closed:
            return
        with contextlib.suppress(*_LOST):
            while True:
                self.connection.recv_bytes()
        self.connection.close()


def _serve(connection: Connection, options: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]) -> None:
    """What a worker does: tasks from the pipe, until None comes or nobody is there any more."""
    _begin(options, environment)
    with contextlib.suppress(*_LOST):
        while (work := connection.recv()) is not None:
            outcome = _outcome(*work)
            try:
                connection.send(outcome)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                connection.send((None, RuntimeError(f"what came of a unit cannot travel: {error}"), outcome[2]))


def _outcome(task: Callable[[Any], Any], unit: Any) -> tuple[Any, BaseException | None, str]:
    """What the task returned, or the error that it raised and where that was."""
    try:
        return task(unit), None, ""
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's
        return None, error, traceback.format_exc()


def _begin(options: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str]) -> None:
    """Leave Ctrl-C to the parent, and end with it, also in the middle of a task.

    The server that workers are forked from keeps the environment in which it was started, which may be another now.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    storage.configure(options)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
