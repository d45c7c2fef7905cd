"""Normalization of text before tokenization.

The rules exist twice: here, and as regular expressions in tokenizer.json
(`data_prep.tokenizer.hugging_face_tokenizer`). Character ranges are explicit, so that the Unicode tables of Python and
Rust cannot disagree. In order: lone surrogates become U+FFFD; control and invisible formatting characters are removed
(see `RULES` for those that stay); the Unicode form; case and accents if configured; each run of white space, newlines
and U+2581 included, becomes one space, and one space is put before the text.

The characters that are removed and those that are white space have versions (`RULES`). A tokenizer stores the version
it was trained with, and its text is normalized by that version for good.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from functools import cache
from itertools import groupby, islice
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from data_prep.base.errors import UserError
from data_prep.base.settings import Settings

METASPACE = "\u2581"
"""Character that SentencePiece writes for a space; in a text it counts as one."""

NORMALIZATION_VERSION: Literal[2] = 2
"""That of new tokenizers. A rule changes only with a new version, because the same settings then give other ids."""

MAX_MARKS = 1_000
"""Largest number of combining marks in a row; letters of real scripts have a few."""

MAX_WORD_BYTES = 1 << 20
"""A longer run of characters without a space is encoded in parts; SentencePiece needs over 100 times its size."""

TOO_MANY_MARKS = "too many marks"
"""The drop reason of documents with more marks."""

Ranges = tuple[tuple[int, int], ...]


def _ranges(text: str) -> Ranges:
    """Read `0041-005A 0061` as ((0x41, 0x5A), (0x61, 0x61))."""
    pairs = (part.partition("-") for part in text.split())
    return tuple((int(first, 16), int(last or first, 16)) for first, _, last in pairs)


def _characters(ranges: Ranges) -> frozenset[str]:
    return frozenset(chr(number) for first, last in ranges for number in range(first, last + 1))


class Rules(NamedTuple):
    """The characters that a version of normalization treats as a kind.

    Attributes:
        removed: are deleted.
        white_space: separate words.
    """

    removed: Ranges
    white_space: Ranges

    @property
    def removed_pattern(self) -> re.Pattern[str]:
        return _pattern(self.removed)

    @property
    def rare_white_space_pattern(self) -> re.Pattern[str]:
        """Match white space outside ASCII."""
        return _pattern(tuple(pair for pair in self.white_space if pair[0] >= 0x80))


RULES = {
    1: Rules(
        _ranges("0000-0008 000E-001B 007F-0084 0086-009F 00AD 200B 200E-200F 202A-202E 2060 2066-2069 FEFF FFF9-FFFB"),
        _ranges("0009-000D 001C-0020 0085 00A0 1680 2000-200A 2028-2029 202F 205F 2581 3000"),
    ),
    2: Rules(
        _ranges(
            "0000-0008 000E-001B 007F-0084 0086-009F 00AD 061C 200E-200F 202A-202E 2060-2064 2066-206F FEFF FFF9-FFFB "
            "1BCA0-1BCA3 1D173-1D17A E0001"
        ),
        _ranges("0009-000D 001C-0020 0085 00A0 1680 2000-200B 2028-2029 202F 205F 2581 3000"),
    ),
}
"""Rules by version. White space is that of `str.isspace`, and the metaspace.

Version 2 treats U+200B as white space, because it separates the words of Khmer, Thai and Burmese; version 1 removes it.

Removed are control characters and, of Unicode's format characters (category Cf), all that are invisible: soft hyphen,
word joiner, byte order mark, marks of text direction, invisible operators, deprecated format characters, annotation
marks, controls of shorthand and musical notation, the language tag. Version 1 lacks U+061C, U+2061 to U+2064, U+206A to
U+206F, U+1BCA0 to U+1BCA3, U+1D173 to U+1D17A and U+E0001. The other format characters stay in both versions: signs
that are visible (U+0600 to U+0605, U+06DD, U+070F, U+0890, U+0891, U+08E2, U+110BD, U+110CD), and characters that
decide how their neighbors are written (the joiners U+200C and U+200D, the Mongolian vowel separator U+180E, the layout
of hieroglyphs U+13430 to U+1343F, and the tags U+E0020 to U+E007F of flags in emoji).
"""

ACCENTS = _ranges("0300-036F 1AB0-1AFF 1DC0-1DFF 20D0-20FF FE20-FE2F")
"""Unicode's blocks of combining diacritical marks; the vowel signs of other scripts are letters and stay."""

_INERT = _ranges(
    "0558 058B-058C 05C8-05C9 07FD 0897-089F 08CA-08D3 09FE 0C3C 0D3B-0D3C 0EBA 1715 1ABF-1AF0 1DF6-1DFA 209D-209F "
    "32FF A7F1-A7F4 A82C AB69 105C9 105D2 105DA 105E4 10781-10785 10787-107B0 107B2-107BF 10D24-10D27 10D69-10D6D "
    "10EAB-10EAC 10ECB-10ECF 10EF0-10EFB 10EFD-10EFF 10F46-10F50 10F82-10F85 11070 1133B 11382-11385 1138B 1138E "
    "11390-11391 113B8 113BB 113C2 113C5 113C7-113C9 113CE-113D0 1145E 11839-1183A 11930 11935 11938 1193D-1193E "
    "11943 119E0 11A34 11A47 11A99 11D42 11D44-11D45 11D97 11F41-11F42 1611E-16129 1612F 16D63 16D67-16D6A "
    "16FF0-16FF1 1B123-1B126 1CCD6-1CCF9 1D127-1D128 1D250-1D252 1D25B-1D25C 1D25F 1D280-1D281 1D6A6 1DF95 "
    "1DFCD-1DFFF 1E030-1E06D 1E08F 1E130-1E136 1E2AE 1E2EC-1E2EF 1E4EC-1E4EF 1E5EE-1E5EF 1E6E3 1E6E6 1E6EE-1E6EF "
    "1E6F5 1F16C 1FBF0-1FBF9"
)
# The tokenizers library normalizes by the tables of Unicode 9; these are the characters since then that newer tables
# reorder, compose or decompose. Both sides keep them unchanged.

_LATE_CAPITALS = {
    **{0x1C89: 0x1C8A, 0xA7CB: 0x264, 0xA7CC: 0xA7CD, 0xA7CE: 0xA7CF, 0xA7D2: 0xA7D3, 0xA7D4: 0xA7D5},
    **{0xA7DA: 0xA7DB, 0xA7DC: 0x19B, ord("\N{GREEK CAPITAL LETTER SIGMA}"): ord("\N{GREEK SMALL LETTER SIGMA}")},
    **{capital: capital + 0x20 for capital in range(0x10D50, 0x10D66)},
    **{capital: capital + 0x1B for capital in range(0x16EA0, 0x16EB9)},
}
# Capitals of Unicode 16 and 17, which older Pythons do not lower, and sigma, which only `str.lower` treats by its
# position in the word; the tokenizers library lowers character by character.


class Normalization(Settings):
    """The choices in the normalization of text; part of a tokenizer's identity."""

    form: Literal["NFC", "NFKC", "none"] = Field(
        "NFC", description="Unicode form; NFKC also replaces ligatures, full-width letters and the like by plain ones"
    )
    lowercase: bool = Field(False, description="convert to lowercase, for an uncased model")
    strip_accents: bool = Field(False, description="remove the diacritical marks of letters, for an uncased model")
    version: Literal[1, 2] = Field(
        NORMALIZATION_VERSION,
        description="version of the rules: 2 treats U+200B as a space and removes all invisible format characters; 1 "
        "removes U+200B and fewer of the others, as releases before this setting did",
    )

    @model_validator(mode="after")
    def _accents_need_a_form(self) -> Normalization:
        if self.strip_accents and self.form == "none":
            raise ValueError("strip_accents=true needs a Unicode form; set form to NFC or NFKC")
        return self

    @property
    def rules(self) -> Rules:
        return RULES[self.version]


def normalize(text: str, normalization: Normalization) -> str:
    """Return the text for the tokenizer: words with one space before each, or "" if nothing is left."""
    words = clean(text, normalization).split()
    return (b" " + b" ".join(words)).decode() if words else ""


def clean(text: str, normalization: Normalization) -> bytes:
    """Return the text in UTF-8, normalized but for the runs of white space.

    The only white space left is spaces and newlines; a run with two or more newlines separates paragraphs.
    """
    data = text.encode("utf-8", "surrogatepass")
    if not text.isascii() and not _is_plain(data, normalization):
        data = _clean_thoroughly(data.decode("utf-8", "surrogatepass"), normalization).encode()
    elif normalization.lowercase:
        data = data.lower()  # of ASCII alone
    if b"\r" in data:
        data = data.translate(None, _REMOVED_ASCII).replace(b"\r\n", b"\n")
    return data.translate(_PLAIN_WHITE_SPACE, _REMOVED_ASCII)


def is_stable(character: str, normalization: Normalization) -> bool:
    """Whether text may be cut between two such characters: both stay unchanged and neither joins the other."""
    return "!" <= character <= "~" or (character > "\x7f" and _stays(character, normalization))


def has_too_many_marks(text: str, most: int = MAX_MARKS) -> bool:
    """Whether there are more than `most` combining marks in a row, ignoring removed characters between them.

    Characters that any version removes are ignored. Python sorts a row of marks in quadratic time.
    """
    size = most // 2
    firsts = "" if text.isascii() else text[::size]
    if _OTHERS_IN_ROW.isdisjoint(firsts) and not any(map(unicodedata.combining, firsts)):
        return False  # the usual case; few characters are inspected
    # A row of that length contains one of these pieces completely.
    pieces = (text[start : start + size] for start in range(0, len(text) - size + 1, size))
    if not any(all(map(_is_in_row, piece)) for piece in pieces):
        return False
    rows = groupby(_EVER_REMOVED.sub("", text), _is_mark)
    return any(is_mark and next(islice(row, most, None), None) is not None for is_mark, row in rows)


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON escapes can smuggle in, by U+FFFD; UTF-8 cannot hold them."""
    return _SURROGATES.sub("\ufffd", text)


def character_class(ranges: Ranges) -> str:
    """Return the ranges as a character class that Python's `re` and Oniguruma read alike."""
    return "[" + "".join(chr(first) if first == last else f"{chr(first)}-{chr(last)}" for first, last in ranges) + "]"


def _is_plain(data: bytes, normalization: Normalization) -> bool:
    """Whether normalization leaves all non-ASCII characters unchanged; true and fast for most texts."""
    others = data.translate(None, _ASCII).decode("utf-8", "surrogatepass")
    codes = np.frombuffer(others.encode("utf-32-le", "surrogatepass"), np.uint32)
    kinds = _kinds(normalization)
    found = kinds.take(codes).tobytes()
    if _UNSEEN in found:
        for code in np.unique(codes[kinds.take(codes) == _UNSEEN]).tolist():
            kinds[code] = _PLAIN if _stays(chr(code), normalization) else _ALTERED
        found = kinds.take(codes).tobytes()
    return _ALTERED not in found


@cache
def _kinds(normalization: Normalization) -> np.ndarray:
    """The cached result of `_stays` for each character, (number of code points,) uint8 of the kinds below."""
    return np.zeros(sys.maxunicode + 1, np.uint8)


def _stays(character: str, normalization: Normalization) -> bool:
    """Return whether the character is kept, is not white space, and is unchanged next to any other such character."""
    form, is_mark = normalization.form, unicodedata.category(character)[0] == "M"
    if character in _altered_characters(normalization.version):
        return False
    # Rows of marks are counted before text is lowered.
    if normalization.lowercase and (is_mark or character.translate(_LATE_CAPITALS).lower() != character):
        return False
    if normalization.strip_accents and not unicodedata.is_normalized("NFD", character):
        return False
    # Marks, and the vowels and final consonants of Hangul, may join with the preceding character.
    joins = is_mark or "\u1100" <= character <= "\u11ff"
    return form == "none" or not (
        joins or character in _INERT_CHARACTERS or not unicodedata.is_normalized(form, character)
    )


@cache
def _altered_characters(version: Literal[1, 2]) -> frozenset[str]:
    """Those that are removed or replaced whatever the Unicode form."""
    rules = RULES[version]
    return _characters(
        (*rules.removed, *((first, last) for first, last in rules.white_space if first >= 0x80), _HALVES)
    )


def _clean_thoroughly(text: str, normalization: Normalization) -> str:
    """Apply all rules except those for ASCII white space."""
    if has_too_many_marks(text, 2 * MAX_MARKS):  # a text that was cleaned before has up to twice as many
        raise UserError(
            f"a text has more than {2 * MAX_MARKS:,} combining marks (such as accents) in a row",
            fix="remove them or the text",
            code="too-many-combining-marks",
        )
    rules = normalization.rules
    cleaned = _in_form(rules.removed_pattern.sub("", replace_surrogates(text)), normalization.form)
    if normalization.lowercase:
        cleaned = _in_form(cleaned.translate(_LATE_CAPITALS).lower(), normalization.form)
    if normalization.strip_accents:
        cleaned = _in_form(_ACCENTS.sub("", _in_form(cleaned, "NFD")), normalization.form)
    return rules.rare_white_space_pattern.sub(lambda found: _LINE_BREAKS.get(found[0], " "), cleaned)


@cache
def _pattern(ranges: Ranges) -> re.Pattern[str]:
    return re.compile(character_class(ranges))


def _is_mark(character: str) -> bool:
    return unicodedata.combining(character) > 0 or character in _OTHER_MARKS


def _is_in_row(character: str) -> bool:
    return unicodedata.combining(character) > 0 or character in _OTHERS_IN_ROW


def _in_form(text: str, form: Literal["NFC", "NFD", "NFKC", "none"]) -> str:
    if form == "none":
        return text
    if _INERT_CHARACTERS.isdisjoint(text):  # ten times as fast as the pattern
        return unicodedata.normalize(form, text)
    parts = _INERT_CHARACTER.split(text)
    parts[::2] = [unicodedata.normalize(form, part) for part in parts[::2]]
    return "".join(parts)


_ASCII = bytes(range(128))
_REMOVED_ASCII = bytes(byte for byte in range(128) if RULES[1].removed_pattern.match(chr(byte)))  # in every version
_PLAIN_WHITE_SPACE = bytes.maketrans(b"\r\x0b\x0c\t\x1c\x1d\x1e\x1f", b"\n\n\n     ")
_EVER_REMOVED = _pattern(tuple(pair for rules in RULES.values() for pair in rules.removed))
_LINE_BREAKS = {"\x85": "\n", "\u2028": "\n", "\u2029": "\n\n"}
_HALVES = (0xD800, 0xDFFF)
_SURROGATES = _pattern((_HALVES,))
_ACCENTS = re.compile(character_class(ACCENTS))
_INERT_CHARACTER = re.compile(f"({character_class(_INERT)})")
_INERT_CHARACTERS = _characters(_INERT)
# Marks of class 0: those that become others (Tibetan vowels, half-width voicing), and accents, which may be stripped.
_OTHER_MARKS = _characters(_ranges("0F73 0F75 0F81 FF9E-FF9F")) | _characters(ACCENTS)
_OTHERS_IN_ROW = _OTHER_MARKS.union(*(_characters(rules.removed) for rules in RULES.values()))

_UNSEEN, _PLAIN, _ALTERED = range(3)  # kinds of characters
