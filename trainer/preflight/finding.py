"""What a check before a run finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from data_prep.base.errors import UserError
from data_prep.base.known_secrets import hide_secrets

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """What one check found: a short name of what was looked at, what was seen, and the remedy where it is not well."""

    level: Level
    name: str
    text: str

    def __str__(self) -> str:
        return hide_secrets(f"{self.level:<4}  {self.name:<12}  {self.text}", keeps_queries=True)


def guarded(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of a check; an error that the user can fix is one too."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except UserError as error:
        findings.append(Finding("fail", name, str(error)))
    return findings
