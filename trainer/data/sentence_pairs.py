"""Sentence pairs for next-sentence or sentence-order prediction, planned from sentence lengths alone.

Sentences of a document are gathered until a target length is reached, and the chunk is cut between two sentences into
A and B (Devlin et al. 2018, section 3.1 and Appendix A.2, and their published data program). The end of a chunk depends
only on its first sentence. So the successor of *every* sentence is computed at once, and all documents then advance
from chunk to chunk in lock-step.

Lengths are fixed before labels, so that they carry no information about labels. The published program draws a new
random B, which has another length, and makes every chunk of one sentence a random pair. Here pairs are matched two by
two, and one fair coin labels both:

- Next sentence: two pairs of different documents whose Bs are equally long keep their Bs or exchange them.
- Sentence order (Lan et al. 2019, "ALBERT", section 3.1): of two pairs whose lengths mirror each other, one is swapped
  and the other keeps its order. A pair whose halves have equal lengths needs no partner.

A chunk of one sentence is an A alone, and a pair without a partner keeps the order of the text; neither has a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from data_prep.dataset.shards import ShardIndex
from trainer.config.objective_settings import PairTask
from trainer.data.batch import IGNORED
from trainer.data.packing import SPECIAL_POSITIONS, document_starts
from trainer.data.pair_rows import PairCounts, PairPlan, pack_rows
from trainer.data.randomness import below, fold, high_bits, low_bits

IS_NEXT, IS_RANDOM = 0, 1
"""Labels as in Hugging Face's `next_sentence_label`."""
IN_ORDER, IS_SWAPPED = 0, 1
"""Labels as in Hugging Face's `sentence_order_label`."""

_NEXT_SENTENCE_BITS = (5, 4, 3, 2, 1, 0)
"""Lengths of Bs that agree in so many leading bits are cut to the shorter one; 0 bits match any two."""
_SENTENCE_ORDER_BITS = (5, 4, 3, 2)
"""Mirrored lengths differ by less than a half: what differs more has no label."""

_LENGTH, _CUT, _FIT, _TRUNCATE_A, _TRUNCATE_B, _MATCH, _LABEL, _DIRECTION = range(8)


@dataclass(frozen=True)
class _Text:
    """A shard as a sequence of S sentences."""

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

    def mirrored(self, is_mirrored: np.ndarray) -> _Text:
        """Return the text with the sentences of some documents, (D,) bool, in reverse order."""
        sentences = np.arange(len(self.documents))
        sources = np.where(is_mirrored[self.documents], self.mirror(sentences + 1, self.documents), sentences)
        lengths = np.diff(self.offsets)[sources]
        return replace(self, offsets=np.concatenate([[0], np.cumsum(lengths)]))

    def mirror(self, bounds: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return the sentence boundaries of `documents` in reversed order."""
        mirrored: np.ndarray = self.document_firsts[documents] + self.document_firsts[documents + 1] - bounds
        return mirrored

    def reach(self, firsts: np.ndarray, targets: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return the end of the fewest sentences (at least one) from `firsts` that hold `targets` tokens, at most the
        end of the document."""
        ends = np.searchsorted(self.offsets, self.offsets[firsts] + targets, side="left")
        reached: np.ndarray = np.minimum(np.maximum(ends, firsts + 1), self.document_firsts[documents + 1])
        return reached

    def tokens(self, firsts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        counts: np.ndarray = self.offsets[ends] - self.offsets[firsts]
        return counts


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
        itemsize: bytes per token in the shard.
        key: of (seed, epoch, shard).
    """
    text = _Text.of(index)
    capacity = sequence_length - SPECIAL_POSITIONS
    cut = _cut_chunks if task == "next_sentence" else _cut_chunks_both_ways
    firsts, a_ends, ends = cut(text, capacity, short_seq_probability, key)
    lengths = np.stack([text.tokens(firsts, a_ends), text.tokens(a_ends, ends)], axis=1)
    fitted = _fit_evenly(lengths, capacity, firsts, key)
    documents = text.documents[firsts]
    tar_shifts = document_starts(index, itemsize) - text.offsets[text.document_firsts[:-1]]
    starts = text.offsets[np.stack([firsts, a_ends], axis=1)] + tar_shifts[documents, None]
    starts += _front_cuts(lengths - fitted, firsts, key)
    singles = np.count_nonzero(ends == firsts + 1)
    truncated_tokens = lengths.sum() - fitted.sum()
    coins = high_bits(fold(fold(key, _LABEL), firsts)) < 2**31
    if task == "next_sentence":
        planned = _label_next_sentences(starts, fitted, index.document_ids[documents], coins, key)
    else:
        planned = _label_sentence_orders(starts, fitted, coins, key)
    starts, lengths, labels = planned

    used = lengths.sum(1) + SPECIAL_POSITIONS - (lengths[:, 1] == 0)
    rows = pack_rows(used, sequence_length)
    order = np.argsort(rows, kind="stable")
    num_rows = int(rows.max(initial=-1)) + 1
    return PairPlan(
        row_starts=np.searchsorted(rows[order], np.arange(num_rows + 1)),
        starts=starts[order],
        lengths=lengths[order].astype(np.int32),
        labels=labels[order].astype(np.int8),
        counts=PairCounts(
            pairs=int((labels != IGNORED).sum()),
            random_pairs=int((labels == IS_RANDOM).sum()) if task == "next_sentence" else 0,
            swapped_pairs=int((labels == IS_SWAPPED).sum()) if task == "sentence_order" else 0,
            single_sentence_chunks=int(singles),
            unlabeled_pairs=int(((labels == IGNORED) & (lengths[:, 1] > 0)).sum()),
            truncated_tokens=int(truncated_tokens),
            rows=num_rows,
            filled_positions=int(used.sum()),
        ),
    )


def _cut_chunks(
    text: _Text, capacity: int, short_seq_probability: float, key: np.uint64
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first sentence of every chunk, ascending, the end of its A and its own end; (K,) int64 each."""
    sentences = np.arange(len(text.documents))
    draws = fold(fold(key, _LENGTH), sentences)
    short = high_bits(draws) < short_seq_probability * 2**32
    targets = np.where(short, 2 + below(low_bits(draws), capacity - 1), capacity)
    successors = text.reach(sentences, targets, text.documents)
    firsts = _walk(text, successors)
    ends = successors[firsts]
    cuts = below(high_bits(fold(fold(key, _CUT), firsts)), ends - firsts - 1)
    return firsts, firsts + 1 + cuts, ends


def _cut_chunks_both_ways(
    text: _Text, capacity: int, short_seq_probability: float, key: np.uint64
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return chunks like `_cut_chunks`; half of the documents are gathered from the last sentence to the first.

    The sentence that reaches a target tends to be long. With one direction it would always be in B.
    """
    is_mirrored = high_bits(fold(fold(key, _DIRECTION), np.arange(len(text.document_firsts) - 1))) < 2**31
    firsts, a_ends, ends = _cut_chunks(text.mirrored(is_mirrored), capacity, short_seq_probability, key)
    documents = text.documents[firsts]
    mirrored = is_mirrored[documents]
    singles = ends == a_ends
    a_ends = np.where(mirrored & ~singles, text.mirror(a_ends, documents), a_ends)
    firsts, ends = (
        np.where(mirrored, text.mirror(ends, documents), firsts),
        np.where(mirrored, text.mirror(firsts, documents), ends),
    )
    return firsts, np.where(singles, ends, a_ends), ends


def _walk(text: _Text, successors: np.ndarray) -> np.ndarray:
    """Return the sentences at which chunks begin, ascending, from the first sentence of each document to its end."""
    chunks = []
    at, stop = text.document_firsts[:-1], text.document_firsts[1:]
    while len(at):
        chunks.append(at)
        at = successors[at]
        inside = at < stop
        at, stop = at[inside], stop[inside]
    return np.sort(np.concatenate([np.empty(0, np.int64), *chunks]))


def _label_next_sentences(
    starts: np.ndarray, lengths: np.ndarray, document_ids: np.ndarray, coins: np.ndarray, key: np.uint64
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exchange the Bs of half of the couples; return (starts, lengths, labels) of all pairs and of the tails.

    If two Bs differ in length, the longer one is cut, whether they are exchanged or not. Its tail becomes an A alone,
    so that no token is lost. Parts of one split document share its id, so they do not count as different documents.

    Args:
        starts, lengths: (K, 2) int64 of A and B. document_ids: (K,). coins: (K,) bool, fair, one for each pair.
    """
    pairs = np.flatnonzero(lengths[:, 1])
    couples = pairs[_match(lengths[pairs, 1:], document_ids[pairs], _NEXT_SENTENCE_BITS, key)]
    b_starts, b_lengths = starts[couples, 1], lengths[couples, 1]
    shared = b_lengths.min(axis=1, keepdims=True)
    is_tail = b_lengths > shared
    tail_starts, tail_lengths = (b_starts + shared)[is_tail], (b_lengths - shared)[is_tail]

    exchanged = coins[couples[:, 0]]
    lengths, starts, labels = lengths.copy(), starts.copy(), np.full(len(lengths), IGNORED)
    lengths[couples, 1] = shared
    starts[couples[exchanged], 1] = b_starts[exchanged, ::-1]
    labels[couples] = np.where(exchanged, IS_RANDOM, IS_NEXT)[:, None]
    return (
        np.concatenate([starts, np.stack([tail_starts, tail_starts], axis=1)]),
        np.concatenate([lengths, np.stack([tail_lengths, np.zeros_like(tail_lengths)], axis=1)]),
        np.concatenate([labels, np.full(len(tail_lengths), IGNORED)]),
    )


def _label_sentence_orders(
    starts: np.ndarray, lengths: np.ndarray, coins: np.ndarray, key: np.uint64
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Swap one pair of every couple, and half of the pairs with equal halves; return (starts, lengths, labels).

    Args:
        starts, lengths: (K, 2) int64 of A and B. coins: (K,) bool, fair, one for each pair.
    """
    pairs = np.flatnonzero(lengths[:, 1])
    even = pairs[lengths[pairs, 0] == lengths[pairs, 1]]
    uneven = pairs[lengths[pairs, 0] != lengths[pairs, 1]]
    a_is_longer = lengths[uneven, 0] > lengths[uneven, 1]
    couples = uneven[_match(np.sort(lengths[uneven], axis=1), a_is_longer, _SENTENCE_ORDER_BITS, key)]
    labels = np.full(len(lengths), IGNORED)
    labels[even] = np.where(coins[even], IS_SWAPPED, IN_ORDER)
    labels[couples[:, 0]] = np.where(coins[couples[:, 0]], IS_SWAPPED, IN_ORDER)
    labels[couples[:, 1]] = IN_ORDER + IS_SWAPPED - labels[couples[:, 0]]
    swapped = (labels == IS_SWAPPED)[:, None]
    return np.where(swapped, starts[:, ::-1], starts), np.where(swapped, lengths[:, ::-1], lengths), labels


def _match(sizes: np.ndarray, kinds: np.ndarray, bits: Sequence[int], key: np.uint64) -> np.ndarray:
    """Return couples of items with different kinds and the same sizes, (C, 2) int64; an item is in at most one couple.

    The first round matches items of equal sizes, and one round for each of `bits` those whose sizes agree in so many
    leading bits. In a group of equal sizes, sorted by kind, each item of the first half is matched with the item half a
    group behind it, so that as many couples as possible have different kinds.

    Args:
        sizes: (N, 1 or 2) int64, 1 to 2^31 - 1. kinds: (N,).
    """
    shifts = 32 * np.arange(sizes.shape[1])  # a group by one number
    left = np.arange(len(sizes))
    matches = [np.empty((0, 2), np.int64)]
    for num_bits in (64, *bits):
        groups = (_leading_bits(sizes[left], num_bits) << shifts).sum(axis=1)
        # Each group has its own order of kinds, so that different kinds meet.
        order = np.lexsort((fold(fold(fold(key, _MATCH), groups), kinds[left]), groups))
        counts = np.unique(groups, return_counts=True)[1]
        half = np.repeat(counts // 2, counts)
        ranks = np.arange(len(left)) - np.repeat(np.cumsum(counts) - counts, counts)
        in_front = np.flatnonzero(ranks < half)
        couples = left[order[np.stack([in_front, in_front + half[in_front]], axis=1)]]
        couples = couples[kinds[couples[:, 0]] != kinds[couples[:, 1]]]
        matches.append(couples)
        left = np.setdiff1d(left, couples, assume_unique=True)
    return np.concatenate(matches)


def _leading_bits(sizes: np.ndarray, num_bits: int) -> np.ndarray:
    """Return `sizes` with all but their `num_bits` leading bits cleared."""
    shifts = np.maximum(np.frexp(sizes)[1] - num_bits, 0)
    cleared: np.ndarray = (sizes >> shifts) << shifts
    return cleared


def _fit_evenly(lengths: np.ndarray, capacity: int, firsts: np.ndarray, key: np.uint64) -> np.ndarray:
    """Apply `fit_pairs` with A and B in roles that a fair coin per pair assigns, so that neither is longer by rule."""
    mirrored = high_bits(fold(fold(key, _FIT), firsts)) < 2**31
    fitted = fit_pairs(np.where(mirrored[:, None], lengths[:, ::-1], lengths), capacity)
    return np.where(mirrored[:, None], fitted[:, ::-1], fitted)


def fit_pairs(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Shorten pairs to `capacity` tokens: remove from the longer half, or from B if both are equal.

    Args:
        lengths: (K, 2) int64 tokens of A and B.
    """
    larger_half, smaller_half = -(-capacity // 2), capacity // 2
    a, b = lengths[:, 0], lengths[:, 1]
    fitted_a = np.where(b <= smaller_half, capacity - b, np.minimum(a, larger_half))
    fitted_a = np.minimum(a, fitted_a)
    return np.stack([fitted_a, np.minimum(b, capacity - fitted_a)], axis=1)


def _front_cuts(excess: np.ndarray, firsts: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return how many of the excess tokens are cut at the front, by a fair coin for each; (K, 2) like `excess`."""
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
