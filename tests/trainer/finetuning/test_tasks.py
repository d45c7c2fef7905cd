"""Encoding and decoding of each task: labels at the right tokens, long texts counted, answers found in windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer.finetuning.answer_task import Answer, AnswerTask
from trainer.finetuning.examples import Examples
from trainer.finetuning.multilabel_task import MultilabelTask
from trainer.finetuning.tasks import (
    IGNORED,
    ClassificationTask,
    EncodedExamples,
    ExamplePrediction,
    Output,
    TokenTask,
)
from trainer.inference.preprocessor import Preprocessor


def test_a_pair_is_encoded_as_the_tokenizer_does_it(preprocessor: Preprocessor) -> None:
    task = ClassificationTask(("0", "1"), pair=True)
    encoded = task.encode(Examples(["the cat", "a dog"], ["sat", "ran to it"], ["1", "0"]), preprocessor)
    expected = preprocessor.tokenizer("the cat", "sat", return_token_type_ids=True)
    assert encoded.rows[0]["input_ids"] == expected["input_ids"]
    assert encoded.rows[0]["token_type_ids"] == expected["token_type_ids"] == [0, 0, 0, 0, 1, 1]
    assert [row["labels"] for row in encoded.rows] == [1, 0] and encoded.num_truncated == 0


def test_a_long_text_is_cut_and_counted(preprocessor: Preprocessor) -> None:
    encoded = ClassificationTask(("0", "1")).encode(
        Examples(["the cat" + " the cat" * 39, "a dog"], None, None), preprocessor
    )
    assert encoded.num_truncated == 1 and encoded.num_tokens == [82, 4]
    assert [len(row["input_ids"]) for row in encoded.rows] == [32, 4]
    assert encoded.rows[0]["input_ids"][-1] == preprocessor.tokenizer.sep_token_id


@pytest.mark.parametrize(
    ("names", "tag", "continued"),
    [(("B-X", "I-X", "O"), "B-X", "I-X"), (("B-X", "O"), "B-X", "B-X"), (("NOUN", "O"), "NOUN", "NOUN")],
)
def test_a_words_tokens_begin_and_continue_its_tag_and_read_as_running_text(
    preprocessor: Preprocessor, names: tuple[str, ...], tag: str, continued: str
) -> None:
    task = TokenTask(names)
    words = ["the", "cat.", "sat"]  # the full stop is a token of its own, within the second word
    (row,) = task.encode(Examples([words], None, [["O", tag, "O"]]), preprocessor).rows
    assert row["input_ids"] == preprocessor.tokenizer("the cat. sat")["input_ids"]
    outside, begins, continues = (names.index(each) for each in ("O", tag, continued))
    assert row["labels"] == [IGNORED, outside, begins, continues, outside, IGNORED]


def test_truncated_words_get_the_tag_outside(preprocessor: Preprocessor) -> None:
    task = TokenTask(("B-X", "O"))
    examples = Examples([["cat"] * 50], None, [["B-X"] * 50])
    encoded = task.encode(examples, preprocessor)
    assert len(encoded.rows[0]["input_ids"]) == 32 and encoded.num_truncated == 1
    outputs: list[Output] = [{"logits": np.tile(np.float32([9, 0]), (32, 1))}]
    (prediction,) = task.decode(outputs, encoded, examples)
    assert prediction.label == ["B-X"] * 30 + ["O"] * 20


@pytest.mark.parametrize("place", [0, 20, 59])
def test_an_answer_is_found_in_any_window(preprocessor: Preprocessor, place: int) -> None:
    words = ["the"] * 60
    words[place] = "cat"
    context = " ".join(words)
    answer = Answer("cat", context.index("cat"))
    task = AnswerTask()
    examples = Examples([context], ["it was"], [answer])
    encoded = task.encode(examples, preprocessor)
    assert len(encoded.rows) > 1 and set(encoded.example_of_row) == {0} and encoded.num_truncated == 1
    outputs = []
    for row in encoded.rows:  # a model that points where the labels say
        length = len(row["input_ids"])
        start, end = np.zeros(length, np.float32), np.zeros(length, np.float32)
        start[row["start_positions"]] = end[row["end_positions"]] = 5.0
        outputs.append({"start_logits": start, "end_logits": end})
    (prediction,) = task.decode(outputs, encoded, examples)
    assert prediction.label == answer and task.score_example(answer, prediction) == 1.0
    assert sum(row["start_positions"] > 0 for row in encoded.rows) >= 1


def test_squads_own_answers_are_read() -> None:
    cell = {"text": ["cat", "the cat"], "answer_start": [8, 4]}
    assert AnswerTask().parse_label(cell, "dog the cat") == Answer("cat", 8, ("the cat",))
    with pytest.raises(ValueError, match="no answer"):
        AnswerTask().parse_label({"text": [], "answer_start": []}, "dog")
    with pytest.raises(ValueError, match="no answer"):
        AnswerTask().parse_label({"text": [" "], "answer_start": [3]}, "the dog")


def test_any_of_several_answers_is_right() -> None:
    task = AnswerTask()
    label = task.parse_label({"text": ["cat", "the dog"], "answer_start": [8, 0]}, "the dog cat")
    said = ExamplePrediction(Answer("the dog", 0), 0.9)
    assert task.score([label], [said]) == {"f1": 1.0, "exact_match": 1.0} and task.score_example(label, said) == 1.0


@pytest.mark.parametrize(
    "cell",
    [
        {"text": "cat", "answer_start": 8},
        {"text": "cat", "answer_start": 8.0},
        {"text": np.array(["cat"], object), "answer_start": np.array([8])},
        {"answers": {"text": ["cat"], "answer_start": [8]}},
        [{"text": "cat", "answer_start": 8}],
        np.array([{"text": "cat", "answer_start": 8}], object),
        '{"text": ["cat"], "answer_start": [8]}',
        '[{"text": "cat", "answer_start": 8}]',
    ],
)
def test_every_form_of_squads_answers_is_read(cell: object) -> None:
    assert AnswerTask().parse_label(cell, "cat and cat") == Answer("cat", 8)


@pytest.mark.parametrize("cell", [[], {"text": "", "answer_start": 0}, {"answer_start": 0}, {"answers": []}, ["cat"]])
def test_an_answer_without_text_is_refused(cell: object) -> None:
    with pytest.raises(ValueError, match="there is no answer"):
        AnswerTask().parse_label(cell, "the cat")


def test_an_answer_that_looks_like_json_is_a_text() -> None:
    text = 'write {"text" there'
    assert AnswerTask().parse_label('{"text" there', text) == Answer('{"text" there', 6)


@pytest.mark.parametrize("cell", ["cat ", " cat", {"text": [" cat "], "answer_start": [3]}])
def test_white_space_around_an_answer_is_removed(preprocessor: Preprocessor, cell: Any) -> None:
    context = "the cat sat"
    label = AnswerTask().parse_label(cell, context)
    assert label == Answer("cat", 4)
    (row,) = AnswerTask().encode(Examples([context], ["it was"], [label]), preprocessor).rows
    assert row["start_positions"] == row["end_positions"] > 0


def test_a_long_question_takes_at_most_half_of_a_window(preprocessor: Preprocessor) -> None:
    encoded = AnswerTask().encode(Examples(["the cat sat"], ["a " * 100], None), preprocessor)
    assert all(len(row["input_ids"]) <= 32 for row in encoded.rows)
    assert sum(span is not None for span in encoded.offsets[0]) == 3


def test_words_that_just_fit_are_not_cut(preprocessor: Preprocessor) -> None:
    for num_words, num_truncated in ((30, 0), (31, 1)):  # and two special tokens, of 32
        encoded = TokenTask(("B-X", "O")).encode(Examples([["cat"] * num_words], None, None), preprocessor)
        assert (len(encoded.rows[0]["input_ids"]), encoded.num_truncated) == (32, num_truncated)


def test_labels_of_several_classes_are_lists_or_texts() -> None:
    task = MultilabelTask(("a", "b", "c d"))
    cells: list[Any] = [["b", "a"], np.array(["a"]), [], "a b", "c d, a", "a"]
    parsed = [task.parse_label(cell, "") for cell in cells]
    assert parsed == [["b", "a"], ["a"], [], ["a", "b"], ["c d", "a"], ["a"]]
    assert task.model_label(["c d", "a"]) == (1.0, 0.0, 1.0)
    for wrong in (["a", "a"], ["a", None], 5, "a,,b"):
        with pytest.raises(ValueError, match="twice|empty|list of classes"):
            task.parse_label(wrong, "")


def test_scores_of_several_classes_count_decisions_and_whole_texts() -> None:
    task = MultilabelTask(("a", "b"))
    labels = [["a"], ["a", "b"], []]
    outputs: list[Output] = [{"logits": np.float32(each)} for each in ([1, -1], [1, -1], [-1, 1])]
    predictions = task.decode(outputs, EncodedExamples([], [], [], 0), Examples(["x"] * 3, None, None))
    assert [each.label for each in predictions] == [["a"], ["a"], ["b"]]
    scores = task.score(labels, predictions)
    assert scores == pytest.approx({"f1": 4 / 6, "f1_macro": 0.5, "accuracy": 1 / 3})
    assert [task.score_example(label, each) for label, each in zip(labels, predictions, strict=True)] == [1.0, 0.0, 0.0]
    assert task.yardstick(labels)[0]("any") == ["a"] and not task.is_constant(labels, predictions)
    assert task.is_constant(labels, predictions[:2]) and task.constant_label([["a", "b"], ["b", "a"]]) == "a, b"
