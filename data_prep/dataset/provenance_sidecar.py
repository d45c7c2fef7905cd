"""The provenance sidecar of a shard: one Parquet row for every document read, copies that were dropped included.

A sidecar exists where the configuration names an id, URL or metadata field. A row lies in the sidecar of the shard to
which the document's own text belongs, whether or not the shard holds it, so a takedown by URL finds the copy that was
kept (`kept_as`). The bytes depend on the rows and the version of pyarrow alone.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data_prep.base.errors import UserError
from data_prep.dataset.manifest_records import REBUILD, FileRecord, read_file, record_of
from data_prep.storage import storage

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_PER_GROUP = 1 << 16
_NUMBER_IN_FILE = r"#[0-9]+$"


class ProvenanceRow(NamedTuple):
    """The origin of a document, and the document of the data set that represents it.

    Attributes:
        document_id: hash of the document's own normalized text.
        source: name of the source.
        metadata: canonical JSON of the fields that the configuration names.
        kept_as: the id under which its text is kept: its own, or that of the document that it nearly duplicates; None
            if no document represents it.
    """

    document_id: int
    source: str
    id: str | None
    url: str | None
    metadata: str | None
    kept_as: int | None


def provenance_name(name: str) -> str:
    """Return the name of the sidecar of a shard `name`, such as train-000000."""
    return f"{name}.provenance.parquet"


def write_provenance(folder: str, name: str, rows: Iterable[ProvenanceRow]) -> FileRecord:
    """Write the sidecar of the shard `name` (such as train-000000) atomically, its rows sorted."""
    import pyarrow as pa

    ordered = sorted(rows, key=_order)
    columns = list(zip(*ordered, strict=True)) or [()] * len(ProvenanceRow._fields)
    return _write(folder, name, pa.table([*map(list, columns)], schema=_schema()))


def read_provenance(folder: str, file: FileRecord) -> pa.Table:
    """Read a sidecar whose record the manifest holds: columns document_id uint64, source, id, url, metadata string,
    kept_as uint64; all but the first two may be null. Rows are sorted by (document_id, source, id, url).

    Raises:
        UserError: the file is missing, or its content is not what the manifest names.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    data, where = read_file(folder, file), storage.redact(storage.join(folder, file.name))
    try:
        # From a buffer of pyarrow's own: a thread of pyarrow that lets go of a Python file while the process ends
        # aborts it.
        table = pq.ParquetFile(pa.BufferReader(data)).read()
        table.validate(full=True)  # texts are UTF-8
        names = table.schema.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where} is not Parquet ({error})", fix=REBUILD, code="damaged-provenance") from None
    if not table.schema.equals(_schema()):
        raise UserError(f"{where} has columns {names}", fix=REBUILD, code="damaged-provenance")
    return table


def rewrite_provenance(
    folder: str, file: FileRecord, name: str, gone: np.ndarray, source: str | None = None
) -> FileRecord | None:
    """Rewrite a sidecar for the shard `name` without the removed rows.

    A row is removed if its `kept_as` or `document_id` is in `gone` (n,) uint64, or its source is `source`. Returns
    None, and writes nothing, if no row is left.
    """
    import pyarrow as pa

    table = read_provenance(folder, file)
    kept = table.filter(pa.array(~rows_to_remove(table, gone, source)))
    return _write(folder, name, kept) if kept.num_rows else None


def rows_to_remove(table: pa.Table, gone: np.ndarray, source: str | None = None) -> np.ndarray:
    """Return which rows of a sidecar, (R,) bool, a removal removes; see `rewrite_provenance`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    gone = np.asarray(gone, np.uint64)
    wanted = pa.array(gone, pa.uint64())
    found = np.zeros(table.num_rows, bool)
    for column in ("document_id", "kept_as"):
        found |= pc.is_in(table[column], value_set=wanted).to_numpy().astype(bool)
    if source is not None:
        found |= pc.equal(table["source"], source).to_numpy().astype(bool)
    return found


def find_rows(table: pa.Table, column: str, values: Sequence[str], files: Sequence[str] = ()) -> pa.Table:
    """Return the rows of a sidecar whose `column` is one of the values, with the value that matched in that column.

    Args:
        files: those of the values that are names of files; they match `documents.document.numbered` ids too.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    is_found = pc.is_in(table[column], value_set=pa.array(values, pa.string()))
    if not files:
        return table.filter(is_found)
    names = pc.replace_substring_regex(table[column], _NUMBER_IN_FILE, "")
    is_in_file = pc.is_in(names, value_set=pa.array(files, pa.string()))
    matched = pc.if_else(is_in_file, names, table[column])
    number = table.schema.get_field_index(column)
    return table.set_column(number, table.schema.field(column), matched).filter(pc.or_(is_found, is_in_file))


def _order(row: ProvenanceRow) -> tuple[object, ...]:
    """Nulls come before strings, as in SQL's ascending order; metadata makes equal rows come in one order."""
    return (
        row.document_id,
        row.source,
        *((value is not None, value or "") for value in (row.id, row.url, row.metadata)),
        row.kept_as is not None,
        row.kept_as or 0,
    )


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("document_id", pa.uint64(), nullable=False),
            pa.field("source", pa.string(), nullable=False),
            pa.field("id", pa.string()),
            pa.field("url", pa.string()),
            pa.field("metadata", pa.string()),
            pa.field("kept_as", pa.uint64()),
        ]
    )


def _write(folder: str, name: str, table: pa.Table) -> FileRecord:
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    # Without Arrow's schema, whose metadata is not part of Parquet; a dictionary only for repeated values.
    pq.write_table(
        table,
        buffer,
        row_group_size=_ROWS_PER_GROUP,
        compression="zstd",
        use_dictionary=["source"],
        store_schema=False,
    )
    data = buffer.getvalue()
    storage.write_bytes(storage.join(folder, provenance_name(name)), data)
    return record_of(provenance_name(name), data)


class ShardProvenance:
    """The rows of one sidecar by document id; empty without a sidecar. It is read on first use."""

    def __init__(self, folder: str, file: FileRecord | None) -> None:
        self._folder, self._file = folder, file

    def rows(self, document_id: int) -> list[ProvenanceRow]:
        """Return the rows of a document and of its exact copies, in the order of the sidecar."""
        if self._file is None:
            return []
        table, ids = self._sorted
        start = int(np.searchsorted(ids, np.uint64(document_id), "left"))
        stop = int(np.searchsorted(ids, np.uint64(document_id), "right"))
        return [ProvenanceRow(**row) for row in table.slice(start, stop - start).to_pylist()]

    def row(self, document_id: int, source: str) -> ProvenanceRow | None:
        """Return the row of the document of this source; None if there is none."""
        return next((row for row in self.rows(document_id) if row.source == source), None)

    @cached_property
    def _sorted(self) -> tuple[Any, np.ndarray]:
        assert self._file is not None
        table = read_provenance(self._folder, self._file)
        return table, table["document_id"].to_numpy().astype(np.uint64)
