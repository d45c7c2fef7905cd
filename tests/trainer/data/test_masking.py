from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.tokenizer.tokenizer import (
    CLS_TOKEN_ID,
    MASK_TOKEN_ID,
    PAD_TOKEN_ID,
    SEP_TOKEN_ID,
    SPECIAL_TOKENS,
    SpecialTokens,
    Tokenizer,
)
from tests.support.foreign_tokenizers import WRITERS
from tests.support.preparations import normalized
from trainer.data.batch import IGNORED
from trainer.data.masking import (
    MAX_SPAN_WORDS,
    Masking,
    PieceKind,
    choose_parts,
    choose_tokens,
    choose_whole,
    mask_rows,
    piece_kinds,
    split_spans,
    word_starts,
)
from trainer.data.randomness import fold, root_key, uniform

VOCAB_SIZE = 1000
BERT = Masking(max_mlm_probability=0.15, mask_share=0.8, random_share=0.1, vocab_size=VOCAB_SIZE)


def keys(count: int, seed: int = 0) -> np.ndarray:
    return fold(root_key(seed), np.arange(count))


def text_rows(num_rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Rows of [CLS] tokens [SEP] with some padding at the end of every other row."""
    rows = np.random.default_rng(seed).integers(len(SPECIAL_TOKENS), VOCAB_SIZE, (num_rows, length))
    rows[:, 0], rows[:, -1] = CLS_TOKEN_ID, SEP_TOKEN_ID
    rows[::2, -3:] = PAD_TOKEN_ID
    return rows


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(8, 70), st.floats(0.01, 0.8), st.integers(0, 1000))
def test_a_row_masks_its_exact_number_and_no_special_token(
    rows: int, length: int, probability: float, seed: int
) -> None:
    masking = Masking(probability, 0.8, 0.1, VOCAB_SIZE)
    ids = text_rows(rows, length, seed)
    masked = mask_rows(ids, keys(rows, seed), masking)
    used = masked.labels != IGNORED
    positions = masked.masked_positions[used]
    assert len(masked.labels) == len(masked.masked_positions) == rows * masking.max_masked(length)
    assert (np.diff(positions) > 0).all()
    assert not masked.masked_positions[~used].any()
    assert (masked.labels[used] == ids.reshape(-1)[positions]).all()
    assert (masked.labels[used] >= len(SPECIAL_TOKENS)).all()
    untouched = np.ones(ids.size, bool)
    untouched[positions] = False
    assert (masked.input_ids[untouched] == ids.reshape(-1)[untouched]).all()
    counts = np.bincount(positions // length, minlength=rows)
    expected = probability * (ids >= len(SPECIAL_TOKENS)).sum(1)
    assert ((np.floor(expected - 1e-9) <= counts) & (counts <= np.ceil(expected + 1e-9))).all()


def test_a_row_without_tokens_masks_nothing() -> None:
    masked = mask_rows(np.full((2, 16), PAD_TOKEN_ID), keys(2), BERT)
    assert (masked.labels == IGNORED).all()
    assert not masked.input_ids.any()


def test_a_mask_depends_on_its_row_and_key_alone() -> None:
    ids, row_keys = text_rows(5, 64), keys(5)
    together = mask_rows(ids, row_keys, BERT).input_ids.reshape(5, 64)
    alone = mask_rows(ids[3:4], row_keys[3:4], BERT).input_ids
    assert np.array_equal(together[3], alone)
    assert not np.array_equal(alone, mask_rows(ids[3:4], keys(4, seed=9)[3:], BERT).input_ids)


def test_rates_are_those_requested_at_a_million_tokens() -> None:
    num_rows, length = 8192, 128
    ids = np.random.default_rng(0).integers(len(SPECIAL_TOKENS), VOCAB_SIZE, (num_rows, length))
    masked = mask_rows(ids, keys(num_rows), BERT)
    used = masked.labels != IGNORED
    positions, labels = masked.masked_positions[used], masked.labels[used]
    total = len(labels)
    # The number of a row varies by one draw only, of variance 1/4 at most.
    assert abs(total - 0.15 * ids.size) < 5 * np.sqrt(num_rows / 4)
    seen = masked.input_ids[positions]
    for share, expected in (
        ((seen == MASK_TOKEN_ID).mean(), 0.8),
        # A random token is now and then the original one.
        ((seen == labels).mean(), 0.1 + 0.1 / (VOCAB_SIZE - len(SPECIAL_TOKENS))),
    ):
        assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / total)
    by_place = np.bincount(positions % length, minlength=length) / num_rows
    assert abs(by_place - 0.15).max() < 5 * np.sqrt(0.15 * 0.85 / num_rows)
    random = seen[(seen != MASK_TOKEN_ID) & (seen != labels)]
    counts = np.bincount(random, minlength=VOCAB_SIZE)
    assert not counts[: len(SPECIAL_TOKENS)].any()
    mean = len(random) / (VOCAB_SIZE - len(SPECIAL_TOKENS))
    assert abs(counts[len(SPECIAL_TOKENS) :] - mean).max() < 6 * np.sqrt(mean)


def test_the_random_token_is_of_the_tokenizers_whole_vocabulary() -> None:
    tiny = Masking(max_mlm_probability=0.5, mask_share=0.0, random_share=1.0, vocab_size=8)
    masked = mask_rows(np.full((50, 64), 5), keys(50), tiny)
    assert set(masked.input_ids[masked.masked_positions[masked.labels != IGNORED]]) == {5, 6, 7}


def test_rates_agree_with_transformers() -> None:
    """Rates only: the collator draws every token alone, so its number a row varies more than ours."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    vocabulary |= {f"w{number}": number for number in range(len(vocabulary), VOCAB_SIZE)}
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL_TOKENS, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary, "[UNK]")), **names)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.15, seed=0)
    ids = text_rows(1500, 128)
    theirs = collator.torch_call([{"input_ids": torch.from_numpy(row)} for row in ids])
    their_labels, their_ids = theirs["labels"].numpy(), theirs["input_ids"].numpy()
    ours = mask_rows(ids, keys(len(ids)), BERT)
    used = ours.labels != IGNORED
    our_seen, our_labels = ours.input_ids[ours.masked_positions[used]], ours.labels[used]
    their_seen, their_labels = their_ids[their_labels != -100], their_labels[their_labels != -100]
    assert abs(len(our_labels) - len(their_labels)) < 5 * np.sqrt(ids.size * 0.15)
    for share in (lambda seen, labels: seen == MASK_TOKEN_ID, lambda seen, labels: seen == labels):
        ours_mean, theirs_mean = share(our_seen, our_labels).mean(), share(their_seen, their_labels).mean()
        assert abs(ours_mean - theirs_mean) < 5 * np.sqrt(2 * 0.8 * 0.2 / len(our_labels))


@pytest.fixture(scope="module")
def kinds() -> np.ndarray:
    """A vocabulary in which every third piece begins a word."""
    return np.where(np.arange(VOCAB_SIZE) % 3 == 0, PieceKind.OPENS, PieceKind.JOINS).astype(np.int8)


@pytest.mark.parametrize("unit", ["token", "word", "span"])
def test_shares_of_zero_and_one(unit: str, kinds: np.ndarray) -> None:
    ids = text_rows(20, 64)
    masking = Masking(0.15, 0.0, 0.0, VOCAB_SIZE, unit=unit, kinds=None if unit == "token" else kinds)
    kept = mask_rows(ids, keys(20), masking)
    assert np.array_equal(kept.input_ids, ids.reshape(-1))
    assert (kept.labels != IGNORED).any()
    hidden = mask_rows(ids, keys(20), replace(masking, mask_share=1.0))
    assert (hidden.input_ids[hidden.masked_positions[hidden.labels != IGNORED]] == MASK_TOKEN_ID).all()
    drawn = mask_rows(ids, keys(20), replace(masking, random_share=1.0))
    seen = drawn.input_ids[drawn.masked_positions[drawn.labels != IGNORED]]
    assert (seen >= len(SPECIAL_TOKENS)).all() and not np.array_equal(drawn.input_ids, ids.reshape(-1))


def test_words_are_masked_whole(kinds: np.ndarray) -> None:
    ids = text_rows(64, 128)
    masked = mask_rows(ids, keys(64), replace(BERT, unit="word", kinds=kinds))
    chosen = np.zeros(ids.shape, bool)
    chosen.reshape(-1)[masked.masked_positions[masked.labels != IGNORED]] = True
    starts = word_starts(ids, ids >= len(SPECIAL_TOKENS), kinds)
    inside = (ids >= len(SPECIAL_TOKENS)) & ~starts
    assert inside.any() and (chosen[:, 1:] == chosen[:, :-1])[inside[:, 1:]].all()
    # Words are short beside the budget, so nearly all of it is spent.
    assert 0.145 < chosen.sum() / (ids >= len(SPECIAL_TOKENS)).sum() <= 0.153


def test_a_span_is_treated_as_one(kinds: np.ndarray) -> None:
    ids = text_rows(64, 128)
    masked = mask_rows(ids, keys(64), replace(BERT, unit="span", kinds=kinds))
    positions = masked.masked_positions[masked.labels != IGNORED]
    assert abs(len(positions) - 0.15 * (ids >= len(SPECIAL_TOKENS)).sum()) < 5 * np.sqrt(64 / 4)
    hidden = masked.input_ids[positions] == MASK_TOKEN_ID
    neighbors = np.diff(positions) == 1
    assert neighbors.mean() > 0.8, "spans are long here: words of three pieces on average, spans of three words"
    assert (hidden[1:] == hidden[:-1])[neighbors].mean() > 0.95, "but for spans that touch"
    assert 0.6 < hidden.mean() < 0.95


@pytest.mark.parametrize("unit", ["token", "word", "span"])
def test_a_lower_rate_masks_a_part_of_the_same_positions(unit: str, kinds: np.ndarray) -> None:
    ids = text_rows(16, 128)
    masking = replace(BERT, max_mlm_probability=0.3, unit=unit, kinds=kinds)
    many, few = (mask_rows(ids, keys(16), masking, rate) for rate in (0.3, 0.15))
    assert len(many.labels) == len(few.labels), "capacities are those of the largest rate"
    count = (few.labels != IGNORED).sum()
    assert abs(count - 0.15 * (ids >= len(SPECIAL_TOKENS)).sum()) < 40
    if unit == "token":
        assert set(few.masked_positions[:count]) <= set(many.masked_positions[many.labels != IGNORED])


FOREIGN = {
    "wordpiece": SpecialTokens(pad=0, unk=100, cls=101, sep=102, mask=103),
    "byte level": SpecialTokens(
        pad=VOCAB_SIZE - 2, unk=VOCAB_SIZE - 5, cls=VOCAB_SIZE - 4, sep=VOCAB_SIZE - 3, mask=VOCAB_SIZE - 1, others=(7,)
    ),
}


@pytest.mark.parametrize("unit", ["token", "word", "span"])
@pytest.mark.parametrize("special", FOREIGN.values(), ids=list(FOREIGN))
def test_foreign_special_tokens_are_never_predicted_nor_put_in_a_tokens_place(special, unit):
    ordinary = np.setdiff1d(np.arange(VOCAB_SIZE), special.ids)
    generator = np.random.default_rng(0)
    ids = generator.choice(ordinary, (200, 64))
    ids[:, 0], ids[:, 20], ids[:, 40] = special.cls, special.unk, special.sep
    ids[:, 60:] = special.pad
    ids[:, 30] = special.others[0] if special.others else special.mask
    masking = replace(
        BERT, unit=unit, special_tokens=special, kinds=generator.integers(0, 2, VOCAB_SIZE).astype(np.int8)
    )
    masked = mask_rows(ids, keys(200), masking)
    used = masked.labels != -100
    seen, labels = masked.input_ids[masked.masked_positions[used]], masked.labels[used]
    assert not np.isin(labels, special.ids).any()
    replaced = seen[(seen != labels) & (seen != special.mask)]
    assert len(replaced) > 50 and not np.isin(replaced, special.ids).any()
    assert 0.75 < (seen == special.mask).mean() < 0.85
    untouched = np.ones(ids.size, bool)
    untouched[masked.masked_positions[used]] = False
    assert np.array_equal(masked.input_ids[untouched], ids.reshape(-1)[untouched])
    assert replaced.min() < 5 if special.pad else replaced.min() < 100


SHAPES = {"rows": st.integers(1, 5), "length": st.integers(4, 60), "seed": st.integers(0, 10_000)}


def draw(rows: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Maskable positions with holes, starts of units, hashes and budgets."""
    generator = np.random.default_rng(seed)
    maskable = generator.random((rows, length)) < 0.9
    starts = maskable & ((generator.random((rows, length)) < 0.5) | ~np.roll(maskable, 1, axis=1))
    starts[:, 0] = maskable[:, 0]
    hashes = fold(fold(root_key(seed), np.arange(rows))[:, None], np.arange(length))
    return maskable, starts, hashes, generator.integers(0, length // 2, rows)


def units_of(maskable: np.ndarray, starts: np.ndarray) -> list[list[int]]:
    """The positions of each unit of one row, by hand."""
    units: list[list[int]] = []
    for position in np.flatnonzero(maskable).tolist():
        if starts[position]:
            units.append([])
        units[-1].append(position)
    return units


@settings(max_examples=100, deadline=None)
@given(**SHAPES)
def test_whole_units_are_those_that_one_by_one_still_fit(rows: int, length: int, seed: int) -> None:
    maskable, starts, hashes, budgets = draw(rows, length, seed)
    chosen = choose_whole(maskable, starts, hashes, budgets)
    for row in range(rows):
        expected, left = np.zeros(length, bool), budgets[row]
        for unit in sorted(units_of(maskable[row], starts[row]), key=lambda unit: int(hashes[row][unit[0]])):
            if len(unit) <= left:
                expected[unit] = True
                left -= len(unit)
        assert np.array_equal(chosen[row], expected)


@settings(max_examples=100, deadline=None)
@given(**SHAPES)
def test_parts_spend_the_budget_exactly_and_cut_one_unit_at_most(rows: int, length: int, seed: int) -> None:
    maskable, starts, hashes, budgets = draw(rows, length, seed)
    chosen, firsts = choose_parts(maskable, starts, hashes, budgets)
    assert chosen.sum(1).tolist() == np.minimum(budgets, maskable.sum(1)).tolist()
    assert not (chosen & ~maskable).any()
    for row in range(rows):
        units = units_of(maskable[row], starts[row])
        cut = [unit for unit in units if 0 < chosen[row][unit].sum() < len(unit)]
        assert len(cut) <= 1
        for unit in units:
            assert (firsts[row][unit] == unit[0]).all()
            assert chosen[row][unit].tolist() == sorted(chosen[row][unit].tolist(), reverse=True)  # cut at its end


@settings(max_examples=50, deadline=None)
@given(**SHAPES)
def test_single_tokens_are_units_of_one(rows: int, length: int, seed: int) -> None:
    maskable, _, hashes, budgets = draw(rows, length, seed)
    budgets = np.minimum(budgets, maskable.sum(1))
    hashes = hashes >> np.uint64(6) << np.uint64(6) | np.arange(length, dtype=np.uint64)
    tokens = choose_tokens(maskable, hashes, budgets)
    assert np.array_equal(tokens, choose_whole(maskable, maskable, hashes, budgets))
    assert np.array_equal(tokens, choose_parts(maskable, maskable, hashes, budgets)[0])


def test_spans_have_geometric_lengths_and_an_end() -> None:
    rows, length, mean = 200, 1000, 3.0
    every = np.ones((rows, length), bool)
    cuts = uniform(fold(fold(root_key(3), np.arange(rows))[:, None], np.arange(length)))
    starts = split_spans(every, every, cuts, mean)
    lengths = np.concatenate([np.diff(np.flatnonzero(row)) for row in starts])
    assert starts[:, 0].all() and lengths.max() == MAX_SPAN_WORDS
    shares = np.bincount(lengths, minlength=MAX_SPAN_WORDS + 1)[1:] / len(lengths)
    geometric = (1 / mean) * (1 - 1 / mean) ** np.arange(MAX_SPAN_WORDS)
    geometric[-1] = 1 - geometric[:-1].sum()  # longer ones are cut there
    assert np.abs(shares - geometric).max() < 5 * np.sqrt(0.25 / len(lengths))


def test_spans_start_at_words_and_after_special_tokens() -> None:
    maskable = np.array([[0, 1, 1, 1, 1, 0, 0, 1, 1, 1]], bool)
    words = np.array([[0, 1, 0, 1, 0, 0, 0, 1, 1, 0]], bool)
    never, always = np.ones((1, 10)), np.zeros((1, 10))
    assert np.flatnonzero(split_spans(maskable, words, never, 4.0)).tolist() == [1, 7]
    assert np.flatnonzero(split_spans(maskable, words, always, 4.0)).tolist() == [1, 3, 7, 8]


def test_a_draw_equal_to_the_probability_opens_no_span() -> None:
    """Draws are of [0, 1): with `<` exactly one in `mean_words` is below the probability."""
    words = np.ones((1, 4), bool)
    assert np.flatnonzero(split_spans(words, words, np.array([[0.0, 0.25, 0.24, 0.75]]), 4.0)).tolist() == [0, 2]


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
        (
            "roberta",
            "The unhomable river,\n\nsé   東京!",
            ["The", " unhomable", " river,", "\n", "\nsé", " ", "  東", "京", "!"],
        ),
        (
            "xlm-roberta",
            "the unhomable river,\n\nsé   東京!",
            [" the", " unhomable", " river,", " sé", " 東", "京", "!"],
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
