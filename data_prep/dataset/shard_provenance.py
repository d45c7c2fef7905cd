"""The provenance of single documents, looked up in the sidecar of their shard."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from data_prep.dataset.manifest_records import FileRecord
from data_prep.dataset.provenance_sidecar import ProvenanceRow, read_provenance


class ShardProvenance:
    """The rows of one sidecar by document id; empty without a sidecar. It is read on first use."""

    def __init__(self, folder: str, file: FileRecord | None) -> None:
        self._folder, self._file = folder, file

    def rows(self, document_id: int) -> list[ProvenanceRow]:
        """Return the rows of a document and of its exact copies, in the order of the sidecar.

        Raises:
            UserError: the sidecar is missing or damaged.
        """
        if self._file is None:
            return []
        table, ids = self._sorted
        start = int(np.searchsorted(ids, np.uint64(document_id), "left"))
        stop = int(np.searchsorted(ids, np.uint64(document_id), "right"))
        return [ProvenanceRow(**row) for row in table.slice(start, stop - start).to_pylist()]

    def row(self, document_id: int, source: str) -> ProvenanceRow | None:
        """Return the row of the document of this source; None if there is none.

        Raises:
            UserError: the sidecar is missing or damaged.
        """
        return next((row for row in self.rows(document_id) if row.source == source), None)

    @cached_property
    def _sorted(self) -> tuple[Any, np.ndarray]:
        assert self._file is not None
        table = read_provenance(self._folder, self._file)
        return table, table["document_id"].to_numpy().astype(np.uint64)
