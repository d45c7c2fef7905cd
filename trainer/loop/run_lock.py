"""One training at a time in an output folder: rank 0 holds the folder's lock for the run's life.

Two at once would write each other's checkpoints, curves and status. The lock ends with rank 0 however that ends, so a
killed run hinders no restart.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.storage.locks import LOCK_NAME, IsHeld, hold_lock
from trainer.checkpoint.writer import warn_on_stderr
from trainer.distributed.process_group import Ranks, broadcast_object
from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS

PATIENCE_SECONDS = 120
"""The run before, as of a job that was requeued, may still be saving, or its host be lost: NFS keeps the lock of a lost
host for another 90 seconds (by default of Linux)."""
LOOK_SECONDS = 1.0


class IsHeldElsewhere(IsHeld):
    """A process of another host holds the folder still, maybe one that is lost: a later try may do."""

    exit_status = LOST_RANK_EXIT_STATUS


@contextlib.contextmanager
def only_training(output_dir: str, ranks: Ranks, mark: Callable[[str], None]) -> Iterator[None]:
    """Keep other runs from the folder while the block runs; all ranks call it alike.

    `mark` hears of every second of waiting, in which no rank stays in a collective.

    Raises:
        IsHeld: another training works there still after `PATIENCE_SECONDS`; on all ranks, as the next.
        UserError: the folder cannot be written.
    """
    path = Path(output_dir)
    made = [folder for folder in (path, *path.parents) if ranks.is_first and not folder.exists()]
    try:
        with contextlib.ExitStack() as held:
            looks = round(PATIENCE_SECONDS / LOOK_SECONDS)
            for looks_left in range(looks, -1, -1):
                error = broadcast_object(_take(held, output_dir) if ranks.is_first else None, ranks)
                if error is None:
                    break
                if not isinstance(error, IsHeld) or not looks_left:
                    raise error
                if looks_left == looks and ranks.is_first:
                    warn_on_stderr(f"{error}. Waiting for up to {PATIENCE_SECONDS} s, as it may be about to end")
                mark("waiting for another training to leave output_dir")
                time.sleep(LOOK_SECONDS)
            yield
    finally:
        for folder in made:  # a run that is refused leaves none
            with contextlib.suppress(OSError):
                folder.rmdir()


def _take(held: contextlib.ExitStack, output_dir: str) -> UserError | None:
    """Take the lock, to be kept with `held`; what stands in the way, and how to free the folder of a lost host."""
    try:
        held.enter_context(hold_lock(output_dir))
    except IsHeld as error:
        process, _, host = error.holder.rpartition(" on ")
        kind = IsHeldElsewhere if process and host != socket.gethostname() else IsHeld
        fix = f"{error.fix}; if no training runs there, remove {Path(output_dir, LOCK_NAME)}"
        return kind(error.problem, error.holder, fix=fix)
    except UserError as error:
        return error
    return None
