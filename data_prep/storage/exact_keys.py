"""Removal of exactly the keys that a listing of the store named.

fsspec's own `rm`, `find` and `expand_path` read `*`, `?` and `[...]` in a name as a pattern, and would remove the files
of other folders: here every name is only listed and removed as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from data_prep.storage.storage_options import with_these_options
from data_prep.storage.store_errors import IncompleteTransfer

_REQUESTS_AT_ONCE = 16
_KEYS_PER_REQUEST = 1000  # of S3

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def map_at_once(request: Callable[[Asked], Answer], over: Sequence[Asked]) -> list[Answer]:
    """Return the result of a request to a store for each item, in order; many requests wait at the same time."""
    if len(over) < 2:
        return [request(item) for item in over]
    from concurrent.futures import ThreadPoolExecutor  # takes as long to import as a small command has work

    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        waiting = [threads.submit(with_these_options(request), item) for item in over]
        return [each.result() for each in waiting]


def is_s3(filesystem: Any) -> bool:
    """Whether a filesystem of fsspec speaks to an S3 API."""
    return "s3" in filesystem.protocol


def remove_path(filesystem: Any, path: str) -> None:
    """Remove a file, or a folder with all that is in it; nothing happens where there is none.

    Raises:
        IncompleteTransfer: the store did not remove all.
        PermissionError: it refuses to.
    """
    try:
        is_file = filesystem.info(path)["type"] == "file"
    except FileNotFoundError:
        return
    if is_s3(filesystem):
        _remove_s3_keys(filesystem, path, is_file)
    elif is_file:
        _remove_file(filesystem, path)
    else:
        _remove_folder(filesystem, path)
    if path.strip("/").partition("/")[2] and filesystem.exists(path):
        raise IncompleteTransfer("that files are left")


def abort_s3_uploads(filesystem: Any, path: str) -> None:
    """Abort the multipart uploads of this key, and of all keys of this folder."""
    bucket, key, _ = filesystem.split_path(path)
    answer = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key)
    for found in answer.get("Uploads", []):
        if found["Key"] == key or found["Key"].startswith(_folder(key)):
            filesystem.call_s3("abort_multipart_upload", Bucket=bucket, Key=found["Key"], UploadId=found["UploadId"])


def _remove_s3_keys(filesystem: Any, path: str, is_file: bool) -> None:
    """Remove the key if it is a file, and every key of the folder, placeholders included; S3 allows both."""
    bucket, key, _ = filesystem.split_path(path)
    keys = [*([key] if is_file else []), *_s3_keys(filesystem, bucket, _folder(key))]
    for first in range(0, len(keys), _KEYS_PER_REQUEST):
        wanted = {"Objects": [{"Key": each} for each in keys[first : first + _KEYS_PER_REQUEST]], "Quiet": True}
        # A store answers a request that did not remove all of its keys with status 200.
        for failed in filesystem.call_s3("delete_objects", Bucket=bucket, Delete=wanted).get("Errors", []):
            if failed.get("Code") == "AccessDenied":
                raise PermissionError("AccessDenied")
            raise IncompleteTransfer(f"that a key is left ({failed.get('Code')})")


def _s3_keys(filesystem: Any, bucket: str, prefix: str) -> Iterator[str]:
    page: dict[str, Any] = {"MaxKeys": _KEYS_PER_REQUEST}
    while True:
        answer = filesystem.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, **page)
        yield from (entry["Key"] for entry in answer.get("Contents", []))
        if not answer.get("IsTruncated"):
            return
        page["ContinuationToken"] = answer["NextContinuationToken"]


def _folder(key: str) -> str:
    return f"{key.rstrip('/')}/" if key else ""


def _remove_folder(filesystem: Any, folder: str) -> None:
    files: list[str] = []
    folders: list[str] = []
    _list_all(filesystem, folder, files, folders)
    if filesystem.async_impl:  # others, such as SFTP, have one connection
        map_at_once(lambda file: _remove_file(filesystem, file), files)
    else:
        for file in files:
            _remove_file(filesystem, file)
    for each in reversed(folders):
        if each.strip("/"):
            with contextlib.suppress(OSError):  # a store without folders
                filesystem.rmdir(each)


def _remove_file(filesystem: Any, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        filesystem.rm_file(path)


def _list_all(filesystem: Any, folder: str, files: list[str], folders: list[str]) -> None:
    """Add the files below a folder, and the folders, each before those in it."""
    folders.append(folder)
    for entry in filesystem.ls(folder, detail=True):
        name = entry["name"]
        if entry["type"] != "directory":
            files.append(name)
        elif name.strip("/") != folder.strip("/"):
            _list_all(filesystem, name, files, folders)
