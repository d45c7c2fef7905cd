"""Whole words to predict that do not depend on the tokenizer, for `valid/word_bits_per_byte`.

Text, not tokens, decides everything, so that two tokenizers hide the same words in the same context:

- A word is a run of characters between white space; a run of letters of a script without spaces (Chinese, Japanese,
  Thai, ...) is a word of its own. Word n of a document is the n-th of its normalized text, counted from 0.
- A passage is a run of words of at most `PASSAGE_BYTES`, a space before each counted; a longer word is in no passage.
  A document is cut into passages from its beginning, and each passage is read alone, between [CLS] and [SEP].
- Documents are taken in the order of a hash of their ids, of each the words in its first max(4, ceil(1024 / D)) times
  `PASSAGE_BYTES`, where D is the number of documents of the valid split, until there are `MAX_PASSAGES`.
- Word n of document d is hidden where a hash of (d, n) is below `HIDDEN_SHARE`: all its tokens become [MASK] at once.
  The space before a word is a part of its tokens, and not of its bytes.

A passage with more tokens than the model has positions is read in parts. Both words of a token that reaches into
two stay visible, and so does a word with [UNK], whose bytes are unknown. So the digest of the hidden words shows
whether two tokenizers hide the same words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import regex
import torch

from data_prep.tokenizer.special_tokens import SpecialTokens
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.measurements import WORD_ROW_LENGTH, WORDS
from trainer.data.assembly import assemble_rows
from trainer.data.batch import IGNORED, Batch
from trainer.data.evaluation_batches import EvaluationBatch
from trainer.data.packing import SEGMENT_A, RowSettings, Segments, document_starts
from trainer.data.randomness import Purpose, fold, root_key, uniform
from trainer.data.shard_set import Shard, ShardSet

PASSAGE_BYTES = WORD_ROW_LENGTH - 2
"""No token of normalized text is shorter than a byte, so a row has room for any passage between [CLS] and [SEP]."""
MAX_PASSAGES = 1024
MIN_PASSAGES_PER_DOCUMENT = 4
HIDDEN_SHARE = 0.15
_ORDER, _CHOICE = 1, 2
_LETTERS = (
    r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Yi}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}\p{Javanese}"
)
_WORD = regex.compile(rf"[{_LETTERS}]+|[^\s{_LETTERS}]+")


@dataclass(frozen=True)
class HiddenWords:
    """The sequences of all passages, in rows.

    Attributes:
        tokens: (sum(lengths),) int64 ids, sequence after sequence.
        hidden: (sum(lengths),) int64: 1 at the tokens of hidden words.
        lengths: (S,) int64 tokens of each sequence, without special tokens.
        rows: (S,) int64 row of each sequence, ascending.
        words: (S,) int64 hidden words of each sequence.
        num_bytes: (S,) int64 their UTF-8 bytes.
        digest: of (document, word, bytes) of all hidden words; equal digests hide the same words.
    """

    tokens: np.ndarray
    hidden: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray
    words: np.ndarray
    num_bytes: np.ndarray
    row_length: int
    special_tokens: SpecialTokens
    digest: str

    @property
    def num_rows(self) -> int:
        return int(self.rows[-1]) + 1 if len(self.rows) else 0


def hide_words(
    shard_sets: Sequence[ShardSet], tokenizer: Tokenizer, row_length: int, skip_corrupt_shards: bool = False
) -> HiddenWords:
    """Choose the passages of the valid split and the words to hide in them.

    Args:
        row_length: positions of a row; a passage with more tokens is read in parts.

    Raises:
        UserError: a shard cannot be read.
    """
    parts: list[_Sequence] = []
    hidden_words: list[tuple[int, int, int]] = []
    for passage in _passages(shard_sets, tokenizer, skip_corrupt_shards):
        parts += passage.sequences(row_length - 2)
        hidden_words += passage.hidden_words
    lengths = np.array([len(part.tokens) for part in parts], np.int64)
    return HiddenWords(
        tokens=np.concatenate([part.tokens for part in parts] or [np.empty(0, np.int64)]),
        hidden=np.concatenate([part.hidden for part in parts] or [np.empty(0, np.int64)]),
        lengths=lengths,
        rows=_rows_of(lengths + 2, row_length),
        words=np.array([part.words for part in parts], np.int64),
        num_bytes=np.array([part.num_bytes for part in parts], np.int64),
        row_length=row_length,
        special_tokens=tokenizer.special_tokens,
        digest=hashlib.sha256(np.array(hidden_words, np.uint64).tobytes()).hexdigest(),
    )


def word_batches(words: HiddenWords, num_rows: int, rank: int, world_size: int) -> Iterator[EvaluationBatch]:
    """Yield all passages once, in micro-batches of that many rows; as many on every rank."""
    bounds = np.searchsorted(words.rows, np.arange(words.num_rows + 1))
    token_starts = np.concatenate([[0], np.cumsum(words.lengths)])
    for first in range(0, words.num_rows, num_rows * world_size):
        own = min(first + rank * num_rows, words.num_rows)
        stop = min(own + num_rows, words.num_rows)
        yield _batch(words, slice(bounds[own], bounds[stop]), token_starts, num_rows, own)


def _batch(
    words: HiddenWords, which: slice, token_starts: np.ndarray, num_rows: int, first_row: int
) -> EvaluationBatch:
    inside = slice(token_starts[which.start], token_starts[which.stop])
    number = which.stop - which.start
    zeros = np.zeros(number, np.int64)
    segments = Segments(
        words.rows[which] - first_row,
        zeros,
        zeros,
        words.lengths[which],
        np.full(number, SEGMENT_A),
        np.full(number, IGNORED),
    )
    rows = assemble_rows(segments, words.tokens[inside], num_rows, RowSettings(words.row_length), words.special_tokens)
    positions = rows.token_positions[words.hidden[inside] == 1]
    labels = rows.input_ids[positions]
    rows.input_ids[positions] = words.special_tokens.mask
    if not len(positions):  # a prediction that does not count, so that no head gets an empty batch
        positions, labels = np.zeros(1, np.int64), np.array([IGNORED])
    pad = words.special_tokens.pad
    return EvaluationBatch(
        Batch.of_sequences(rows.input_ids, rows.starts, words.row_length, positions, labels, pad_token_id=pad),
        torch.zeros(len(rows.input_ids), dtype=torch.int64),
        frozenset({WORDS}),
        num_words=int(words.words[which].sum()),
        num_bytes=int(words.num_bytes[which].sum()),
    )


@dataclass(frozen=True)
class _Sequence:
    tokens: np.ndarray
    hidden: np.ndarray
    words: int
    num_bytes: int


@dataclass(frozen=True)
class _Passage:
    """Tokens of a passage with the word of each, (n,) int64; hidden words by number in the passage."""

    tokens: np.ndarray
    word_of: np.ndarray
    hidden: dict[int, int]
    """Bytes of the hidden words, by the numbers in `word_of`."""
    document: int

    @property
    def hidden_words(self) -> list[tuple[int, int, int]]:
        return [(self.document, number, num_bytes) for number, num_bytes in self.hidden.items()]

    def sequences(self, most_tokens: int) -> Iterator[_Sequence]:
        """Return the passage in parts of at most that many tokens, cut before a word where one begins."""
        is_hidden = np.isin(self.word_of, list(self.hidden))
        start = 0
        while start < len(self.tokens):
            stop = min(start + most_tokens, len(self.tokens))
            if stop < len(self.tokens):
                begins = np.flatnonzero(np.diff(self.word_of[start : stop + 1])) + 1
                stop = start + int(begins[-1]) if len(begins) else stop
            # A word that is cut counts in the part that has its last token.
            ends = {number for number in self.hidden if start <= np.flatnonzero(self.word_of == number)[-1] < stop}
            num_bytes = sum(self.hidden[number] for number in ends)
            yield _Sequence(self.tokens[start:stop], is_hidden[start:stop].astype(np.int64), len(ends), num_bytes)
            start = stop


def _passages(shard_sets: Sequence[ShardSet], tokenizer: Tokenizer, skip_corrupt_shards: bool) -> Iterator[_Passage]:
    """Return the passages of all documents, those with the smallest hashes first."""
    shards = [shard for shard_set in shard_sets for shard in shard_set.shards("valid")]
    ids = [shard.read_index().document_ids for shard in shards]
    numbers = np.repeat(np.arange(len(shards)), [len(each) for each in ids])
    positions = np.concatenate([np.arange(len(each)) for each in ids] or [np.empty(0, np.int64)])
    document_ids = np.concatenate(ids or [np.empty(0, np.uint64)])
    order = np.lexsort((document_ids, fold(_key(_ORDER), document_ids)))
    per_document = max(MIN_PASSAGES_PER_DOCUMENT, -(-MAX_PASSAGES // max(len(document_ids), 1)))
    layout = lru_cache(len(shards) or 1)(_layout_of)
    left = MAX_PASSAGES
    for number in order:
        shard = shards[numbers[number]]
        if not left:
            return
        if skip_corrupt_shards and not shard.is_readable():
            continue
        starts, lengths = layout(shard)
        start, length = starts[positions[number]], int(lengths[positions[number]])
        most = (per_document + 1) * PASSAGE_BYTES  # a token is a byte at least
        tokens = shard.read_tokens()[start : start + min(length, most)].astype(np.int64)
        passages = list(_cut(tokens, length > most, tokenizer, int(document_ids[number]), per_document * PASSAGE_BYTES))
        yield from passages[:left]
        left -= min(left, len(passages))


def _layout_of(shard: Shard) -> tuple[np.ndarray, np.ndarray]:
    index = shard.read_index()
    return document_starts(index, shard.itemsize), index.document_lengths


def _key(purpose: int) -> np.uint64:
    return root_key(0, Purpose.EVALUATION, Purpose.HIDDEN_WORDS, purpose)


def _cut(tokens: np.ndarray, is_cut: bool, tokenizer: Tokenizer, document: int, max_bytes: int) -> Iterator[_Passage]:
    """Return the passages in the first bytes of a document; cut tokens may leave the last word incomplete."""
    texts = tokenizer.bytes_of(tokens.tolist())
    text = b"".join(texts).decode(errors="surrogateescape")
    words = [(match.start(), match.end()) for match in _WORD.finditer(text)]
    if is_cut:
        words = words[:-1]
    size = np.concatenate([[0], np.cumsum([len(each.encode(errors="surrogateescape")) for each in text])])
    spans = [(int(size[first]), int(size[stop])) for first, stop in words]
    word_of, straddled = _words_of_tokens(spans, texts)
    visible = straddled | set(word_of[tokens == tokenizer.special_tokens.unk].tolist())
    within = np.cumsum([stop - first + 1 for first, stop in spans]) <= max_bytes
    draws = uniform(fold(fold(_key(_CHOICE), document), np.arange(len(spans))))
    for first, stop in _passage_bounds(spans[: int(within.sum())]):
        inside = np.flatnonzero((word_of >= first) & (word_of < stop))
        hidden = {
            number: spans[number][1] - spans[number][0]
            for number in range(first, stop)
            if draws[number] < HIDDEN_SHARE and number not in visible
        }
        if len(inside):
            yield _Passage(tokens[inside], word_of[inside], hidden, document)


def _passage_bounds(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the first word of each passage, and the word after its last."""
    bounds: list[tuple[int, int]] = []
    first, used = 0, 0
    for number, (begin, end) in enumerate(spans):
        num_bytes = end - begin + 1
        if used + num_bytes > PASSAGE_BYTES:
            bounds.append((first, number))
            first, used = number, 0
        if num_bytes > PASSAGE_BYTES:  # in no passage
            first, used = number + 1, 0
            continue
        used += num_bytes
    bounds.append((first, len(spans)))
    return [(first, stop) for first, stop in bounds if first < stop]


def _words_of_tokens(spans: Sequence[tuple[int, int]], texts: Sequence[bytes]) -> tuple[np.ndarray, set[int]]:
    """Return the word of each token, (n,) int64, and the words that share a token with another one.

    A token of white space alone belongs to the word that follows it; tokens after the last word belong to none (-1).
    """
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    starts = ends - np.array([len(text) for text in texts], np.int64)
    begins, stops = np.array(spans, np.int64).reshape(-1, 2).T
    first = np.searchsorted(stops, starts, side="right")  # the first word that ends behind the token's start
    last = np.searchsorted(begins, ends, side="left") - 1  # the last word that begins before the token's end
    word_of = np.where(first < len(spans), np.maximum(first, 0), -1)
    across = np.flatnonzero(last > first)
    straddled = {number for token in across.tolist() for number in range(first[token], last[token] + 1)}
    return word_of, straddled


def _rows_of(positions: np.ndarray, row_length: int) -> np.ndarray:
    """Return the row of each consecutive sequence, (S,) int64; a new row opens where the next one does not fit."""
    rows = np.zeros(len(positions), np.int64)
    row, used = 0, 0
    for number, size in enumerate(positions.tolist()):
        if used + size > row_length:
            row, used = row + 1, 0
        rows[number] = row
        used += size
    return rows
