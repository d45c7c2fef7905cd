"""Lines that a run logs while it works, through `logging`: notes on standard output, warnings on standard error.

A module logs to `logger(__name__)`; results of commands, progress and the last words of a failing process are printed.
One handler of the logger `clozeworks` shows all lines, to a caller of the Python API as in a command. A caller who sets
handlers or a level of this logger gets them instead, except those of worker processes, which show their own.
"""

from __future__ import annotations

import sys
import threading
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

_NAME = "clozeworks"

_setting_up = threading.RLock()


def logger(name: str) -> logging.Logger:
    """Return the logger of a module; rank 0 alone logs what all ranks find alike."""
    with _setting_up:  # once, also where two threads log the first lines
        project = _project()
    return project.getChild(name)


@cache
def _project() -> logging.Logger:
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

            tqdm.write(record.getMessage(), file=sys.stdout)
            sys.stdout.flush()

    project = logging.getLogger(_NAME)
    if project.level == logging.NOTSET:
        project.setLevel(logging.INFO)
    if not project.handlers:
        project.propagate = False  # the root's handlers, which libraries add, would show every line again
        project.addHandler(Lines())
    return project
