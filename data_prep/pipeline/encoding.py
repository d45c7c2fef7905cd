"""Encoding of documents: cleaning, length limits, ids, and the tokens and sentences that the tokenizer makes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document
from data_prep.pipeline.provenance_rows import pack_provenance
from data_prep.pipeline.sections import Section
from data_prep.text.sentences import known_language
from data_prep.text.text_batch import TextBatch, normalize_batch
from data_prep.tokenizer.tokenizer import Tokenizer


def document_id(normalized: str) -> int:
    """Return the 64-bit id of a document: xxh3_64 of its normalized text."""
    return xxhash.xxh3_64_intdigest(normalized.encode())


class EncodedDocuments(NamedTuple):
    """The result of `encode_documents` for D documents.

    Attributes:
        section: the E documents that stay, encoded.
        num_cut_words: their words that were encoded in parts.
        drops: masks (D,) bool of the documents that are dropped, by reason.
        texts: the E documents that stay, normalized.
    """

    section: Section
    num_cut_words: int
    drops: Mapping[str, np.ndarray]
    texts: TextBatch

    def reasons(self) -> Iterator[str | None]:
        """Yield for each of the D documents why it is dropped; None for one that stays."""
        for number in range(len(self.drops["empty"])):
            yield next((reason for reason, is_so in self.drops.items() if is_so[number]), None)


def encode_documents(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    settings: DocumentSettings,
    dropped: Counter[str],
    has_provenance: bool = False,
) -> EncodedDocuments:
    """Encode the documents that are neither empty, too short nor too long; count the others in `dropped`.

    The language of the settings applies to documents without a known language. With `has_provenance` every document
    has its provenance.
    """
    batch = normalize_batch([document.text for document in documents], tokenizer.normalization)
    drops = _drops(batch, settings)
    is_kept = ~(drops["empty"] | drops["too short"] | drops["too long"])
    kept = [documents[number] for number in np.flatnonzero(is_kept).tolist()]
    batch = batch.select(is_kept)
    languages = None
    if settings.sentences == "split":
        languages = [known_language(document.language, settings.language) for document in kept]
    encoded = tokenizer.encode_batch([document.text for document in kept], batch, languages)
    if not encoded.has_tokens.all():
        drops["empty"][np.flatnonzero(is_kept)[~encoded.has_tokens]] = True
        kept = [document for document, is_so in zip(kept, encoded.has_tokens.tolist(), strict=True) if is_so]
        batch = batch.select(encoded.has_tokens)
    dropped.update({reason: int(is_so.sum()) for reason, is_so in drops.items() if is_so.any()})
    section = Section(
        document_ids=_document_ids(batch),
        document_lengths=encoded.lengths,
        sentence_counts=encoded.sentence_counts,
        sentence_lengths=encoded.sentence_lengths,
        tokens=encoded.tokens,
    )
    if has_provenance:
        section = dataclasses.replace(section, **pack_provenance(kept))
    return EncodedDocuments(section, encoded.num_cut_words, drops, batch)


def _drops(batch: TextBatch, settings: DocumentSettings) -> dict[str, np.ndarray]:
    """Return masks (D,) bool of the documents beyond the limits, by reason; a document is in one of them at most."""
    num_bytes = np.diff(batch.document_starts)
    shortest, longest = settings.min_document_characters, settings.max_document_characters or np.iinfo(np.int64).max
    # Without the space before the text. Most texts have one byte per character; the maximum is four.
    num_characters = np.maximum(num_bytes - 1, 0)
    for number in np.flatnonzero((num_characters < 4 * shortest) | (num_characters > longest)).tolist():
        num_characters[number] = max(0, len(batch.document(number).decode()) - 1)
    is_empty = num_bytes == 0
    is_short = ~is_empty & (num_characters < shortest)
    return {"empty": is_empty, "too short": is_short, "too long": num_characters > longest}


def _document_ids(batch: TextBatch) -> np.ndarray:
    """Return the `document_id` of every text of the batch, (D,) uint64."""
    data = memoryview(batch.data)
    bounds = batch.document_starts.tolist()
    ids = [xxhash.xxh3_64_intdigest(data[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return np.array(ids, np.uint64)
