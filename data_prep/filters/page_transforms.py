"""The built-in transforms for text that was taken from pages, such as PDFs: headers, hyphens and lines.

Pages end at a form feed (U+000C), as the usual tools write them. Each transform changes white space and what it names
and nothing else, and a second pass changes nothing. Put them in this order: `repeated_headers` looks at pages,
`join_hyphens` at lines, and `join_lines` removes lines and page breaks.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import regex

from data_prep.base.errors import UsageError
from data_prep.base.local_paths import expand_home
from data_prep.documents.document import Document
from data_prep.storage import storage

HYPHENS = "-\u00ad\u058a\u2010\u2011\u2e17\ufe63\uff0d"
"""Hyphens at the end of a line; dashes (U+2013, U+2014) separate words and are none."""

_SOFT_HYPHEN = "\u00ad"
_BREAK = r"(?:\r\n|[\n\r\v\x85\u2028])"
_BLANK = r"[^\S\n\r\v\f\x85\u2028\u2029]"  # white space within a line
_WORD = r"[\p{L}\p{M}\p{N}]"

# --- repeated headers ---------------------------------------------------------------------------------------------

_LINE = regex.compile(rf"[^\n\r\v\x85\u2028\u2029]*(?:{_BREAK}|\u2029)|[^\n\r\v\x85\u2028\u2029]+")
_NUMBER = regex.compile(r"(?<!\d)\d{1,6}(?!\d)|\b[ivxlc]{1,8}\b", regex.IGNORECASE)
_ROMAN = {"i": 1, "v": 5, "x": 10, "l": 50, "c": 100}
_MOST_GAP = 2  # pages between two occurrences: left and right pages may have headers of their own
_MOST_ROUNDS = 10

Key = tuple[str, str | tuple[str, int, str]]
"""The border of a line, and its text; or what is around a number, and that number less the number of the page."""


class RepeatedHeaders:
    """Removes lines that repeat at the tops or the bottoms of successive pages of a document.

    An equal line stays on the first of its pages. A line with a number that grows by one from page to page, Roman ones
    included, is removed from all. A document whose pages repeat far into their text, such as a form, stays as it is.

    Args:
        lines: number of lines with text at each border of a page that are examined.
        min_pages: number of pages on which a line repeats; between two of them is at most one other page.
    """

    version = "1"

    def __init__(self, lines: int = 3, min_pages: int = 3) -> None:
        if not (isinstance(lines, int) and isinstance(min_pages, int) and lines >= 1 and min_pages >= 2):
            raise UsageError(
                f"filter 'repeated_headers': lines={lines!r} or min_pages={min_pages!r} is out of range",
                fix="give lines of at least 1 and min_pages of at least 2",
                code="filter-parameters",
            )
        self._lines, self._min_pages = lines, min_pages

    def __call__(self, document: Document) -> Document | None:
        pages = [_LINE.findall(page) for page in document.text.split("\f")]
        if len(pages) < self._min_pages:
            return None
        for _ in range(_MOST_ROUNDS):
            found = self._repeated(pages)
            if not found:
                return _with_text(document, "\f".join(map("".join, pages)))
            for page, lines in found.items():
                pages[page] = [line for number, line in enumerate(pages[page]) if number not in lines]
        return None

    def _repeated(self, pages: Sequence[Sequence[str]]) -> dict[int, set[int]]:
        """Return the numbers of the lines to remove from each page."""
        places: dict[Key, list[tuple[int, int]]] = defaultdict(list)
        for page, lines in enumerate(pages):
            for border, numbers in (("top", range(len(lines))), ("bottom", reversed(range(len(lines))))):
                for number in self._with_text(lines, numbers):
                    for key in _keys(border, lines[number], page):
                        places[key].append((page, number))
        removed: dict[int, set[int]] = defaultdict(set)
        for (_, text), found in places.items():
            for run in _runs(found):
                if len({page for page, _ in run}) >= self._min_pages:
                    first = min(page for page, _ in run)
                    for page, number in run:
                        if not isinstance(text, str) or page != first:
                            removed[page].add(number)
        return removed

    def _with_text(self, lines: Sequence[str], numbers: Any) -> Iterator[int]:
        left = self._lines
        for number in numbers:
            if left and lines[number].strip():
                left -= 1
                yield number
            elif not left:
                return


def _keys(border: str, line: str, page: int) -> Iterator[Key]:
    text = " ".join(line.split())
    yield border, text
    if len(text) <= 300:  # a longer line is a paragraph
        for found in _NUMBER.finditer(text):
            yield border, (text[: found.start()], _value(found[0]) - page, text[found.end() :])


def _value(number: str) -> int:
    if number.isdecimal():
        return int(number)
    values = [_ROMAN[letter] for letter in number.lower()]
    return sum(-value if value < after else value for value, after in pairwise([*values, 0]))


def _runs(places: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Yield the places of a line, in the order of pages, in runs of pages that are near each other."""
    run: list[tuple[int, int]] = []
    for place in places:
        if run and place[0] - run[-1][0] > _MOST_GAP:
            yield run
            run = []
        run.append(place)
    yield run


# --- hyphens ------------------------------------------------------------------------------------------------------

_BROKEN = regex.compile(
    rf"(?<={_WORD})(?P<hyphen>[{HYPHENS}])"
    rf"(?P<gap>{_BLANK}*(?:{_BREAK}(?:(?:{_BLANK}|{_BREAK})*\f(?:{_BLANK}|{_BREAK})*)?|\f(?:{_BLANK}|{_BREAK})*){_BLANK}*)"
    rf"(?P<right>{_WORD}+)(?P<rest>\S*)(?P<space>{_BLANK}*)"
)
_WORDS = regex.compile(rf"{_WORD}+(?:[{HYPHENS}]{_WORD}+)*")
_LEFT_CHARACTERS = 100  # before the hyphen that are examined
_JOINING_WORDS = frozenset({"and", "or", "und", "oder", "sowie", "et", "ou"})  # after a hyphen that stands for a word
_TO_HYPHEN = str.maketrans(dict.fromkeys(HYPHENS.replace(_SOFT_HYPHEN, ""), "-"))


class JoinHyphens:
    """Joins words that a hyphen breaks at the end of a line or page; the line then ends after the word.

    The hyphen goes, unless the word is a compound: one that is more frequent with a hyphen than without in the document
    or, if the document has neither, in `words`; or one that neither has, with a capital, a digit or another hyphen
    next to the break, or in a URL. Capitals on both sides are a word in capitals. `short-` before `and` stays as it is.

    Args:
        words: file with one word per line, with or without hyphens, and after a tab its frequency; the default is 1.
    """

    version = "1"

    def __init__(self, words: str = "") -> None:
        if not isinstance(words, str):
            raise UsageError(
                f"filter 'join_hyphens': words={words!r:.100} is not the name of a file",
                fix="give the name of a file with one word per line",
                code="filter-parameters",
            )
        self._words, self._sha256 = Counter[str](), ""
        if words:
            data = storage.read_bytes(expand_home(words))
            self._words, self._sha256 = _frequencies(data, words), hashlib.sha256(data).hexdigest()

    @staticmethod
    def files(words: str = "") -> list[str]:
        """Return the files that are read."""
        return [expand_home(words)] if words and isinstance(words, str) else []

    def identity(self) -> dict[str, Any]:
        """Return the content of the file instead of its name."""
        return {"parameters": {"words": {"sha256": self._sha256}} if self._sha256 else {}}

    def __call__(self, document: Document) -> Document | None:
        text, before = document.text, ""
        while text != before and _BROKEN.search(text):
            before, counts = text, Counter(map(_plain, _WORDS.findall(text)))
            text = _BROKEN.sub(partial(self._joined, counts=counts), before)
        return _with_text(document, text)

    def _joined(self, found: regex.Match[str], counts: Counter[str]) -> str:
        hyphen, gap, right, rest = found["hyphen"], found["gap"], found["right"], found["rest"]
        token = found.string[max(found.start() - _LEFT_CHARACTERS, 0) : found.start()].split()[-1]
        keeps = self._keeps_hyphen(token, hyphen, right, rest, counts)
        if keeps is None:
            return found[0]
        word = (hyphen if keeps else "") + right + rest
        after = found.string[found.end() : found.end() + 1]
        if not after or after in "\n\r\v\f\x85\u2028\u2029":  # the line ends here already
            return word + (gap if "\f" in gap else found["space"])
        if word[-1] in HYPHENS:  # followed by a space; with the line's end after it, it would be another broken word
            return found[0] if "\f" in gap else word + found["space"]
        return word + gap

    def _keeps_hyphen(self, token: str, hyphen: str, right: str, rest: str, counts: Counter[str]) -> bool | None:
        """Return whether the word is a compound; None if this is not a broken word."""
        if hyphen == _SOFT_HYPHEN:
            return False
        left = _WORDS.findall(token)[-1]
        following = _WORDS.match(right + rest)
        after = following[0] if following else right
        one_word, compound = _plain(left + after), _plain(f"{left}-{after}")
        for known in (counts, self._words):
            if known[one_word] or known[compound]:
                return known[compound] > known[one_word]
        if right.casefold() in _JOINING_WORDS or (right.isdecimal() and rest in (".", ")")):
            return None
        if right.isupper() and left.isupper() and len(left) > 1:
            return False
        is_url = "://" in token or "@" in token or "/" in token or token.startswith("www.")
        has_capital = right[0].isupper()
        has_digit = left[-1].isdecimal() or right[0].isdecimal()
        return is_url or has_capital or has_digit or "-" in (left + after).translate(_TO_HYPHEN)


def _plain(word: str) -> str:
    return word.translate(_TO_HYPHEN).replace(_SOFT_HYPHEN, "").casefold()


def _frequencies(data: bytes, name: str) -> Counter[str]:
    counts = Counter[str]()
    try:
        for line in data.decode("utf-8-sig").splitlines():
            word, _, frequency = line.strip().partition("\t")
            if word:
                counts[_plain(word)] += int(frequency or 1)
    except ValueError:
        raise UsageError(
            f"filter 'join_hyphens': {storage.redact(name)} is not a UTF-8 list of words and frequencies",
            fix="write one word per line, and its frequency as a whole number after a tab",
            code="filter-parameters",
        ) from None
    return counts


# --- lines --------------------------------------------------------------------------------------------------------

_GAP = regex.compile(rf"(?<!{_BLANK}){_BLANK}*+(?:{_BREAK}|[\f\u2029])\s*+")
_BEGINS_ITEM = regex.compile(
    r"[-*+\u2022\u2023\u25aa\u25cf\u25e6\u00b7\u2013\u2014]\s|\(?(?:\d{1,3}|[A-Za-z]|[ivx]{1,5})\)\s|\d{1,3}\.\s"
    r"|\d+(?:\.\d+)+\.?\s|\[\d+\]\s|[#|>]"
)
_IS_ROW = regex.compile(r"\S(?: {3,}|\t)\s*\S")
_ENDS_SENTENCE = regex.compile(r"[.!?:;\u2026\u3002\uff01\uff1f\u0964\u06d4]['\")\]\u2019\u201d\u00bb\u300d]*$")
_WITHOUT_SPACES = regex.compile(
    r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\u3000-\u303f\uff01-\uff60]"
)
_BREAKS = regex.compile(_BREAK)
_FULL = 0.85  # of the usual width, to which lines of proportional type come
_MOST_RAGGED = 0.4
_FEWEST_PAIRS = 3  # of lines, by which a block is judged


@dataclass(frozen=True)
class _Line:
    text: str
    gap: str  # white space up to the next line
    indent: int

    @property
    def ends_block(self) -> bool:
        return "\f" in self.gap or "\u2029" in self.gap or len(_BREAKS.findall(self.gap)) > 1


class JoinLines:
    """Joins the lines of a paragraph, also over a page break, and puts a blank line before and after it.

    Two lines are joined if the first word of the second did not fit on the first. The width is that of the document:
    half of its characters, without spaces, are on lines that are at least as long. Lists, tables, headings, indented
    beginnings and blocks of lines of any length, such as verse, keep their lines.

    Args:
        max_width: number of characters without spaces; lines of a document with a larger width are paragraphs and stay.
    """

    version = "1"

    def __init__(self, max_width: int = 200) -> None:
        if not (isinstance(max_width, int) and max_width >= 20):
            raise UsageError(
                f"filter 'join_lines': max_width={max_width!r} is out of range",
                fix="give a number of characters of at least 20",
                code="filter-parameters",
            )
        self._max_width = max_width

    def __call__(self, document: Document) -> Document | None:
        text = document.text.lstrip()
        head = document.text[: len(document.text) - len(text)]
        lines = list(_lines(text, _indent(head)))
        width = _width([_size(line.text) for line in lines])
        if len(lines) < 2 or width > self._max_width:
            return None
        joins = _joins(lines, width)
        parts = [head]
        for number, line in enumerate(lines):
            joined_before, joined_after = number > 0 and joins[number - 1], joins[number]
            joined_next = number + 1 < len(lines) and joins[number + 1]
            parts.append(line.text)
            if joined_after:
                parts.append(_space(line.text, lines[number + 1].text))
            elif number + 1 < len(lines) and (joined_before or joined_next) and not line.ends_block:
                parts += [_first_break(line.gap), line.gap]
            else:
                parts.append(line.gap)
        return _with_text(document, "".join(parts))


def _lines(text: str, indent: int) -> Iterator[_Line]:
    start = 0
    for found in _GAP.finditer(text):
        yield _Line(text[start : found.start()], found[0], indent)
        start, indent = found.end(), _indent(found[0])
    if start < len(text):
        yield _Line(text[start:].rstrip(), text[len(text.rstrip()) :], indent)


def _indent(gap: str) -> int:
    """Return the white space after the last end of a line."""
    return len(gap) - max(gap.rfind(each) for each in "\n\r\v\f\x85\u2028\u2029") - 1


def _size(text: str) -> int:
    """Return the number of characters that are not white space, which joining does not change."""
    return sum(map(len, text.split()))


def _width(lengths: Sequence[int]) -> int:
    """Return the largest length with half of the characters on lines of at least this length."""
    seen = 0
    for length in sorted(lengths, reverse=True):
        seen += length
        if 2 * seen >= sum(lengths):
            return length
    return 0


def _joins(lines: Sequence[_Line], width: int) -> list[bool]:
    """Return for each line whether it is joined with the next one."""
    joins, keeps, start = [False] * len(lines), [False] * len(lines), 0
    for stop in (number + 1 for number, line in enumerate(lines) if line.ends_block or number + 1 == len(lines)):
        pairs = [number for number in range(start, stop - 1) if _may_join(lines[number], lines[number + 1])]
        full = {number for number in pairs if _is_full(lines[number].text, lines[number + 1].text, width)}
        is_kept = _has_own_lines(
            [lines[number] for number in pairs], [lines[number + 1] for number in pairs], len(full)
        )
        for number in range(start, stop):
            keeps[number], joins[number] = is_kept, number in full and not is_kept
        start = stop
    for number, (line, after) in enumerate(pairwise(lines)):
        if line.gap.count("\f") == 1 and not keeps[number] and not keeps[number + 1]:
            joins[number] = _continues(line.text, after.text)
    return joins


def _may_join(line: _Line, after: _Line) -> bool:
    is_item = _BEGINS_ITEM.match(line.text)
    return not (
        _BEGINS_ITEM.match(after.text)
        or line.text[0] in "#|>"
        or _IS_ROW.search(line.text)
        or _IS_ROW.search(after.text)
        or (line.text.isupper() and not after.text.isupper())
        or (after.indent > line.indent + 1 and not is_item)
    )


def _is_full(text: str, after: str, width: int) -> bool:
    """Whether the first word of the next line would not have fitted on this one."""
    first = after[:1] if _WITHOUT_SPACES.match(after) else after.split(maxsplit=1)[0]
    return _size(text) + len(first) >= _FULL * width


def _has_own_lines(lines: Sequence[_Line], after: Sequence[_Line], num_full: int) -> bool:
    """Whether the lines of a block, such as verse, are not those of a paragraph."""
    if len(lines) < _FEWEST_PAIRS:
        return False
    firsts = [line.text[0] for line in after if line.text[0].isupper() or line.text[0].islower()]
    num_lower = sum(first.islower() for first in firsts)
    num_sentences = sum(bool(_ENDS_SENTENCE.search(line.text[-20:])) for line in lines)
    return (
        num_full < (1 - _MOST_RAGGED) * len(lines)
        or (len(firsts) >= _FEWEST_PAIRS and num_lower < len(firsts) / 4)
        or num_sentences > len(lines) * 0.6
    )


def _continues(text: str, after: str) -> bool:
    """Whether the first line of a page continues the paragraph of the page before it."""
    if _ENDS_SENTENCE.search(text[-20:]) or _BEGINS_ITEM.match(after) or _IS_ROW.search(after):
        return False
    return after[0].islower() or bool(_WITHOUT_SPACES.match(after) and _WITHOUT_SPACES.match(text[-1]))


def _space(text: str, after: str) -> str:
    return "" if _WITHOUT_SPACES.match(text[-1]) and _WITHOUT_SPACES.match(after) else " "


def _first_break(gap: str) -> str:
    return str(_BREAKS.findall(gap)[0])


def _with_text(document: Document, text: str) -> Document | None:
    return None if text == document.text else replace(document, text=text)
