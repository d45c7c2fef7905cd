"""Decoded documents of a data set, one sentence per line."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from data_prep.base.errors import UsageError
from data_prep.base.terminal import printable
from data_prep.dataset.manifest import TOKENIZER_FOLDER, Manifest, read_manifest
from data_prep.dataset.manifest_records import ShardRecord
from data_prep.dataset.provenance_sidecar import ProvenanceRow
from data_prep.dataset.shard_documents import DocumentPlace, ShardDocuments, find_document
from data_prep.dataset.shard_provenance import ShardProvenance
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

_SHOWN_SENTENCES = 12


def inspect_report(
    folder: str, split: Literal["train", "valid"], shard_number: int | None, num_documents: int, num_skipped: int = 0
) -> Iterator[str]:
    """Yield lines with the first sentences of documents of a shard (by default the first) from `num_skipped` on.

    Reads only the index and these documents, also from a remote shard.

    Raises:
        UsageError: there is no such shard or document.
        UserError: the data set is damaged.
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
        place = documents.place(number)
        yield from _head(place)
        row = provenance.row(place.document_id, place.source.name)
        if row is not None:
            yield from _origin(row)
        yield from _text(documents.sentences(number), tokenizer, _SHOWN_SENTENCES)


def document_report(folder: str, document_id: int) -> Iterator[str]:
    """Yield lines with a whole document and its source, found by its id; with all pieces of one that was split.

    Raises:
        UserError: no shard holds it, or the data set is damaged.
    """
    places = find_document(folder, document_id)
    manifest = read_manifest(folder)
    tokenizer = Tokenizer.load(storage.join(folder, TOKENIZER_FOLDER))
    opened: ShardDocuments | None = None
    for number, place in enumerate(places):
        if len(places) > 1:
            yield f"--- {number + 1} of {len(places)} pieces or copies with this id"
        if number == 0 or place.shard != places[number - 1].shard:
            opened = ShardDocuments(folder, manifest, place.split, place.shard)
        assert opened is not None
        yield from _provenance(place)
        for row in ShardProvenance(folder, place.shard.provenance).rows(place.document_id):
            if row.source == place.source.name and row.kept_as == place.document_id:
                yield from _origin(row)
            else:
                yield f"dropped copy, of source {printable(row.source)}"
                yield from _origin(row)
        yield from _head(place)
        yield from _text(opened.sentences(place.number), tokenizer, None)


def parse_document_id(text: str) -> int:
    """Return the number of a hexadecimal id.

    Raises:
        UsageError: the text is not an id.
    """
    digits = text.lower().removeprefix("0x")
    if not 1 <= len(digits) <= 16 or set(digits) - set("0123456789abcdef"):
        raise UsageError(
            f"{text!r} is not a document id",
            fix="give the 16 hexadecimal digits that 'inspect' shows, such as 00f3a9c2d4e5b617",
            code="malformed-document-id",
        )
    return int(digits, 16)


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


def _provenance(place: DocumentPlace) -> Iterator[str]:
    source = place.source
    yield f"document {place.document_id:016x}"
    yield f"split    {place.split}"
    yield f"shard    {place.shard.name}, record {place.record_key}, document {place.number_in_record} of it"
    yield printable(f"source   {source.name}")
    for name in ("url", "license", "date", "language"):
        yield printable(f"{name:<8} {getattr(source, name) or '-'}")


def _origin(row: ProvenanceRow) -> Iterator[str]:
    """Yield what the provenance holds of a document, without empty fields."""
    for name in ("id", "url", "metadata"):
        value = getattr(row, name)
        if value is not None:
            yield printable(f"{'corpus id' if name == 'id' else name:<9} {value}")


def _head(place: DocumentPlace) -> Iterator[str]:
    yield printable(
        f"=== {place.shard.name} record {place.record_key} document {place.number_in_record}: "
        f"id {place.document_id:016x}, source {place.source.name}, {place.num_tokens:,} tokens, "
        f"{place.num_sentences:,} sentences"
    )


def _text(sentences: Iterable[np.ndarray], tokenizer: Tokenizer, limit: int | None) -> Iterator[str]:
    sentences = list(sentences)
    for tokens in sentences[:limit]:
        yield f"  | {printable(tokenizer.decode(tokens).removeprefix(' '))}"
    if limit is not None and len(sentences) > limit:
        yield f"  ... {len(sentences) - limit:,} more sentences"
    yield ""
