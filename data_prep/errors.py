"""The errors of the whole project: what a user can mend, told in one paragraph.

A `UserError` names what is wrong, where, and what to do about it; commands print it without a traceback.
Everything else that is raised is a mistake of ours and keeps its traceback.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable

from data_prep.terminal import paragraph

READER_GONE_STATUS = 141
"""128 + SIGPIPE, as a shell has it."""


class UserError(Exception):
    """Something failed on the way that the user can mend: bad input, a damaged file, a full disk."""

    exit_status = 1


class UsageError(UserError):
    """The command line or the configuration is wrong; nothing was started."""

    exit_status = 2


def run_command(command: Callable[[], None], speaks: bool = True) -> None:
    """Run a command's main function and end the process: status 0, or the error's paragraph and its status.

    A reader of the output that has seen enough (`| head`, `q` in `less`) ends it quietly, with the status of a process
    that SIGPIPE ended. Where it does not speak, as all ranks but the first, errors are left to another process.
    """
    status = 0
    try:
        status = _run(command, speaks)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):  # what is still in the buffers goes there, and not into a complaint at the end
            os.dup2(nowhere, descriptor)
        status = status or READER_GONE_STATUS
    if status:
        sys.exit(status)


def _run(command: Callable[[], None], speaks: bool) -> int:
    """The exit status of a command, its error told; a `SystemExit` that it raises goes on."""
    try:
        command()
    except UserError as error:
        message, status = f"error: {paragraph(error)}", error.exit_status
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    except SystemExit:
        sys.stdout.flush()
        raise
    else:
        return 0
    if speaks:
        print(message, file=sys.stderr, flush=True)
    return status


def _is_reader_gone() -> bool:
    """Whether standard output or error is a pipe that nobody reads; another pipe may have broken."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)  # errors alone, which need not be asked for
    return any(events & select.POLLERR for _, events in poll.poll(0))
