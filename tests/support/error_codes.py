"""Matching errors by their stable code: `pytest.raises(UserError, check=coded("missing-manifest"))`."""

from __future__ import annotations

from collections.abc import Callable

from data_prep.base.errors import UserError


def coded(*codes: str) -> Callable[[BaseException], bool]:
    """Return a check for `pytest.raises` that is true of an error with one of these codes."""
    return lambda error: isinstance(error, UserError) and error.code in codes
