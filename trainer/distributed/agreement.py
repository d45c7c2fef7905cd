"""Agreement of all ranks, before the first step, on configuration, data, code, libraries and output directory.

Each rank states facts: those that must be equal on all ranks, and those that may differ between hosts. Two digests per
rank are gathered, so that equal ranks cost one small collective at any world size. If digests differ, one rank for
each different digest broadcasts its facts as JSON. Texts about them lose the secrets of every rank's environment.

All ranks share the output directory: rank 0 writes a file there, and every rank reads it. Hosts with separate disks
would each keep a part of every checkpoint, and no host all parts. One run at a time works in the directory: rank 0
keeps its lock until the run ends, because two runs would overwrite each other's checkpoints, metrics and status. The
lock ends with the process of rank 0, so a killed run does not block a restart.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.base.errors import UsageError, UserError
from data_prep.base.known_secrets import hide_secrets
from data_prep.base.logs import logger
from data_prep.storage.locks import LOCK_NAME, IsHeld, hold_lock
from trainer.distributed.exit import PrintedByEveryRank
from trainer.distributed.process_group import Ranks, broadcast_bytes, broadcast_object, gather_bytes, gather_objects
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

_DIGEST_BYTES = 32
_MAX_TEXTS = 8
_MAX_NAMES = 12
_NOT_SET = "not set"


class RanksDiffer(PrintedByEveryRank, UsageError):
    """Ranks of one run have different settings, data, code or libraries."""


class RankCannotRun(PrintedByEveryRank):
    """Some ranks cannot run and others can, for example because one host lacks the data."""

    def __init__(self, problem: str, *, fix: str, code: str, exit_status: int) -> None:
        super().__init__(problem, fix=fix, code=code)
        self.exit_status = exit_status


class FolderIsNotShared(PrintedByEveryRank, UsageError):
    """Not every rank can read what rank 0 wrote into the output directory."""


class IsHeldElsewhere(IsHeld):
    """A process on another host, maybe a lost one, still has the lock of the directory: a later attempt may succeed."""

    exit_status = LOST_RANK_EXIT_STATUS


class Fact(NamedTuple):
    """A value that ranks compare."""

    value: str
    """The compared text; it stays on its rank."""
    display: str
    """The text for messages on other ranks: short and without secrets."""


@dataclass(frozen=True)
class Facts:
    """The facts of a rank, by name."""

    equal: Mapping[str, Fact]
    """Must be equal on all ranks."""
    per_host: Mapping[str, Fact]
    """May differ between hosts; a difference is a warning."""
    problem: UserError | None = None
    """The error that stopped this rank from determining the other facts, which are then not compared."""


class _Variant(NamedTuple):
    """Facts that some ranks share, as stated by the first of these ranks."""

    ranks: list[int]
    host: str
    facts: dict[str, list[str]]
    """By name: a digest of the value, and its display."""
    problem: str | None
    fix: str
    exit_status: int
    code: str


def agree(facts: Facts, ranks: Ranks, warn: Callable[[str], None]) -> None:
    """Compare the facts of all ranks in a collective call; rank 0 passes allowed differences to `warn`.

    Raises:
        RanksDiffer: ranks differ in facts that must be equal; the same text on every rank.
        RankCannotRun: some ranks have a problem; the first such rank's problem, on every rank.
        UserError: all ranks have a problem; this rank's own.
    """
    problem = None if facts.problem is None else (str(facts.problem), facts.problem.exit_status)
    own = _digest([_values(facts.equal), problem]) + _digest(_values(facts.per_host))
    digests = gather_bytes(own, ranks)
    variants = _variants([each[:_DIGEST_BYTES] for each in digests], facts.equal, facts.problem, ranks)
    if differences := describe_differences(variants):
        raise RanksDiffer(
            f"the ranks do not run the same job: {_without_secrets(differences, ranks)}",
            fix="start every rank with the same configuration, command line, data, code and library versions",
            code="ranks-differ",
        )
    if any(each.problem is None for each in variants):
        for each in variants:
            if each.problem is not None:
                raise RankCannotRun(
                    f"{who(each.ranks, each.host)}: {_without_secrets(each.problem, ranks)}",
                    fix=_without_secrets(each.fix, ranks),
                    code=each.code,
                    exit_status=each.exit_status,
                )
    if facts.problem is not None:
        raise facts.problem
    per_host = _variants([each[_DIGEST_BYTES:] for each in digests], facts.per_host, None, ranks)
    if differences := describe_differences(per_host):
        differences = _without_secrets(differences, ranks)
        if ranks.is_first:
            warn(f"hosts differ, which is allowed here: {differences}")


def raise_error_of_any(error: UserError | None, ranks: Ranks) -> None:
    """Raise this rank's error, or that of the first rank with an error; return if no rank has one; a collective.

    Raises:
        UserError: on all ranks.
    """
    for rank, details in enumerate(gather_objects(error and (error.problem, error.fix, error.code), ranks)):
        if details is not None:
            raise error or UserError(f"rank {rank} ended the run: {details[0]}", fix=details[1], code=details[2])


def describe_differences(variants: Sequence[_Variant]) -> str:
    """Describe each name in which the variants differ, with values and ranks; empty if they do not differ.

    Names that a variant with a problem lacks do not count as differences, because its ranks stopped before them.
    """
    names = dict.fromkeys(name for variant in variants for name in variant.facts)
    differences = [text for name in names if (text := _describe(name, variants)) is not None]
    more = f"; and {len(differences) - _MAX_NAMES} more" if len(differences) > _MAX_NAMES else ""
    return "; ".join(differences[:_MAX_NAMES]) + more


def who(ranks: Sequence[int], host: str) -> str:
    """Describe ranks: the first with its host, and the number of the others."""
    more = f" and {len(ranks) - 1} more rank{'s' if len(ranks) > 2 else ''}" if len(ranks) > 1 else ""
    return f"rank {ranks[0]} ({host}){more}"


def texts_of_different(digests: Sequence[bytes], text: str, ranks: Ranks) -> list[tuple[list[int], str]]:
    """Return the ranks of each different digest (of the first few) and the text of the first of them, by rank.

    A collective call: each rank passes its own text and the same digests, one per rank.
    """
    members: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        members.setdefault(digest, []).append(rank)
    groups = list(members.values())[:_MAX_TEXTS]
    if len(groups) == 1:
        return [(groups[0], text)]
    return [(group, broadcast_bytes(text.encode(), ranks, group[0]).decode()) for group in groups]


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


def _without_secrets(text: str, ranks: Ranks) -> str:
    """Return a text that all ranks have, without the secrets of any rank; a collective call."""
    own = hide_secrets(text, keeps_queries=True)
    digests = gather_bytes(_digest(own), ranks)
    others = {digest: rank for rank, digest in reversed(list(enumerate(digests))) if digest != _digest(text)}
    for source in others.values():
        text = broadcast_bytes(hide_secrets(text, keeps_queries=True).encode(), ranks, source).decode()
    return text


def _describe(name: str, variants: Sequence[_Variant]) -> str | None:
    by_value: dict[str, tuple[str, list[int], str]] = {}
    for variant in variants:
        if name not in variant.facts and variant.problem is not None:
            continue
        digest, display = variant.facts.get(name, ["", _NOT_SET])
        by_value.setdefault(digest, (display, [], variant.host))[1].extend(variant.ranks)
    if len(by_value) == 1:
        return None
    values = by_value.values()
    return f"{name} is " + " and ".join(f"{display} on {who(members, host)}" for display, members, host in values)


def _variants(
    digests: Sequence[bytes], facts: Mapping[str, Fact], problem: UserError | None, ranks: Ranks
) -> list[_Variant]:
    stated = {
        "host": socket.gethostname(),
        "facts": {name: [_digest(fact.value).hex(), fact.display] for name, fact in facts.items()},
        "problem": None if problem is None else problem.problem,
        "fix": "" if problem is None else problem.fix,
        "exit_status": 0 if problem is None else problem.exit_status,
        "code": "" if problem is None else problem.code,
    }
    texts = texts_of_different(digests, json.dumps(stated), ranks)
    return [_Variant(members, **json.loads(text)) for members, text in texts]


def _values(facts: Mapping[str, Fact]) -> dict[str, str]:
    return {name: fact.value for name, fact in facts.items()}


def _digest(value: Any) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
