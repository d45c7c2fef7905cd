"""Readers of Arrow IPC streams, and of files that wrap one, row by row.

A truncated stream is an error, and so are bytes that belong to no stream: no part of a file is ignored.

The values of columns, those of Parquet files too, become JSON values. They are the same with and without pandas and a
database of time zones. Arrow itself writes dates and times as text: Python's own types have no nanoseconds and no year
after 9999, and pandas would write another text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import NoneType
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import pyarrow as pa

_FILE_MAGIC = b"ARROW1\0\0"
_CONTINUES = b"\xff\xff\xff\xff"
_END = _CONTINUES + bytes(4)
_FILE_END = b"ARROW1"  # after the footer and its length, four bytes
_PIECE_BYTES = 1 << 20
_WITHOUT_STORAGE = ("arrow.uuid", "arrow.bool8")  # extension types whose own values JSON can hold as text or booleans


class DamagedTable(Exception):
    """The file is damaged, truncated, or uses an unsupported feature; the text is the library's.

    Attributes:
        place: where in the file, such as "row group 2 of 4, rows 101 to 200".
    """

    def __init__(self, place: str, error: BaseException) -> None:
        super().__init__(_first_line(error))
        self.place = place


def looks_like_arrow(head: bytes) -> bool:
    """Whether a file that begins with these bytes is an Arrow stream or file."""
    return head.startswith(_FILE_MAGIC) or (head.startswith(_CONTINUES) and len(head) > 8 and head[4:8] != bytes(4))


class ArrowRows:
    """The rows of a file: of its streams, or of the one stream before a footer.

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
        """Yield the rows as objects of these columns, with values as by `json_values`."""
        while (batch := self._next()) is not None:
            columns = [json_values(batch.column(name)) for name in names]
            for values in zip(*columns, strict=True) if columns else ():
                yield dict(zip(names, values, strict=True))

    def count(self) -> int:
        """Return the number of rows that were not read yet."""
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
        """Check that a single footer is all that is left, so that no other file was joined with this one."""
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


def json_values(column: pa.Array) -> list[Any]:
    """Return the values of a column.

    What JSON has no type for becomes text: dates and times as in ISO 8601 (those with a time zone in UTC), durations
    as in PT1.5S, and bytes if they are UTF-8; other bytes stay bytes. Those of a fixed size become hexadecimal text,
    because they are hashes and keys, some of which could be UTF-8 by chance.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return json_values(column.dictionary_decode())
    if types.is_run_end_encoded(kind):
        return json_values(pc.run_end_decode(column))
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name not in _WITHOUT_STORAGE:
        return json_values(column.storage)
    if types.is_fixed_size_binary(kind):
        return [None if value is None else value.hex() for value in column.to_pylist()]
    if str(kind) in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"):
        return [_text(value) for value in bytes_of(column)]
    if types.is_temporal(kind) and not types.is_interval(kind):
        return _temporal_values(column)
    if types.is_map(kind):
        return _map_values(column)
    if any(is_kind(kind) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)) or any(
        is_kind(kind) for is_kind in (types.is_list_view, types.is_large_list_view)
    ):
        items = iter(json_values(column.flatten()))
        lengths = pc.list_value_length(column).to_pylist()
        valid = column.is_valid().to_pylist()
        return [
            [next(items) for _ in range(length)] if is_there else None
            for length, is_there in zip(lengths, valid, strict=True)
        ]
    if types.is_struct(kind):
        names = [kind.field(number).name for number in range(kind.num_fields)]
        columns = [json_values(each) for each in column.flatten()]
        rows = zip(*columns, strict=True) if columns else [()] * len(column)
        valid = column.is_valid().to_pylist()
        return [
            dict(zip(names, row, strict=True)) if is_there else None for row, is_there in zip(rows, valid, strict=True)
        ]
    return [_json_value(value) for value in column.to_pylist()]


def bytes_of(column: pa.Array) -> list[bytes | None]:
    """Return the values of a column of text or bytes; a file may hold in a text column what is not UTF-8."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    values: list[bytes | None] = column.cast(pa.large_binary()).to_pylist()
    return values


def _text(value: bytes | None) -> str | bytes | None:
    if value is not None:
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    return value


def _temporal_values(column: pa.Array) -> list[str | None]:
    import pyarrow as pa

    kind, types = column.type, pa.types
    if types.is_duration(kind):
        per_second = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}[kind.unit]
        return [
            None if count is None else _duration(count, per_second) for count in column.cast(pa.int64()).to_pylist()
        ]
    zone = ""
    if types.is_timestamp(kind) and kind.tz is not None:
        column, zone = column.view(pa.timestamp(kind.unit)), "+00:00"
    elif types.is_date64(kind):
        column = column.view(pa.timestamp("ms"))
    texts: list[str | None] = column.cast(pa.string()).to_pylist()
    if types.is_date64(kind):
        return [text and _iso(text).removesuffix("T00:00:00") for text in texts]
    return [text and _iso(text) + zone for text in texts]


def _iso(text: str) -> str:
    """Return Arrow's text as Python's `isoformat` writes it: a T, and a fraction of six or nine digits if not zero."""
    if text.startswith("<"):  # "<value out of range: 2147483647>": a year that Arrow has no digits for
        return text
    whole, _, fraction = text.replace(" ", "T", 1).partition(".")
    fraction = fraction.rstrip("0")
    return f"{whole}.{fraction.ljust(6 if len(fraction) <= 6 else 9, '0')}" if fraction else whole


def _duration(count: int, per_second: int) -> str:
    seconds, rest = divmod(abs(count), per_second)
    fraction = f"{rest:0{len(str(per_second)) - 1}d}".rstrip("0") if rest else ""
    return f"{'-' if count < 0 else ''}PT{seconds}{fraction and '.'}{fraction}S"


def _map_values(column: pa.Array) -> list[Any]:
    import pyarrow as pa

    kind = column.type
    pairs = pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)]))
    rows = json_values(column.cast(pairs))
    return [row and [str((pair["key"], pair["value"])) for pair in row] for row in rows]


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return value if isinstance(value, (str, bytes, int, float, NoneType)) else str(value)


def damage() -> tuple[type[Exception], ...]:
    """The exceptions that a damaged file raises; ValueError for names that are not UTF-8 and our own checks."""
    import pyarrow as pa

    return pa.ArrowException, OSError, MemoryError, ValueError


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ")
