"""Counts of a data set: tokens by id, documents and text by source, totals and entropy of a split."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import safetensors.numpy

from data_prep.base.errors import UserError
from data_prep.dataset.manifest import TOKEN_COUNTS_NAME, Manifest
from data_prep.dataset.manifest_records import FileRecord, ShardRecord, SplitRecord, read_file, record_of
from data_prep.dataset.shards import TENSOR_FAULTS, Record
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer

SOURCE_COLUMNS = ("documents", "sentences", "tokens", "words", "text_bytes")
"""What is counted of each source, as `SourceRecord` names it."""

_TOKENS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class PieceText:
    """Text properties of each token id.

    Attributes:
        num_bytes: (vocab_size,) uint16 UTF-8 bytes of normalized text; uint16 keeps the table in the cache of a core.
        begins_word: (vocab_size,) bool.
    """

    num_bytes: np.ndarray
    begins_word: np.ndarray

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> PieceText:
        return cls(tokenizer.byte_lengths.astype(np.uint16), tokenizer.opens_word)


class RecordCounts:
    """Counts tokens and text of the records that are added.

    Attributes:
        by_token: (vocab_size,) int64 how often each token id occurs.
        by_source: (num_sources, 5) int64 in the order of `SOURCE_COLUMNS`.
    """

    def __init__(self, vocab_size: int, num_sources: int, text: PieceText | None) -> None:
        """Without `text`, words and bytes are not counted."""
        self._text = text
        self.by_token = np.zeros(vocab_size, np.int64)
        self.by_source = np.zeros((num_sources, len(SOURCE_COLUMNS)), np.int64)

    def add(self, record: Record) -> None:
        for tokens in _pieces(record.tokens):
            self.by_token += np.bincount(tokens, minlength=len(self.by_token))
        starts = record.documents.astype(np.int64)
        columns = [
            np.ones(len(starts), np.int64),
            np.diff(np.searchsorted(record.sentences, record.documents), append=len(record.sentences)),
            np.diff(starts, append=len(record.tokens)),
        ]
        if self._text is not None:
            tables = (self._text.begins_word, self._text.num_bytes)
            found = (np.concatenate([table[tokens] for tokens in _pieces(record.tokens)]) for table in tables)
            columns += [np.add.reduceat(each, starts, dtype=np.int64) for each in found]
        for column, values in enumerate(columns):
            np.add.at(self.by_source[:, column], record.sources, values)


def _pieces(tokens: np.ndarray) -> list[np.ndarray]:
    """Return the tokens in parts: numpy converts every counted token to 8 bytes."""
    return [tokens[start : start + _TOKENS_AT_ONCE] for start in range(0, len(tokens), _TOKENS_AT_ONCE)]


def unigram_entropy_nats(token_counts: np.ndarray) -> float | None:
    """Return the entropy of token frequencies (vocab_size,) in nats; None if nothing was counted."""
    total = int(token_counts.sum())
    shares = token_counts[token_counts > 0] / total if total else token_counts[:0]
    # math.log and fsum give the same result on every machine; those of numpy depend on its vector units.
    logarithms = np.fromiter(map(math.log, shares.tolist()), np.float64, len(shares))
    return math.fsum((-shares * logarithms).tolist()) if total else None


def split_record(shards: Sequence[ShardRecord], token_counts: np.ndarray) -> SplitRecord:
    """Return the record of a split of these shards, with its totals."""
    return SplitRecord(
        shards=tuple(shards),
        documents=sum(shard.documents for shard in shards),
        sentences=sum(shard.sentences for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        unigram_entropy_nats=unigram_entropy_nats(token_counts),
    )


def token_counts_file(token_counts: Mapping[str, np.ndarray], version: int) -> tuple[FileRecord, bytes]:
    """Return the content of the file with the counts of train and valid, (vocab_size,) int64 each, and its record."""
    data = safetensors.numpy.save({name: np.asarray(counts, np.int64) for name, counts in token_counts.items()})
    name = TOKEN_COUNTS_NAME if version == 1 else f"token_counts-{version:06d}.safetensors"
    return record_of(name, data), data


def read_tensors(folder: str, record: FileRecord) -> dict[str, np.ndarray]:
    """Return the arrays of a safetensors file that the manifest names."""
    remedy = "restore it, or make the shards again"
    data = read_file(folder, record, remedy)
    try:
        return safetensors.numpy.load(data)
    except TENSOR_FAULTS as error:
        where = storage.redact(storage.join(folder, record.name))
        raise UserError(f"{where} is damaged ({error})", fix=remedy, code="damaged-counts") from None


def read_token_counts(folder: str, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return how often each token id occurs in train and in valid, (vocab_size,) int64.

    Raises:
        UserError: the file is missing, not the one that the manifest names, or counts something else.
    """
    counts = read_tensors(folder, manifest.token_counts)
    shape = (manifest.tokenizer.vocab_size,)
    for name in ("train", "valid"):
        if name not in counts or counts[name].shape != shape or counts[name].dtype != np.int64:
            where = storage.redact(storage.join(folder, manifest.token_counts.name))
            raise UserError(
                f"{where} lacks the {name} counts of some token ids",
                fix="make the shards again",
                code="damaged-counts",
            )
    return counts


@functools.lru_cache(maxsize=1)
def piece_text(tokenizer_url: str, fingerprint: str) -> PieceText:
    """Return the text properties of the ids of the data set's tokenizer, loaded once per process."""
    tokenizer = Tokenizer.load(tokenizer_url)
    if not tokenizer.is_named(fingerprint):
        raise UserError(
            f"{storage.redact(tokenizer_url)} is another tokenizer: its fingerprint is {tokenizer.fingerprint} and the "
            f"shards were made with {fingerprint}",
            fix="copy the right one there, or make the shards again",
            code="other-tokenizer",
        )
    return PieceText.of(tokenizer)
