"""Slow ways to what preparation computes, which tests compare with it: one text, one paragraph, one token at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencex

from data_prep.text.cleaning import Normalization, clean
from data_prep.tokenizer.hugging_face_tokenizer import compare_with_hugging_face
from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer

_CHINESE_STOPS = tuple("\u3002\uff01\uff1f\uff61")
_PARAGRAPH_BREAK = re.compile(rb"\n *\n[ \n]*")


def clean_paragraphs(text: str, normalization: Normalization) -> list[str]:
    """Return the paragraphs (separated by blank lines or U+2029), each normalized, without the space before it.

    `normalize(text)` is exactly `"".join(" " + paragraph for paragraph in clean_paragraphs(text))`.
    """
    paragraphs = _PARAGRAPH_BREAK.split(clean(text, normalization))
    return [b" ".join(words).decode() for words in map(bytes.split, paragraphs) if words]


def sentence_starts(paragraphs: Sequence[str], language: str) -> list[int]:
    """Return the byte offsets (UTF-8) in the normalized text " p1 p2 ..." at which sentences begin.

    sentencex splits each paragraph as a whole. It takes a digit after a full stop of Chinese for a decimal's, so it
    gets a digit of full width there. White space that it makes a sentence of its own belongs to the sentence before.
    """
    starts, text = list[int](), ""
    for paragraph in paragraphs:
        shown = "".join(
            "\uff10" if character in "0123456789" and before in _CHINESE_STOPS else character
            for before, character in zip(" " + paragraph, paragraph, strict=False)
        )
        begun = ""
        for number, sentence in enumerate(sentencex.segment(re.split("[-_]", language.lower())[0], shown)):
            if number == 0:
                starts.append(len(text.encode()))
            elif sentence.strip():
                starts.append(len(f"{text} {paragraph[: len(begun) - begun.endswith(' ')]}".encode()))
            begun += sentence
        text += f" {paragraph}"
    return starts


def sentence_token_starts(
    tokenizer: SentencePieceTokenizer, ids: np.ndarray, starts_bytes: list[int], normalized_text: str | None = None
) -> np.ndarray:
    """Return the tokens at which sentences begin, (num_sentences,) uint32: rising strictly, the first 0.

    An offset inside a token moves back to the token's start; sentences that fall on one token become one. The text is
    needed where [UNK] is among the ids.
    """
    if len(ids) == 0:
        return np.zeros(0, dtype=np.uint32)
    lengths = tokenizer.token_bytes(ids, normalized_text)
    token_starts = np.cumsum(lengths) - lengths
    starts = np.searchsorted(token_starts, np.asarray(starts_bytes, dtype=np.int64), side="right") - 1
    return np.unique(starts).astype(np.uint32)


def check_parity(folder: str | Path, texts: Iterable[str], hugging_face_folder: str | Path | None = None) -> None:
    """Compare the ids of raw texts by `tokenizer.json` (of another folder, if given) with those of preparation."""
    compare_with_hugging_face(
        SentencePieceTokenizer.open(str(folder)), Path(hugging_face_folder or folder), list(texts)
    )
