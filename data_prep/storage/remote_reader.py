"""Reading a remote file by ranges: few large requests where it is read in order, small ones where it is not."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from data_prep.base.urls import WEB_SCHEMES, redact, scheme
from data_prep.storage.store_errors import (
    ChangedWhileRead,
    IncompleteTransfer,
    explained,
    http_status,
    is_transient,
    with_retries,
)

LARGEST_BLOCK_BYTES = 8 << 20
SMALLEST_BLOCK_BYTES = 64 << 10
_GROWTH = 4


def open_ranges(url: str, filesystem: Any, path: str) -> BinaryIO:
    """Open a file of an fsspec filesystem for reading; seekable, each request tried again.

    Reading fails once the object is another one than when it was opened: on S3 every request says which (If-Match),
    elsewhere the store is asked again where the file ends.
    """
    found = with_retries(url, "read", lambda: filesystem.info(path))
    if scheme(url) in WEB_SCHEMES:
        copy = _copy_without_ranges(url, filesystem, path, found.get("size"))
        if copy is not None:
            return copy
    fetch_range = _range_fetcher(url, filesystem, path)

    def fetch(start: int, stop: int) -> bytes:
        with explained(url, "read"):
            data = with_retries(url, "read", lambda: _exactly(fetch_range(start, stop), stop - start))
            if stop == found["size"] and scheme(url) not in ("s3", "s3a"):
                now = with_retries(url, "read", lambda: filesystem.info(path))
                if tag(now) != tag(found):
                    raise ChangedWhileRead
            return data

    return io.BufferedReader(RemoteFile(redact(url), found["size"], fetch), SMALLEST_BLOCK_BYTES)


def tag(info: Mapping[str, Any]) -> str:
    """A mark of the content that changes when the file is written again: the store's own tag, or the time."""
    names = ("ETag", "etag", "blob_id", "LastModified", "Last-Modified", "created", "mtime")
    mark = next((info[name] for name in names if info.get(name)), None)
    return f"{info.get('size')}-{mark}"


class RemoteFile(io.RawIOBase):
    """A seekable file over `fetch(start, stop)`, which gives exactly the bytes of that range.

    One block is kept. A file read from its beginning comes in blocks of 8 MiB, one request each. After a jump the
    blocks begin small and grow while the reading goes on in order, so that a section of a few kilobytes costs a small
    request; a jump near the end fetches the last 64 KiB at once, where formats keep their tables.
    Wrap it in a BufferedReader of SMALLEST_BLOCK_BYTES for lines and small reads. Not for several threads at once.
    """

    def __init__(self, name: str, size: int, fetch: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self.name, self.size = name, size
        self._fetch = fetch
        self._position = 0
        self._block, self._block_start = b"", 0
        self._block_bytes = LARGEST_BLOCK_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence] + offset
        if position < 0:
            raise ValueError(f"negative seek position {position}")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` from the block at hand; fewer bytes come where the block or the file ends."""
        view = memoryview(buffer).cast("B")
        if not len(view) or self._position >= self.size:
            return 0
        offset = self._position - self._block_start
        if not 0 <= offset < len(self._block):
            self._load(len(view))
            offset = self._position - self._block_start
        piece = self._block[offset : offset + len(view)]
        view[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def readall(self) -> bytes:
        pieces = []
        while self._position < self.size:
            piece = bytearray(min(self.size - self._position, LARGEST_BLOCK_BYTES))
            pieces.append(bytes(piece[: self.readinto(piece)]))
        return b"".join(pieces)

    def close(self) -> None:
        self._block = b""
        super().close()

    def _load(self, wanted: int) -> None:
        """Fetch the block that the next bytes lie in."""
        start = self._position
        if start == 0:
            self._block_bytes = LARGEST_BLOCK_BYTES
        elif start == self._block_start + len(self._block):
            self._block_bytes = min(self._block_bytes * _GROWTH, LARGEST_BLOCK_BYTES)
        else:
            self._block_bytes = SMALLEST_BLOCK_BYTES
            start = min(start, max(0, self.size - SMALLEST_BLOCK_BYTES))
        amount = min(max(wanted, self._block_bytes), LARGEST_BLOCK_BYTES)
        stop = min(max(start + amount, self._position + 1), self.size)
        self._block = b""  # not two blocks in memory
        self._block, self._block_start = self._fetch(start, stop), start


def _range_fetcher(url: str, filesystem: Any, path: str) -> Callable[[int, int], bytes]:
    if scheme(url) == "memory":  # whose open files share one position
        return lambda start, stop: filesystem.cat_file(path, start, stop)
    # With "none" each read is one request; on S3 it carries If-Match.
    file = with_retries(url, "read", lambda: filesystem.open(path, "rb", cache_type="none"))

    def fetch(start: int, stop: int) -> bytes:
        file.seek(start)
        try:
            data: bytes = file.read(stop - start)
            return data
        except OSError as error:
            if http_status(error) == 412 or (isinstance(error, FileNotFoundError) and not is_transient(error)):
                raise ChangedWhileRead from None
            raise

    return fetch


def _exactly(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise IncompleteTransfer(f"{len(data)} of {size} bytes")
    return data


def gives_ranges(url: str, filesystem: Any, path: str) -> bool:
    """Return whether a store gives a part of a file; some web servers give whole files only."""
    if scheme(url) not in WEB_SCHEMES:
        return True
    size = with_retries(url, "read", lambda: filesystem.info(path)).get("size")
    return bool(size) and with_retries(url, "read", lambda: _request_last_byte(filesystem, path, size, None))


def _copy_without_ranges(url: str, filesystem: Any, path: str, size: int | None) -> BinaryIO | None:
    """Return a local copy without a name if a web server gives whole files only; None if it gives ranges.

    The answer to the request that finds it out is the copy, so the file is fetched once.
    """
    file = tempfile.TemporaryFile()

    def fetch() -> bool:
        file.seek(0)
        file.truncate()
        return _request_last_byte(filesystem, path, size, file)

    if with_retries(url, "read", fetch):
        file.close()
        return None
    file.seek(0)
    return file


def _request_last_byte(filesystem: Any, path: str, size: int | None, copy: BinaryIO | None) -> bool:
    """Return whether the server answers with the last byte alone; the whole file goes to `copy`.

    Without a size the whole file is requested.
    """
    from asyncio import run_coroutine_threadsafe  # here: work on local files starts sooner without it

    async def request() -> bool:
        options = dict(filesystem.kwargs)
        headers = {**options.pop("headers", {}), **({"Range": f"bytes={size - 1}-{size - 1}"} if size else {})}
        session = await filesystem.set_session()
        async with session.get(filesystem.encode_url(path), headers=headers, **options) as response:
            filesystem._raise_not_found_for_status(response, path)
            if response.status == 206:
                return True
            num_bytes = 0
            while copy is not None and (piece := await response.content.read(LARGEST_BLOCK_BYTES)):
                num_bytes += copy.write(piece)
            if copy is not None and size is not None and num_bytes != size:
                raise IncompleteTransfer(f"{num_bytes} of {size} bytes")
            return False

    return run_coroutine_threadsafe(request(), filesystem.loop).result()
