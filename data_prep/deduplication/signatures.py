"""MinHash signatures: a document's set of token n-grams as a short row of numbers that preserves similarity.

Two documents are compared by the Jaccard similarity of their n-gram sets (Broder 1997, "On the resemblance and
containment of documents"). The n-grams consist of tokens, not words: Chinese, Japanese and Thai have no spaces between
words, and the texts are already tokenized. Similarity is measured on the tokens that the model is trained on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from rensa import RMinHash

from data_prep.config.preparation_config import DeduplicationSettings
from data_prep.deduplication.similarity_search import mix

# Version of rensa, which identifies the algorithm: signatures of different versions cannot be compared.
ALGORITHM_VERSION = RMinHash.ALGORITHM_VERSION
_SEED = 1
_MULTIPLIER = 0x9E3779B97F4A7C13  # odd, so that it has an inverse among the 64-bit words
_CHUNK_TOKENS = 1 << 16  # fits in a core's cache


def signatures(tokens: Sequence[np.ndarray], settings: DeduplicationSettings) -> np.ndarray:
    """Return the MinHash signature of every document, (D, num_hashes) uint32.

    The share of equal values of two signatures approximates the Jaccard similarity of the n-gram sets. A document
    shorter than an n-gram is a single n-gram. A signature depends only on its document and the settings: not on other
    documents, the machine, or the dtype of the tokens.

    Args:
        tokens: tokens of each document, (n,) uint16 or uint32; no document is empty.
    """
    if not tokens:
        return np.empty((0, settings.num_hashes), np.uint32)
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    hashes, counts = ngram_hashes(np.concatenate(tokens), lengths, settings.ngram_tokens)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashes, offsets, settings.num_hashes, _SEED)
    return np.array(matrix.to_rows(), np.uint32)


def ngram_hashes(tokens: np.ndarray, lengths: np.ndarray, ngram_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes (G,) uint64 of the n-grams of concatenated documents, and the number of each, (D,).

    The hash of n tokens is the polynomial sum(word(t_k) * M**k) of 64-bit words, mixed. It is a difference of running
    sums divided by a power of M, so its cost does not grow with n (Karp and Rabin 1987, with all windows at once).

    Args:
        tokens: (T,) of any unsigned dtype.
        lengths: (D,) tokens of each document, none 0.
    """
    assert lengths.all() and lengths.sum() == len(tokens)
    stops = np.cumsum(lengths)
    begins_ngram = np.ones(len(tokens), bool)
    for tokens_before_end in range(1, ngram_tokens):
        begins_ngram[stops[lengths > tokens_before_end] - tokens_before_end] = False
    short_stops = stops[lengths < ngram_tokens]
    short_starts = short_stops - lengths[lengths < ngram_tokens]

    counts = np.maximum(lengths - ngram_tokens + 1, 1)
    hashes = np.empty(counts.sum(), np.uint64)
    powers, inverse_powers = _powers(_CHUNK_TOKENS + ngram_tokens)
    done = 0
    for chunk_start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk_stop = min(chunk_start + _CHUNK_TOKENS, len(tokens))
        words = mix(tokens[chunk_start : chunk_stop + ngram_tokens].astype(np.uint64))
        sums = np.zeros(len(words) + 1, np.uint64)
        np.cumsum(words * powers[: len(words)], out=sums[1:])
        starts = np.flatnonzero(begins_ngram[chunk_start:chunk_stop])
        ends = starts + ngram_tokens
        short = slice(*np.searchsorted(short_starts, (chunk_start, chunk_stop)))
        ends[np.searchsorted(starts, short_starts[short] - chunk_start)] = short_stops[short] - chunk_start
        hashes[done : done + len(starts)] = mix((sums[ends] - sums[starts]) * inverse_powers[starts])
        done += len(starts)
    return hashes, counts


@functools.lru_cache(maxsize=2)
def _powers(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the powers 0 to count - 1 of the multiplier and of its inverse modulo 2**64, (count,) uint64 each."""

    def powers_of(base: int) -> np.ndarray:
        values = np.full(count, base, np.uint64)
        values[0] = 1
        return np.cumprod(values, dtype=np.uint64)

    return powers_of(_MULTIPLIER), powers_of(pow(_MULTIPLIER, -1, 1 << 64))
