"""The tokenizer of an export names places in the text that begin at the word, with the ids of preparation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tokenizers

from data_prep.text.cleaning import replace_surrogates
from data_prep.tokenizer.adversarial_lines import ADVERSARIAL_LINES
from data_prep.tokenizer.hugging_face_tokenizer import compare_with_hugging_face, write_hugging_face_tokenizer
from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.foreign_tokenizers import WRITERS
from tests.support.preparations import trained
from trainer.hf_export.word_offsets import begin_at_words

TEXTS = ["Anna Smith lives in Paris and walks to the river.", "the quick brown fox jumps over the lazy dog"]
ODD = [
    *ADVERSARIAL_LINES,
    "  Anna\tSmith\nlives  in Zu\u0308rich.  ",
    "[MASK]. [MASK] a[MASK]b [MASK]",
    "\x01a \x01 [MASK]\x01b",
    "\u2581x \u2581\u2581 y\u2581",
    "[SEP]x [SEP] x[CLS] [PAD]",
    "<url> a<url>b <url>. @x @ Anna Smith [MASK]<url>",
    "",
    "   ",
]


@pytest.fixture(params=["own", "own with symbols", *WRITERS])
def written(request: pytest.FixtureRequest, tokenizer_folder: Path, tmp_path: Path) -> tuple[Tokenizer, Path, Path]:
    """A tokenizer, its files as written for every reader, and those of an export."""
    source = tokenizer_folder
    if request.param == "own with symbols":
        settings = {"user_symbols": ["<url>", "nna"], "normalization": {"form": "NFKC", "lowercase": True}}
        trained(TEXTS * 20, tmp_path / "source", vocab_size=400, **settings)
        source = tmp_path / "source"
    elif request.param in WRITERS:
        source = WRITERS[request.param](tmp_path / "source", TEXTS * 20)
    tokenizer, plain, export = Tokenizer.load(source), tmp_path / "plain", tmp_path / "export"
    plain.mkdir()
    write_hugging_face_tokenizer(source, plain)
    shutil.copytree(plain, export)
    begin_at_words(export, tokenizer)
    return tokenizer, plain, export


def test_ids_types_and_special_tokens_stay_the_same(written: tuple[Tokenizer, Path, Path]) -> None:
    tokenizer, plain, export = written
    before, after = (tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (plain, export))
    for as_text in (False, True):
        before.encode_special_tokens = after.encode_special_tokens = as_text
        for text in map(replace_surrogates, ODD):
            old, new = before.encode(text, "a b"), after.encode(text, "a b")
            assert (old.ids, old.type_ids) == (new.ids, new.type_ids), text
            assert old.word_ids == new.word_ids, text
            assert before.decode(old.ids, skip_special_tokens=False) == after.decode(new.ids, skip_special_tokens=False)
    if isinstance(tokenizer, SentencePieceTokenizer):
        compare_with_hugging_face(tokenizer, export, ODD)


def test_places_begin_and_end_at_words(written: tuple[Tokenizer, Path, Path]) -> None:
    encoder = tokenizers.Tokenizer.from_file(str(written[2] / "tokenizer.json"))
    for text in ("Anna Smith\nlives  in Zürich.", " [MASK]. Anna [MASK] Smith", "\u200b Anna \u5317\u4eac"):
        encoded = encoder.encode(text, add_special_tokens=False)
        named = [(begin, end) for begin, end in encoded.offsets if "MASK" not in text[begin:end]]
        assert not [text[begin:end] for begin, end in named if text[begin:end].strip(" ") != text[begin:end]]
        begins = {begin for begin, end in named if end > begin}
        assert {text.index(word) for word in ("Anna", "Smith", "lives", "Zürich", "\u5317") if word in text} <= begins


def test_an_export_of_an_unchanged_kind_keeps_its_bytes(tmp_path: Path) -> None:
    source = WRITERS["wordpiece"](tmp_path / "source", TEXTS * 20)
    before = (source / "tokenizer.json").read_bytes()
    begin_at_words(source, Tokenizer.load(source))
    assert (source / "tokenizer.json").read_bytes() == before
