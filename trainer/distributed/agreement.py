"""Agreement of all ranks on configuration, data, code and libraries, checked before the first step; and on errors.

Each rank states facts: those that must be equal on all ranks, and those that may differ between hosts. Two digests per
rank are gathered, so that equal ranks cost one small collective at any world size. If digests differ, one rank for
each different digest broadcasts its facts as JSON. Texts about them lose the secrets of every rank's environment.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from data_prep.base.errors import UsageError, UserError
from data_prep.base.known_secrets import hide_secrets
from trainer.distributed.exit import PrintedByEveryRank
from trainer.distributed.process_group import Ranks, broadcast_bytes, gather_bytes, gather_objects

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
