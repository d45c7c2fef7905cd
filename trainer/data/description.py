"""A micro-batch as a person reads it: what the model sees, what it is to predict, where documents begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.data.batch import IGNORED, Batch

LEGEND = "⟦word⟧ masked   ⟦word→other⟧ replaced by a random piece   ⟦word=⟧ predicted, though it stands there"
_COLORS = {"masked": "\033[31m", "random": "\033[33m", "kept": "\033[32m"}
_PLAIN = "\033[0m"


def describe_batch(batch: Batch, tokenizer: Tokenizer, pair_labels: tuple[str, str], color: bool) -> Iterator[str]:
    """Describe every row that holds text, a line for each document's piece, and for each half of a sentence pair.

    Args:
        pair_labels: what the labels 0 and 1 of a sentence pair mean.
        color: tell the kinds of prediction apart by color too.
    """
    text = _Text(batch, tokenizer, color)
    starts = np.unique(batch.cu_seqlens.numpy())
    judged = batch.next_sentence_labels != IGNORED
    labels = dict(zip(batch.cls_positions[judged].tolist(), batch.next_sentence_labels[judged].tolist(), strict=True))
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
    """Yield every row that holds tokens as plain values; positions count from the row's first one.

    The help of `launch/show_batch.py` describes the fields.
    """
    length = batch.sequence_length
    starts = np.unique(batch.cu_seqlens.numpy())
    filled = batch.input_ids.numpy() != batch.pad_token_id
    predicted = _used(batch.masked_positions.numpy(), batch.labels.numpy())
    judged = _used(batch.cls_positions.numpy(), batch.next_sentence_labels.numpy())
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
                for position, label in judged
                if first <= position < stop
            ],
        }


def _used(positions: np.ndarray, labels: np.ndarray) -> list[tuple[int, int]]:
    """(position, label) of the entries that are in use, by position."""
    used = labels != IGNORED
    return sorted(zip(positions[used].tolist(), labels[used].tolist(), strict=True))


class _Text:
    """The places of a batch as text."""

    def __init__(self, batch: Batch, tokenizer: Tokenizer, color: bool) -> None:
        self._tokenizer, self._color = tokenizer, color
        self._special = frozenset(tokenizer.special_tokens.ids)
        self._seen = batch.input_ids.numpy()
        self._originals = np.full(len(self._seen), IGNORED)
        used = batch.labels.numpy() != IGNORED
        self._originals[batch.masked_positions.numpy()[used]] = batch.labels.numpy()[used]
        self.filled = self._seen != batch.pad_token_id

    def summary(self, first: int, stop: int) -> str:
        """Fill rate and predictions of the places from `first` to `stop` - 1."""
        predicted = first + np.flatnonzero(self._originals[first:stop] != IGNORED)
        kinds = [self._kind(place) for place in predicted.tolist()]
        filled = int(self.filled[first:stop].sum())
        return (
            f"{filled} of {stop - first} places filled ({filled / (stop - first):.1%}), {len(kinds)} predicted "
            f"({kinds.count('masked')} masked, {kinds.count('random')} random, {kinds.count('kept')} kept)"
        )

    def marked(self, first: int, stop: int) -> str:
        """The text of the places, with the predicted ones in brackets."""
        parts, plain = [], []
        for place in range(first, stop):
            if self._originals[place] == IGNORED:
                plain.append(place)
                continue
            parts += [self._plain(plain), self._predicted(place)]
            plain = []
        return "".join([*parts, self._plain(plain)]).strip()

    def _kind(self, place: int) -> str:
        if self._seen[place] == self._tokenizer.special_tokens.mask:
            return "masked"
        return "kept" if self._seen[place] == self._originals[place] else "random"

    def _plain(self, places: list[int]) -> str:
        text = ""
        run: list[int] = []
        for token in self._seen[places].tolist():
            if token in self._special:
                text += self._tokenizer.decode(run) + f" {self._tokenizer.vocabulary[token].text}"
                run = []
            else:
                run.append(token)
        return text + self._tokenizer.decode(run)

    def _predicted(self, place: int) -> str:
        kind = self._kind(place)
        original = self._piece(self._originals[place])
        other = {"masked": "", "random": f"→{self._piece(self._seen[place]).strip()}", "kept": "="}[kind]
        space = " " if original.startswith(" ") else ""
        text = f"{space}⟦{original.strip()}{other}⟧"
        return f"{_COLORS[kind]}{text}{_PLAIN}" if self._color else text

    def _piece(self, token: int) -> str:
        """A piece as text; what is no text alone (a byte of a character) by its name."""
        text = self._tokenizer.decode([int(token)])
        return self._tokenizer.vocabulary[int(token)].text if "\ufffd" in text or not text.strip() else text
