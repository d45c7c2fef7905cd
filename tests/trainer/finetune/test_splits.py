"""Every example lands in exactly one part, classes in proportion, the same for a seed."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from trainer.finetune.splits import split


def test_classes_keep_their_proportion() -> None:
    groups = ["a"] * 900 + ["b"] * 100
    train, valid, test = split(groups, [0.1, 0.1], seed=0)
    for part, a, b in ((train, 720, 80), (valid, 90, 10), (test, 90, 10)):
        assert Counter(groups[place] for place in part) == {"a": a, "b": b}


def test_the_seed_decides_and_nothing_else() -> None:
    groups = ["a", "b"] * 50
    assert split(groups, [0.2], 1) == split(groups, [0.2], 1) != split(groups, [0.2], 2)


@given(
    groups=st.lists(st.sampled_from("abcde"), max_size=80),
    fractions=st.lists(st.floats(0.05, 0.3), max_size=3),
    seed=st.integers(0, 99),
)
def test_nothing_is_lost_and_nothing_comes_twice(groups: list[str], fractions: list[float], seed: int) -> None:
    parts = split(groups, fractions, seed)
    assert sorted(place for part in parts for place in part) == list(range(len(groups)))
    assert {groups[place] for place in parts[0]} == set(groups)  # training has an example of every class


def test_many_rare_classes_together_fill_their_share() -> None:
    groups = [number // 2 for number in range(200)]  # 100 classes of two examples
    _, valid = split(groups, [0.1], 0)
    assert 18 <= len(valid) <= 22
