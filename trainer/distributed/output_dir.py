"""The output directory of a run: all ranks share it, and one run at a time works in it.

Rank 0 writes a file there, and every rank reads it: hosts with separate disks would each keep a part of every
checkpoint, and no host all parts.

Rank 0 keeps the lock of the directory until the run ends: two runs would overwrite each other's checkpoints,
metrics and status. The lock ends with the process of rank 0, so a killed run does not block a restart.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from data_prep.base.errors import UsageError, UserError
from data_prep.base.logs import logger
from data_prep.storage.locks import LOCK_NAME, IsHeld, hold_lock
from trainer.distributed.agreement import texts_of_different, who
from trainer.distributed.exit import PrintedByEveryRank
from trainer.distributed.process_group import Ranks, broadcast_bytes, broadcast_object, gather_bytes
from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS

LOG = logger(__name__)

PREFIX = ".shared-folder-"
PATIENCE_SECONDS = 10.0
"""A network file system may show a new file late to other hosts."""
_LOOK_SECONDS = 0.25
_MOST_HOSTS = 4

LOCK_PATIENCE_SECONDS = 120
"""The previous run of a requeued job may still be saving, or its host may be lost: NFS keeps the lock of a lost host
for another 90 seconds (Linux default)."""
LOCK_LOOK_SECONDS = 1.0


class FolderIsNotShared(PrintedByEveryRank, UsageError):
    """Not every rank can read what rank 0 wrote into the output directory."""


def refuse_unshared(folder: str, ranks: Ranks) -> None:
    """Check in a collective call that all ranks share the output directory, which must exist on rank 0.

    Raises:
        FolderIsNotShared: lists the ranks that cannot read rank 0's file, with their paths.
        UserError: rank 0 cannot write there.
    """
    if ranks.world_size == 1:
        return
    try:
        written = broadcast_bytes(json.dumps(_write_nonce(folder)).encode() if ranks.is_first else b"", ranks, 0)
        nonce, problem = json.loads(written)
        if problem is not None:
            raise UserError(problem, fix="free space there, or choose another output_dir", code="unwritable-output-dir")
        reason = _why_unseen(Path(folder, PREFIX + nonce), nonce)
        own = json.dumps({"host": socket.gethostname(), "folder": str(Path(folder).absolute()), "reason": reason})
        # All ranks that can read it form one group, on any hosts.
        digests = gather_bytes(hashlib.sha256(own.encode() if reason else b"").digest(), ranks)
        answers = [(members, json.loads(text)) for members, text in texts_of_different(digests, own, ranks)]
    finally:
        if ranks.is_first:
            _remove_nonces(folder)
    unseen = [
        f"{who(members, each['host'])} cannot access it in {each['folder']} ({each['reason']})"
        for members, each in answers
        if each["reason"] is not None
    ]
    if unseen:
        first = answers[0][1]
        raise FolderIsNotShared(
            f"output_dir={folder} is not a directory that all hosts share: rank 0 ({first['host']}) wrote a file into "
            f"{first['folder']}, and {', '.join(unseen[:_MOST_HOSTS])}",
            fix="mount one directory at output_dir on every host, or set checkpoint.upload_to to a storage that all "
            "hosts reach",
            code="output-dir-not-shared",
        )


def _write_nonce(folder: str) -> tuple[str, str | None]:
    """Write a file with a nonce; return the nonce, and the problem if there is one."""
    nonce = secrets.token_hex(16)
    try:
        with open(Path(folder, PREFIX + nonce), "x", encoding="ascii") as file:
            file.write(nonce)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return nonce, f"output_dir={folder} cannot be written ({error.strerror})"
    return nonce, None


def _why_unseen(path: Path, nonce: str) -> str | None:
    """Return why the file cannot be read within the time; None if it can."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if path.read_text(encoding="ascii", errors="replace") == nonce:
                return None
            reason = "its content is another"
        except OSError as error:
            reason = error.strerror or type(error).__name__
        if time.monotonic() > deadline:
            return reason
        time.sleep(_LOOK_SECONDS)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes NFS ask the server again for missing names


def _remove_nonces(folder: str) -> None:
    """Remove the file of this start, and those of killed starts."""
    for path in Path(folder).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            path.unlink()


class IsHeldElsewhere(IsHeld):
    """A process on another host, maybe a lost one, still has the lock of the directory: a later attempt may succeed."""

    exit_status = LOST_RANK_EXIT_STATUS


@contextlib.contextmanager
def only_training(output_dir: str, ranks: Ranks, mark: Callable[[str], None]) -> Iterator[None]:
    """Lock the output directory during the block; a collective.

    `mark` is called every second of waiting, and no rank waits inside a collective.

    Raises:
        IsHeld: another run still works there after `LOCK_PATIENCE_SECONDS`; on all ranks.
        UserError: the directory cannot be written; on all ranks.
    """
    path = Path(output_dir)
    made = [folder for folder in (path, *path.parents) if ranks.is_first and not folder.exists()]
    try:
        with contextlib.ExitStack() as stack:
            looks = round(LOCK_PATIENCE_SECONDS / LOCK_LOOK_SECONDS)
            for looks_left in range(looks, -1, -1):
                error = broadcast_object(_take(stack, output_dir) if ranks.is_first else None, ranks)
                if error is None:
                    break
                if not isinstance(error, IsHeld) or not looks_left:
                    raise error
                if looks_left == looks and ranks.is_first:
                    LOG.warning(f"{error.problem}; waiting up to {LOCK_PATIENCE_SECONDS} s for its end")
                mark("waiting for another run in output_dir to end")
                time.sleep(LOCK_LOOK_SECONDS)
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
