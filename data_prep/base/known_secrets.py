"""Which settings, variables and URLs hold a secret, and `hide_secrets`: text without these values.

Every text of another library goes through `hide_secrets` on its way to a person, a file or a run: that of a
`UserError` when the error is made, a line of a logger, a warning and a traceback when they are printed.

Two rules of names: what bears a secret's name among a store's options is only hidden, so that rule is wide; a variable
that does is also kept from the launcher of the ranks, so its rule takes whole words (UCX_IB_PKEY is not a key).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from data_prep.base.environment import environment_now
from data_prep.base.urls import HIDDEN as HIDDEN
from data_prep.base.urls import SECRET_QUERY, has_password, logins_in, redact_text

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


_WORDS = {"mlflow", "postgres", "clozeworks"}  # as passwords they hide nothing, and messages need them

_known: set[str] = set()


def remember_secrets(values: Iterable[str]) -> None:
    """Hide these values in every text from here on."""
    _known.update(values)


def remember_logins(text: str) -> None:
    """Hide the logins of all URLs in a text, also where a library quotes them without the URL."""
    if "://" in text:
        _known.update(_logins(text))


def hide_secrets(text: str, keeps_queries: bool = False) -> str:
    """Return the text without known secrets, those of the environment, and users in URLs.

    Args:
        keeps_queries: only the parameters of queries that bear the name of a secret are hidden, as in addresses of
            pages that a person is to open; else queries go altogether.
    """
    return without_secrets(text, _known, environment_now(), keeps_queries)


def is_secret_option(name: str) -> bool:
    """Whether an option of a store's package bears the name of a secret."""
    return _SECRET_OPTION.search(name) is not None


def secret_options(values: Mapping[str, Any], inside_secret: bool = False) -> Iterator[str]:
    """The secrets among a store's options, whatever their depth."""
    for name, value in values.items():
        secret = inside_secret or is_secret_option(str(name))
        if isinstance(value, Mapping):
            yield from secret_options(value, secret)
        elif secret and isinstance(value, str | int) and not isinstance(value, bool):
            yield str(value)


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold a secret: by their name, or a URL with a password."""
    return {
        name: value
        for name, value in environment.items()
        if len(value) >= _SHORTEST_SECRET and (_is_secret_variable(name) or has_password(value))
    }


def without_secrets(
    text: str, secrets: Iterable[str], environment: Mapping[str, str], keeps_queries: bool = False
) -> str:
    """The text without these values and those of secret variables, and without users and queries in URLs."""
    named = {secret for variable in environment.items() for secret in _secrets_of_variable(*variable)}
    # Whole values first, for a connection string has a URL within.
    for value in sorted({*secrets, *named}, key=len, reverse=True):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, HIDDEN)
    return SECRET_QUERY.sub(rf"\1{HIDDEN}", redact_text(text, keeps_queries))


def _logins(text: str) -> set[str]:
    """User with password, and password, of every URL with both, also as they are decoded."""
    found: set[str] = set()
    for login in logins_in(text):
        for spelling in (login, unquote(login)):
            user, _, password = spelling.partition(":")
            if password:
                found |= {spelling, password} | ({user} if user.isupper() else set())  # the key id of an S3 login
    return found - _WORDS


@functools.lru_cache(maxsize=1024)  # every error asks for all variables
def _secrets_of_variable(name: str, value: str) -> frozenset[str]:
    # Of a URL under another name only the login is hidden, so that the host stays.
    if len(value) < _SHORTEST_SECRET:
        return frozenset()
    return frozenset(_logins(value) if has_password(value) else ()) | ({value} if _is_secret_variable(name) else set())


def _is_secret_variable(name: str) -> bool:
    return _SECRET_VARIABLE.search(name) is not None and _NOT_SECRET.fullmatch(name) is None
