"""Which settings and variables hold a secret, by their names or by a password in a URL, and text without these values.

Two rules of names: what bears a secret's name among a store's options is only hidden, so that rule is wide; a variable
that does is also kept from the launcher of the ranks, so its rule takes whole words (UCX_IB_PKEY is no key).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from data_prep.base.urls import HIDDEN as HIDDEN
from data_prep.base.urls import SECRET_QUERY, has_password, redact_text

# Names of secrets in the options of s3fs, gcsfs, adlfs and aiohttp. An AWS key id is one of the two halves of a login.
_SECRET_OPTION = re.compile(
    r"key|secret|token|password|passwd|passphrase|credential|sas\b|sas_|signature|connection_string|auth|cookie|header",
    re.IGNORECASE,
)
# AWS_ACCESS_KEY_ID too: handed on without its other half, it hides a login that a host has in a file.
_SECRET_VARIABLE = re.compile(
    r"password|passwd|passphrase|secret|token(?!s|izer)|credential|access_?key|api_?key|(?<![a-z])(?:key|sas)s?$|"
    r"connection_string|authorization|cookie|headers|jwt",
    re.IGNORECASE,
)
_NOT_SECRET = re.compile(r"GOOGLE_APPLICATION_CREDENTIALS|.*_(FILE|PATH|DIR)", re.IGNORECASE)
_SHORTEST_SECRET = 6  # shorter values stand in ordinary words by chance


def is_secret_option(name: str) -> bool:
    """Whether an option of a store's package bears the name of a secret."""
    return _SECRET_OPTION.search(name) is not None


def secret_options(values: Mapping[str, Any], inside_secret: bool = False) -> Iterator[str]:
    """The secrets among a store's options, whatever their depth."""
    for name, value in values.items():
        secret = inside_secret or is_secret_option(str(name))
        if isinstance(value, Mapping):
            yield from secret_options(value, secret)
        elif secret and isinstance(value, str):
            yield value


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold a secret: by their name, or a URL with a password."""
    return {
        name: value
        for name, value in environment.items()
        if len(value) >= _SHORTEST_SECRET and (_is_secret_variable(name) or has_password(value))
    }


def without_secrets(text: str, secrets: Iterable[str], environment: Mapping[str, str]) -> str:
    """The text without these values and those of secret variables, and without users and queries in URLs."""
    # A variable that holds a URL would take the host away as well; its password goes with those of all URLs.
    named = {value for name, value in secrets_of(environment).items() if _is_secret_variable(name)}
    # Whole values first, for a connection string has a URL within.
    for value in sorted({*secrets, *named}, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, HIDDEN)
    return SECRET_QUERY.sub(rf"\1{HIDDEN}", redact_text(text))


def _is_secret_variable(name: str) -> bool:
    return _SECRET_VARIABLE.search(name) is not None and _NOT_SECRET.fullmatch(name) is None
