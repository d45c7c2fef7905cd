"""Lines that a run logs while it works, through `logging`: notes on standard output, warnings on standard error.

A module logs to `logger(__name__)`; results of commands, progress and the last words of a failing process are printed.
One handler of the logger `clozeworks` shows all lines, to a caller of the Python API as in a command. A caller who sets
handlers or a level of this logger gets them instead, except those of worker processes, which show their own.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from data_prep.base.known_secrets import hide_secrets

if TYPE_CHECKING:
    import logging

_NAME = "clozeworks"

_setting_up = threading.RLock()
_shows_times = threading.Event()


def logger(name: str) -> logging.Logger:
    """Return the logger of a module; rank 0 alone logs what all ranks find alike."""
    with _setting_up:  # once, also where two threads log the first lines
        child = project_logger().getChild(name)
        if _hide_secrets not in child.filters:
            child.addFilter(_hide_secrets)
    return child


def show_times() -> None:
    """Begin every later note on the console with the time of day (UTC), as a process does that works for hours."""
    _shows_times.set()


def hide_secrets_in_records() -> None:
    """Hide secrets in the records of all loggers, such as those of the packages of stores and MLflow."""
    import logging

    make = logging.getLogRecordFactory()
    if make is not _record:
        _factories.append(make)
        logging.setLogRecordFactory(_record)


_factories: list[Callable[..., logging.LogRecord]] = []
"""What made records before."""


def _record(*arguments: Any, **options: Any) -> logging.LogRecord:
    record = _factories[-1](*arguments, **options)
    _hide_secrets(record)
    return record


def _hide_secrets(record: logging.LogRecord) -> bool:
    """Replace the message and the traceback by those without secrets; True, as a filter that keeps every record."""
    with contextlib.suppress(
        TypeError, ValueError
    ):  # of a message that does not fit its arguments, which logging shows
        record.msg, record.args = hide_secrets(record.getMessage(), keeps_queries=True), ()
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        record.exc_text = hide_secrets("".join(traceback.format_exception(record.exc_info[1])).rstrip())
    return True


@cache
def project_logger() -> logging.Logger:
    """The logger of the project; what the caller set before stays."""
    import logging  # here: commands start sooner without it

    class Lines(logging.Handler):
        """Shows a note as it is, above a progress bar, and a warning after the word."""

        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                # one write also with `python -u`: worker processes share the stream
                print(f"warning: {record.getMessage()}\n", end="", file=sys.stderr, flush=True)
                return
            from tqdm import tqdm  # here: most commands log no note

            moment = time.strftime("%H:%M:%S ", time.gmtime(record.created)) if _shows_times.is_set() else ""
            tqdm.write(moment + record.getMessage(), file=sys.stdout)
            sys.stdout.flush()

    project = logging.getLogger(_NAME)
    if project.level == logging.NOTSET:
        project.setLevel(logging.INFO)
    if not project.handlers:
        project.propagate = False  # the root's handlers, which libraries add, would show every line again
        project.addHandler(Lines())
    return project
