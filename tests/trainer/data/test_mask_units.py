from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.masking import MAX_SPAN_WORDS, choose_parts, choose_tokens, choose_whole, split_spans
from trainer.data.randomness import fold, root_key, uniform

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
