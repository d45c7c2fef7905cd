"""Paths and URLs as text: what is remote, how names are joined, and what of a URL may be shown."""

from __future__ import annotations

import os
import re
from pathlib import Path

WEB_SCHEMES = ("http", "https")

_URL_IN_TEXT = re.compile(r"\w://[^\s'\"]+")
# A password may hold "/", "?" and "#" (in SQLAlchemy): then the last "@" ends it, unless it is a port that they follow.
_USER_INFO = re.compile(r"(?<=://)(?:[^/:?#]*:(?!\d*(?:[/?#]|$)).*@|[^/?#]*@)", re.DOTALL)
_PASSWORD = re.compile(r"://[^/\s@:]*:(?!\d+/)[^\s@]+@")  # a password may hold "/", which a port does not


def is_remote(url: str | Path) -> bool:
    """Whether `url` lies in an object store or on a server rather than at a local path."""
    return "://" in str(url) and not str(url).startswith("file://")


def local_path(url: str | Path) -> Path:
    """The local path that a `file://` URL or a plain path means."""
    return Path(str(url).removeprefix("file://"))


def join(folder: str | Path, name: str) -> str:
    """The path or URL of `name` in `folder`."""
    return f"{str(folder).rstrip('/')}/{name}" if is_remote(folder) else os.path.join(local_path(folder), name)


def folder_of_file(url: str | Path) -> str | None:
    """The folder of a local file that was given where a folder is asked for; None where `url` is no local file."""
    path = local_path(url)
    return str(path.parent) if not is_remote(url) and path.is_file() else None


def scheme(url: str | Path) -> str:
    """The URL's scheme, such as s3; empty for a plain path."""
    return str(url).partition("://")[0] if "://" in str(url) else ""


def redact(url: str | Path) -> str:
    """The URL without user, password, query and fragment, fit for messages, manifests and logs."""
    return re.split("[?#]", _without_user(str(url)), maxsplit=1)[0] if is_remote(url) else str(url)


def redact_text(text: str) -> str:
    """The text without user, password and query of any URL in it; a server's refusal often quotes them."""
    return _URL_IN_TEXT.sub(lambda found: _without_user(found.group()).partition("?")[0], text)


def has_password(text: str) -> bool:
    """Whether the text, such as a word of a command line, holds a URL with user and password."""
    return _PASSWORD.search(text) is not None


def _without_user(url: str) -> str:
    return _USER_INFO.sub("", url)
