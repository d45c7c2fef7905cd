"""Readers of Parquet files, text columns by row group or whole tables, that report every kind of damage.

pyarrow is imported where it is used: it takes 34 MB of a process, and most corpora contain no Parquet.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from data_prep.storage.arrow_stream import DamagedTable as DamagedTable
from data_prep.storage.arrow_stream import bytes_of, damage, json_values
from data_prep.storage.hashing_files import RangeHashingFile

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"PAR1"
_END = bytes(4) + _MAGIC  # the length of the footer and the magic bytes are all that follows it
_HEAD = re.compile(rb"PAR(1\x15|E)")  # the magic bytes, and the first of the structure after them
_READ_BYTES = 1 << 20
_BATCH_ROWS = 64  # texts of a megabyte each stay under 100 MB; more rows are hardly faster
_TEXT_TYPES = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null"}


class RowGroup(NamedTuple):
    """The footer's description of a row group.

    Attributes:
        num_rows: its rows.
        stored_bytes: its size in the file.
        plain_bytes: its size before compression.
    """

    num_rows: int
    stored_bytes: int
    plain_bytes: int


class ParquetRows:
    """The row groups `start` to `stop` of a Parquet file (to its end without a number).

    Attributes:
        columns: the file's columns and their types, in its order.
        first_row: number of rows before them.
        num_rows: their rows.

    Raises:
        DamagedTable: the file is damaged; the methods raise it too.
        UserError: the disk or the network failed.
    """

    def __init__(self, file: RangeHashingFile, start: int = 0, stop: int | None = None) -> None:
        import pyarrow.parquet as pq

        self._file = file
        with self._footer():
            # No read-ahead of whole row groups: pages are read as they are asked for, so memory is bounded by them.
            self._parquet = pq.ParquetFile(
                self._file, pre_buffer=False, buffer_size=_READ_BYTES, page_checksum_verification=True
            )
            self._schema = self._parquet.schema_arrow
            self.columns = [(field.name, field.type) for field in self._schema]
            metadata = self._parquet.metadata
            self._rows_of_groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            if min(self._rows_of_groups, default=0) < 0:
                raise ValueError("a row group of a negative number of rows")
        self._groups = range(len(self._rows_of_groups))[start:stop]
        self.first_row = sum(self._rows_of_groups[: self._groups.start])
        self.num_rows = sum(self._rows_of_groups[group] for group in self._groups)

    def row_groups(self) -> list[RowGroup]:
        """The footer's description of each row group."""
        with self._footer():
            groups = [self._parquet.metadata.row_group(number) for number in self._groups]
            return [
                RowGroup(
                    group.num_rows,
                    sum(group.column(column).total_compressed_size for column in range(group.num_columns)),
                    group.total_byte_size,
                )
                for group in groups
            ]

    def check_all_described(self) -> None:
        """Check that no other file lies before the footer: of joined files only the last one would be read."""
        with self._footer():
            num_bytes = self._file.seek(0, io.SEEK_END)
            self._file.seek(num_bytes - len(_END))
            footer = num_bytes - len(_END) - int.from_bytes(self._file.read(4), "little")
            position = max((stop for _, stop in self._ranges(range(len(self._rows_of_groups)))), default=len(_MAGIC))
            self._file.seek(position)
            tail = b""  # of column indexes and Bloom filters, which take little space
            while position < footer and (piece := self._file.read(min(_READ_BYTES, footer - position))):
                position += len(piece)
                if _MAGIC + _MAGIC in tail + piece:
                    raise ValueError("several Parquet files were joined to one, of which only the last can be read")
                tail = piece[1 - 2 * len(_MAGIC) :]

    def column_ranges(self, names: Collection[str]) -> list[tuple[int, int]]:
        """(start, stop) of the stored bytes of these columns, and of the columns within them."""
        return self._ranges(self._groups, names)

    def _ranges(self, groups: range, names: Collection[str] | None = None) -> list[tuple[int, int]]:
        ranges = []
        within = tuple(f"{name}." for name in names or ())
        with self._footer():
            num_bytes = self._file.seek(0, io.SEEK_END)
            for number in groups:
                group = self._parquet.metadata.row_group(number)
                for column in (group.column(index) for index in range(group.num_columns)):
                    path = column.path_in_schema
                    if names is None or path in names or path.startswith(within):
                        offsets = (column.dictionary_page_offset, column.data_page_offset)
                        start = min(offset for offset in offsets if offset)  # 0 and None: there is no dictionary
                        stop = start + column.total_compressed_size
                        if not 0 < start <= stop <= num_bytes:
                            raise ValueError(f"a column from byte {start} to byte {stop}")
                        ranges.append((start, stop))
        return ranges

    def values(self, names: Sequence[str], of_any_type: Collection[str] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of these columns; None means null.

        Columns hold text, which is given as bytes; those `of_any_type` are given as `json_values`.
        """
        row = self.first_row
        for group in self._groups:
            num_rows, num_read = self._rows_of_groups[group], 0
            try:
                for batch in self._parquet.iter_batches(
                    batch_size=_BATCH_ROWS, row_groups=[group], columns=list(names), use_threads=False
                ):
                    num_read += batch.num_rows
                    columns = ((name, self._column(batch, name)) for name in names)
                    yield from zip(
                        *(json_values(c) if name in of_any_type else bytes_of(c) for name, c in columns), strict=True
                    )
                if num_read != num_rows:
                    raise ValueError(f"it holds {num_read} rows")
            except damage() as error:
                of_all = f"row group {group + 1} of {len(self._rows_of_groups)}"
                raise DamagedTable(f"{of_all}, rows {row + 1} to {row + num_rows}", error) from None
            row += num_rows

    def column_type(self, name: str) -> Any:
        """Type of a column, or of a field within one, such as `text.body`; None where there is none."""
        import pyarrow as pa

        if name in self._schema.names:
            return self.columns[self._schema.names.index(name)][1]
        first, *path = name.split(".")
        found: Any = self._schema.field(first).type if path and self._schema.names.count(first) == 1 else None
        for part in path:
            is_there = found is not None and pa.types.is_struct(found) and found.get_field_index(part) >= 0
            found = found.field(part).type if is_there else None
        return found

    def is_text(self, name: str) -> bool:
        """Whether `column_type` is text, bytes that may be UTF-8, or null."""
        return is_text(self.column_type(name))

    def _column(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        if name in self._schema.names:
            return batch.column(name)
        import pyarrow.compute as pc

        first, *path = name.split(".")
        return pc.struct_field(batch.column(first), path)

    @contextlib.contextmanager
    def _footer(self) -> Iterator[None]:
        """Turn errors of reading the footer into `DamagedTable`."""
        try:
            yield
        except damage() as error:
            place = f"its footer, which ends at byte {self._file.seek(0, io.SEEK_END)}"
            raise DamagedTable(place, error) from None


def read_whole(path: Path) -> pa.Table:
    """Read the file as a table and check every page and every text.

    Raises:
        DamagedTable: the file is damaged.
        FileNotFoundError: there is no such file.
    """
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path, page_checksum_verification=True).read()
        table.validate(full=True)  # a text may hold bytes that are not UTF-8
    except FileNotFoundError:
        raise
    except damage() as error:
        raise DamagedTable("all of it was read", error) from None
    return table


def looks_like_parquet(head: bytes) -> bool:
    """Whether a file that begins with these bytes is a Parquet file, possibly a damaged one."""
    return bool(_HEAD.match(head))


def is_text(column_type: Any) -> bool:
    """Whether values of the type are text, bytes that may be UTF-8, or null."""
    import pyarrow as pa

    if pa.types.is_dictionary(column_type):
        column_type = column_type.value_type
    return str(column_type) in _TEXT_TYPES
