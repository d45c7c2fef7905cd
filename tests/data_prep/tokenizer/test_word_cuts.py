"""Cuts within words: each part gets the ids that it has within the text, whatever the script and the vocabulary."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.tokenizer import word_cuts
from data_prep.tokenizer.sentencepiece_model import train_model
from data_prep.tokenizer.word_cache import WordCache
from data_prep.tokenizer.word_cuts import WordCuts, can_cut_at_letters
from tests.support.preparations import normalized

_SCRIPTS = [
    *(
        "the thin tin; it's (1st) 3.14",
        "\u4f60\u597d\u4e16\u754c\u3002\u4f60\u662f\uff0c",
        "\u3053\u3093\u306b\u3061\u306f\u30a2\u30a4",
    ),
    *(
        "\uc548\ub155\ud558\uc138\uc694",
        "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440",
        "\u0645\u0631\u062d\u0628\u0627",
        "\u0928\u092e\u0938\u094d\u0924\u0947",
    ),
    *(
        "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
        "na\u00efve caf\u00e9 \u00fcber",
        "\U0001f600\U0001f468\u200d\U0001f469",
        "\u05e9\u05dc\u05d5\u05dd",
        "\U00020000\U00020001",
    ),
]
_CHARACTERS = sorted(set("".join(_SCRIPTS)) | set("<0x41>\ufffd\u0301"))
# Texts of one script, of all mixed, and of any characters.
_TEXTS = st.one_of(
    *(st.text(st.sampled_from(script), max_size=60) for script in _SCRIPTS),
    st.text(st.sampled_from(_CHARACTERS), max_size=60),
    st.text(st.characters(codec="utf-8"), max_size=40),
).map(normalized)


def _model(scripts: list[str], seed: int, user_symbols: tuple[str, ...]) -> sentencepiece.SentencePieceProcessor:
    generator = random.Random(seed)
    lines = [" " + "".join(generator.choices(script, k=12)).strip() for script in scripts for _ in range(150)]
    size = 300 + len(set("".join(scripts)))
    model = train_model(
        iter(lines), vocab_size=size, byte_fallback=True, user_symbols=user_symbols, max_line_bytes=4096
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def _pieces(processor: sentencepiece.SentencePieceProcessor) -> list[str]:
    ids = range(processor.get_piece_size())
    return [processor.id_to_piece(i).replace("\u2581", " ") for i in ids if not processor.is_byte(i) and i > 4]


@pytest.fixture(
    scope="module",
    params=[(_SCRIPTS, ()), (_SCRIPTS[:2], ("\u4f60\u597d", "it's", "\u3002\u4f60"))],
    ids=["all", "symbols"],
)
def processor(request: pytest.FixtureRequest) -> sentencepiece.SentencePieceProcessor:
    scripts, symbols = request.param
    return _model(scripts, 1, symbols)


@pytest.mark.long
@settings(max_examples=200)
@given(text=_TEXTS)
def test_the_ids_of_the_parts_are_those_of_the_text(processor: sentencepiece.SentencePieceProcessor, text: str) -> None:
    data = text.encode()
    starts = [*WordCuts(_pieces(processor)).starts(data).tolist(), len(data)]
    parts = [data[start:stop] for start, stop in itertools.pairwise(starts)]
    assert b"".join(parts) == data and (not data or starts[0] == 0)
    assert [i for part in parts for i in processor.encode(part)] == processor.encode(data)


@pytest.mark.long
@settings(max_examples=100)
@given(texts=st.lists(_TEXTS, min_size=1, max_size=4))
def test_the_cache_gives_the_ids_of_the_text(processor: sentencepiece.SentencePieceProcessor, texts: list[str]) -> None:
    cache = WordCache(processor.encode, np.uint16, _pieces(processor), num_slots=64)
    for text in [*texts, "".join(texts)]:
        assert cache.encode(text.encode()).tolist() == processor.encode(text)


def test_text_is_cut_only_between_characters_that_share_no_piece() -> None:
    data = " \u4f60\u597d\u4e16\u754c\u597d".encode()
    assert WordCuts([" \u4f60", "\u4f60\u597d", "\u4e16\u754c"]).starts(data).tolist() == [0, 7, 13]


def test_colliding_hashes_of_all_pairs_leave_only_cuts_at_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_cuts, "_hashed", lambda firsts, seconds: np.zeros(len(firsts), np.uint32))
    assert WordCuts(["ab"]).starts(" \u4f60\u597d \u4e16".encode()).tolist() == [0, 7]


def test_without_byte_fallback_text_is_cut_only_at_spaces() -> None:
    assert WordCuts(None).starts(" a, \u4f60\u597d".encode()).tolist() == [0, 3]


def test_a_trained_vocabulary_can_be_cut_at_letters(processor: sentencepiece.SentencePieceProcessor) -> None:
    pieces = [piece for piece in _pieces(processor) if piece != "it's"]
    assert len(pieces) > 50 and can_cut_at_letters(pieces)


@pytest.mark.parametrize("piece", ["it's", " a.", "1st", "x=", "c3"])
def test_a_piece_of_letters_and_others_forbids_the_cut_at_letters(piece: str) -> None:
    assert not can_cut_at_letters([" the", piece])
    assert WordCuts([" the", piece]).starts(b" the,").tolist() == [0]
