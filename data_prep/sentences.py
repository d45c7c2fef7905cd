"""Where sentences begin: offsets into the normalised text, found by sentencex a paragraph at a time."""

from __future__ import annotations

import re

import sentencex

from data_prep.errors import UsageError

_WINDOW_CHARACTERS = 2_048
_LONGEST_WINDOW_CHARACTERS = 65_536
# sentencex takes time in the square of the number of sentences where no spaces part them (2.5 s for 100,000
# characters of Chinese), so a long paragraph is worked through in windows.

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
    """Refuse what is no language code: sentencex would silently take the rules of English.

    Raises:
        UsageError: neither a code of ISO 639-1 nor one of the three-letter codes without a shorter one.
    """
    code = _base_code(language)
    if code not in _TWO_LETTER_CODES and code not in _THREE_LETTER_CODES:
        raise UsageError(
            f"language {language!r} is not known: give its ISO 639-1 code of two letters, such as en, de, fr, zh or ar "
            "(or the code of three letters of a language that has no shorter one, such as yue), "
            "as documents.language or as the language of a source"
        )


def sentence_starts(paragraphs: list[str], language: str) -> list[int]:
    """Return the byte offsets (UTF-8) in the normalised text " p1 p2 ..." at which sentences begin.

    A sentence begins at the space before it where there is one. The first offset is 0, they rise strictly, and every
    paragraph begins a sentence. `paragraphs` are those of `clean_paragraphs`.

    Raises:
        UsageError: the language is not known.
    """
    check_language(language)
    code = _base_code(language)
    starts: list[int] = []
    paragraph_start = 0
    for paragraph in paragraphs:
        starts.append(paragraph_start)
        offset, previous = paragraph_start + 1, 0
        for start in _starts_in_paragraph(paragraph, code):
            if paragraph[start - 1] == " ":
                start -= 1
            offset += _num_bytes(paragraph[previous:start])
            previous = start
            starts.append(offset)
        paragraph_start = offset + _num_bytes(paragraph[previous:])
    return starts


def _starts_in_paragraph(paragraph: str, code: str) -> list[int]:
    """Character offsets of the paragraph's sentences but its first, strictly rising."""
    starts: list[int] = []
    position, window = 0, _WINDOW_CHARACTERS
    while position < len(paragraph):
        piece = paragraph[position : position + window]
        found = [position + start for start in _boundaries(piece, code)]
        if position + window >= len(paragraph):
            starts.extend(found)
            break
        if found:
            # The last sentence may go on beyond the window: begin again with it.
            starts.extend(found)
            position, window = found[-1], _WINDOW_CHARACTERS
        elif window < _LONGEST_WINDOW_CHARACTERS:
            window *= 2
        else:
            position, window = position + window, _WINDOW_CHARACTERS
    return starts


def _boundaries(piece: str, code: str) -> list[int]:
    """Character offsets at which sentencex begins a sentence, but not 0 and none at white space alone."""
    starts: list[int] = []
    for boundary in sentencex.get_sentence_boundaries(code, piece):
        start = boundary["start_index"]
        if start > (starts[-1] if starts else 0) and boundary["text"].strip():
            starts.append(start)
    return starts


def _base_code(language: str) -> str:
    return re.split("[-_]", language.strip().lower(), maxsplit=1)[0]


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
