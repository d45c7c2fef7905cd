"""Filling masks: candidates, several masks, long texts, and masking a word of a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import regex
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UsageError, UserError
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import WRITERS, as_named
from trainer.inference.fill_mask import (
    Candidate,
    FillMask,
    MaskedText,
    Prediction,
    as_json,
    fill,
    is_right,
    mask_random_word,
    mask_reader,
    report,
    windows,
)
from trainer.inference.preprocessor import load_text_tokenizer
from trainer.model.pretrained import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORD = Candidate("cat", 7, 0.5, True)
ENDING = Candidate("ing", 8, 0.25, False)


@pytest.fixture(scope="module")
def model(tiny_hugging_face: Path) -> FillMask:
    return FillMask.load(tiny_hugging_face)


@pytest.mark.parametrize(
    ("text", "candidates", "filled"),
    [
        ("the [MASK].", [WORD], "the cat."),
        ("([MASK]) sat", [WORD], "(cat) sat"),
        ("play [MASK] now", [ENDING], "playing now"),
        ("play[MASK] a [MASK]", [ENDING, WORD], "playing a cat"),
    ],
)
def test_a_word_replaces_the_mask_and_a_continuation_joins_the_word_before(
    text: str, candidates: list[Candidate], filled: str
) -> None:
    assert fill(text, "[MASK]", candidates) == filled


def test_a_short_text_is_read_at_once_and_a_long_one_around_each_mask() -> None:
    assert windows([3, 9], 10, 10) == [(0, [3, 9])]
    assert windows([0, 50, 99], 100, 10) == [(0, [0]), (45, [50]), (90, [99])]


@given(
    num_tokens=st.integers(1, 200),
    length=st.integers(1, 50),
    places=st.sets(st.integers(0, 199), min_size=1, max_size=5),
)
def test_every_mask_lies_in_exactly_one_window(num_tokens: int, length: int, places: set[int]) -> None:
    positions = sorted(place for place in places if place < num_tokens)
    found = windows(positions, num_tokens, length)
    assert [place for _, inside in found for place in inside] == positions
    for start, inside in found:
        assert all(0 <= start <= place < start + length for place in inside)


def test_the_masked_word_follows_from_seed_and_text() -> None:
    text = "The cat, the dog and the horse ran home."
    first = mask_random_word(text, 1)
    assert first == mask_random_word(text, 1)
    assert len({mask_random_word(text, seed).word for seed in range(50)}) > 3
    assert first.masked.replace("[MASK]", first.word) == text


@given(text=st.text(max_size=60), seed=st.integers(0, 1000))
def test_masking_touches_one_word_and_nothing_else(text: str, seed: int) -> None:
    try:
        masked = mask_random_word(text, seed)
    except UsageError:
        return
    assert regex.search(r"[\p{L}\p{Han}]", masked.word)  # Python's own isalpha knows an older Unicode
    assert not any(character.isspace() or character in '.,;:!?()"-' for character in masked.word)
    before, _, after = masked.masked.partition("[MASK]")
    assert before + masked.word + after == text or masked.word in text


def test_a_word_is_whole_with_apostrophes_and_combining_marks() -> None:
    assert mask_random_word("don't", 0).word == "don't"
    assert mask_random_word("हिन्दी", 0).word == "हिन्दी"
    assert mask_random_word("été", 0).word == "été"


def test_punctuation_numbers_and_masks_alone_leave_no_word() -> None:
    for text in ("", "... !? -- 1984", "[MASK] [MASK]"):
        with pytest.raises(UsageError, check=coded("text-without-word")):
            mask_random_word(text, 0)


def test_preferred_words_are_masked_where_there_are_any() -> None:
    text = "alpha beta gamma"
    assert {mask_random_word(text, seed, preferred=[lambda word: word == "beta"]).word for seed in range(9)} == {"beta"}
    assert mask_random_word(text, 3, preferred=[lambda word: False]) == mask_random_word(text, 3)
    both = [lambda word: word != "beta", lambda word: word != "alpha"]
    assert {mask_random_word(text, seed, preferred=both).word for seed in range(9)} == {"gamma"}


def test_function_words_are_the_short_ones_and_the_first_of_the_vocabulary(model: FillMask) -> None:
    assert not model.is_content_word("the") and not model.is_content_word("ran")
    assert model.is_content_word("unheard") and model.is_content_word("猫")
    model.__dict__["_function_words"] = {"with"}
    assert not model.is_content_word("With") and model.is_content_word("within")


def test_the_report_of_a_random_mask_shows_actual_masked_and_filled_text() -> None:
    masked = MaskedText("the dog\nsat", "the [MASK]\nsat", "dog")
    prediction = Prediction("the [MASK]\nsat", ((WORD,),), "the cat\nsat")
    assert report(prediction, masked) == [
        'masked word: "dog"',
        "guesses:",
        '  "cat"  0.500',
        "ACTUAL: the dog sat",
        "MASKED: the [MASK] sat",
        "MODEL: the cat sat",
    ]
    assert not is_right(prediction, masked)
    assert as_json(prediction, masked)["correct"] is False


def test_a_continuation_is_told_from_punctuation() -> None:
    lines = report(Prediction("", ((WORD, ENDING, ENDING._replace(token=".")),), ""), None)
    assert lines[1:4] == [
        '  "cat"  0.500',
        '  "ing"  0.250  (continues the word before it)',
        '  "."    0.250  (no space before it)',
    ]


def test_a_guess_is_right_whatever_its_case_but_not_as_a_part_of_a_word() -> None:
    masked = MaskedText("The Cat", "The [MASK]", "Cat")
    assert is_right(Prediction("", ((WORD,),), ""), masked)
    assert not is_right(Prediction("", ((WORD._replace(begins_word=False),),), ""), masked)


def test_every_mask_has_its_candidates_and_no_metaspace_is_shown(model: FillMask) -> None:
    prediction = model.predict("the [MASK] sat on a [MASK].", top_k=4)
    assert [len(candidates) for candidates in prediction.masks] == [4, 4]
    for candidates in prediction.masks:
        probabilities = [candidate.probability for candidate in candidates]
        assert probabilities == sorted(probabilities, reverse=True)
        assert 0 < sum(probabilities) < 1
        assert not any("▁" in candidate.token and candidate.token != "▁" for candidate in candidates)
    first, second = (candidates[0].token for candidates in prediction.masks)
    assert prediction.filled.startswith("the") and second in prediction.filled and first in prediction.filled


def test_special_tokens_and_rows_beyond_the_vocabulary_are_no_candidates(model: FillMask) -> None:
    (candidates,) = model.predict("the [MASK]", top_k=1000).masks
    assert sorted(candidate.token_id for candidate in candidates) == list(range(5, len(model.tokenizer)))
    assert model.model.config.vocab_size > len(model.tokenizer)


def test_probabilities_are_those_of_the_pipeline(model: FillMask) -> None:
    from transformers import pipeline

    reference = pipeline("fill-mask", model=model.model, tokenizer=model.tokenizer)
    expected = {item["token"]: item["score"] for item in reference("the cat [MASK] on the mat", top_k=64)}
    (candidates,) = model.predict("the cat [MASK] on the mat", top_k=10).masks
    for candidate in candidates:
        assert candidate.probability == pytest.approx(expected[candidate.token_id], rel=1e-5)


def test_a_long_text_is_read_around_its_masks(model: FillMask) -> None:
    text = "the cat " * 300 + "[MASK] " + "a dog " * 300 + "[MASK]"
    first, second = model.predict(text, top_k=3).masks
    around = "the cat " * 20 + "[MASK]" + " a dog" * 20
    assert first == model.predict(around, top_k=3).masks[0]
    assert second == model.predict("a dog " * 100 + "[MASK]", top_k=3).masks[0]


@pytest.mark.parametrize("kind", WRITERS)
def test_only_the_mask_token_is_read_as_special_in_a_text(kind: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(WRITERS[kind](tmp_path, ["the river and a village where masks are sold"] * 9))
    reader = mask_reader(tokenizer)
    for text in ("the [MASK] river", " a river [MASK]. [MASK]", "the river"):
        text = as_named(text, tokenizer)
        assert reader.encode(text).ids == tokenizer(text)["input_ids"]
        assert reader.encode(text, add_special_tokens=False).ids == tokenizer(text, add_special_tokens=False).input_ids
    text = as_named("the [SEP] [MASK] river[CLS] [PAD]", tokenizer)
    ids = reader.encode(text, add_special_tokens=False).ids
    first, second = text.split(tokenizer.mask_token)
    plain = load_text_tokenizer(tmp_path)
    if kind == "wordpiece":  # where pieces hold no space, which a mask may swallow
        parts = [plain(part, add_special_tokens=False).input_ids for part in (first, second)]
        assert ids == [*parts[0], tokenizer.mask_token_id, *parts[1]]
    assert [number for number in ids if number in set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}] == [
        tokenizer.mask_token_id
    ]


def test_a_separator_written_out_beside_a_mask_is_text(model: FillMask, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    forward = model.model.forward

    def kept(input_ids: torch.Tensor, **others: torch.Tensor) -> object:
        seen.extend(input_ids[0].tolist())
        return forward(input_ids=input_ids, **others)

    monkeypatch.setattr(model.model, "forward", kept)
    assert len(model.predict("the [SEP] sat on [MASK] mat").masks) == 1
    assert seen.count(model.tokenizer.sep_token_id) == seen.count(model.tokenizer.mask_token_id) == 1


def test_an_unknown_script_is_no_error(model: FillMask) -> None:
    assert model.predict("ᚠᚢᚦ [MASK] 𒀀", top_k=1).masks[0]


def test_a_text_without_a_mask_is_a_usage_error(model: FillMask) -> None:
    with pytest.raises(UsageError, match=r"no \[MASK\]", check=coded("text-without-mask")):
        model.predict("the cat sat")


def test_a_folder_that_is_no_model_is_refused_in_one_paragraph(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, check=coded("model-not-loadable")):
        FillMask.load(tmp_path)


def test_a_model_without_a_trained_mask_head_fills_nothing_at_random(tiny_hugging_face: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    AutoModelForSequenceClassification.from_pretrained(tiny_hugging_face).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_hugging_face).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lacks cls\.predictions", check=coded("missing-weights")):
        FillMask.load(tmp_path)


def test_holes_of_a_vocabulary_are_no_candidates(
    model: FillMask, tokenizer_with_holes: PreTrainedTokenizerBase
) -> None:
    vocabulary = tokenizer_with_holes.get_vocab()
    (candidates,) = FillMask(model.model, tokenizer_with_holes).predict("the [MASK]", top_k=1000).masks
    found = sorted(candidate.token_id for candidate in candidates)
    assert found == sorted(set(vocabulary.values()) - set(range(5))) and found[-1] == vocabulary["▁dog"] > len(found)


def test_a_list_of_texts_gives_a_list_and_other_values_are_refused(model: FillMask) -> None:
    texts = ["the [MASK] sat", "a [MASK] ran to [MASK]"]
    assert model(texts, top_k=2) == [model(text, top_k=2) for text in texts] and model([]) == []
    for wrong in (7, None, [7], [texts], b"a [MASK]"):
        with pytest.raises(UsageError, check=coded("not-a-text")):
            model(wrong)  # type: ignore[call-overload]
    with pytest.raises(UsageError, check=coded("not-a-text")):
        model.predict(texts)  # type: ignore[arg-type]
