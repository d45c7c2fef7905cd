"""tokenizer.json gives, from raw text, the ids that preparation writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from data_prep.base.errors import UserError
from data_prep.text.cleaning import Normalization, replace_surrogates
from data_prep.tokenizer.hugging_face_tokenizer import ADVERSARIAL_LINES, write_hugging_face_tokenizer
from data_prep.tokenizer.tokenizer import (
    CLS_TOKEN_ID,
    MASK_TOKEN_ID,
    SEP_TOKEN_ID,
    SPECIAL_TOKENS,
    Tokenizer,
    TokenizerSettings,
)
from tests.support.error_codes import coded
from tests.support.made_up_documents import train_tokenizer
from tests.support.preparations import normalized
from tests.support.references import check_parity

TEXT = [
    "The first rule of the house: nobody reads the letters of the others, and nobody hides them either.",
    "\u00c9cole \u00e9t\u00e9 caf\u00e9, the weather was fine; 100 letters were read. aaaa ababab ...... ------",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \uc548\ub155 "
    "\u0645\u0631\u062d\u0628\u0627 the others wrote house rules, reading and hiding, weathered.",
]
CASES = {
    "plain": Normalization(),
    "uncased": Normalization(form="NFKC", lowercase=True, strip_accents=True),
    "no form": Normalization(form="none", lowercase=True),
    "version 1": Normalization(version=1),
}
CHARACTERS = st.one_of(
    st.characters(codec="utf-8"),
    st.sampled_from(
        "ab  \t\nthe\u2581\u00e9\u0301\u0323\u200b\u061c\U000e0001\ufeff\u00ad\x00\u3000"
        "\u03a3\u0130\ufb01\u1112\u1161\u11ab\u0897\U00011935\U00011930"
    ),
)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    folder = tmp_path_factory.mktemp("tokenizer")
    settings = TokenizerSettings(vocab_size=400, character_coverage=1.0, normalization=request.param)
    train_tokenizer(TEXT, folder, settings)
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


def prepared(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(normalized(text, tokenizer.normalization)).tolist()


def plain(line: str) -> str:
    """The line without literal special tokens (tokens to AutoTokenizer) and surrogates (which it refuses)."""
    for token in SPECIAL_TOKENS:
        line = line.replace(token, token.lower())
    return replace_surrogates(line)


def test_auto_tokenizer_gives_the_ids_of_preparation_for_raw_text_and_pairs(
    both: tuple[Tokenizer, PreTrainedTokenizerBase],
) -> None:
    tokenizer, auto = both
    lines = [plain(line) for line in [*TEXT, *ADVERSARIAL_LINES]]
    for first, second in zip(lines, [*lines[1:], lines[0]], strict=True):
        ids, second_ids = prepared(tokenizer, first), prepared(tokenizer, second)
        assert auto(first)["input_ids"] == [CLS_TOKEN_ID, *ids, SEP_TOKEN_ID], ascii(first)
        if not second:
            continue  # transformers reads an empty second text as none
        pair = auto(first, second)
        assert pair["input_ids"] == [CLS_TOKEN_ID, *ids, SEP_TOKEN_ID, *second_ids, SEP_TOKEN_ID], ascii(second)
        assert pair["token_type_ids"] == [0] * (len(ids) + 2) + [1] * (len(second_ids) + 1)


@settings(max_examples=60)
@given(text=st.text(CHARACTERS, max_size=40))
def test_any_raw_text_gets_the_ids_of_preparation(both: tuple[Tokenizer, PreTrainedTokenizerBase], text: str) -> None:
    tokenizer, auto = both
    text = plain(text)
    assert auto(text, add_special_tokens=False)["input_ids"] == prepared(tokenizer, text)


def test_a_mask_takes_the_space_before_it_and_leaves_the_text_after(
    both: tuple[Tokenizer, PreTrainedTokenizerBase],
) -> None:
    tokenizer, auto = both
    pieces = auto.convert_ids_to_tokens(auto("the [MASK].", add_special_tokens=False)["input_ids"])
    assert pieces[-2:] == ["[MASK]", "."]
    assert auto("the [MASK] house", add_special_tokens=False)["input_ids"] == [
        *prepared(tokenizer, "the"),
        MASK_TOKEN_ID,
        *prepared(tokenizer, "house"),
    ]
    assert [auto.pad_token_id, auto.unk_token_id, auto.cls_token_id, auto.sep_token_id, auto.mask_token_id] == [
        0,
        1,
        2,
        3,
        4,
    ]
    assert len(auto) == tokenizer.vocab_size


def test_decoding_gives_the_text_back(both: tuple[Tokenizer, PreTrainedTokenizerBase]) -> None:
    tokenizer, auto = both
    for line in TEXT:
        assert (
            auto.decode(auto(line)["input_ids"], skip_special_tokens=True)
            == normalized(line, tokenizer.normalization).strip()
        )


def test_a_changed_tokenizer_json_is_refused_naming_the_text(
    both: tuple[Tokenizer, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    tokenizer, _ = both
    folder = Path(shutil.copytree(tokenizer.folder, tmp_path / "copy"))
    check_parity(folder, TEXT)
    values = json.loads((folder / "tokenizer.json").read_text())
    values["pre_tokenizer"]["prepend_scheme"] = "never"
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="'The first rule", check=coded("tokenizer-json-mismatch")):
        check_parity(folder, TEXT)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, check=coded("damaged-tokenizer")):
        check_parity(folder, TEXT)


def test_the_files_can_be_written_to_another_folder_with_a_length(
    both: tuple[Tokenizer, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    tokenizer, _ = both
    write_hugging_face_tokenizer(tokenizer.folder, tmp_path, model_max_length=64)
    assert (tmp_path / "tokenizer.json").read_bytes() == (tokenizer.folder / "tokenizer.json").read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 64
    check_parity(tokenizer.folder, TEXT, tmp_path)
