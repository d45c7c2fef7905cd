"""The errors of the whole project: what is wrong, how to fix it, and a stable code.

Commands print a `UserError` as one paragraph without a traceback: `error: WHAT (VALUE). Fix: WHAT TO DO. [CODE]`.
Every other exception is a bug of this project and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Callable

from data_prep.base.standard_streams import OutputLost, lead_to_nowhere, prepare_standard_streams
from data_prep.base.terminal import paragraph

READER_GONE_STATUS = 141
"""128 + SIGPIPE, as a shell has it."""


class UserError(Exception):
    """A problem that the user can fix: bad input, a damaged file, a full disk.

    Args:
        problem: what is wrong, with the value and where it was found.
        fix: what to do, or the exact command.
        code: stable name of the violated rule in kebab case, such as `missing-manifest`; tests and scripts match it,
            because sentences change.
    """

    exit_status = 1

    def __init__(self, problem: str, *, fix: str = "", code: str = "") -> None:
        super().__init__(f"{problem.rstrip('. ')}. Fix: {fix.rstrip('. ')}." if fix else problem)
        self.problem = problem
        self.fix = fix
        self.code = code


class UsageError(UserError):
    """A wrong command line or configuration; nothing was started."""

    exit_status = 2


class Stopped(BaseException):
    """A signal has asked the process to end, and what was done is kept; no `Exception`, as `KeyboardInterrupt`."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_status = 128 + signal_number  # as a shell has it


def unusable_name(error: OSError) -> UsageError | None:
    """Where the system refused the very name of a file: that, told to the user."""
    if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP) or error.filename is None:
        return None
    return UsageError(f"{os.fsdecode(error.filename)}: {error.strerror}; give another name")


def missing_working_folder(error: OSError) -> UsageError | None:
    """Where a path could not be told because the working folder was deleted: that, told to the user."""
    try:
        os.getcwd()
    except FileNotFoundError:
        gone = "the working folder is gone; change into one that is there, and run the same command again"
        return UsageError(gone) if isinstance(error, FileNotFoundError) else None
    return None


def run_command(command: Callable[[], None], speaks: bool = True, extra: str | None = None) -> None:
    """Run a command's main function and end the process: status 0, or the error's paragraph and its status.

    A reader of the output that has seen enough (`| head`, `q` in `less`) ends it quietly, with the status of a process
    that SIGPIPE ended. Output that cannot be written for another reason is an error, and messages that cannot be are
    lost. Where it does not speak, as all ranks but the first, errors are left to another process. `extra` is the extra
    of pyproject.toml that the command needs, for the error about a library that is not installed.
    """
    prepare_standard_streams()
    status = 0
    try:
        status = _run(command, speaks, extra)
        flush_status = _run(sys.stdout.flush, speaks)
        status = status or flush_status
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        lead_to_nowhere(1, 2)
        status = status or READER_GONE_STATUS
    if status:
        sys.exit(status)


def _run(command: Callable[[], None], speaks: bool, extra: str | None = None) -> int:
    """The exit status of a command, its error told; a `SystemExit` that it raises goes on."""
    try:
        command()
    except OutputLost as error:
        reason = f"standard output cannot be written ({error.strerror})"
        message, status = f"error: {reason}; send it elsewhere, and run the same command again", UserError.exit_status
        lead_to_nowhere(1)
    except (UserError, OSError) as error:
        told = unusable_name(error) or missing_working_folder(error) if isinstance(error, OSError) else error
        if told is None:
            raise
        message, status = f"error: {paragraph(told)}{f' [{told.code}]' if told.code else ''}", told.exit_status
    except ModuleNotFoundError as error:
        from data_prep.base.missing_extra import missing_extra

        missing = missing_extra(error, extra)
        if missing is None:
            raise
        message, status = f"error: {paragraph(missing)} [{missing.code}]", missing.exit_status
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    except Stopped as stopped:
        message, status = "stopped; the same command, without --fresh, goes on from here", stopped.exit_status
    except SystemExit:
        if status := _run(sys.stdout.flush, speaks):
            return status
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
