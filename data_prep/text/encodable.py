"""Checks that names and notes can be stored in a manifest: bytes that are not UTF-8 arrive as lone surrogates."""

from __future__ import annotations

from data_prep.base.errors import UsageError


def check_encodable(text: str, what: str) -> None:
    """Raise if a text cannot be written as UTF-8; `what` names it.

    Raises:
        UsageError: it contains lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{what} {text!r} is not UTF-8, which a manifest requires",
            fix="rename the file, or write it in UTF-8",
            code="not-utf8",
        ) from None
