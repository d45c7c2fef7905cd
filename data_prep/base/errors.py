"""The errors of the whole project: what is wrong, how to fix it, and a stable code.

Commands print a `UserError` as one paragraph without a traceback: `error: WHAT (VALUE). Fix: WHAT TO DO. [CODE]`.
Every other exception is a bug of this project and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
import re
import select
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from data_prep.base.known_secrets import hide_secrets, remember_logins
from data_prep.base.logs import hide_secrets_in_records
from data_prep.base.standard_streams import OutputLost, lead_to_nowhere, prepare_standard_streams
from data_prep.base.terminal import paragraph

_SHOWN_CHARACTERS = 500
READER_GONE_STATUS = 141
"""128 + SIGPIPE, as in a shell."""


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
        # The texts may quote another library, and go from here to a screen, a file, a run or a caller.
        problem, fix = (hide_secrets(text, keeps_queries=True) for text in (problem, fix))
        super().__init__(f"{problem.rstrip('. ')}. Fix: {fix.rstrip('. ')}." if fix else problem)
        self.problem = problem
        self.fix = fix
        self.code = code


class UsageError(UserError):
    """A wrong command line or configuration; nothing was started."""

    exit_status = 2


def failure(error: BaseException) -> str:
    """Describe where and how a function that the user brought failed."""
    frames = traceback.extract_tb(error.__traceback__)
    # The last may be code that a library made, such as the methods of a frozen dataclass.
    frame = next((frame for frame in reversed(frames) if not frame.filename.startswith("<")), frames[-1])
    what = str(error)
    shortened = what if len(what) <= _SHOWN_CHARACTERS else f"{what[:_SHOWN_CHARACTERS]}..."
    return f"failed at {frame.filename}:{frame.lineno} ({type(error).__name__}: {shortened})"


class Stopped(BaseException):
    """A signal ended the process and finished work is kept; like `KeyboardInterrupt`, not an `Exception`."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.exit_status = 128 + signal_number  # as in a shell


@contextmanager
def options_as_parameters() -> Iterator[None]:
    """Name the parameters of a function in errors, where its command names options; commands in backticks stay."""
    try:
        yield
    except UserError as error:
        error.problem, error.fix = _with_parameters(error.problem), _with_parameters(error.fix)
        error.args = (f"{error.problem.rstrip('. ')}. Fix: {error.fix.rstrip('. ')}." if error.fix else error.problem,)
        raise


def _with_parameters(text: str) -> str:
    """`--label-column X` becomes `label_column=X`, `--pair-column` becomes `pair_column=`."""

    def parameter(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        return {"no_quoting": "quoting=False", "no_tracking": "is_tracked=False"}.get(name, f"{name}=")

    parts = text.split("`")
    parts[::2] = [
        re.sub(r"--([a-z]+(?:-[a-z]+)*)(?: (?=[\d'\[A-Z])|(?<=--task) |(?<=--output) (?!is |has ))?", parameter, part)
        for part in parts[::2]
    ]
    return "`".join(parts)


def unusable_name(error: OSError) -> UsageError | None:
    """Return the error for a file name that the system does not accept; None for other errors."""
    if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP) or error.filename is None:
        return None
    return UsageError(
        f"{os.fsdecode(error.filename)}: {error.strerror}", fix="choose another name", code="unusable-file-name"
    )


def missing_working_folder(error: OSError) -> UsageError | None:
    """Return the error for a deleted working folder; None for other errors."""
    try:
        os.getcwd()
    except FileNotFoundError:
        if not isinstance(error, FileNotFoundError):
            return None
        return UsageError(
            "the working folder was deleted",
            fix="change into an existing folder and rerun the same command",
            code="missing-working-folder",
        )
    return None


def run_command(command: Callable[[], None], speaks: bool = True, extra: str | None = None) -> None:
    """Run a command's main function and end the process: status 0, or the error's paragraph and its status.

    A reader that closes the output early (`| head`, `q` in `less`) ends the command quietly, with the status of a
    process that SIGPIPE ended. Output that cannot be written for another reason is an error; messages that cannot be
    written are dropped. With `speaks=False`, as on all ranks but the first, errors are not printed. `extra` is the
    extra of pyproject.toml that the command needs, for the error about a library that is not installed.
    """
    prepare_standard_streams()
    hide_secrets_of_others()
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
    """Run a command, print its error and return the exit status; a `SystemExit` propagates."""
    try:
        command()
    except OutputLost as error:
        message = (
            f"error: standard output cannot be written ({error.strerror}). Fix: redirect it elsewhere and rerun the "
            "same command. [unwritable-output]"
        )
        status = UserError.exit_status
        lead_to_nowhere(1)
    except (UserError, OSError) as error:
        problem = unusable_name(error) or missing_working_folder(error) if isinstance(error, OSError) else error
        if problem is None:
            raise
        code = f" [{problem.code}]" if problem.code else ""
        message, status = f"error: {paragraph(problem)}{code}", problem.exit_status
    except ModuleNotFoundError as error:
        from data_prep.base.packages import missing_extra

        missing = missing_extra(error, extra)
        if missing is None:
            raise
        message, status = f"error: {paragraph(missing)} [{missing.code}]", missing.exit_status
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    except Stopped as stopped:
        message, status = "stopped; rerun the same command, without --fresh, to resume", stopped.exit_status
    except SystemExit:
        if status := _run(sys.stdout.flush, speaks):
            return status
        raise
    else:
        return 0
    if speaks:
        print(message, file=sys.stderr, flush=True)
    return status


def hide_secrets_of_others() -> None:
    """Hide secrets, also those of the command's arguments, in tracebacks, and in lines and warnings of libraries."""
    for word in sys.argv[1:]:
        remember_logins(word)
    if "logging" in sys.modules:  # else where what logs is imported: most commands start without it
        hide_secrets_in_records()
    sys.excepthook = print_traceback
    threading.excepthook = _print_traceback_of_thread
    if warnings.formatwarning is not _format_warning:
        _formats.append(warnings.formatwarning)
        warnings.formatwarning = _format_warning


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error, a bug of this project, without secrets."""
    print(hide_secrets("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr, flush=True)


def _print_traceback_of_thread(arguments: threading.ExceptHookArgs) -> None:
    if arguments.exc_type is not SystemExit and arguments.exc_value is not None:
        print_traceback(arguments.exc_type, arguments.exc_value, arguments.exc_traceback)


_formats: list[Callable[..., str]] = []
"""What formatted warnings before."""


def _format_warning(*arguments: Any, **options: Any) -> str:
    return hide_secrets(_formats[-1](*arguments, **options))


def _is_reader_gone() -> bool:
    """Whether standard output or error is a pipe without a reader; another pipe may have broken."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)  # errors alone, which poll reports always
    return any(events & select.POLLERR for _, events in poll.poll(0))
