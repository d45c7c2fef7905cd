"""Which names and aliases MLflow's registry takes: checked before any work is done."""

from __future__ import annotations

import regex

from data_prep.base.errors import UsageError

PREVIOUS = "previous"
"""The alias of the version that bore the promoted alias before."""


def check_names(name: str, alias: str | None) -> None:
    """Refuse names that MLflow would refuse after the work was done.

    Raises:
        UsageError: the name or the alias is of a form that MLflow does not allow.
    """
    if name != name.strip() or not regex.fullmatch(r"[^/:@%?'\"\p{Cc}\p{Cs}]{1,250}", name) or not name.strip("."):
        raise UsageError(
            f"--name {name!r} cannot name a model; leave out / : @ % ?, quotation marks and control characters"
        )
    if alias is not None and (
        not regex.fullmatch(r"[\w-]{1,255}", alias) or regex.fullmatch(r"v\d+|latest", alias, regex.IGNORECASE)
    ):
        raise UsageError(
            f"--alias {alias!r} cannot be an alias; take letters, digits, '-' and '_', but neither 'latest' nor 'v1'"
        )


def check_promoted(name: str, alias: str) -> None:
    """Refuse an alias that no promotion can move.

    Raises:
        UsageError: as `check_names`, or it is the one that a promotion gives to the version before.
    """
    check_names(name, alias)
    if alias == PREVIOUS:
        raise UsageError(f"--promote {PREVIOUS}: that alias is set by a promotion to the version before; take another")
