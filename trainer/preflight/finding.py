"""Findings of the checks before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from data_prep.base.errors import UserError
from data_prep.base.known_secrets import hide_secrets

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """A result of a check: the name of the check, what it found, and the remedy unless the level is ok."""

    level: Level
    name: str
    text: str

    def __str__(self) -> str:
        return hide_secrets(f"{self.level:<4}  {self.name:<12}  {self.text}", keeps_queries=True)


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of a check; a `UserError` of the check is one of them."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except UserError as error:
        findings.append(Finding("fail", name, str(error)))
    return findings
