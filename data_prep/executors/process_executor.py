"""Running units in a pool of processes of this machine.

Each worker runs one unit at a time and has a pipe of its own: workers share nothing, so none can block another.

Not `concurrent.futures`: its queues need named semaphores, for which a killed resource tracker prints tracebacks, and
when the fork server is killed it leaves workers behind and may wait for them forever.

A worker does not import the `__main__` module of its parent: a script needs no `if __name__ == "__main__"`, and
functions that a script or notebook defines travel by value.
"""

from __future__ import annotations

import contextlib
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
from types import TracebackType
from typing import Any, TypeVar

from data_prep.base import progress
from data_prep.base.environment import environment_now
from data_prep.base.errors import UserError
from data_prep.base.garbage import collect_rarely
from data_prep.base.logs import logger
from data_prep.base.terminal import counted
from data_prep.executors.worker_server import START_METHOD, start_worker_server
from data_prep.storage import storage

MAX_LOSSES = 3

# Starting a process may raise these when the fork server was killed.
_NOT_STARTED = (EOFError, ConnectionError, FileNotFoundError)
# Sending to or receiving from a killed process raises these; a process killed while it sends raises a bare OSError.
_LOST = (EOFError, OSError)
_SERVER_END_SECONDS = 0.2  # from when a killed server closes its pipes until the system reports its end

_starting = threading.Lock()

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class ProcessExecutor:
    """Runs units in processes of this machine, which it keeps from one run to the next.

    With one worker or one unit, the units run in this process, in order. When a worker is killed, all workers end, and
    new ones run the unfinished units.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> ProcessExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_workers(at_once=error is not None)

    def warm_up(self, task: Callable[[Unit], object], unit: Unit) -> None:
        """Start the processes, and run the task in each while this process does something else.

        Results and errors are ignored: units that depend on the task do it themselves.
        """
        if self.num_workers == 1:
            return
        try:
            self._start_workers(self.num_workers)
        except _WorkerLost:
            self._end_workers(at_once=True)
        pickled = _dumps(task)
        for worker in self._workers:
            worker.begin(pickled, None, unit)

    def run(self, task: Callable[[Unit], Result], units: Sequence[Unit]) -> Iterator[tuple[Unit, Result]]:
        """See `Executor.run`."""
        if min(self.num_workers, len(units)) <= 1:
            for unit in units:
                try:
                    result = task(unit)
                finally:
                    progress.unit_ended(None)
                yield unit, result
            return
        unfinished, pickled = dict(enumerate(units)), _dumps(task)
        for losses in range(1, MAX_LOSSES + 1):
            try:
                for number, result in self._run_in_workers(pickled, unfinished):
                    yield unfinished.pop(number), result
                return
            except _WorkerLost:
                logger(__name__).warning(
                    f"a worker process was killed; resubmitting {counted(len(unfinished), 'unfinished unit')} "
                    f"(attempt {losses} of {MAX_LOSSES})"
                )
        raise UserError(
            f"worker processes were killed {MAX_LOSSES} times, most likely because memory ran out",
            fix="rerun the same command with fewer --workers; it resumes from the finished units",
            code="workers-killed",
        )

    def _run_in_workers(self, task: bytes, units: Mapping[int, Any]) -> Iterator[tuple[int, Any]]:
        """Yield (number, result) pairs as they come, also those that were done before a worker was killed."""
        waiting = list(units.items())[::-1]
        try:
            self._start_workers(min(self.num_workers, len(waiting)))
            for worker in self._workers:
                if waiting and not worker.is_busy:
                    worker.begin(task, *waiting.pop())
            is_lost = False
            while not is_lost and (waiting or any(worker.number is not None for worker in self._workers)):
                busy = {worker.connection: worker for worker in self._workers if worker.is_busy}
                for connection in multiprocessing.connection.wait(list(busy)):
                    worker = busy[connection]
                    number = worker.number
                    try:
                        if not worker.receive():
                            continue
                        result = worker.result()
                    except _WorkerLost:
                        is_lost = True
                        continue
                    if waiting:
                        worker.begin(task, *waiting.pop())  # before the consumer of the result takes its time
                    if number is not None:
                        yield number, result
            if is_lost:
                raise _WorkerLost
        except BaseException:
            # A unit may take minutes, and its result is useless now or is written again.
            self._end_workers(at_once=True)
            raise

    def _start_workers(self, count: int) -> None:
        while len(self._workers) < count:
            self._workers.append(_Worker())

    def _end_workers(self, at_once: bool) -> None:
        while self._workers:
            self._workers.pop().end(at_once)


class _WorkerLost(Exception):
    """A worker or the fork server was killed."""


class _Traceback(Exception):
    """The worker's traceback of an error; set as the cause of that error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Worker:
    """The parent's end of a worker, which is idle or runs one unit.

    Attributes:
        is_busy: it runs a unit, or was killed with one.
        number: number of the unit; None if the result is ignored.
    """

    def __init__(self) -> None:
        """Start the process; raise `_WorkerLost` if the fork server was killed meanwhile."""
        start_worker_server()
        context: Any = multiprocessing.get_context(START_METHOD)  # its type has no Process
        self.connection, theirs = context.Pipe()
        self.is_busy = False
        self.number: int | None = None
        self._task = b""
        self._answer: Any = None
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
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
            raise _WorkerLost
        self._process = process

    def begin(self, task: bytes, number: int | None, unit: object) -> None:
        """Have the idle worker run a unit by a pickled task; if it was killed, `result` raises `_WorkerLost`.

        The task goes to the worker with its first unit, and stays there until it gets another one.
        """
        self.is_busy, self.number = True, number
        new_task, self._task = (b"" if self._task is task else task), task
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
        """Return the result of the task, which was received, or raise its error.

        The outcome of a unit without a number is ignored. A killed process raises `_WorkerLost`.
        """
        progress.unit_ended(self)
        if self._answer is None:
            raise _WorkerLost
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


def _serve(connection: Connection) -> None:
    """Run tasks from the pipe until None arrives or the parent is gone."""
    collect_rarely()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()
    progress.report_to(connection.send)
    task: list[Callable[[Any], Any]] = []
    with contextlib.suppress(*_LOST):
        while (work := connection.recv()) is not None:
            new_task, unit, options, environment = work
            # The fork server keeps the environment of its own start.
            if environment_now() != environment:
                os.environ.clear()
                os.environ.update(environment)
            if storage.options() != options:
                storage.configure(options)
            outcome = _outcome(task, new_task, unit)
            try:
                answer = pickle.dumps(outcome)
                pickle.loads(pickle.dumps(outcome[1]))  # noqa: S301 - some errors can be pickled, and not read again
            except Exception as error:  # noqa: BLE001 - classes of users decide what it is
                problem = RuntimeError(f"what a unit returned or raised cannot be pickled: {error}")
                answer = pickle.dumps((None, problem, outcome[2]))
            connection.send_bytes(answer)


def _end_with_parent() -> None:
    """End this worker once its parent is gone, also in the middle of a task."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _outcome(task: list[Callable[[Any], Any]], new_task: bytes, unit: bytes) -> tuple[Any, BaseException | None, str]:
    """Run the task, of which the worker keeps one; return its result, or its error and traceback."""
    try:
        if new_task:
            task[:] = [pickle.loads(new_task)]  # noqa: S301 - of the parent process
        return task[0](pickle.loads(unit)), None, ""  # noqa: S301
    except BaseException as error:  # noqa: BLE001 - every error goes to the caller
        return None, error, traceback.format_exc()


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
