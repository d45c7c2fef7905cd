"""Lines that a run logs while it works, through `logging`: notes on standard output, warnings on standard error.

A module logs to `logger(__name__)`; results of commands and the last words of a failing process are printed. One
handler of the logger `clozeworks` shows all lines. Another one there, or another level, gives them to the caller of the
Python API.
"""

from __future__ import annotations

import logging
import sys
from functools import cache

_NAME = "clozeworks"


def logger(name: str) -> logging.Logger:
    """Return the logger of a module; rank 0 alone logs what all ranks find alike."""
    return _project().getChild(name)


@cache
def _project() -> logging.Logger:
    """The logger of the project, with its handler."""
    project = logging.getLogger(_NAME)
    project.setLevel(logging.INFO)
    project.propagate = False  # the root's handlers, which libraries add, would show every line again
    project.addHandler(_Lines())
    return project


class _Lines(logging.Handler):
    """Shows a note as it is, above a progress bar, and a warning after the word."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            print(f"warning: {record.getMessage()}", file=sys.stderr, flush=True)
            return
        from tqdm import tqdm  # here: most commands log no note

        tqdm.write(record.getMessage(), file=sys.stdout)
        sys.stdout.flush()
