"""Files in object stores and on web servers, through fsspec; requests to a busy store are repeated.

fsspec's caches of listings are off, because they hide what other processes wrote. Several threads may use its
filesystems, but forked processes may not: workers are forked from a server that has none.
"""

from __future__ import annotations

import contextlib
import glob
import posixpath
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from data_prep.base.errors import UsageError, UserError
from data_prep.base.known_secrets import hide_secrets, remember_logins
from data_prep.base.logs import hide_secrets_in_records
from data_prep.base.packages import install_command
from data_prep.base.urls import OBJECT_STORES, WEB_SCHEMES, has_login, has_no_query, redact, scheme
from data_prep.storage import remote_reader
from data_prep.storage.exact_keys import abort_s3_uploads, is_s3, remove_path
from data_prep.storage.patterns import Entry, files_of, matching_names, walk
from data_prep.storage.remote_reader import open_ranges
from data_prep.storage.remote_reader import tag as tag
from data_prep.storage.storage_options import forget_other_logins, options_for
from data_prep.storage.store_errors import IncompleteTransfer, explained, http_status, store_code, with_retries

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}

_PART_BYTES = 16 << 20  # of a multipart upload; four are under way at once
# One layer tries again, ours: botocore's and s3fs's own would multiply its attempts and hide them from the user.
_S3_DEFAULTS = {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 1}}

Result = TypeVar("Result")


def info(url: str, seconds: float | None = None) -> dict[str, Any] | None:
    """Return the store's description of a file or folder (`size` in bytes, `type` file or directory, tags), or None.

    Here and below a request to a busy store is repeated for `seconds`, by default those of `retry_seconds`.
    """
    with explained(url, "read"):
        filesystem, path = _filesystem(url)
        try:
            found: dict[str, Any] = with_retries(url, "read", lambda: filesystem.info(path), seconds)
            return found
        except FileNotFoundError as error:
            _raise_if_elsewhere(error)
            return None


def existing(url: str) -> dict[str, Any]:
    """Return the `info` of a file."""
    found = info(url)
    if found is None:
        raise UserError(
            f"{redact(url)} cannot be read: there is no such file", fix="check its name", code="missing-file"
        )
    return found


def size_of(url: str, info: Mapping[str, Any]) -> int:
    """Return the size of a file with this `info`."""
    found: int | None = info["size"]
    if found is None:
        raise UserError(
            f"{redact(url)} cannot be read: the web server does not state its size, or sends it with a "
            "Content-Encoding",
            fix="download it, for example with curl -O, and name the local file",
            code="unknown-size",
        )
    return found


def open_file(url: str) -> BinaryIO:
    """Open for reading; seekable. Reading fails once the object was replaced."""
    with explained(url, "read"):
        filesystem, path = _filesystem(url)
        return open_ranges(url, filesystem, path)


def gives_ranges(url: str) -> bool:
    """Return whether parts of a file can be fetched; some web servers send whole files only."""
    with explained(url, "read"):
        filesystem, path = _filesystem(url)
        return remote_reader.gives_ranges(url, filesystem, path)


def download(url: str, file: Path) -> None:
    """Copy a remote file to a local path, block by block; each request is repeated by itself."""
    with open_file(url) as source, open(file, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)


def read_bytes(url: str, seconds: float | None = None) -> bytes:
    """Return the content of a file, by one request."""
    with explained(url, "read"):
        filesystem, path = _filesystem(url)
        data: bytes = with_retries(url, "read", lambda: filesystem.cat_file(path), seconds)
        return data


def write_bytes(url: str, data: bytes) -> None:
    """Publish the bytes at `url`, whole or not at all."""
    _publish(url, len(data), lambda filesystem, path: filesystem.pipe_file(path, data))


def upload(file: Path, url: str) -> None:
    """Publish a local file at `url`, whole or not at all: the name appears with the last part."""
    _publish(url, file.stat().st_size, lambda filesystem, path: _put(filesystem, str(file), path))


def create(url: str, data: bytes) -> bool:
    """Publish the bytes unless the file exists; return whether they were. As exclusive as the store allows."""

    def create_or_check(filesystem: Any, path: str) -> None:
        try:
            filesystem.pipe_file(path, data, mode="create")
        except (NotImplementedError, TypeError, ValueError):
            _write_if(not filesystem.exists(path), filesystem, path, data)
        except OSError as error:
            if http_status(error) != 501:
                raise
            _write_if(not filesystem.exists(path), filesystem, path, data)

    return _conditional(url, create_or_check)


def replace(url: str, data: bytes, expected: Mapping[str, Any], seconds: float | None = None) -> bool:
    """Publish the bytes if the file is still the one that `info` described as `expected`; return whether they were."""

    def replace_or_check(filesystem: Any, path: str) -> None:
        if is_s3(filesystem):
            with contextlib.suppress(NotImplementedError):
                filesystem.pipe_file(path, data, IfMatch=expected["ETag"])
                return
        _write_if(tag(filesystem.info(path)) == tag(expected), filesystem, path, data)

    return _conditional(url, replace_or_check, seconds)


def list_folder(url: str) -> list[dict[str, Any]]:
    """Return the entries of a folder as `info` describes them, sorted by name; empty if there is no such folder."""
    with explained(url, "read"):
        filesystem, path = _filesystem(url)
        return _list(url, filesystem, path)


def matching(pattern: str) -> list[str]:
    """Return the URLs of the files that a glob pattern (`*`, `?`, `[...]`, `**`) matches, or of the file so named."""
    if scheme(pattern) in WEB_SCHEMES and "*" in pattern:
        raise UsageError(
            f"{redact(pattern)} is a pattern, and a web server cannot list files",
            fix="name every file",
            code="pattern-of-web-addresses",
        )
    exact = info(pattern)
    if exact is not None and exact["type"] != "directory":
        return [pattern]
    with explained(pattern, "read"):
        folders = _StoreFolders(pattern)
        if exact is not None:
            return files_of(folders, redact(pattern), [Entry(redact(pattern), "directory")])
        if scheme(pattern) in WEB_SCHEMES or not glob.has_magic(folders.path):
            return []
        return files_of(folders, redact(pattern), walk(folders, folders.root, folders.path.split("/")))


class _StoreFolders:
    """The folders of the store of a URL; `path` is the path of the URL below `root`, the URL of the store."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._filesystem, path = _filesystem(url)
        self._slash = "/" * path.startswith("/")  # with which paths in memory begin
        self.path = path.strip("/")
        # Where the path lacks a part of the URL, such as the host of sftp://, the URLs of files need it.
        self.root = url.removesuffix(self.path) if self.path and url.endswith(self.path) else f"{scheme(url)}://"

    def entries(self, folder: str, part: str, is_last: bool = True) -> list[Entry]:
        if not is_last and not glob.has_magic(part):
            return [Entry(posixpath.join(folder, part), "directory")]
        # A store may have a file and a folder of one name.
        listed: dict[str, list[Entry]] = {}
        for found in _list(self._url, self._filesystem, self._slash + folder.removeprefix(self.root)):
            path = found["name"].strip("/")
            kind = "directory" if found["type"] == "directory" else "file"
            listed.setdefault(posixpath.basename(path), []).append(Entry(self.root + path, kind))
        return [entry for name in matching_names(list(listed), part) for entry in listed[name]]

    def identity(self, folder: str) -> str:
        return folder


def remove(url: str, seconds: float | None = None) -> None:
    """Remove a file, or a folder with its content; do nothing if there is none."""
    _refuse_web(url, "removed")
    with explained(url, "removed"):
        filesystem, path = _filesystem(url)
        with_retries(url, "removed", lambda: remove_path(filesystem, path), seconds)


def check_name(url: str) -> None:
    """Check that a file or folder of this name may be written to its store.

    Other tools, and earlier releases of this one, read `*` and `?` in a key as a pattern of other keys.
    """
    _refuse_web(url, "written")
    found = next((character for character in url if character in "*?"), None)
    if found:
        raise UsageError(
            f"{redact(url)} cannot be written: in object stores, {found} in a name is read as a pattern of other names",
            fix="choose a name without * and ?",
            code="pattern-in-output",
        )
    _filesystem(url)


def abort_uploads(url: str) -> None:
    """Abort the multipart uploads of this name, or of all below this folder, that killed processes left behind.

    They bear no name, but a store charges for them. Stores without a way to list them are left alone.
    """
    with contextlib.suppress(Exception):
        filesystem, path = _filesystem(url)
        if is_s3(filesystem):
            abort_s3_uploads(filesystem, path)


def _publish(url: str, size: int, put: Callable[[Any, str], None]) -> None:
    check_name(url)
    failures = 0
    with explained(url, "written"):
        filesystem, path = _filesystem(url)

        def attempt() -> None:
            nonlocal failures
            try:
                put(filesystem, path)
                arrived = filesystem.info(path)["size"]
            except Exception:
                failures += 1
                abort_uploads(url)
                raise
            if arrived != size:
                raise IncompleteTransfer(f"that {arrived} of {size} bytes arrived")

        with_retries(url, "written", attempt)
    if failures:  # a store that was down took no request to abort either
        abort_uploads(url)


def _put(filesystem: Any, file: str, path: str) -> None:
    if is_s3(filesystem):
        filesystem.put_file(file, path, chunksize=_PART_BYTES, max_concurrency=4)
    else:
        filesystem.put_file(file, path)


def _conditional(url: str, write: Callable[[Any, str], None], seconds: float | None = None) -> bool:
    check_name(url)
    with explained(url, "written"):
        filesystem, path = _filesystem(url)
        try:
            with_retries(url, "written", lambda: write(filesystem, path), seconds)
        except (FileExistsError, FileNotFoundError):
            return False
        except OSError as error:
            if http_status(error) != 412:
                raise
            return False
        return True


def _write_if(condition: bool, filesystem: Any, path: str, data: bytes) -> None:
    if not condition:
        raise FileExistsError(path)
    filesystem.pipe_file(path, data)


def _list(url: str, filesystem: Any, path: str) -> list[dict[str, Any]]:
    """What a folder holds. fsspec's glob is not used: it treats a folder whose listing fails as empty."""
    try:
        found = with_retries(url, "read", lambda: filesystem.ls(path, detail=True))
    except FileNotFoundError as error:
        _raise_if_elsewhere(error)
        return []
    # A store may list the folder's own placeholder, and lists a file for itself.
    inside = [entry for entry in found if entry["name"].strip("/") != path.strip("/")]
    return sorted(inside, key=lambda entry: entry["name"])


def _raise_if_elsewhere(error: FileNotFoundError) -> None:
    """Raise if more than a file is missing: the bucket, or the permission, which fsspec's web files hide."""
    if store_code(error) == "NoSuchBucket":
        raise error
    if http_status(error) in (401, 403):
        raise PermissionError(str(error)) from None


def _refuse_web(url: str, what: str) -> None:
    if scheme(url) in WEB_SCHEMES:
        raise UserError(
            f"{redact(url)} cannot be {what}: web addresses are read-only",
            fix="give a folder or a bucket",
            code="web-address-read-only",
        )


def _filesystem(url: str) -> tuple[Any, str]:
    """The filesystem of fsspec for the URL, with its options, and the path on it."""
    remember_logins(url)
    if "::" in (url if scheme(url) not in (*OBJECT_STORES, *WEB_SCHEMES) else scheme(url)):
        raise UsageError(
            f"{redact(url)} is a chain of filesystems", fix="give the URL of the file or folder", code="invalid-url"
        )
    if has_no_query(url) and has_login(url):
        raise UsageError(
            f"{redact(url)} is given with a user or password, which URLs of this store do not have",
            fix="remove it, and set AWS_PROFILE, variables such as AWS_ACCESS_KEY_ID, or storage_options for this URL",
            code="credentials-in-url",
        )
    import fsspec  # here: work on local files starts sooner without it

    hide_secrets_in_records()  # of the packages of stores
    given, protocol = options_for(url), scheme(url)
    if protocol in ("s3", "s3a"):
        given = {"max_concurrency": 1} | given | {"config_kwargs": _S3_DEFAULTS | given.get("config_kwargs", {})}
    if protocol in WEB_SCHEMES:  # a compressed answer has no length, and no range of the file
        given = given | {"headers": {"Accept-Encoding": "identity"} | given.get("headers", {})}
    try:
        # Not `url_to_fs`, which takes "::" in a key for a chain of filesystems, and # in one for a version of it.
        kind = fsspec.get_filesystem_class(protocol)
        forget_other_logins(kind)
        of_url = {} if has_no_query(url) else kind._get_kwargs_from_urls(url)
        filesystem = fsspec.filesystem(protocol, **{"use_listings_cache": False} | of_url | given)
        path = kind._strip_protocol(url)
        if protocol == "memory" and path:
            path = f"/{path.lstrip('/')}"  # which fsspec omits where a name contains "::"
    except ImportError as error:
        extra = EXTRAS.get(scheme(url))
        raise UsageError(
            f"{redact(url)} cannot be opened: {error}",
            fix=install_command(extra) if extra else "install the package that it names",
            code="missing-extra",
        ) from None
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{redact(url)} cannot be opened: {hide_secrets(str(error))}",
            fix="check the URL and storage_options",
            code="invalid-url",
        ) from None
    if is_s3(filesystem):
        filesystem.retries = 1
    return filesystem, path
