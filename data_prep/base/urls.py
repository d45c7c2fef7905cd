"""Paths and URLs as text: remote or local, joining, and redaction."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

WEB_SCHEMES = ("http", "https")
HIDDEN = "(hidden)"
# Of paths with a query, which stand in errors of requests; of whole web addresses the query goes in any case.
SECRET_QUERY = re.compile(
    r"(?i)([?&](?:x-amz-[\w-]+|x-goog-[\w-]+|awsaccesskeyid|sig|signature|token|access_token|api_key|key|password)=)"
    r"[^&\s\"']+"
)

OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "memory", "az", "abfs", "abfss", "adl", "oci", "oss", "r2")
_OF_VERSION = "?versionId="  # of a key of S3, the only query that a store takes

_URL_IN_TEXT = re.compile(r"(?<![\w+.-])[\w+.-]*\w://[^\s'\"]+")
# A password may contain "/", "?" and "#" (in SQLAlchemy): then the last "@" ends it, unless they follow a port.
_USER_INFO = re.compile(r"(?<=://)(?:[^/:?#]*:(?!\d*(?:[/?#]|$)).*@|[^/?#]*@)", re.DOTALL)
_PASSWORD = re.compile(r"://[^/\s@:]*:(?!\d+/)[^\s@]+@")  # a password may hold "/", which a port does not


def is_remote(url: str | Path) -> bool:
    """Whether `url` is in an object store or on a server, not a local path."""
    return "://" in str(url) and not str(url).startswith("file://")


def local_path(url: str | Path) -> Path:
    """Return the local path of a `file://` URL or a plain path."""
    return Path(str(url).removeprefix("file://"))


def absolute(url: str) -> str:
    """Return a path or URL that processes in other folders or on other machines can use."""
    return url if is_remote(url) else os.path.abspath(local_path(url))


def join(folder: str | Path, name: str) -> str:
    """Return the path or URL of `name` in `folder`."""
    return f"{str(folder).rstrip('/')}/{name}" if is_remote(folder) else os.path.join(local_path(folder), name)


def folder_of_file(url: str | Path) -> str | None:
    """Return the folder of a local file; None if `url` is not a local file."""
    path = local_path(url)
    return str(path.parent) if not is_remote(url) and path.is_file() else None


def path_parts(url: str) -> list[str]:
    """Return the folders and the name of a file, of a web address without its escapes and query."""
    if not is_remote(url):
        return [part for part in local_path(url).parts if part != os.sep]
    path = redact(url).partition("://")[2]
    is_web = scheme(url) in WEB_SCHEMES
    return [unquote(part) if is_web else part for part in path.split("/") if part]


def scheme(url: str | Path) -> str:
    """The URL's scheme, such as s3; empty for a plain path."""
    return str(url).partition("://")[0] if "://" in str(url) else ""


def name_of(url: str | Path) -> str:
    """Return the last part of a URL's path, without the query of a web address."""
    return redact(url).rstrip("/").rpartition("/")[2]


def has_no_query(url: str | Path) -> bool:
    """Whether `?` and `#` in the URL are parts of a name, as in object stores; only a version of S3 is none."""
    return scheme(url) in OBJECT_STORES and _OF_VERSION not in str(url)


def redact(url: str | Path) -> str:
    """Return the URL without user, password, query and fragment, for messages, manifests and logs."""
    if not is_remote(url):
        return str(url)
    text = _without_user(str(url))
    return SECRET_QUERY.sub(rf"\1{HIDDEN}", text) if has_no_query(url) else re.split("[?#]", text, maxsplit=1)[0]


def redact_text(text: str, keeps_queries: bool = False) -> str:
    """Remove user, password and query of every URL in a text; servers' errors often quote them."""
    if keeps_queries:
        return _URL_IN_TEXT.sub(lambda found: _without_user(found.group()), text)
    return _URL_IN_TEXT.sub(lambda found: _without_query(found.group()), text)


def logins_in(text: str) -> list[str]:
    """User and password of every URL in a text, as they stand there; of a URL with a user alone the user."""
    logins = (_USER_INFO.search(found.group()) for found in _URL_IN_TEXT.finditer(text))
    return [login.group()[:-1] for login in logins if login is not None]


def has_login(url: str | Path) -> bool:
    """Whether a URL names a user, as in s3://KEY:SECRET@bucket; the container of an Azure URL is none."""
    return not scheme(url).startswith("abfs") and _without_user(str(url)) != str(url)


def has_password(text: str) -> bool:
    """Whether the text, such as an argument of a command line, contains a URL with user and password."""
    return _PASSWORD.search(text) is not None


def _without_user(url: str) -> str:
    return _USER_INFO.sub("", url)


def _without_query(url: str) -> str:
    return redact(url) if has_no_query(url) else _without_user(url).partition("?")[0]
