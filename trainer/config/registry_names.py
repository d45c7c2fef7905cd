"""Names and aliases that MLflow's registry accepts, checked before any work is done."""

from __future__ import annotations

import regex

from data_prep.base.errors import UsageError

PREVIOUS = "previous"
"""Alias of the version that held the promoted alias before."""


def check_names(name: str, alias: str | None) -> None:
    """Check a model name and an alias before the work, because MLflow checks them after it.

    Raises:
        UsageError: MLflow does not allow the name or the alias.
    """
    if name != name.strip() or not regex.fullmatch(r"[^/:@%?'\"\p{Cc}\p{Cs}]{1,250}", name) or not name.strip("."):
        raise UsageError(
            f"--name {name!r} is not a valid model name",
            fix="use 1 to 250 characters without / : @ % ?, quotation marks and control characters",
            code="invalid-model-name",
        )
    if alias is not None and (
        not regex.fullmatch(r"[\w-]{1,255}", alias) or regex.fullmatch(r"v\d+|latest", alias, regex.IGNORECASE)
    ):
        raise UsageError(
            f"--alias {alias!r} is not a valid alias",
            fix="use letters, digits, '-' and '_', but neither 'latest' nor 'v1'",
            code="invalid-alias",
        )


def check_promoted(name: str, alias: str) -> None:
    """Check an alias that a promotion is to move.

    Raises:
        UsageError: as `check_names`, or the alias is reserved for the version that held the promoted alias before.
    """
    check_names(name, alias)
    if alias == PREVIOUS:
        raise UsageError(
            f"--promote {PREVIOUS} is reserved: a promotion gives this alias to the old version",
            fix="choose another alias",
            code="reserved-alias",
        )
