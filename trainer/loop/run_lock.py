"""One run at a time in an output directory: rank 0 holds the lock of the directory as long as the run lives.

Two runs would overwrite each other's checkpoints, metrics and status. The lock ends with the process of rank 0, so a
killed run does not block a restart.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.base.logs import logger
from data_prep.storage.locks import LOCK_NAME, IsHeld, hold_lock
from trainer.distributed.process_group import Ranks, broadcast_object
from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS

LOG = logger(__name__)

PATIENCE_SECONDS = 120
"""The previous run of a requeued job may still be saving, or its host may be lost: NFS keeps the lock of a lost host
for another 90 seconds (Linux default)."""
LOOK_SECONDS = 1.0


class IsHeldElsewhere(IsHeld):
    """A process on another host, maybe a lost one, still holds the directory: a later attempt may succeed."""

    exit_status = LOST_RANK_EXIT_STATUS


@contextlib.contextmanager
def only_training(output_dir: str, ranks: Ranks, mark: Callable[[str], None]) -> Iterator[None]:
    """Lock the output directory during the block; a collective.

    `mark` is called every second of waiting, and no rank waits inside a collective.

    Raises:
        IsHeld: another run still works there after `PATIENCE_SECONDS`; on all ranks, as the next.
        UserError: the directory cannot be written.
    """
    path = Path(output_dir)
    made = [folder for folder in (path, *path.parents) if ranks.is_first and not folder.exists()]
    try:
        with contextlib.ExitStack() as stack:
            looks = round(PATIENCE_SECONDS / LOOK_SECONDS)
            for looks_left in range(looks, -1, -1):
                error = broadcast_object(_take(stack, output_dir) if ranks.is_first else None, ranks)
                if error is None:
                    break
                if not isinstance(error, IsHeld) or not looks_left:
                    raise error
                if looks_left == looks and ranks.is_first:
                    LOG.warning(f"{error.problem}; waiting up to {PATIENCE_SECONDS} s for its end")
                mark("waiting for another run in output_dir to end")
                time.sleep(LOOK_SECONDS)
            yield
    finally:
        for folder in made:  # a rejected run leaves no directory
            with contextlib.suppress(OSError):
                folder.rmdir()


def _take(stack: contextlib.ExitStack, output_dir: str) -> UserError | None:
    """Take the lock and keep it in `stack`; return the error instead of raising it."""
    try:
        stack.enter_context(hold_lock(output_dir))
    except IsHeld as error:
        process, _, host = error.holder.rpartition(" on ")
        kind = IsHeldElsewhere if process and host != socket.gethostname() else IsHeld
        return kind(
            error.problem,
            error.holder,
            fix=f"wait for it to end; if no run works there, remove {Path(output_dir, LOCK_NAME)}",
        )
    except UserError as error:
        return error
    return None
