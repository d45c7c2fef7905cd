"""Executors: the protocol that runs idempotent work units, and the registry of implementations.

A task writes its result under a final name as its last act, so a unit may run twice without harm. Tasks keep what is
expensive to load (the tokenizer) in a cache of their own process.

A new executor is one module with a class that follows `Executor` and a function that takes `ExecutorOptions` and
returns it. Users name it as `--executor module:function`; a package registers it as an entry point of the group
`clozeworks.executors`; the built-in ones are in `EXECUTORS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeVar

from data_prep.base.errors import UsageError, UserError, failure
from data_prep.base.packages import missing_extra
from data_prep.base.registries import Registry
from data_prep.executors.process_executor import ProcessExecutor
from data_prep.executors.worker_server import default_num_workers

EXECUTORS = Registry(
    where="executor={name} (--executor)",
    import_fix="give module:function of a function that takes ExecutorOptions and returns an Executor",
    import_code="unknown-executor",
    callable_fix="give module:function of a function that takes ExecutorOptions and returns an Executor",
    callable_code="unknown-executor",
    unknown_code="unknown-executor",
    built_in={
        "process": "data_prep.executors.executors:open_process_executor",
        "dask": "data_prep.executors.dask_executor:open_dask_executor",
    },
    entry_points="clozeworks.executors",
)

_MOST_WORKERS = 4_096

Unit = TypeVar("Unit")
Result = TypeVar("Result")


class Executor(Protocol):
    """Runs units; leaving the `with` block releases its resources."""

    def run(self, task: Callable[[Unit], Result], units: Sequence[Unit]) -> Iterator[tuple[Unit, Result]]:
        """Run the task on every unit, started in their order, and yield (unit, result) as they finish.

        Task, units and results travel to other processes, so they must be picklable. A task may hold much that all
        units share, so it should go to a process once. The options of `storage.configure` apply there too.
        """
        ...

    def __enter__(self) -> Executor: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True)
class ExecutorOptions:
    """The options of the command line that an executor may use.

    Attributes:
        num_workers: processes of this machine.
        scheduler: address of a cluster.
    """

    num_workers: int = 1
    scheduler: str | None = None


def shared(function: Callable[[Any, Unit], Result], job: Any) -> Callable[[Unit], Result]:
    """Return a function of what all units share, and of a unit, as a task: what is shared goes to a process once."""
    return functools.update_wrapper(functools.partial(function, job), function)


def num_workers(wanted: int | None) -> int:
    """Return the number that the user gave, or one per core."""
    if wanted is not None and not 1 <= wanted <= _MOST_WORKERS:
        raise UsageError(
            f"num_workers={wanted} (--workers) is out of range",
            fix=f"give a number from 1 to {_MOST_WORKERS:,}",
            code="workers-out-of-range",
        )
    return wanted or default_num_workers()


def open_executor(name: str, options: ExecutorOptions) -> Executor:
    """Open an executor by the name of a built-in one, of an entry point, or as `module:function`."""
    factory = _factory(name)
    if name in EXECUTORS.built_in:
        return factory(options)
    try:
        opened = factory(options)
    except UserError:
        raise
    except Exception as error:  # whatever a user's function raises is the user's to fix
        raise UserError(
            f"executor={name} {failure(error)}", fix="correct the executor or its options", code="executor-failed"
        ) from error
    return own_executor(opened, name)


def given_executor(executor: Executor) -> AbstractContextManager[Executor]:
    """Return an executor object of the caller, who also closes it, as a context."""
    return nullcontext(own_executor(executor, type(executor).__name__))


def own_executor(opened: Any, name: str) -> Executor:
    """Return an executor that the user made as a context that checks its results."""
    if not callable(getattr(opened, "run", None)):
        raise UsageError(
            f"executor={name} is {type(opened).__name__}, which has no method run",
            fix="give an object with run(task, units), which yields (unit, task(unit)) as they finish",
            code="unknown-executor",
        )
    return opened if isinstance(opened, ProcessExecutor) else _OwnExecutor(opened, name)


class _OwnExecutor:
    """An executor of the user: it need not be a context, and all its results must come."""

    def __init__(self, executor: Any, name: str) -> None:
        self._executor, self._name = executor, name

    def run(self, task: Callable[[Unit], Result], units: Sequence[Unit]) -> Iterator[tuple[Unit, Result]]:
        num_results = 0
        try:
            for result in self._executor.run(task, units):
                num_results += 1
                yield result
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # such as a full disk
            raise UserError(
                f"executor={self._name} {failure(error)}",
                fix="correct it and rerun the same command; finished work is kept",
                code="executor-failed",
            ) from error
        if num_results != len(units):
            raise UserError(
                f"executor={self._name} yielded {num_results:,} results for {len(units):,} units",
                fix="yield (unit, task(unit)) once for every unit; finished work is kept",
                code="executor-failed",
            )

    def __enter__(self) -> Executor:
        if hasattr(self._executor, "__enter__"):
            self._executor.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self._executor, "__exit__"):
            self._executor.__exit__(kind, error, trace)


def open_process_executor(options: ExecutorOptions) -> Executor:
    """Open a pool of processes of this machine."""
    if options.scheduler is not None:
        raise UsageError(
            f"scheduler={options.scheduler} contradicts executor=process, which has no scheduler",
            fix="give --executor dask (in Python: executor='dask'), or leave the scheduler out",
            code="scheduler-without-cluster",
        )
    return ProcessExecutor(options.num_workers)


def run_units(
    task: Callable[[Unit], Result], units: Sequence[Unit], executor: Executor | int
) -> Iterator[tuple[Unit, Result]]:
    """Run units as `Executor.run` does; a number stands for a pool of so many processes, which ends with the units."""
    if isinstance(executor, int):
        with ProcessExecutor(executor) as pool:
            yield from pool.run(task, units)
    else:
        yield from executor.run(task, units)


def num_processes(executor: Executor | int, num_units: int) -> int | None:
    """Return how many processes will run so many units at once; None if the executor does not say."""
    found = executor if isinstance(executor, int) else getattr(executor, "num_workers", None)
    return max(1, min(found, num_units)) if isinstance(found, int) else None


def _factory(name: str) -> Callable[[ExecutorOptions], Executor]:
    try:
        return EXECUTORS.find(name).value
    except UsageError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError):
            raise
        if answer := missing_extra(missing):
            raise answer from None
        raise UsageError(
            f"executor={name} (--executor) needs the module {missing.name}, which is not installed",
            fix=f"install {missing.name}, or correct the name",
            code="missing-package",
        ) from None
