"""The values of Arrow columns as JSON has them, the same with and without pandas and a database of time zones.

Dates and times become text in Arrow: Python's own have no nanoseconds and no year after 9999, and pandas, where it is
installed, would write other text.
"""

from __future__ import annotations

import contextlib
from types import NoneType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

_WITHOUT_STORAGE = ("arrow.uuid", "arrow.bool8")  # extension types whose own values JSON can hold as text or booleans


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
