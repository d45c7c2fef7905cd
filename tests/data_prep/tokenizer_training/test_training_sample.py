"""The sample with its texts: lines for the trainer, and documents held out."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from data_prep.tokenizer_training.training_sample import MAX_LINE_BYTES, TrainingSample, chop


def sample_of(texts: list[str], sample_bytes: int = 1_000, seed: int = 0) -> TrainingSample:
    sample = TrainingSample(sample_bytes, seed)
    for text in texts:
        sample.add(text.split("\n"), "source", "en")
    return sample


TEXTS = [f"document {number} " + "x" * (number % 7) for number in range(100)]


def test_the_sample_depends_on_texts_and_seed_alone() -> None:
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    one, other = sample_of(TEXTS), sample_of([*shuffled, *shuffled[:10]])
    assert list(one.lines()) == list(other.lines()) and one.held_out() == other.held_out()
    assert list(one.lines()) != list(sample_of(TEXTS, seed=1).lines())


def test_the_budget_is_kept_to_the_byte_and_characters_are_not_cut() -> None:
    sample = sample_of(["\u4f60" * 500])
    assert sample.num_bytes == 1_000 and sample.num_documents == 1
    assert "".join(sample.lines()) == " " + "\u4f60" * 333
    assert sample_of(TEXTS).num_bytes == 1_000
    assert sum(len(line) for line in sample_of(TEXTS).lines()) >= 1_000
    assert sample_of(TEXTS).bytes_by("source") == {"source": 1_000}


def test_held_out_documents_are_not_in_the_sample_where_there_are_others() -> None:
    sample = sample_of(TEXTS)
    held_out = sample.held_out()
    assert 0 < len(held_out) == 100 - sample.num_documents
    lines = set(sample.lines())
    assert not {f" {document.text.strip()}" for document in held_out} & lines
    everything = sample_of(TEXTS, 10**6)
    assert len(everything.held_out()) == 100


def test_a_sample_that_holds_the_whole_corpus_gives_up_a_twentieth_of_it() -> None:
    texts = [f"document {number:03} of the corpus" for number in range(400)]
    sample = sample_of(texts, 10**6)
    offered = {document.document_hash: document.text for document in sample.held_out()}
    held_out = sample.set_aside()
    assert len(held_out) == 20 and sample.num_documents == 380
    learned = {line.strip() for line in sample.lines()}
    assert {document.text for document in held_out} | learned == set(texts)
    assert not {document.text for document in held_out} & learned
    assert {document.text for document in held_out} == {offered[key] for key in sorted(offered)[-20:]}
    assert sample.num_bytes == sum(map(len, learned)) == sample.bytes_by("source").total()
    assert sample.set_aside() == held_out and sample.num_documents == 380  # a second time it takes no more
    shuffled = sample_of(random.Random(1).sample(texts, 400), 10**6)
    assert shuffled.set_aside() == held_out and list(shuffled.lines()) == list(sample.lines())


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


def test_held_out_documents_are_at_most_a_twentieth_of_the_bytes() -> None:
    texts = [f"document {number}" for number in range(400)]
    longest = max(sample_of(texts, 10**6).held_out()).text  # the first to be held out, if it were not so long
    texts = [text for text in texts if text != longest]
    for seed in range(200):
        sample = sample_of([*texts, longest + " word" * 1_000 + f" {seed}"], 10**6)
        held_out = sample.set_aside()
        assert sum(len(document.text) for document in held_out) < 600 and len(held_out) == 20


def test_what_lies_outside_the_budget_counts_as_held_out() -> None:
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


def test_of_one_text_in_two_sources_the_first_by_name_counts_whatever_comes_first() -> None:
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


@given(st.text(st.sampled_from("ab\u00e9\u5c71\U0001f600  "), max_size=80), st.integers(9, 40))
def test_lines_are_filled_word_by_word(paragraph: str, max_bytes: int) -> None:
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
