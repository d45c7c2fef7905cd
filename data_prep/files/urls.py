"""Paths and URLs as text: what is remote, how names are joined, and what of a URL may be shown."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

WEB_SCHEMES = ("http", "https")

_USER_IN_URL = re.compile(r"(\w://)[^\s/@]+@")
_QUERY_OF_URL = re.compile(r"(\w://[^\s?'\"]+)\?[^\s'\"]*")


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
    """The URL without user, password and query, fit for messages, manifests and logs."""
    if not is_remote(url):
        return str(url)
    parts = urlsplit(str(url))
    # Not urlunsplit: it makes sqlite:/x of sqlite:///x.
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def redact_text(text: str) -> str:
    """The text with every URL in it redacted; a server's refusal often quotes the URL, credentials included."""
    return _QUERY_OF_URL.sub(r"\1", _USER_IN_URL.sub(r"\1", text))
