"""Encoding of documents: cleaning, length limits, sentence boundaries, tokenization."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
import xxhash

from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.document import Document
from data_prep.pipeline.provenance_rows import has_provenance, pack_provenance
from data_prep.pipeline.sections import Section
from data_prep.text.cleaning import replace_surrogates
from data_prep.text.sentences import batch_sentence_starts, known_language, raw_sentence_starts
from data_prep.text.text_batch import TextBatch, normalize_batch
from data_prep.tokenizer.foreign_tokenizer import ForeignTokenizer
from data_prep.tokenizer.tokenizer import Tokenizer
from data_prep.tokenizer.word_cache import count_long_words, pieces_of


def document_id(normalized: str) -> int:
    """Return the 64-bit id of a document: xxh3_64 of its normalized text."""
    return xxhash.xxh3_64_intdigest(normalized.encode())


def encode_documents(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    settings: DocumentSettings,
    language: str,
    dropped: Counter[str],
) -> tuple[Section, int]:
    """Encode the documents that are neither empty, too short nor too long; count the others in `dropped`.

    Returns the encoded documents, and how many of their words were encoded in parts. `language` applies to documents
    without a known language.
    """
    batch = normalize_batch([document.text for document in documents], tokenizer.normalization)
    is_kept = _kept(batch, settings, dropped)
    kept = [documents[number] for number in np.flatnonzero(is_kept).tolist()]
    batch = batch.select(is_kept)
    languages = [known_language(document.language, language) for document in kept]
    if isinstance(tokenizer, ForeignTokenizer):
        texts = [replace_surrogates(document.text) for document in kept]
        section, is_encoded, num_cut = _encode_raw(texts, batch, languages, tokenizer, dropped)
        kept = [document for document, is_so in zip(kept, is_encoded.tolist(), strict=True) if is_so]
    else:
        section, num_cut = _encode(batch, languages, tokenizer), count_long_words(batch.data)
    if has_provenance(settings):
        section = dataclasses.replace(section, **pack_provenance(kept))
    return section, num_cut


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


def _encode(batch: TextBatch, languages: Sequence[str], tokenizer: Tokenizer) -> Section:
    """Return the token ids of non-empty documents; a sentence begins at the token with its first byte."""
    starts_bytes = batch_sentence_starts(batch, languages)
    tokens, sentence_starts = [np.zeros(0, tokenizer.token_dtype)], [np.zeros(0, np.int64)]
    position = num_tokens = 0
    for piece in pieces_of(batch.data):
        ids = tokenizer.encode_bytes(piece)
        has_unknown = (ids == tokenizer.special_tokens.unk).any()
        token_stops = np.cumsum(tokenizer.token_bytes(ids, piece.decode() if has_unknown else None))
        first, last = np.searchsorted(starts_bytes, (position, position + len(piece)))
        # Tokens that end at or before a byte precede the token with this byte.
        indices = np.searchsorted(token_stops, starts_bytes[first:last] - position, "right")
        sentence_starts.append(indices + num_tokens)
        tokens.append(ids)
        position += len(piece)
        num_tokens += len(ids)
    starts = np.concatenate(sentence_starts)
    # Every document begins with its own sentence and token.
    document_starts = starts[np.searchsorted(starts_bytes, batch.document_starts[:-1])]
    starts = starts[np.diff(starts, prepend=-1) > 0]
    return Section(
        document_ids=_document_ids(batch),
        document_lengths=np.diff(document_starts, append=num_tokens).astype(np.uint32),
        sentence_counts=np.diff(np.searchsorted(starts, document_starts), append=len(starts)).astype(np.uint32),
        sentence_lengths=np.diff(starts, append=num_tokens).astype(np.uint32),
        tokens=np.concatenate(tokens),
    )


def _encode_raw(
    texts: Sequence[str], batch: TextBatch, languages: Sequence[str], tokenizer: ForeignTokenizer, dropped: Counter[str]
) -> tuple[Section, np.ndarray, int]:
    """Do the same for a tokenizer that takes the original texts; the batch holds the normalized ones.

    Also returns which documents (D,) bool have tokens.
    """
    encoded = tokenizer.encode_texts(texts)
    # A tokenizer may remove what is text here.
    is_kept = np.array([len(text.ids) > 0 for text in encoded], bool)
    if not is_kept.all():
        dropped["empty"] += int((~is_kept).sum())
    tokens, lengths, sentence_counts = [np.zeros(0, tokenizer.token_dtype)], [], []
    sentence_lengths = [np.zeros(0, np.int64)]
    for number in np.flatnonzero(is_kept).tolist():
        ids, stops, _ = encoded[number]
        indices = np.searchsorted(stops, raw_sentence_starts(texts[number], languages[number]), "right")
        starts = np.unique(np.append(indices[indices < len(ids)], 0))
        tokens.append(ids)
        lengths.append(len(ids))
        sentence_counts.append(len(starts))
        sentence_lengths.append(np.diff(starts, append=len(ids)))
    section = Section(
        document_ids=_document_ids(batch)[is_kept],
        document_lengths=np.array(lengths, np.uint32),
        sentence_counts=np.array(sentence_counts, np.uint32),
        sentence_lengths=np.concatenate(sentence_lengths).astype(np.uint32),
        tokens=np.concatenate(tokens),
    )
    return section, is_kept, sum(text.cut_words for text in encoded)


def _document_ids(batch: TextBatch) -> np.ndarray:
    """Return the `document_id` of every text of the batch, (D,) uint64."""
    data = memoryview(batch.data)
    bounds = batch.document_starts.tolist()
    ids = [xxhash.xxh3_64_intdigest(data[start:stop]) for start, stop in zip(bounds, bounds[1:], strict=False)]
    return np.array(ids, np.uint64)
