"""Micro-batches as text: the input of the model, the tokens to predict, and the document boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.data.batch import IGNORED, Batch

LEGEND = "⟦word⟧ masked   ⟦word→other⟧ replaced by a random token   ⟦word=⟧ unchanged but predicted"
_COLORS = {"masked": "\033[31m", "random": "\033[33m", "unchanged": "\033[32m"}
_PLAIN = "\033[0m"


def describe_batch(batch: Batch, tokenizer: Tokenizer, pair_labels: tuple[str, str], color: bool) -> Iterator[str]:
    """Describe every row with text: one line per document part, and one per sentence of a pair.

    Args:
        pair_labels: meaning of the labels 0 and 1 of a sentence pair.
        color: color the kinds of prediction.
    """
    text = _Text(batch, tokenizer, color)
    starts = np.unique(batch.cu_seqlens.numpy())
    labeled = batch.next_sentence_labels != IGNORED
    labels = dict(zip(batch.cls_positions[labeled].tolist(), batch.next_sentence_labels[labeled].tolist(), strict=True))
    types = batch.token_type_ids.numpy()
    for row in range(batch.num_rows):
        first, stop = row * batch.sequence_length, (row + 1) * batch.sequence_length
        if not text.filled[first:stop].any():
            continue
        inside = starts[(first <= starts) & (starts < stop)].tolist()
        sequences = [(begin, end) for begin, end in zip(inside, [*inside[1:], stop], strict=True) if text.filled[begin]]
        yield f"row {row}: {text.summary(first, stop)}, sequences: {len(sequences)}"
        for begin, end in sequences:
            if not types[begin:end].any():
                yield f"  | {text.marked(begin, end)}"
                continue
            cut = begin + int(np.argmax(types[begin:end]))
            label = f"{labels[begin]} = {pair_labels[labels[begin]]}" if begin in labels else "no label"
            yield f"  A {text.marked(begin, cut)}"
            yield f"  B {text.marked(cut, end)}   <- {label}"
        yield ""


def rows_as_data(batch: Batch, pair_labels: tuple[str, str], first_sample: int = 0) -> Iterator[dict[str, Any]]:
    """Yield every row with tokens as plain values; positions count from the row's first one.

    The help of `clozeworks show-batch` describes the fields.
    """
    length = batch.sequence_length
    starts = np.unique(batch.cu_seqlens.numpy())
    filled = batch.input_ids.numpy() != batch.pad_token_id
    predicted = _used(batch.masked_positions.numpy(), batch.labels.numpy())
    labeled = _used(batch.cls_positions.numpy(), batch.next_sentence_labels.numpy())
    for row in range(batch.num_rows):
        first, stop = row * length, (row + 1) * length
        if not filled[first:stop].any():
            continue
        inside = starts[(first <= starts) & (starts < stop)].tolist()
        masked = [(position - first, label) for position, label in predicted if first <= position < stop]
        yield {
            "row": row,
            "sample": first_sample + row,
            "num_tokens": int(filled[first:stop].sum()),
            "input_ids": batch.input_ids[first:stop].tolist(),
            "position_ids": batch.position_ids[first:stop].tolist(),
            "token_type_ids": batch.token_type_ids[first:stop].tolist(),
            "masked_positions": [position for position, _ in masked],
            "labels": [label for _, label in masked],
            "documents": [
                {"start": begin - first, "stop": end - first}
                for begin, end in zip(inside, [*inside[1:], stop], strict=True)
                if filled[begin]
            ],
            "pairs": [
                {"cls_position": position - first, "label": label, "meaning": pair_labels[label]}
                for position, label in labeled
                if first <= position < stop
            ],
        }


def _used(positions: np.ndarray, labels: np.ndarray) -> list[tuple[int, int]]:
    """Return (position, label) of the used entries, by position."""
    used = labels != IGNORED
    return sorted(zip(positions[used].tolist(), labels[used].tolist(), strict=True))


class _Text:
    """The positions of a batch as text."""

    def __init__(self, batch: Batch, tokenizer: Tokenizer, color: bool) -> None:
        self._tokenizer, self._color = tokenizer, color
        self._special = frozenset(tokenizer.special_tokens.ids)
        self._seen = batch.input_ids.numpy()
        self._originals = np.full(len(self._seen), IGNORED)
        used = batch.labels.numpy() != IGNORED
        self._predicts = batch.masked_positions.numpy()[used]
        self._is_causal = batch.is_causal
        if not batch.is_causal:
            self._originals[self._predicts] = batch.labels.numpy()[used]
        self.filled = self._seen != batch.pad_token_id

    def summary(self, first: int, stop: int) -> str:
        """Return fill rate and predictions of the positions from `first` to `stop` - 1."""
        predicted = first + np.flatnonzero(self._originals[first:stop] != IGNORED)
        kinds = [self._kind(position) for position in predicted.tolist()]
        filled = int(self.filled[first:stop].sum())
        number = int(((first <= self._predicts) & (self._predicts < stop)).sum())
        how = f"{kinds.count('masked')} masked, {kinds.count('random')} random, {kinds.count('unchanged')} unchanged"
        how = "each from those before it" if self._is_causal else how
        share = filled / (stop - first)
        return f"{filled} of {stop - first} positions filled ({share:.1%}), {number} predicted ({how})"

    def marked(self, first: int, stop: int) -> str:
        """Return the text of the positions, with the predicted tokens in brackets."""
        parts, plain = [], []
        for position in range(first, stop):
            if self._originals[position] == IGNORED:
                plain.append(position)
                continue
            parts += [self._plain(plain), self._predicted(position)]
            plain = []
        return "".join([*parts, self._plain(plain)]).strip()

    def _kind(self, position: int) -> str:
        if self._seen[position] == self._tokenizer.special_tokens.mask:
            return "masked"
        return "unchanged" if self._seen[position] == self._originals[position] else "random"

    def _plain(self, positions: list[int]) -> str:
        text = ""
        run: list[int] = []
        for token in self._seen[positions].tolist():
            if token in self._special:
                text += self._tokenizer.decode(run) + f" {self._tokenizer.vocabulary[token].text}"
                run = []
            else:
                run.append(token)
        return text + self._tokenizer.decode(run)

    def _predicted(self, position: int) -> str:
        kind = self._kind(position)
        original = self._token_text(self._originals[position])
        other = {"masked": "", "random": f"→{self._token_text(self._seen[position]).strip()}", "unchanged": "="}[kind]
        space = " " if original.startswith(" ") else ""
        text = f"{space}⟦{original.strip()}{other}⟧"
        return f"{_COLORS[kind]}{text}{_PLAIN}" if self._color else text

    def _token_text(self, token: int) -> str:
        """Return a token as text; a token that is not text alone (a byte of a character) as its name."""
        text = self._tokenizer.decode([int(token)])
        return self._tokenizer.vocabulary[int(token)].text if "\ufffd" in text or not text.strip() else text
