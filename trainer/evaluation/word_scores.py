"""Bits per byte of hidden words, for masked language models with any tokenizer.

A word is a run of characters between white space. Each word of each line is hidden as a whole and alone, and the
log-probabilities of its tokens are summed; the space before a word is a part of its tokens, and not of its bytes. Both
words of a token that reaches into two stay visible, and so does a word with an unknown token or a mask. The digest of
the hidden words shows whether two tokenizers hide the same. Text that a tokenizer changes, such as to lower case, is
easier to predict.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from data_prep.base.errors import UsageError, UserError
from data_prep.base.progress import Progress
from data_prep.tokenizer.untrusted_file import library_errors
from trainer.data.minimal_pairs import BATCH_TOKENS, MaskedCopies
from trainer.evaluation.masked_scorers import scorer_of
from trainer.inference.fill_mask import FillMask, mask_reader

_SHOWN_CHARACTERS = 60
_WORD = re.compile(r"\S+")


class HiddenWord(NamedTuple):
    """A word to predict: its line and number there, its bytes, the token ids of the line and the hidden positions."""

    line: int
    word: int
    num_bytes: int
    ids: np.ndarray
    positions: np.ndarray


class WordScore(NamedTuple):
    """The mean of all hidden words, and the digest of these words."""

    bits_per_byte: float
    digest: str


def read_lines(path: Path) -> list[str]:
    """Return the lines of a UTF-8 text file that are not empty.

    Raises:
        UserError: the file cannot be read, or has no text.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error})", fix="give a text file in UTF-8", code="invalid-text") from None
    if not any(lines):
        raise UsageError(f"{path} has no text", fix="give a file with one text per line", code="missing-text")
    return [line for line in lines if line]


def score_words(model: FillMask, lines: Sequence[str]) -> WordScore:
    """Hide every word of every line, and score it in fp32.

    Raises:
        UserError: a line is longer than the model takes, no word can be hidden, or a score is not finite.
    """
    words = sorted(hidden_words(model, lines), key=lambda each: len(each.ids))
    if not words:
        raise UsageError(
            "the tokenizer leaves no word of the text to hide",
            fix="give text in the language of the model",
            code="missing-text",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer, loss = scorer_of(model, device, torch.float32), 0.0
    with Progress("scoring hidden words", len(words), "words") as progress:
        for batch in _batches(words):
            loss -= float(scorer(_copies(batch, model.tokenizer.mask_token_id)).sum())
            progress.add(len(batch))
    if not math.isfinite(loss):
        raise UserError(
            "the model gives a score that is not finite",
            fix="use a model whose weights are finite",
            code="weights-not-finite",
        )
    named = json.dumps(sorted((each.line, each.word, each.num_bytes) for each in words)) + json.dumps(list(lines))
    digest = hashlib.sha256(named.encode(errors="surrogatepass")).hexdigest()
    return WordScore(loss / math.log(2) / sum(each.num_bytes for each in words), digest)


def hidden_words(model: FillMask, lines: Sequence[str]) -> Iterator[HiddenWord]:
    """Yield the words that can be hidden, in the order of the lines."""
    tokenizer = model.tokenizer
    if not tokenizer.is_fast:
        raise UserError(
            f"the tokenizer of {tokenizer.name_or_path} does not map tokens to characters",
            fix="give a model with a tokenizer.json",
            code="slow-tokenizer",
        )
    backend, visible = mask_reader(tokenizer), {tokenizer.unk_token_id, tokenizer.mask_token_id}
    for number, line in enumerate(lines):
        with library_errors(tokenizer.name_or_path):
            encoded = backend.encode(line)
        if len(encoded.ids) > model.max_length:
            raise UsageError(
                f"the line {line[:_SHOWN_CHARACTERS]!r} has {len(encoded.ids):,} tokens, and "
                f"{tokenizer.name_or_path} takes {model.max_length:,}",
                fix="split the line",
                code="text-too-long",
            )
        spans = [match.span() for match in _WORD.finditer(line)]
        owners = [
            _words_of(offsets, spans) if not special else []
            for offsets, special in zip(encoded.offsets, encoded.special_tokens_mask, strict=True)
        ]
        ids = np.array(encoded.ids, np.int64)
        shared = {word for words in owners if len(words) > 1 for word in words}
        shared |= {word for words, token in zip(owners, encoded.ids, strict=True) if token in visible for word in words}
        counts = Counter(word for words in owners for word in words)
        for word, (start, stop) in enumerate(spans):
            if counts[word] and word not in shared:
                positions = np.array([position for position, words in enumerate(owners) if words == [word]])
                num_bytes = len(line[start:stop].encode(errors="surrogatepass"))
                yield HiddenWord(number, word, num_bytes, ids, positions)


def _words_of(offsets: tuple[int, int], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the words that a token has characters of; a token of white space alone belongs to the word after it."""
    first, stop = offsets
    words = [word for word, (start, end) in enumerate(spans) if first < end and start < stop]
    return words or [word for word, (start, _) in enumerate(spans) if start >= first][:1]


def _batches(words: Sequence[HiddenWord]) -> Iterator[list[HiddenWord]]:
    """Yield words whose lines have one number of tokens, of about `BATCH_TOKENS` together."""
    batch: list[HiddenWord] = []
    num_tokens = 0
    for word in words:
        size = len(word.positions) * len(word.ids)
        if batch and (len(batch[0].ids) != len(word.ids) or num_tokens + size > BATCH_TOKENS):
            yield batch
            batch, num_tokens = [], 0
        batch.append(word)
        num_tokens += size
    yield batch


def _copies(words: Sequence[HiddenWord], mask_token_id: int) -> MaskedCopies:
    """Return one copy for each token of each word, in which all tokens of the word are masked."""
    rows = []
    for word in words:
        masked = word.ids.copy()
        masked[word.positions] = mask_token_id
        rows.append(np.tile(masked, (len(word.positions), 1)))
    targets = np.concatenate([word.ids[word.positions] for word in words])
    return MaskedCopies(np.concatenate(rows), np.concatenate([word.positions for word in words]), targets)
