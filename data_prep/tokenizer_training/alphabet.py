"""Alphabet: the characters that get a token, and the training lines without all others.

SentencePiece's own choice (`character_coverage`, `required_chars`) leaves out required characters too: it stops at the
coverage, in ASCII text long before the rarer letters, and never adds a character that the text lacks. So the alphabet
is chosen here, and the trainer gets lines that hold this alphabet and nothing else.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from data_prep.text.cleaning import METASPACE, Normalization, normalize
from data_prep.text.text_batch import batches

PRINTABLE_ASCII = "".join(map(chr, range(0x21, 0x7F)))
"""Without the space, for which the metaspace stands."""

RESERVED_CHARACTER = "\u2585"
"""SentencePiece's trainer silently drops lines that hold it, so it never has a token."""

_TRAINER_RESOLUTION = 1 << 24
"""The trainer stops at a coverage of 1.0 in 32-bit floats: it misses the last characters that are rarer than this."""

_COUNTED_CHARACTERS = 1 << 17  # so that numpy's arrays stay in a core's own cache


class Alphabet(NamedTuple):
    """The characters with a token, and those of the text without one."""

    characters: frozenset[str]
    left_out: dict[str, int]
    """Their counts, the commonest first."""
    num_characters: int
    """Characters of the entire text, counted with repetitions; a space counts as one."""
    copies: int
    """Minimum number of occurrences of a character in the training lines."""

    @property
    def left_out_share(self) -> float:
        """Return the share of the text's characters without a token, from 0 to 1."""
        return sum(self.left_out.values()) / max(1, self.num_characters)


def required_characters(normalization: Normalization) -> frozenset[str]:
    """Return the metaspace and every printable ASCII character that normalized text can hold."""
    kept = (character for character in PRINTABLE_ASCII if normalize(character, normalization) == f" {character}")
    return frozenset((METASPACE, *kept))


def count_characters(texts: Iterable[str], user_symbols: Sequence[str]) -> Counter[str]:
    """Count the characters of normalized paragraphs (one a line), outside user symbols; a space as the metaspace."""
    symbols = re.compile("|".join(_alternatives(user_symbols))) if user_symbols else None
    totals = np.zeros(sys.maxunicode + 1, np.int64)
    num_texts = 0
    for group in batches(texts, len, _COUNTED_CHARACTERS):
        num_texts += len(group)
        text = "".join(symbols.sub("\0", each) if symbols else each for each in group)
        found = np.bincount(np.frombuffer(text.encode("utf-32-le"), np.uint32))
        totals[: len(found)] += found
    # Before the first word of each text stands another space.
    totals[ord(METASPACE)] += num_texts + totals[ord(" ")] + totals[ord("\n")]
    totals[[ord(" "), ord("\n"), 0]] = 0
    return Counter({chr(code): int(totals[code]) for code in np.flatnonzero(totals).tolist()})


def choose_alphabet(counts: Counter[str], coverage: float, required: frozenset[str]) -> Alphabet:
    """Take the required characters, then the commonest others until `coverage` of the text's characters have a token.

    Of equally common characters the one with the smaller code point comes first.
    """
    total = counts.total()
    covered = sum(counts[character] for character in required)
    chosen = set(required)
    commonest_first = sorted(counts, key=lambda character: (-counts[character], character))
    for character in commonest_first:
        if covered >= coverage * total:
            break
        if character not in required and character != RESERVED_CHARACTER:
            covered += counts[character]
            chosen.add(character)
    left_out = {character: counts[character] for character in commonest_first if character not in chosen}
    return Alphabet(frozenset(chosen), left_out, total, copies=total // _TRAINER_RESOLUTION + 1)


def training_lines(lines: Iterable[str], alphabet: Alphabet, user_symbols: Sequence[str]) -> Iterator[str]:
    """Yield the lines cut at every character without a token, as no token reaches across one, then the alphabet.

    A line of a single character adds no pair to merge. `alphabet.copies` of each keep the trainer from missing it.
    """
    left_out = "".join(map(re.escape, sorted({*alphabet.left_out, RESERVED_CHARACTER})))
    barrier = re.compile("|".join([*_alternatives(user_symbols), f"[{left_out}]"]))
    keeps_ascii = not user_symbols and not any(map(str.isascii, alphabet.left_out))
    for line in lines:
        if keeps_ascii and line.isascii():
            yield line
        else:
            yield from filter(None, barrier.sub(_symbol_or_cut, line).split("\n"))
    for character in sorted(alphabet.characters):
        for _ in range(alphabet.copies):
            yield " " if character == METASPACE else character


def _symbol_or_cut(match: re.Match[str]) -> str:
    return match[0] if len(match[0]) > 1 else "\n"


def _alternatives(user_symbols: Sequence[str]) -> list[str]:
    """Return patterns of the symbols, the longest first, as SentencePiece matches them."""
    return [re.escape(symbol) for symbol in sorted(user_symbols, key=lambda symbol: (-len(symbol), symbol))]
