"""Names and notes that a manifest can hold: what is not UTF-8 on a disk or a command line comes as lone surrogates."""

from __future__ import annotations

from data_prep.base.errors import UsageError


def check_encodable(text: str, what: str) -> None:
    """Refuse a text that cannot be written as UTF-8; `what` names it.

    Raises:
        UsageError: it holds lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{what} {text!r} is not UTF-8, as all that a manifest holds must be; rename the file, or write it in UTF-8"
        ) from None
