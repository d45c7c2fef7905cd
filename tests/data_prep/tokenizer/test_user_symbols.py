"""User symbols in tokenizer.json are cut exactly as SentencePiece cuts them."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data_prep.tokenizer.adversarial_lines import lines_with_symbols
from data_prep.tokenizer.hugging_face_tokenizer import cuts_of_unreachable_pieces
from data_prep.tokenizer.special_tokens import UNK_TOKEN_ID
from data_prep.tokenizer.tokenizer import MASK_TOKEN_ID, SPECIAL_TOKENS, Tokenizer, TokenizerSettings
from tests.support.made_up_documents import train_tokenizer
from tests.support.preparations import normalized
from tests.support.references import check_parity

SYMBOLS = ("<sep>", "@user", "\u2603", "\u4e2dx", "ab", "abc", "b", "[mask]", "<0x", "\\d", "(?:", "x]", "-^", "][")
TEXT = [
    "the first <sep> rule of the house: @user reads abc and hides the \u2603 letters, cab crabs [mask]ed.",
    "the <0x41> second house <sep><sep> of letters \u4e2dx \\d (?: and x] -^ ][ the other crabs. a [b] <c>",
]
CHARACTERS = st.one_of(
    st.sampled_from(SYMBOLS),
    st.sampled_from([*"abcx <>[]0@\u4e2d\u5c71\u2581\u0301\u200b\n", "<0x41>", "the "]),
    st.characters(codec="utf-8"),
)
TEXTS = st.lists(CHARACTERS, max_size=20).map("".join)


@pytest.fixture(scope="module", params=[True, False], ids=["bytes", "no bytes"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    folder = tmp_path_factory.mktemp("symbols")
    values = TokenizerSettings(
        vocab_size=430 if request.param else 180,
        character_coverage=1.0,
        byte_fallback=request.param,
        user_symbols=SYMBOLS,
    )
    train_tokenizer(TEXT, folder, values)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


def prepared(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(normalized(text, tokenizer.normalization)).tolist()
    assert ids == [span.token_id for span in tokenizer.spans(normalized(text, tokenizer.normalization))]
    return ids


def without_special_tokens(text: str) -> str:
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text


@pytest.mark.long
@settings(max_examples=150)
@given(text=TEXTS)
def test_any_text_with_symbols_gets_the_ids_of_preparation(
    both: tuple[Tokenizer, PreTrainedTokenizerBase], text: str
) -> None:
    tokenizer, auto = both
    text = without_special_tokens(text)
    assert auto(text, add_special_tokens=False)["input_ids"] == prepared(tokenizer, text)


def test_lines_full_of_symbols_agree_and_have_symbols(both: tuple[Tokenizer, PreTrainedTokenizerBase]) -> None:
    tokenizer, _ = both
    lines = list(lines_with_symbols(SYMBOLS))
    check_parity(tokenizer.folder, lines)
    for symbol in ("<sep>", "\u2603"):
        token_id = tokenizer.pieces.index(symbol)
        assert all(prepared(tokenizer, line).count(token_id) for line in lines if symbol in line)


@pytest.mark.parametrize("symbol", ["<sep>", "abc"])
def test_after_a_mask_a_symbol_gets_a_space_only_where_there_is_one(
    both: tuple[Tokenizer, PreTrainedTokenizerBase], symbol: str
) -> None:
    tokenizer, auto = both
    token_id, space = tokenizer.pieces.index(symbol), tokenizer.pieces.index("\u2581")

    def ids(text: str) -> list[int]:
        return auto(text, add_special_tokens=False)["input_ids"]

    assert ids(f"[MASK]{symbol}") == [MASK_TOKEN_ID, token_id]
    assert ids(f"[MASK] {symbol}") == [MASK_TOKEN_ID, space, token_id]
    assert ids(f"{symbol} [MASK].") == [space, token_id, MASK_TOKEN_ID, *prepared(tokenizer, ".")[1:]]
    assert ids(f"the {symbol}[MASK]{symbol}")[-3:] == [token_id, MASK_TOKEN_ID, token_id]


def test_decoding_gives_symbols_back(both: tuple[Tokenizer, PreTrainedTokenizerBase]) -> None:
    tokenizer, auto = both
    for text in TEXT:
        assert auto.decode(prepared(tokenizer, text), skip_special_tokens=True) == text
        assert tokenizer.decode(prepared(tokenizer, text)) == f" {text}"


def test_names_of_bytes_and_special_tokens_are_cut_where_sentencepiece_cuts_them(
    both: tuple[Tokenizer, PreTrainedTokenizerBase],
) -> None:
    tokenizer, _ = both
    cuts = dict(cuts_of_unreachable_pieces(tokenizer))
    num_bytes = 256 if tokenizer.info.settings.byte_fallback else 0
    assert len(cuts) >= num_bytes + 1 and all(0 < cut < len(text) for text, cut in cuts.items())
    assert num_bytes == 0 or "<0x41>" in cuts


def test_a_piece_that_becomes_one_unknown_token_is_not_cut() -> None:
    def spans(text: str) -> list[SimpleNamespace]:
        if text == "[MASK]":
            return [SimpleNamespace(token_id=UNK_TOKEN_ID, stop_bytes=6)]
        return [SimpleNamespace(token_id=8, stop_bytes=1), SimpleNamespace(token_id=9, stop_bytes=2)]

    tokenizer: Any = SimpleNamespace(vocabulary=[SimpleNamespace(text=text) for text in ("[MASK]", "ab")], spans=spans)
    assert list(cuts_of_unreachable_pieces(tokenizer)) == [("ab", 1)]


def test_a_real_vocabulary_agrees_on_shuffled_symbols(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("aeioubdfgklm", k=draw.randint(2, 7))) for _ in range(300)]
    texts = [" ".join(draw.choices(words, k=80)) for _ in range(60)]
    settings = TokenizerSettings(
        vocab_size=900, character_coverage=1.0, user_symbols=("ba", "##", "<k>"), normalization={"form": "NFKC"}
    )
    train_tokenizer(texts, tmp_path, settings)
    lines = ["".join(draw.choices(["ba", "##", "<k>", " ", *words[:20]], k=30)) for _ in range(300)]
    check_parity(tmp_path, lines)
