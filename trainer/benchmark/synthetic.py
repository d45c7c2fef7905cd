"""Shards of random tokens in documents with a given distribution of lengths, to measure speed without a corpus.

The time of a kernel does not depend on the ids, but that of attention depends on the lengths of documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.dataset.manifest import FORMAT_VERSION, Manifest, write_manifest
from data_prep.dataset.manifest_records import FileRecord, SplitRecord, TokenizerRecord
from data_prep.dataset.shards import Record, write_shard
from data_prep.tokenizer.special_tokens import SPECIAL_TOKENS

RECORD_TOKENS = 65_536
SENTENCE_TOKENS = 20
ONE_TOKEN_SHARE = 0.01
"""Share of documents: real corpora contain headings and stray lines, and their sequences cost time in attention."""


@dataclass(frozen=True)
class DocumentLengths:
    """Log-normal lengths of documents in tokens; `ONE_TOKEN_SHARE` of the documents have one token."""

    mean: float = 600.0
    sigma: float = 1.0
    """Standard deviation of the logarithm of lengths; with 0 all documents have the same length."""

    def sample(self, generator: np.random.Generator, size: int) -> np.ndarray:
        """Return lengths, (size,) int64."""
        lengths = generator.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, size)
        if self.sigma:
            lengths[generator.random(size) < ONE_TOKEN_SHARE] = 1
        return np.maximum(1, np.rint(lengths).astype(np.int64))

    def __str__(self) -> str:
        if self.sigma == 0:
            return f"synthetic documents of {self.mean:g} tokens each"
        lengths = f"log-normal lengths of mean {self.mean:g} tokens and sigma {self.sigma:g}"
        return f"synthetic documents, {lengths}, {ONE_TOKEN_SHARE:.0%} of them of one token"


def write_synthetic_shards(folder: Path, vocab_size: int, num_tokens: int, lengths: DocumentLengths) -> None:
    """Write a shard set with one train shard of about `num_tokens` tokens, without valid shards and tokenizer."""
    records = _records(np.random.default_rng(0), vocab_size, num_tokens, lengths)
    shard = write_shard(str(folder), "train-000000", records)
    nothing = SplitRecord(shards=(), documents=0, sentences=0, tokens=0, unigram_entropy_nats=None)
    train = SplitRecord(
        shards=(shard,),
        documents=shard.documents,
        sentences=shard.sentences,
        tokens=shard.tokens,
        unigram_entropy_nats=None,
    )
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        clozeworks_version="0",
        tokenizer=TokenizerRecord(fingerprint="0" * 64, vocab_size=vocab_size, token_dtype=_dtype(vocab_size).name),
        config={},
        inputs=(),
        sources=(),
        train=train,
        valid=nothing,
        token_counts=FileRecord(name="token_counts.safetensors", bytes=0, sha256="0" * 64),
    )
    write_manifest(str(folder), manifest)


def _records(
    generator: np.random.Generator, vocab_size: int, num_tokens: int, lengths: DocumentLengths
) -> Iterator[Record]:
    num_documents = max(1, round(RECORD_TOKENS / lengths.mean))
    written = first_id = 0
    while written < num_tokens:
        documents = lengths.sample(generator, num_documents)
        starts = np.cumsum(documents) - documents
        sentences = [
            np.arange(start, start + length, SENTENCE_TOKENS) for start, length in zip(starts, documents, strict=True)
        ]
        yield Record(
            tokens=generator.integers(len(SPECIAL_TOKENS), vocab_size, documents.sum()).astype(_dtype(vocab_size)),
            documents=starts.astype(np.uint32),
            sentences=np.concatenate(sentences).astype(np.uint32),
            sources=np.zeros(num_documents, np.uint16),
            document_ids=np.arange(first_id, first_id + num_documents, dtype=np.uint64),
        )
        written += int(documents.sum())
        first_id += num_documents


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)
