"""Lists of a data set's sources, and of the documents of a source with the names by which a takedown finds them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from data_prep.base.terminal import printable
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.dataset.provenance_sidecar import read_provenance
from data_prep.dataset.removal_request import source_number
from data_prep.dataset.shard_index import read_index

_HEADER = "document id\tcorpus id\tURL\tnote"


def sources_report(folder: str) -> Iterator[str]:
    """Yield a header and a line for each source: name, documents, and how many of them have a corpus id or a URL."""
    manifest = read_manifest(folder)
    ids = dict.fromkeys((source.name for source in manifest.sources), 0)
    urls = dict(ids)
    for file in manifest.provenance_files:
        table = read_provenance(folder, file)
        for counts, column in ((ids, "id"), (urls, "url")):
            for found in table.filter(table[column].is_valid())["source"].value_counts().to_pylist():
                counts[found["values"]] = counts.get(found["values"], 0) + found["counts"]
    yield "source\tdocuments\twith corpus id\twith URL"
    for source in manifest.sources:
        yield f"{printable(source.name)}\t{source.documents}\t{ids[source.name]}\t{urls[source.name]}"


def source_report(folder: str, name: str) -> Iterator[str]:
    """Yield a header and a line for each document of a source, in the order of the shards; dropped copies are noted.

    Documents without provenance have a document id alone.
    """
    manifest = read_manifest(folder)
    number = source_number(folder, manifest, name)
    yield _HEADER
    for shard in manifest.shards:
        if shard.provenance is None:
            index = read_index(folder, shard)
            for identity in index.document_ids[index.document_sources == number].tolist():
                yield f"{identity:016x}\t-\t-\t-"
    yield from _rows(folder, manifest, name)


def _rows(folder: str, manifest: Manifest, name: str) -> Iterator[str]:
    for file in manifest.provenance_files:
        table = read_provenance(folder, file)
        mine = np.flatnonzero(np.array(table["source"].to_pylist()) == name)
        for row in table.take(mine).to_pylist():
            note = "-"
            if row["kept_as"] != row["document_id"]:
                note = "dropped" if row["kept_as"] is None else f"dropped as a duplicate of {row['kept_as']:016x}"
            names = "\t".join(printable(row[column] or "-") for column in ("id", "url"))
            yield f"{row['document_id']:016x}\t{names}\t{note}"
