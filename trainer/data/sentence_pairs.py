"""Sentence pairs for next-sentence or sentence-order prediction, planned from sentence lengths alone.

After Devlin et al. 2018, section 3.1 and Appendix A.2, and their published data program: sentences of a document are
gathered until a target length is reached, the chunk is cut between two sentences into A and B, and in half of the
cases B is replaced by a random place of another document, when the replaced sentences are used again. What follows a
chunk depends on nothing but the sentence at which it begins: so the successor of *every* sentence is computed at
once, and all documents are then walked from chunk to chunk in lock-step.

For sentence-order prediction (Lan et al. 2019, "ALBERT", section 3.1) A and B always follow each other, and half of
the pairs are given in the wrong order. A chunk of one sentence has no order: it is an A alone, without a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from data_prep.data_set.shard_index import ShardIndex
from trainer.data.batch import IGNORED
from trainer.data.bin_packing import pack_rows
from trainer.data.packing import document_starts
from trainer.data.pair_rows import PairCounts, PairPlan
from trainer.data.randomness import below, fold, high_bits, low_bits

PairTask = Literal["next_sentence", "sentence_order"]
IS_NEXT, IS_RANDOM = 0, 1
"""Labels as in Hugging Face's `next_sentence_label`."""
IN_ORDER, IS_SWAPPED = 0, 1
"""Labels as in Hugging Face's `sentence_order_label`."""
SPECIAL_PLACES = 3
"""[CLS] A [SEP] B [SEP]."""
SHORTEST_PAIR = SPECIAL_PLACES + 2
SHORTEST_SINGLE = 3
"""[CLS] A [SEP]."""

_LENGTH, _CUT, _DOCUMENT, _SENTENCE, _TRUNCATE_A, _TRUNCATE_B, _SWAP = range(7)
_REDRAWS = 16


@dataclass(frozen=True)
class _Text:
    """A shard as a run of S sentences."""

    offsets: np.ndarray
    """(S + 1,) int64: tokens before each sentence."""
    document_firsts: np.ndarray
    """(D + 1,) int64: first sentence of each document, then S."""
    documents: np.ndarray
    """(S,) int64: the document of each sentence."""

    @classmethod
    def of(cls, index: ShardIndex) -> _Text:
        return cls(
            offsets=np.concatenate([[0], np.cumsum(index.sentence_lengths, dtype=np.int64)]),
            document_firsts=np.concatenate([[0], np.cumsum(index.sentence_counts, dtype=np.int64)]),
            documents=np.repeat(np.arange(len(index.sentence_counts)), index.sentence_counts),
        )

    def reach(self, firsts: np.ndarray, targets: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """The sentence after the fewest whole ones (at least one) from `firsts` on that hold `targets` tokens, or
        after the document's last."""
        ends = np.searchsorted(self.offsets, self.offsets[firsts] + targets, side="left")
        reached: np.ndarray = np.minimum(np.maximum(ends, firsts + 1), self.document_firsts[documents + 1])
        return reached

    def tokens(self, firsts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        counts: np.ndarray = self.offsets[ends] - self.offsets[firsts]
        return counts


def max_pairs_in_row(sequence_length: int) -> int:
    """The most pairs that a row can hold."""
    return sequence_length // SHORTEST_PAIR


def plan_pairs(
    index: ShardIndex,
    itemsize: int,
    sequence_length: int,
    short_seq_probability: float,
    key: np.uint64,
    task: PairTask = "next_sentence",
) -> PairPlan:
    """Plan the pairs of one shard for one epoch, a pure function of the arguments.

    Args:
        itemsize: bytes of a token in the shard.
        key: of (seed, epoch, shard).
    """
    text = _Text.of(index)
    capacity = sequence_length - SPECIAL_PLACES
    in_order = task == "sentence_order"
    some_other = (
        not in_order and len(index.document_ids) > 0 and bool((index.document_ids != index.document_ids[0]).any())
    )
    targets, a_ends, chunk_ends, is_random = _cut_chunks(text, capacity, short_seq_probability, some_other, key)
    firsts = _walk(text, np.where(is_random, a_ends, chunk_ends))
    singles = chunk_ends[firsts] == firsts + 1
    dropped = singles & (not some_other and not in_order)
    dropped_tokens = text.tokens(firsts[dropped], firsts[dropped] + 1).sum()
    firsts, singles = firsts[~dropped], singles[~dropped]

    random = is_random[firsts]
    a_ends = a_ends[firsts]
    b_firsts, b_ends = a_ends.copy(), chunk_ends[firsts]
    remaining = targets[firsts] - text.tokens(firsts, a_ends)
    b_firsts[random], b_ends[random] = _random_places(text, index.document_ids, firsts[random], remaining[random], key)
    if in_order:
        a_ends[singles] = b_firsts[singles] = b_ends[singles]
    lengths = np.stack([text.tokens(firsts, a_ends), text.tokens(b_firsts, b_ends)], axis=1)
    fitted = fit_pairs(lengths, capacity)
    shifts = _front_cuts(lengths - fitted, firsts, key)
    tar_shifts = document_starts(index, itemsize) - text.offsets[text.document_firsts[:-1]]
    halves = np.stack([firsts, np.where(lengths[:, 1] > 0, b_firsts, firsts)], axis=1)
    starts = text.offsets[halves] + shifts + tar_shifts[text.documents[halves]]
    labels = np.where(random, IS_RANDOM, IS_NEXT)
    if in_order:
        swapped = (high_bits(fold(fold(key, _SWAP), firsts)) < 2**31) & ~singles
        starts[swapped], fitted[swapped] = starts[swapped, ::-1], fitted[swapped, ::-1]
        labels = np.where(singles, IGNORED, np.where(swapped, IS_SWAPPED, IN_ORDER))

    places = fitted.sum(1) + SPECIAL_PLACES - (fitted[:, 1] == 0)
    rows = pack_rows(places, sequence_length)
    order = np.argsort(rows, kind="stable")
    num_rows = int(rows.max(initial=-1)) + 1
    return PairPlan(
        row_starts=np.searchsorted(rows[order], np.arange(num_rows + 1)),
        starts=starts[order],
        lengths=fitted[order].astype(np.int32),
        labels=labels[order].astype(np.int8),
        counts=PairCounts(
            pairs=int((labels != IGNORED).sum()),
            random_pairs=int(random.sum()),
            swapped_pairs=int((labels == IS_SWAPPED).sum()) if in_order else 0,
            single_sentence_chunks=int(singles.sum()),
            dropped_chunks=int(dropped.sum()),
            truncated_tokens=int(lengths.sum() - fitted.sum() + dropped_tokens),
            rows=num_rows,
            filled_places=int(places.sum()),
        ),
    )


def _cut_chunks(
    text: _Text, capacity: int, short_seq_probability: float, some_other: bool, key: np.uint64
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For a chunk at every sentence: its target length, the end of A, its own end, and whether B is random; (S,)."""
    sentences = np.arange(len(text.documents))
    draws = fold(fold(key, _LENGTH), sentences)
    short = high_bits(draws) < short_seq_probability * 2**32
    targets = np.where(short, 2 + below(low_bits(draws), capacity - 1), capacity)
    ends = text.reach(sentences, targets, text.documents)
    draws = fold(fold(key, _CUT), sentences)
    single = ends == sentences + 1
    a_ends = sentences + 1 + below(low_bits(draws), ends - sentences - 1)
    is_random = (single | (high_bits(draws) < 2**31)) & some_other
    return targets, a_ends, ends, is_random


def _walk(text: _Text, successors: np.ndarray) -> np.ndarray:
    """The sentences at which chunks begin, ascending: from every document's first on, to its end."""
    found = []
    at, stop = text.document_firsts[:-1], text.document_firsts[1:]
    while len(at):
        found.append(at)
        at = successors[at]
        inside = at < stop
        at, stop = at[inside], stop[inside]
    return np.sort(np.concatenate([np.empty(0, np.int64), *found]))


def _random_places(
    text: _Text, document_ids: np.ndarray, firsts: np.ndarray, targets: np.ndarray, key: np.uint64
) -> tuple[np.ndarray, np.ndarray]:
    """First sentence and end of a B of `targets` tokens from another document, for the pairs that begin at `firsts`.

    Pieces of one split document share its id, and do not count as another.
    """
    own = text.documents[firsts]
    keys = fold(fold(key, _DOCUMENT), firsts)
    other = below(high_bits(fold(keys, 0)), len(document_ids))
    for redraw in range(1, _REDRAWS):
        same = np.flatnonzero(document_ids[other] == document_ids[own])
        if not len(same):
            break
        other[same] = below(high_bits(fold(keys[same], redraw)), len(document_ids))
    # A shard that is nearly all one document: its first document, or the first that is another than that.
    same = document_ids[other] == document_ids[own]
    second = int(np.argmax(document_ids != document_ids[0]))
    other[same] = np.where(document_ids[own[same]] == document_ids[0], second, 0)
    counts = text.document_firsts[other + 1] - text.document_firsts[other]
    b_firsts = text.document_firsts[other] + below(high_bits(fold(fold(key, _SENTENCE), firsts)), counts)
    return b_firsts, text.reach(b_firsts, targets, other)


def fit_pairs(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Shorten pairs to `capacity` tokens, always taking from the longer half, from B where both are equal.

    Args:
        lengths: (K, 2) int64 tokens of A and B.
    """
    larger_half, smaller_half = -(-capacity // 2), capacity // 2
    a, b = lengths[:, 0], lengths[:, 1]
    fitted_a = np.where(b <= smaller_half, capacity - b, np.minimum(a, larger_half))
    fitted_a = np.minimum(a, fitted_a)
    return np.stack([fitted_a, np.minimum(b, capacity - fitted_a)], axis=1)


def _front_cuts(excess: np.ndarray, firsts: np.ndarray, key: np.uint64) -> np.ndarray:
    """How many of the tokens too many are cut at the front: a fair coin for each one; (K, 2) like `excess`."""
    cuts = np.zeros_like(excess)
    for half, purpose in enumerate((_TRUNCATE_A, _TRUNCATE_B)):
        remaining = excess[:, half].copy()
        pairs = np.flatnonzero(remaining)
        keys = fold(fold(key, purpose), firsts)
        word = 0
        while len(pairs):  # 64 coins at a time
            coins = np.minimum(remaining[pairs], 64)
            bits = fold(keys[pairs], word) >> (64 - coins).astype(np.uint64)
            cuts[pairs, half] += np.unpackbits(bits.view(np.uint8).reshape(-1, 8), axis=1).sum(1, dtype=np.int64)
            remaining[pairs] -= coins
            pairs, word = pairs[remaining[pairs] > 0], word + 1
    return cuts
