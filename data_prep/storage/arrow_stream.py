"""Reading Arrow IPC streams row by row, one after the other, and the files that wrap one.

A stream that was cut short is noticed, and so are bytes that belong to no stream: nothing of a file is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from data_prep.storage.json_columns import json_values
from data_prep.storage.parquet import DamagedTable, damage

_FILE_MAGIC = b"ARROW1\0\0"
_CONTINUES = b"\xff\xff\xff\xff"
_END = _CONTINUES + bytes(4)
_FILE_END = b"ARROW1"  # after the footer and its length, four bytes
_PIECE_BYTES = 1 << 20


def looks_like_arrow(head: bytes) -> bool:
    """Whether a file that begins with these bytes is an Arrow stream or file."""
    return head.startswith(_FILE_MAGIC) or (head.startswith(_CONTINUES) and len(head) > 8 and head[4:8] != bytes(4))


class ArrowRows:
    """The rows of a file of one or several streams, or of a file with a footer, which wraps one stream.

    Attributes:
        columns: names of its columns.

    Raises:
        DamagedTable: a stream is damaged or cut short, has other columns than the first one, or other bytes follow it.
    """

    def __init__(self, stream: BinaryIO) -> None:
        import pyarrow as pa

        self._stream = _Tail(stream)
        self._row = 0
        head = self._stream.read(len(_FILE_MAGIC))
        self._has_footer = head == _FILE_MAGIC
        if not self._has_footer:
            self._stream.push_back(head)
        try:
            self._reader = pa.ipc.open_stream(self._stream)
            self.columns: list[str] = list(self._reader.schema.names)
            if len(set(self.columns)) < len(self.columns):
                raise ValueError("two columns have one name")
        except damage() as error:
            raise DamagedTable("its schema", error) from None

    def values(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The rows as objects of these columns, as `json_values` gives them."""
        while (batch := self._next()) is not None:
            columns = [json_values(batch.column(name)) for name in names]
            for values in zip(*columns, strict=True) if columns else ():
                yield dict(zip(names, values, strict=True))

    def count(self) -> int:
        """Number of the rows that are left."""
        num_rows = 0
        while (batch := self._next()) is not None:
            num_rows += batch.num_rows
        return num_rows

    def _next(self) -> Any:
        while True:
            try:
                batch = self._reader.read_next_batch()
                batch.validate(full=True)
            except StopIteration:
                if not self._open_next_stream():
                    return None
            except damage() as error:
                raise DamagedTable(f"a batch of rows that begins with row {self._row + 1}", error) from None
            else:
                self._row += batch.num_rows
                return batch

    def _open_next_stream(self) -> bool:
        """Check the end of a stream; return whether another one follows it, which is then open."""
        import pyarrow as pa

        try:
            if self._stream.last != _END:
                raise ValueError("it has no mark of its end, so it was cut short")
            if self._has_footer:
                self._check_footer()
                return False
            head = self._stream.read(len(_END))
            if not head:
                return False
            if not looks_like_arrow(head + b"\0"):
                raise ValueError(f"other bytes follow its end, the first of them {head!r}")
            self._stream.push_back(head)
            schema, self._reader = self._reader.schema, pa.ipc.open_stream(self._stream)
            if not self._reader.schema.equals(schema):
                raise ValueError("another stream follows, which has other columns or types")
        except damage() as error:
            raise DamagedTable(f"its end, after row {self._row}", error) from None
        return True

    def _check_footer(self) -> None:
        """Check that a single footer is all that is left, so that no other file was joined with this one.

        Raises:
            ValueError: there is more, or the footer is cut short.
        """
        num_bytes, last = 0, b""
        while piece := self._stream.read(_PIECE_BYTES):
            num_bytes += len(piece)
            last = (last + piece)[-4 - len(_FILE_END) :]
        length = int.from_bytes(last[:4], "little")
        if not last.endswith(_FILE_END):
            raise ValueError("its footer is cut short, or other bytes follow it")
        if num_bytes != length + len(last):
            left = num_bytes - length - len(last)
            raise ValueError(f"its footer does not describe {left} bytes: another file was joined with it")


def open_arrow(stream: BinaryIO) -> ArrowRows:
    """Begin to read a stream."""
    return ArrowRows(stream)


class _Tail:
    """A stream that remembers its last eight bytes, as a file that pyarrow reads."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._head = b""
        self.last = b""

    def push_back(self, data: bytes) -> None:
        self._head, self.last = data, b""

    def read(self, num_bytes: int = -1) -> bytes:
        if num_bytes < 0:
            data, self._head = self._head + self._stream.read(), b""
        else:
            data, self._head = self._head[:num_bytes], self._head[num_bytes:]
            if len(data) < num_bytes:
                data += self._stream.read(num_bytes - len(data))
        self.last = (self.last + data)[-8:]
        return data

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        pass
