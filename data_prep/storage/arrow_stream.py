"""Reading Arrow IPC streams row by row, and the files that wrap one; a stream that was cut short is noticed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from data_prep.storage.parquet import DamagedTable, damage, json_values

_BYTES = ("binary", "large_binary", "binary_view")
_FILE_MAGIC = b"ARROW1\0\0"
_CONTINUES = b"\xff\xff\xff\xff"
_END = _CONTINUES + bytes(4)


def looks_like_arrow(head: bytes) -> bool:
    """Whether a file that begins with these bytes is an Arrow stream or file."""
    return head.startswith(_FILE_MAGIC) or (head.startswith(_CONTINUES) and len(head) > 8 and head[4:8] != bytes(4))


class ArrowRows:
    """The rows of a stream.

    Attributes:
        columns: names of its columns.

    Raises:
        DamagedTable: the stream is damaged or cut short.
    """

    def __init__(self, stream: BinaryIO) -> None:
        import pyarrow as pa

        self._stream = _Tail(stream)
        self._row = 0
        head = self._stream.read(len(_FILE_MAGIC))
        if head != _FILE_MAGIC:
            self._stream.push_back(head)
        try:
            self._reader = pa.ipc.open_stream(self._stream)
            self.columns: list[str] = list(self._reader.schema.names)
            if len(set(self.columns)) < len(self.columns):
                raise ValueError("two columns have one name")
        except damage() as error:
            raise DamagedTable("its schema", error) from None

    def values(self, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The rows as objects of these columns, values as JSON has them; those of a column of bytes stay bytes."""
        while (batch := self._next()) is not None:
            columns = [
                column.to_pylist() if str(column.type) in _BYTES else json_values(column)
                for column in map(batch.column, names)
            ]
            for values in zip(*columns, strict=True) if columns else ():
                yield dict(zip(names, values, strict=True))

    def count(self) -> int:
        """Number of the rows that are left."""
        num_rows = 0
        while (batch := self._next()) is not None:
            num_rows += batch.num_rows
        return num_rows

    def _next(self) -> Any:
        try:
            batch = self._reader.read_next_batch()
            batch.validate(full=True)
        except StopIteration:
            if self._stream.last != _END:
                error = ValueError("it has no mark of its end, so it was cut short")
                raise DamagedTable(f"its end, after row {self._row}", error) from None
            return None
        except damage() as error:
            raise DamagedTable(f"a batch of rows that begins with row {self._row + 1}", error) from None
        self._row += batch.num_rows
        return batch


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
