"""The alphabet: printable ASCII always, then the commonest characters, and lines that hold nothing else."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import random
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from data_prep import Tokenizer
from data_prep.text.cleaning import Normalization
from data_prep.tokenizer.sentencepiece_model import open_model, train_model, vocabulary_of
from data_prep.tokenizer.tokenizer import TokenizerSettings
from data_prep.tokenizer_training.alphabet import (
    PRINTABLE_ASCII,
    Alphabet,
    choose_alphabet,
    count_characters,
    required_characters,
    training_lines,
)
from tests.support.made_up_documents import train_tokenizer

METASPACE = frozenset("\u2581")
RARE = [*"\u0259\u0283\u03b2\u0416\u4e2d\u5c71\u2603\u00e9"]


def mixed_lines(count: int = 600) -> list[str]:
    """Lines of common words, into which rarer and rarer characters are strewn, within words too."""
    draw = random.Random(3)
    lines = []
    for number in range(count):
        words = draw.choices(["river", "house", "the", "of", "garden", "winter"], k=12)
        for rank, character in enumerate(RARE):
            if number % (3 * 2**rank) == 0:
                words[rank] = f"{words[rank][:2]}{character}{words[rank][2:]}"
        lines.append(" " + " ".join(words))
    return lines


def test_printable_ascii_is_written_down() -> None:
    assert len(PRINTABLE_ASCII) == 94 and PRINTABLE_ASCII[0] == "!" and PRINTABLE_ASCII[-1] == "~"
    assert set("09AZaz?!#%&@|^`\\\"'") <= set(PRINTABLE_ASCII) and " " not in PRINTABLE_ASCII


@pytest.mark.parametrize(
    ("normalization", "missing"),
    [
        (Normalization(), ""),
        (Normalization(form="NFKC", strip_accents=True), ""),
        (Normalization(lowercase=True), "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    ],
    ids=str,
)
def test_the_required_characters_are_those_of_normalized_text(normalization: Normalization, missing: str) -> None:
    assert required_characters(normalization) == {"\u2581", *PRINTABLE_ASCII} - set(missing)


def test_characters_are_counted_outside_symbols_and_a_space_before_every_word() -> None:
    counts = count_characters(["ab <x>b\nx", "b\u00e9"], ["<x>", "q"])
    assert counts == {"a": 1, "b": 3, "x": 1, "\u00e9": 1, "\u2581": 4}
    assert count_characters(["<x>"], []) == {"<": 1, "x": 1, ">": 1, "\u2581": 1}


def test_the_commonest_are_taken_until_the_coverage_is_reached() -> None:
    counts = Counter({"\u2581": 50, "a": 30, "\u00e9": 10, "\u00e8": 6, "\u4e2d": 2, "\u5c71": 2})
    required = frozenset("\u2581a7")
    taken = {coverage: choose_alphabet(counts, coverage, required) for coverage in (0.8, 0.81, 0.96, 0.961, 1.0)}
    assert ["".join(sorted(alphabet.characters - required)) for alphabet in taken.values()] == [
        "",
        "\u00e9",
        "\u00e8\u00e9",
        "\u00e8\u00e9\u4e2d",
        "\u00e8\u00e9\u4e2d\u5c71",
    ]
    assert taken[0.961].left_out == {"\u5c71": 2} and taken[0.961].left_out_share == 0.02
    assert list(taken[0.8].left_out.items()) == [("\u00e9", 10), ("\u00e8", 6), ("\u4e2d", 2), ("\u5c71", 2)]
    assert taken[1.0].left_out == {} and taken[1.0].left_out_share == 0.0


def test_lines_are_cut_at_characters_without_a_token_but_not_within_symbols() -> None:
    alphabet = Alphabet(frozenset("\u2581ab"), {"\u2603": 2, "]": 1, "-": 1}, 9, copies=2)
    lines = training_lines([" a\u2603b a-b\u2585 <\u2603>]", " \u2603"], alphabet, ["<\u2603>"])
    assert list(lines) == [" a", "b a", "b", " <\u2603>", " ", *"aabb", " ", " "]


@pytest.mark.parametrize("coverage", [0.98, 0.9905, 0.995, 0.9995, 1.0])
def test_the_pieces_are_those_of_the_librarys_own_coverage(coverage: float) -> None:
    """With no character required beyond the space: the choice, and the cuts in place of the library's unknown mark."""
    lines, model = mixed_lines(), io.BytesIO()
    alphabet = choose_alphabet(count_characters((line[1:] for line in lines), []), coverage, METASPACE)
    ours = train_model(
        training_lines(lines, alphabet, []), vocab_size=330, byte_fallback=True, user_symbols=(), max_line_bytes=4_192
    )
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="bpe", vocab_size=330, minloglevel=2,
        character_coverage=coverage, byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
        remove_extra_whitespaces=False, pad_id=0, pad_piece="[PAD]", unk_id=1, unk_piece="[UNK]", bos_id=-1, eos_id=-1,
        control_symbols=["[CLS]", "[SEP]", "[MASK]"],
    )  # fmt: skip
    pieces = [[p.text for p in vocabulary_of(open_model(each, "the test"))] for each in (ours, model.getvalue())]
    assert len(alphabet.left_out) == {0.98: 8, 0.9905: 7, 0.995: 6, 0.9995: 3, 1.0: 0}[coverage]
    assert sorted(pieces[0]) == sorted(pieces[1])
    merged = [[piece for piece in found if len(piece) > 1] for found in pieces]
    assert merged[0] == merged[1]


def texts_of(corpora: Path, name: str) -> list[str]:
    with gzip.open(corpora / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"][:20_000] for line in itertools.islice(lines, 400)]


def assert_every_printable_character_has_a_token(tokenizer: Tokenizer, required: frozenset[str]) -> None:
    for character in sorted(required - METASPACE):
        # A word begins with a space, so the character stands behind another one.
        spans = tokenizer.spans(f" \u2603{character}")
        assert tokenizer.pieces[spans[-1].token_id] == character, character
        assert character in tokenizer.decode(tokenizer.encode(f" {character}"))
        assert not any(tokenizer.vocabulary[token].kind == "byte" for token in tokenizer.encode(f" {character}"))
    text = ' the year 1987, 100% of "Zoë\'s" #5 & x^2 | ~/a_b@c.de `q`? [y]{z} <w>=v; 6*7+8\\9 !'
    lowered = text if "Z" in required else text.lower()
    byte_tokens = [tokenizer.pieces[t] for t in tokenizer.encode(lowered) if tokenizer.vocabulary[t].kind == "byte"]
    assert set(byte_tokens) <= {"<0xC3>", "<0xAB>"}


SETTINGS: dict[str, dict[str, object]] = {
    "default": {},
    "full coverage": {"character_coverage": 1.0},
    "lowest coverage": {"character_coverage": 0.98},
    "no bytes": {"byte_fallback": False},
    "uncased": {"normalization": Normalization(form="NFKC", lowercase=True, strip_accents=True)},
    "symbols": {"user_symbols": ("<sep>", "@", "\u4e2d\u5c71")},
}


@pytest.mark.parametrize("values", SETTINGS.values(), ids=SETTINGS)
def test_printable_ascii_has_tokens_in_a_tiny_text(tmp_path: Path, values: dict[str, object]) -> None:
    settings = TokenizerSettings.model_validate(
        {"vocab_size": 400 if values.get("byte_fallback", True) else 140} | values
    )
    train_tokenizer([*mixed_lines(60), "Zo\u00eb"], tmp_path, settings)
    required = required_characters(settings.normalization)
    assert_every_printable_character_has_a_token(Tokenizer.load(tmp_path), required)


@pytest.mark.long
@pytest.mark.parametrize("name", ["pack_small.jsonl.gz", "zh_wikipedia.jsonl.gz"])
def test_printable_ascii_has_tokens_in_a_larger_text(corpora: Path, tmp_path: Path, name: str) -> None:
    train_tokenizer(texts_of(corpora, name), tmp_path, TokenizerSettings(vocab_size=8_000))
    assert_every_printable_character_has_a_token(Tokenizer.load(tmp_path), required_characters(Normalization()))


def test_copies_grow_with_the_text_since_the_trainer_sums_in_32_bits() -> None:
    sizes = {100: 1, 2**24 - 1: 1, 2**24: 2, 10**8: 6, 10**9: 60}
    found = {size: choose_alphabet(Counter({"a": size}), 1.0, METASPACE).copies for size in sizes}
    assert found == sizes


@pytest.mark.slow
def test_a_character_that_the_text_lacks_has_a_token_in_text_of_forty_million_characters(tmp_path: Path) -> None:
    """With one copy of it the trainer's 32-bit coverage reaches 1.0 before it."""
    words = [first + second for first in "abcdefghij" for second in "klmnopqrst"]
    draw = random.Random(0)
    texts = (" ".join(draw.choices(words, k=1_000)) for _ in range(13_400))
    train_tokenizer(texts, tmp_path, TokenizerSettings(vocab_size=480))
    assert set(PRINTABLE_ASCII) <= set(Tokenizer.load(tmp_path).pieces)


@pytest.mark.long
@given(st.lists(st.text(st.sampled_from("ab \n\u00e9\u4e2d\U0001f600"), max_size=20), max_size=5))
def test_characters_are_counted_as_one_by_one(texts: list[str]) -> None:
    expected = Counter("".join(texts).replace("\n", " ").replace(" ", "\u2581"))
    expected["\u2581"] += len(texts)
    assert count_characters(texts, []) == +expected


def test_characters_of_user_symbols_are_not_counted() -> None:
    assert count_characters(["a<x>b", "x"], ["<x>"]) == {"a": 1, "b": 1, "x": 1, "\u2581": 2}
