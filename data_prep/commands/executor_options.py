"""Arguments of the subcommands whose work an executor runs."""

from __future__ import annotations

import argparse

from data_prep.executors.executors import Executor, ExecutorOptions, num_workers, open_executor


def add_executor(command: argparse.ArgumentParser, memory: str = "") -> None:
    """Add where the work runs."""
    where = command.add_argument_group("where to run")
    where.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes of this machine; by default one per core (fewer for little text)" + memory,
    )
    where.add_argument(
        "--executor",
        default="process",
        metavar="NAME",
        help="process (default), dask, an installed executor, or module:function",
    )
    where.add_argument("--scheduler", metavar="ADDRESS", help="scheduler of the cluster, such as tcp://10.0.0.1:8786")


def plain_executor(arguments: argparse.Namespace) -> Executor:
    """Open where a command without a configuration of its own runs.

    Raises:
        UsageError: the arguments contradict each other, or a package is missing.
        UserError: the cluster does not answer.
    """
    return open_executor(arguments.executor, ExecutorOptions(num_workers(arguments.workers), arguments.scheduler))
