"""The sample with its texts: lines for the trainer, and documents held out."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.tokenizer_training.training_sample import (
    EVEN,
    MAX_LINE_BYTES,
    Choice,
    TrainingSample,
    chop,
    key_of,
    lines_of,
    tempering,
)


def sample_of(texts: list[str], sample_bytes: int = 1_000, seed: int = 0) -> TrainingSample:
    sample = TrainingSample(sample_bytes, seed)
    for text in texts:
        sample.add(text.split("\n"), "source", "en")
    return sample


TEXTS = [f"document {number} " + "x" * (number % 7) for number in range(100)]


def test_the_sample_depends_only_on_texts_and_seed() -> None:
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    one, other = sample_of(TEXTS), sample_of([*shuffled, *shuffled[:10]])
    assert list(lines_of(one.texts())) == list(lines_of(other.texts())) and one.held_out() == other.held_out()
    assert list(lines_of(one.texts())) != list(lines_of(sample_of(TEXTS, seed=1).texts()))


def test_the_budget_is_kept_to_the_byte_and_characters_are_not_cut() -> None:
    sample = sample_of(["\u4f60" * 500])
    assert sample.num_bytes == 1_000 and sample.num_documents == 1
    assert "".join(lines_of(sample.texts())) == " " + "\u4f60" * 333
    assert sample_of(TEXTS).num_bytes == 1_000
    assert sum(len(line) for line in lines_of(sample_of(TEXTS).texts())) >= 1_000
    assert sample_of(TEXTS).bytes_by("source") == {"source": 1_000}


def test_held_out_documents_are_not_in_the_sample_where_there_are_others() -> None:
    sample = sample_of(TEXTS)
    held_out = sample.held_out()
    assert 0 < len(held_out) == 100 - sample.num_documents
    lines = set(lines_of(sample.texts()))
    assert not {f" {document.text.strip()}" for document in held_out} & lines
    everything = sample_of(TEXTS, 10**6)
    assert len(everything.held_out()) == 100


def test_a_sample_that_holds_the_whole_corpus_gives_up_a_twentieth_of_it() -> None:
    texts = [f"document {number:03} of the corpus" for number in range(400)]
    sample = sample_of(texts, 10**6)
    offered = {document.document_hash: document.text for document in sample.held_out()}
    held_out = sample.set_aside()
    assert len(held_out) == 20 and sample.num_documents == 380
    learned = {line.strip() for line in lines_of(sample.texts())}
    assert {document.text for document in held_out} | learned == set(texts)
    assert not {document.text for document in held_out} & learned
    assert {document.text for document in held_out} == {offered[key] for key in sorted(offered)[-20:]}
    assert sample.num_bytes == sum(map(len, learned)) == sample.bytes_by("source").total()
    assert sample.set_aside() == held_out and sample.num_documents == 380  # a second time it takes no more
    shuffled = sample_of(random.Random(1).sample(texts, 400), 10**6)
    assert shuffled.set_aside() == held_out and list(lines_of(shuffled.texts())) == list(lines_of(sample.texts()))


def test_a_source_with_few_documents_is_learned_from_whole() -> None:
    sample = TrainingSample(10**6, 0)
    for number in range(199):
        sample.add([f"few {number}"], "few", "en")
    for number in range(200):
        sample.add([f"more {number}"], "more", "en")
    held_out = sample.set_aside()
    assert sample.num_documents == 199 + 190
    measured = [document.source for document in held_out]
    assert measured.count("few") == 199 and measured.count("more") == 10
    assert [document.document_hash in sample.choice for document in held_out] == [d.source == "few" for d in held_out]


@pytest.mark.long
def test_held_out_documents_are_at_most_a_twentieth_of_the_bytes() -> None:
    texts = [f"document {number}" for number in range(400)]
    longest = max(sample_of(texts, 10**6).held_out()).text  # the first to be held out, if it were not so long
    texts = [text for text in texts if text != longest]
    for seed in range(200):
        sample = sample_of([*texts, longest + " word" * 1_000 + f" {seed}"], 10**6)
        held_out = sample.set_aside()
        assert sum(len(document.text) for document in held_out) < 600 and len(held_out) == 20


def test_text_outside_the_budget_counts_as_held_out() -> None:
    texts = [f"document {number:03}" for number in range(400)]
    for num_outside in (5, 20, 100):
        sample = sample_of(texts, 12 * (400 - num_outside))
        held_out = sample.set_aside()
        assert len(held_out) == max(num_outside, (400 - num_outside) // 20)
        assert sample.num_documents == 400 - len(held_out)


def test_each_source_is_held_out_in_equal_numbers_and_cut() -> None:
    sample = TrainingSample(100, 0)
    for number in range(2_000):
        sample.add([f"large {number}"], "large", "en")
    sample.add(["s" * 50_000], "small", "de")
    found = sample.held_out()
    assert [document.source for document in found].count("large") == 300
    assert [(len(document.text), document.language) for document in found if document.source == "small"] == [
        (6_000, "de")
    ]


def test_a_text_in_two_sources_counts_for_the_first_by_name() -> None:
    for names in (("a", "b"), ("b", "a")):
        sample = TrainingSample(100, 0)
        for name in names:
            sample.add(["the same"], name, "en")
        assert sample.bytes_by("source") == {"a": 8} and sample.num_documents == 1


def test_long_lines_are_cut_at_spaces_and_words_between_characters() -> None:
    lines = list(chop("one two " + "\u5c71" * 3_000 + " three", 4_096))
    assert max(len(line.encode()) for line in lines) <= 4_096
    assert "".join(lines).replace(" ", "") == "onetwo" + "\u5c71" * 3_000 + "three"
    assert all(line.startswith(" ") for line in lines)
    assert list(chop("", MAX_LINE_BYTES)) == []


@given(
    st.text(st.sampled_from("ab\u00e9\u5c71\U0001f600  "), max_size=80), st.integers(9, 40), st.sampled_from(["", " "])
)
def test_lines_are_filled_word_by_word(text: str, max_bytes: int, end: str) -> None:
    paragraph = " ".join(text.split()) + end
    lines = list(chop(paragraph, max_bytes))
    parts = [
        word[start : start + (max_bytes - 1) // 4]
        for word in paragraph.split()
        for start in range(0, len(word), (max_bytes - 1) // 4)
    ]
    assert "".join(lines) == "".join(f" {part}" for part in parts)
    assert all(line[0] == " " and len(line.encode()) <= max_bytes for line in lines)
    for line, following in itertools.pairwise(lines):
        assert len(f"{line} {following.split()[0]}".encode()) > max_bytes, "the next word had fit"


Offers = list[tuple[int, int]]  # (hash, bytes)


def chosen(offers: Offers, budget: int, multipliers: dict[int, int] | None = None) -> dict[int, int]:
    choice = Choice(budget)
    for document_hash, num_bytes in offers:
        multiplier = (multipliers or {}).get(document_hash, EVEN)
        choice.offer(document_hash, key_of(document_hash, multiplier), num_bytes)
    return {document_hash: key for key, document_hash in choice.keys()}


def test_the_smallest_keys_that_just_fill_the_budget_are_chosen() -> None:
    offers = [(50, 10), (10, 4), (30, 4), (20, 4), (40, 4)]
    assert list(chosen(offers, 10)) == [10, 20, 30]
    assert list(chosen(offers, 12)) == [10, 20, 30]
    assert list(chosen(offers, 13)) == [10, 20, 30, 40]
    assert list(chosen(offers, 1)) == [10]
    assert list(chosen(offers, 1_000)) == [10, 20, 30, 40, 50]


def test_displaced_texts_are_returned_and_larger_keys_refused() -> None:
    choice = Choice(10)
    assert choice.offer(5, key_of(5, EVEN), 10) == (True, [])
    assert choice.offer(3, key_of(3, EVEN), 9) == (True, [])
    assert choice.offer(1, key_of(1, EVEN), 2) == (True, [5])
    assert choice.limit == key_of(5, EVEN) and choice.num_bytes == 11 and len(choice) == 2
    assert choice.offer(6, key_of(6, EVEN), 1) == (False, [])
    assert 3 in choice and 5 not in choice


def test_a_text_offered_again_counts_once_with_its_smallest_key() -> None:
    choice = Choice(10)
    for key, taken in ((7, True), (9, False), (7, False), (2, True)):
        assert choice.offer(1, key, 6)[0] is taken
    assert choice.num_bytes == 6 and list(choice.keys()) == [(2, 1)]
    choice.offer(2, 5, 6)
    assert choice.offer(3, 4, 6) == (True, [2])
    assert list(choice.keys()) == [(2, 1), (4, 3)]


OFFERS = st.dictionaries(st.integers(0, 2**64 - 1), st.integers(1, 50), max_size=40).map(lambda d: list(d.items()))


@pytest.mark.long
@given(OFFERS, st.integers(1, 400), st.integers(1, 6), st.randoms(use_true_random=False))
def test_parts_merge_into_the_choice_of_the_whole(offers: Offers, budget: int, parts: int, draw: random.Random) -> None:
    multipliers = {document_hash: draw.choice((1 << 30, 1 << 32)) for document_hash, _ in offers}
    whole = chosen(offers, budget, multipliers)
    draw.shuffle(offers)
    sizes = dict(offers)
    merged: Offers = []
    for part in range(parts):
        merged.extend((h, sizes[h]) for h in chosen(offers[part::parts], budget, multipliers))
    draw.shuffle(merged)
    assert chosen(merged, budget, multipliers) == whole
    in_order = sorted((key_of(h, multipliers[h]), size) for h, size in offers)
    before_last = sum(size for _, size in in_order[: max(0, len(whole) - 1)])
    assert before_last < budget or not whole
    assert len(whole) == len(offers) or sum(size for _, size in in_order[: len(whole)]) >= budget


def test_tempering_is_a_power_of_the_share() -> None:
    assert tempering({"a": 90, "b": 10}, 1.0) == {"a": EVEN, "b": EVEN}
    assert tempering({"a": 90, "b": 10, "none": 0}, 0.0) == {"a": EVEN * 9 // 10, "b": EVEN // 10}
    half = tempering({"a": 75, "b": 25}, 0.5)
    assert half["b"] == EVEN // 2 and half["a"] == pytest.approx(EVEN * 0.75**0.5, abs=1)
    assert tempering({"tiny": 1, "huge": 10**18}, 0.0)["tiny"] >= 1


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_shares_of_a_small_sample_follow_alpha(alpha: float) -> None:
    draw = random.Random(3)
    group_of = {draw.getrandbits(64): "large" if number % 10 else "small" for number in range(20_000)}
    totals = {"large": 18_000, "small": 2_000}
    by_group = tempering(totals, alpha)
    multipliers = {document_hash: by_group[group] for document_hash, group in group_of.items()}
    sample = chosen([(h, 1) for h in group_of], 2_000, multipliers)
    expected = 0.1**alpha / (0.1**alpha + 0.9**alpha)
    # A share of 2,000 draws has a standard deviation of at most 0.011.
    assert sum(group_of[h] == "small" for h in sample) / 2_000 == pytest.approx(expected, abs=0.035)
