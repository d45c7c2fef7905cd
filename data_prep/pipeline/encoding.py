"""Encoding of documents: cleaning, length limits, ids, and the tokens and sentences that the tokenizer makes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

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


def encode_documents(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    settings: DocumentSettings,
    dropped: Counter[str],
    has_provenance: bool = False,
) -> tuple[Section, int]:
    """Encode the documents that are neither empty, too short nor too long; count the others in `dropped`.

    Returns the encoded documents, and how many of their words were encoded in parts. The language of the settings
    applies to documents without a known language. With `has_provenance` every document has its provenance.
    """
    batch = normalize_batch([document.text for document in documents], tokenizer.normalization)
    is_kept = _kept(batch, settings, dropped)
    kept = [documents[number] for number in np.flatnonzero(is_kept).tolist()]
    batch = batch.select(is_kept)
    languages = None
    if settings.sentences == "split":
        languages = [known_language(document.language, settings.language) for document in kept]
    encoded = tokenizer.encode_batch([document.text for document in kept], batch, languages)
    if not encoded.has_tokens.all():
        dropped["empty"] += int((~encoded.has_tokens).sum())
        kept = [document for document, is_so in zip(kept, encoded.has_tokens.tolist(), strict=True) if is_so]
    section = Section(
        document_ids=_document_ids(batch)[encoded.has_tokens],
        document_lengths=encoded.lengths,
        sentence_counts=encoded.sentence_counts,
        sentence_lengths=encoded.sentence_lengths,
        tokens=encoded.tokens,
    )
    if has_provenance:
        section = dataclasses.replace(section, **pack_provenance(kept))
    return section, encoded.num_cut_words


def _kept(batch: TextBatch, settings: DocumentSettings, dropped: Counter[str]) -> np.ndarray:
    """Return which documents (D,) bool are within the limits."""
    num_bytes = np.diff(batch.document_starts)
    shortest, longest = settings.min_document_characters, settings.max_document_characters or np.iinfo(np.int64).max
    # Without the space before the text. Most texts have one byte per character; the maximum is four.
    num_characters = np.maximum(num_bytes - 1, 0)
    for number in np.flatnonzero((num_characters < 4 * shortest) | (num_characters > longest)).tolist():
        num_characters[number] = max(0, len(batch.document(number).decode()) - 1)
    is_empty = num_bytes == 0
    is_short = ~is_empty & (num_characters < shortest)
    is_long = num_characters > longest
    for reason, is_so in (("empty", is_empty), ("too short", is_short), ("too long", is_long)):
        if is_so.any():
            dropped[reason] += int(is_so.sum())
    is_kept: np.ndarray = ~(is_empty | is_short | is_long)
    return is_kept


def _document_ids(batch: TextBatch) -> np.ndarray:
    """Return the `document_id` of every text of the batch, (D,) uint64."""
    data = memoryview(batch.data)
    bounds = batch.document_starts.tolist()
    ids = [xxhash.xxh3_64_intdigest(data[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return np.array(ids, np.uint64)
