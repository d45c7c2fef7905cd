"""Documents of a data set: their text, one sentence per line, and lists of the documents of its sources."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from data_prep.base.errors import UsageError
from data_prep.base.terminal import printable
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.dataset.provenance_sidecar import ProvenanceRow, ShardProvenance, read_provenance
from data_prep.dataset.removal_request import find_listed, source_number
from data_prep.dataset.shard_documents import DocumentLocation, ShardDocuments, find_document
from data_prep.dataset.shards import read_index
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

_SHOWN_SENTENCES = 12
_LINE_TOKENS = 32
_SOURCE_HEADER = "document id\tcorpus id\tURL\tnote"
_DOCUMENT_ID = re.compile("[0-9a-fA-F]{16}")


def inspect_report(
    folder: str, split: Literal["train", "valid"], shard_number: int | None, num_documents: int, num_skipped: int = 0
) -> Iterator[str]:
    """Yield lines with the first sentences of documents of a shard (by default the first) from `num_skipped` on.

    Reads only the index and these documents, also from a remote shard.
    """
    manifest = read_manifest(folder)
    tokenizer = Tokenizer.load(storage.join(folder, TOKENIZER_FOLDER))
    shard = _shard(folder, manifest, split, shard_number)
    documents = ShardDocuments(folder, manifest, split, shard)
    if not 0 <= num_skipped < len(documents):
        raise UsageError(
            f"--skip={num_skipped} is beyond the {len(documents):,} documents of {shard.name}",
            fix="give a smaller number",
            code="skip-out-of-range",
        )
    provenance = ShardProvenance(folder, shard.provenance)
    for number in range(num_skipped, min(num_skipped + num_documents, len(documents))):
        location = documents.location(number)
        yield from _head(location, manifest.has_sentences)
        row = provenance.row(location.document_id, location.source.name)
        if row is not None:
            yield from _origin(row)
        yield from _text(documents.sentences(number), tokenizer, _SHOWN_SENTENCES, manifest.has_sentences)


def document_report(
    folder: str, document_id: int, named: tuple[Literal["id", "url"], str] | None = None
) -> Iterator[str]:
    """Yield lines with a whole document and its source, found by its id; with all pieces of one that was split.

    Args:
        named: the column and the value by which `find_named` found it; if they are those of a near-duplicate, a line
            states it.
    """
    locations = find_document(folder, document_id)
    manifest = read_manifest(folder)
    tokenizer = Tokenizer.load(storage.join(folder, TOKENIZER_FOLDER))
    opened: ShardDocuments | None = None
    for number, location in enumerate(locations):
        if len(locations) > 1:
            yield f"--- {number + 1} of {len(locations)} pieces or copies with this id"
        if number == 0 or location.shard != locations[number - 1].shard:
            opened = ShardDocuments(folder, manifest, location.split, location.shard)
        assert opened is not None
        yield from _provenance(location)
        rows = ShardProvenance(folder, location.shard.provenance).rows(location.document_id)
        if named is not None and not any(getattr(row, named[0]) == named[1] for row in rows):
            yield printable(f"{named[1]} was dropped as a duplicate of this document")
        for row in rows:
            if row.source == location.source.name and row.kept_as == location.document_id:
                yield from _origin(row)
            else:
                yield f"dropped copy, of source {printable(row.source)}"
                yield from _origin(row)
        yield from _head(location, manifest.has_sentences)
        yield from _text(opened.sentences(location.number), tokenizer, None, manifest.has_sentences)


def parse_document_id(text: str) -> int:
    """Return the number of a document id: exactly 16 hexadecimal digits."""
    if not is_document_id(text):
        raise UsageError(
            f"{text[:100]!r} is not a document id",
            fix="give the 16 hexadecimal digits that 'inspect' shows, such as 00f3a9c2d4e5b617; for an id of the "
            "corpus use --id, for a URL --url",
            code="malformed-document-id",
        )
    return int(text, 16)


def is_document_id(text: str) -> bool:
    """Whether a text is 16 hexadecimal digits."""
    return _DOCUMENT_ID.fullmatch(text) is not None


def find_named(folder: str, manifest: Manifest, column: Literal["id", "url"], value: str) -> list[int]:
    """Return the ids of the documents with exactly this corpus id or URL, dropped copies included, ascending."""
    found = find_listed(folder, manifest, column, [value])
    if not len(found.ids):
        noun = "corpus id" if column == "id" else "URL"
        state = "; it was removed" if found.removed else ""
        raise UsageError(
            f"{storage.redact(folder)} has no document with the {noun} {value[:200]!r}{state}",
            fix=f"give the {noun} exactly as the corpus has it; documents of it may have been dropped",
            code="unknown-document",
        )
    return found.ids.tolist()  # type: ignore[no-any-return]  # numpy gives Any


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
    yield _SOURCE_HEADER
    for shard in manifest.shards:
        if shard.provenance is None:
            index = read_index(folder, shard)
            for identity in index.document_ids[index.document_sources == number].tolist():
                yield f"{identity:016x}\t-\t-\t-"
    yield from _source_rows(folder, manifest, name)


def _shard(folder: str, manifest: Manifest, split: Literal["train", "valid"], number: int | None) -> ShardRecord:
    by_number = {int(shard.name.partition(".")[0].rpartition("-")[2]): shard for shard in manifest.split(split).shards}
    if not by_number:
        raise UsageError(
            f"{storage.redact(folder)} has no {split} shards", fix="give the other --split", code="empty-split"
        )
    wanted = min(by_number) if number is None else number  # `remove` rewrites shards under numbers not used before
    if wanted not in by_number:
        raise UsageError(
            f"{storage.redact(folder)} has no {split} shard {number}",
            fix=f"give one of its {len(by_number)} {split} shards: {', '.join(_runs(sorted(by_number)))}",
            code="unknown-shard",
        )
    return by_number[wanted]


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Yield runs of ascending consecutive numbers, such as "0 to 2"."""
    for _, run in itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        first, *others = (number for _, number in run)
        yield f"{first} to {others[-1]}" if others else str(first)


def _provenance(location: DocumentLocation) -> Iterator[str]:
    source = location.source
    yield f"document id   {location.document_id:016x}"
    yield f"split         {location.split}"
    record = f"record {location.record_key}, document {location.number_in_record} of it"
    yield f"shard         {location.shard.name}, {record}"
    yield printable(f"source        {source.name}")
    for label, name in (("source url", "url"), ("license", "license"), ("date", "date"), ("language", "language")):
        yield printable(f"{label:<13} {getattr(source, name) or '-'}")


def _origin(row: ProvenanceRow) -> Iterator[str]:
    """Yield what the provenance holds of a document, without empty fields."""
    for label, value in (("corpus id", row.id), ("document url", row.url), ("metadata", row.metadata)):
        if value is not None:
            yield printable(f"{label:<13} {value}")


def _head(location: DocumentLocation, has_sentences: bool) -> Iterator[str]:
    yield printable(
        f"=== {location.shard.name} record {location.record_key} document {location.number_in_record}: "
        f"document id {location.document_id:016x}, source {location.source.name}, {location.num_tokens:,} tokens"
        + (f", {location.num_sentences:,} sentences" * has_sentences)
    )


def _text(
    sentences: Iterable[np.ndarray], tokenizer: Tokenizer, limit: int | None, has_sentences: bool
) -> Iterator[str]:
    """Yield the text of a document, a line for each sentence, or for a number of tokens where none are known."""
    sentences = list(sentences)
    if not has_sentences:
        tokens = np.concatenate(sentences)
        sentences = [tokens[first : first + _LINE_TOKENS] for first in range(0, len(tokens), _LINE_TOKENS)]
    for tokens in sentences[:limit]:
        yield f"  | {printable(tokenizer.decode(tokens).removeprefix(' '))}"
    if limit is not None and len(sentences) > limit:
        yield f"  ... {len(sentences) - limit:,} more {'sentences' if has_sentences else 'lines'}"
    yield ""


def _source_rows(folder: str, manifest: Manifest, name: str) -> Iterator[str]:
    for file in manifest.provenance_files:
        table = read_provenance(folder, file)
        mine = np.flatnonzero(np.array(table["source"].to_pylist()) == name)
        for row in table.take(mine).to_pylist():
            note = "-"
            if row["kept_as"] != row["document_id"]:
                note = "dropped" if row["kept_as"] is None else f"dropped as a duplicate of {row['kept_as']:016x}"
            names = "\t".join(printable(row[column] or "-") for column in ("id", "url"))
            yield f"{row['document_id']:016x}\t{names}\t{note}"
