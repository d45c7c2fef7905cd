"""Remembering the ids of words: a bounded cache in front of an encoder, exact because words do not touch.

In a normalised text every word has one space before it, and no piece of the vocabulary reaches across a space, so the
ids of a text are the ids of its words in a row. A text is then one dictionary look-up a word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

_MAX_WORDS = 400_000
"""Words kept; about 100 MB at most. Then the cache is emptied, and the common words are soon back."""

_MAX_WORD_CHARACTERS = 64
"""Longer words (Chinese text, data, URLs) hardly ever come twice and are not kept."""


class WordCache:
    """Encodes normalised texts by looking up their words; not for use by several threads at once."""

    def __init__(
        self,
        encode: Callable[[list[str]], list[list[int]]],
        dtype: type[np.unsignedinteger],
        max_words: int = _MAX_WORDS,
    ) -> None:
        """`encode` turns texts into ids; it is asked for " word" only where the word is not in the cache."""
        self._encode, self._dtype, self._max_words = encode, dtype, max_words
        self._ids_of_word: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._ids_of_word)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, (num_tokens,) of the dtype; read-only."""
        words_of_texts = [text.split(" ")[1:] for text in texts]
        for text in texts:
            assert not text or text[0] == " ", "encode takes normalised text, which begins with a space"
        passing = self._add(set(chain.from_iterable(words_of_texts)))
        look_up = self._ids_of_word.__getitem__
        arrays = [np.frombuffer(b"".join(map(look_up, words)), dtype=self._dtype) for words in words_of_texts]
        for word in passing:
            del self._ids_of_word[word]
        return arrays

    def _add(self, words: set[str]) -> list[str]:
        """Take in the words that are missing; return those too long to stay."""
        missing = words.difference(self._ids_of_word)
        if len(self._ids_of_word) + len(missing) > self._max_words:
            self._ids_of_word.clear()
            missing = words
        in_order = sorted(missing)
        for word, ids in zip(in_order, self._encode([" " + word for word in in_order]), strict=True):
            self._ids_of_word[word] = np.array(ids, dtype=self._dtype).tobytes()
        return [word for word in in_order if len(word) > _MAX_WORD_CHARACTERS]
