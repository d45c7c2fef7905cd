from __future__ import annotations

import numpy as np
import pytest

from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.foreign_tokenizers import WRITERS
from tests.support.preparations import normalized
from trainer.data.masking import PieceKind, piece_kinds, word_starts

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def starts_of(pieces: list[str]) -> list[bool]:
    vocabulary = [*SPECIAL, *dict.fromkeys(piece for piece in pieces if piece not in SPECIAL)]
    ids = np.array([[vocabulary.index(piece) for piece in pieces]])
    return word_starts(ids, ids >= len(SPECIAL), piece_kinds(vocabulary))[0].tolist()


def words_of(pieces: list[str]) -> list[list[str]]:
    words: list[list[str]] = []
    for piece, starts in zip(pieces, starts_of(pieces), strict=True):
        if starts:
            words.append([])
        if piece not in SPECIAL:
            words[-1].append(piece)
    return words


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ("▁a ▁wo rd ▁end .", "▁a|▁wo rd|▁end ."),
        ("[CLS] rd ▁a [SEP] [CLS] x y", "rd|▁a|x y"),  # a document's piece may begin within a word
        ("▁ 中 国人 。 好", "▁ 中|国人|。|好"),
        ("▁中国 人 ▁and ▁so", "▁中国|人|▁and|▁so"),
        ("▁ 中 abc d ▁e", "▁ 中|abc d|▁e"),
        ("▁caf <0xC3> <0xA9> s ▁x", "▁caf <0xC3> <0xA9> s|▁x"),
        ("▁ <0xE4> <0xB8> <0xAD> <0xE5> <0x9B> <0xBD> a b", "▁ <0xE4> <0xB8> <0xAD>|<0xE5> <0x9B> <0xBD>|a b"),
        ("▁안 녕 ▁하 세요", "▁안 녕|▁하 세요"),
        ("▁ ▁a", "▁|▁a"),
    ],
)
def test_words_are_distinguished_from_pieces(pieces: str, words: str) -> None:
    assert words_of(pieces.split(" ")) == [word.split(" ") for word in words.split("|")]


def test_words_of_a_real_tokenizer_are_those_between_spaces(small_tokenizer) -> None:
    tokenizer = Tokenizer.load(small_tokenizer)
    text = normalized(
        "Every word, however long-winded or strange (xylographically speaking), stays whole.", tokenizer.normalization
    )
    ids = tokenizer.encode(text).astype(np.int64)[None]
    starts = word_starts(ids, ids >= len(SPECIAL), piece_kinds(tokenizer.pieces))[0]
    words = [tokenizer.decode(part) for part in np.split(ids[0], np.flatnonzero(starts)[1:])]
    assert words == [f" {word}" for word in text.split()]


def test_every_byte_has_a_kind() -> None:
    kinds = piece_kinds([f"<0x{value:02X}>" for value in range(256)])
    assert (kinds[0x80:0xC0] == PieceKind.CONTINUES).all() and (kinds[0xE0:] == PieceKind.ALONE).all()
    assert (kinds[:0x80] == PieceKind.JOINS).all() and (kinds[0xC0:0xE0] == PieceKind.JOINS).all()


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("wordpiece", "The unhomable river, s東京!", [" the", " unhomable", " river", " ,", " s", " 東", " 京", " !"]),
        (
            "byte level",
            "The unhomable river,\n\nsé   東京!",
            ["The", " unhomable", " river,", "\n", "\nsé", "   東", "京", "!"],
        ),
    ],
)
def test_words_of_a_foreign_vocabulary(tmp_path, kind, text, expected):
    """Continuations stay with their word, and white space of any kind begins one; a piece may be half a character."""
    known = ["the river , s é 東 京 !"] * 20 + ["un hom unhom able homable"]
    tokenizer = Tokenizer.load(WRITERS[kind](tmp_path, known, vocab_size=320))
    ids = tokenizer.encode_text(text).astype(np.int64)[None]
    maskable = tokenizer.special_tokens.are_ordinary(ids)
    starts = word_starts(ids, maskable, piece_kinds(tokenizer.pieces))[0]
    words = np.split(ids[0], np.flatnonzero(starts)[1:])
    assert maskable.all() and any(len(word) > 1 for word in words)
    assert [tokenizer.decode(word) for word in words] == expected
