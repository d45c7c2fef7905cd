"""The errors of the whole project: what a user can mend, told in one paragraph.

A `UserError` names what is wrong, where, and what to do about it; commands print it without a traceback.
Everything else that is raised is a mistake of ours and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


class UserError(Exception):
    """Something failed on the way that the user can mend: bad input, a damaged file, a full disk."""

    exit_status = 1


class UsageError(UserError):
    """The command line or the configuration is wrong; nothing was started."""

    exit_status = 2


def run_command(command: Callable[[], None]) -> None:
    """Run a command's main function and end the process: status 0, or the error's paragraph and its status."""
    try:
        command()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
