"""Sentence boundaries: offsets into the normalized text, found by sentencex paragraph by paragraph."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cache

import numpy as np
import sentencex

from data_prep.base.errors import UsageError
from data_prep.text.language_codes import TWO_LETTER_CODES
from data_prep.text.text_batch import TextBatch

_WINDOW_CHARACTERS = 2_048
_LONGEST_WINDOW_CHARACTERS = 65_536
# sentencex takes time in the square of the number of sentences where no spaces part them (2.5 s for 100,000
# characters of Chinese), so a long paragraph is worked through in windows.

# sentencex takes the digit after a full stop for a decimal's, also where the stop is none of these; full-width digits,
# which it does not, stand in for them.
_DIGIT_OF_A_SENTENCE = re.compile("[0-9](?<=[\u3002\uff01\uff1f\uff61].)")

_WHITE_SPACE_WITH_A_BREAK = re.compile("(?<!\\s)\\s*[\n\r\x0b\x0c\x85\u2028\u2029]\\s*")
_WHITE_SPACE_CHARACTER = re.compile(r"\s")
_LINE_BREAK = re.compile("\r\n|[\n\r\x0b\x0c\x85\u2028]")

_TWO_LETTER_CODES = frozenset(
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en "
    "eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv "
    "ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne "
    "ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss "
    "st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu".split()
)
_THREE_LETTER_CODES = frozenset(
    "ang arc arq ary arz ast avk bar bcc bcl bjn ceb ckb crh csb dsb dtp dty ext fit frc frp frr fur gag gan gcr glk "
    "gom hak haw hif hsb ilo kaa kab kbd koi krc ksh lad lez lij lmo ltg lzh mad mai mdf mhr min mni mwl myv mzn nah "
    "nan nap nds new nov nso nys olo pag pam pap pcd pdc pfl pms pnb pnt rmy roa rue sah sat scn sco sgs shn skr srn "
    "stq szl tcy tet tpi trv tyv udm vec vep vls vro war wuu xal xmf yue zea".split()
)


def check_language(language: str) -> None:
    """Refuse an unknown language code, for which sentencex would silently use the rules of English.

    Raises:
        UsageError: neither a code of ISO 639-1 or 639-3, nor one of the three-letter codes without a shorter one.
    """
    if not _is_known(_base_code(language)):
        raise UsageError(
            f"unknown language {language!r}",
            fix="set documents.language or the language of the source to an ISO 639 code of two or three letters, such "
            "as en, deu, fr, zh or yue",
            code="unknown-language",
        )


def known_language(language: str | None, otherwise: str) -> str:
    """Return the language if `check_language` accepts it, else `otherwise`: for the languages in documents."""
    return language if language and _is_known(_base_code(language)) else otherwise


def batch_sentence_starts(batch: TextBatch, languages: Sequence[str]) -> np.ndarray:
    """Return the offsets in `batch.data` at which sentences begin, (S,) int64, strictly rising.

    `languages` are known ones, one for each document. A sentence begins at the space before it where there is one, and
    every paragraph begins a sentence.
    """
    starts: list[int] = []
    data = batch.data
    document, document_stop, code = -1, 0, ""
    offsets = [*batch.paragraph_starts.tolist(), len(data)]
    document_stops = batch.document_starts.tolist()[1:]
    for start, stop in zip(offsets, offsets[1:], strict=False):
        while start >= document_stop:
            document += 1
            document_stop, code = document_stops[document], _base_code(languages[document])
        _add_starts(starts, data[start + 1 : stop].decode(), start, code)
    return np.array(starts, np.int64)


def raw_sentence_starts(text: str, language: str) -> list[int]:
    """Return the character offsets in an original text at which sentences begin, strictly ascending. `language` is a
    known one. Characters before the first character of a sentence belong to the previous sentence.
    """
    code = _base_code(language)
    starts: list[int] = []
    position = 0
    for run in (*_WHITE_SPACE_WITH_A_BREAK.finditer(text), None):
        stop = len(text) if run is None else run.start()
        if run is None or _parts_paragraphs(run[0]):
            paragraph = _WHITE_SPACE_CHARACTER.sub(" ", text[position:stop])
            split = _split if len(paragraph) <= _WINDOW_CHARACTERS else _split_in_windows
            for sentence in split(paragraph, code) if paragraph else ():
                starts.append(position + len(sentence) - len(sentence.lstrip(" ")))
                position += len(sentence)
            position = stop if run is None else run.end()
    return starts


def _parts_paragraphs(white_space: str) -> bool:
    """Return whether white space is a blank line or U+2029."""
    return "\u2029" in white_space or len(_LINE_BREAK.findall(white_space)) > 1


def _add_starts(starts: list[int], paragraph: str, offset: int, code: str) -> None:
    """Add the starts of the sentences of a paragraph, whose space has this offset."""
    starts.append(offset)
    split = _split if len(paragraph) <= _WINDOW_CHARACTERS else _split_in_windows
    sentences = split(paragraph, code)
    if len(sentences) == 1:
        return
    is_ascii = paragraph.isascii()
    for sentence in sentences[:-1]:
        offset += len(sentence if is_ascii else sentence.encode())
        # A space between two sentences ends the first one; one space precedes the paragraph.
        starts.append(offset if sentence[-1] == " " else offset + 1)


def _split_in_windows(paragraph: str, code: str) -> list[str]:
    sentences: list[str] = []
    begun: list[str] = []  # of a sentence longer than a window
    position, window = 0, _WINDOW_CHARACTERS
    while position + window < len(paragraph):
        piece = paragraph[position : position + window]
        found = _split(piece, code)
        if len(found) > 1:
            # The last sentence may continue beyond the window: the next window begins with it.
            sentences.append("".join([*begun, found[0]]))
            sentences.extend(found[1:-1])
            position, window, begun = position + len(piece) - len(found[-1]), _WINDOW_CHARACTERS, []
        elif window < _LONGEST_WINDOW_CHARACTERS:
            window *= 2
        else:
            begun.append(piece)
            position, window = position + window, _WINDOW_CHARACTERS
    first, *others = _split(paragraph[position:], code)
    return [*sentences, "".join([*begun, first]), *others]


def _split(text: str, code: str) -> list[str]:
    """Return the sentences of the text, each with the white space after it; none is only white space."""
    sentences: list[str]
    if text.isascii() or not _DIGIT_OF_A_SENTENCE.search(text):
        sentences = sentencex.segment(code, text)
    else:
        replaced = sentencex.segment(code, _DIGIT_OF_A_SENTENCE.sub("\uff10", text))
        stops = itertools.accumulate(map(len, replaced))
        sentences = [text[start:stop] for start, stop in itertools.pairwise([0, *stops])]
    if len(sentences) == 1 or not any(map(str.isspace, sentences)):
        return sentences
    joined: list[str] = []
    for sentence in sentences:
        if joined and not sentence.strip():
            joined[-1] += sentence
        else:
            joined.append(sentence)
    return joined


@cache
def _base_code(language: str) -> str:
    code = re.split("[-_]", language.strip().lower(), maxsplit=1)[0]
    return TWO_LETTER_CODES.get(code, code)


def _is_known(code: str) -> bool:
    return code in _TWO_LETTER_CODES or code in _THREE_LETTER_CODES
