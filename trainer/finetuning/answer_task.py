"""Extractive question answering: the span of a context that answers a question (Devlin et al. 2018, section 4.2).

A context that exceeds the maximum length is read in windows that overlap by half; the best span of all windows is the
answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import softmax

from trainer.finetuning.examples import Examples, text_of
from trainer.finetuning.scores import answer_f1, answer_scores
from trainer.finetuning.tables import is_missing
from trainer.finetuning.tasks import EncodedExamples, ExamplePrediction, Outputs, Predictions, Task, num_longer
from trainer.inference.preprocessor import Preprocessor, Row

MAX_ANSWER_TOKENS = 30
NUM_CANDIDATES = 20
_JSON_ANSWERS = re.compile(r"\s*(?:\[\s*)?\{.*\"text\"", re.DOTALL)
_NO_ANSWER = "there is no answer, and each question needs one from its context"


@dataclass(frozen=True)
class Answer:
    """A span of the context, from the character `start` on; `others` are more answers that count as right."""

    text: str
    start: int
    others: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text, *self.others)


Offsets = Sequence[tuple[int, int] | None]
"""Begin and end of each token in the context, in characters; None for a token outside the context."""


class AnswerTask(Task):
    """One answer for each question (the pair) in its context (the text)."""

    name = "question_answering"
    auto_class = "AutoModelForQuestionAnswering"
    metrics = ("f1", "exact_match")
    example_score = "F1"
    result_columns = (*Task.result_columns, "start")
    of_long_texts = "they are read in windows of this length, so that nothing is lost"
    needs_pair = True
    baseline_name = "context"

    def head_options(self) -> dict[str, Any]:
        return {}

    def parse_label(self, cell: Any, text: Any) -> Answer:
        """Parse an answer's text, or SQuAD's answers; the first one is learned, and all count as right.

        SQuAD's files have a list of `{"text": ..., "answer_start": ...}`, its tables one such object whose values are
        lists, and its predictions one with plain values. A cell of tsv or csv has such a value as JSON.
        """
        start, others = None, tuple[str, ...]()
        cell = _squad_answers(cell)
        if isinstance(cell, dict):
            texts = [text_of(one) for one in _as_list(cell.get("text"))]
            starts = _as_list(cell.get("answer_start"))
            if not texts or len(texts) != len(starts):
                raise ValueError(_NO_ANSWER)
            cell, start, others = texts[0], _character(starts[0]), tuple(texts[1:])
        answer = text_of(cell)
        if not answer.strip():
            raise ValueError(_NO_ANSWER)
        start = text.find(answer) if start is None else start
        if answer in text and (start < 0 or not text.startswith(answer, start)):
            raise ValueError(
                f"the answer {answer!r} is not at character {start:,} of the context, but at another position"
            )
        if start < 0 or text[start : start + len(answer)] != answer:
            raise ValueError(
                f"the answer {answer!r} does not occur in the context, and an extractive model can only select a span"
            )
        start += len(answer) - len(answer.lstrip())  # white space around an answer belongs to the tokens beside it
        return Answer(answer.strip(), start, others)

    def encode(self, examples: Examples, preprocessor: Preprocessor) -> EncodedExamples:
        assert examples.pairs is not None, "questions are read with their contexts"
        rows, offsets_of_rows, example_of_row, lengths = list[Row](), list[Offsets](), list[int](), list[int]()
        for number, (context, question) in enumerate(zip(examples.texts, examples.pairs, strict=True)):
            windows, length = _windows(question, context, preprocessor)
            lengths.append(length)
            for row, offsets in windows:
                if examples.labels is not None:
                    row["start_positions"], row["end_positions"] = _positions(examples.labels[number], offsets)
                rows.append(row)
                offsets_of_rows.append(offsets)
                example_of_row.append(number)
        return EncodedExamples(rows, example_of_row, lengths, num_longer(lengths, preprocessor), offsets_of_rows)

    def decode(self, outputs: Outputs, encoded: EncodedExamples, examples: Examples) -> Predictions:
        best: dict[int, tuple[float, ExamplePrediction]] = {}
        for output, number, offsets in zip(outputs, encoded.example_of_row, encoded.offsets, strict=True):
            for score, start, end in _spans(output["start_logits"], output["end_logits"], offsets):
                if number not in best or score > best[number][0]:
                    begin, stop = offsets[start][0], offsets[end][1]
                    text = examples.texts[number][begin:stop]
                    begin += len(text) - len(text.lstrip())  # a token may begin with the space before its word
                    sure = float(softmax(output["start_logits"])[start] * softmax(output["end_logits"])[end])
                    best[number] = (score, ExamplePrediction(Answer(text.strip(), begin), sure, {"start": begin}))
        nothing = ExamplePrediction(Answer("", 0), 0.0, {"start": 0})
        return [best[number][1] if number in best else nothing for number in range(len(examples))]

    def score(self, labels: Sequence[Answer], predictions: Sequence[ExamplePrediction]) -> dict[str, float]:
        return answer_scores([label.texts for label in labels], [prediction.label.text for prediction in predictions])

    def score_example(self, label: Answer, prediction: ExamplePrediction) -> float:
        return max(answer_f1(text, prediction.label.text) for text in label.texts)

    def yardstick(self, train: Sequence[Answer]) -> tuple[Callable[[Any], Any], str]:
        return lambda context: Answer(context.strip(), 0), "the whole context as the answer"

    def is_constant(self, labels: Sequence[Answer], predictions: Sequence[ExamplePrediction]) -> bool:
        """Return whether every answer is empty."""
        return not any(prediction.label.text for prediction in predictions)

    def constant_label(self, labels: Sequence[Answer]) -> str | None:
        return None

    def show_label(self, label: Answer) -> str:
        return label.text


def _squad_answers(cell: Any) -> Any:
    """Return SQuAD's answers in any of their forms as an object with lists; anything else unchanged."""
    if isinstance(cell, str) and _JSON_ANSWERS.match(cell):
        try:
            cell = json.loads(cell)
        except (ValueError, RecursionError):
            return cell  # an answer that begins like JSON
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    if isinstance(cell, dict) and "answers" in cell:
        return _squad_answers(cell["answers"])
    if not isinstance(cell, list):
        return cell
    if not cell or not all(isinstance(each, dict) for each in cell):
        raise ValueError(_NO_ANSWER)
    return {name: [value for each in cell for value in _as_list(each.get(name))] for name in ("text", "answer_start")}


def _as_list(cell: Any) -> list[Any]:
    """Return the values of a list (numpy's for Parquet), or a plain value as the only one; none for a missing one."""
    if isinstance(cell, np.ndarray):
        cell = cell.tolist()
    if isinstance(cell, list | tuple):
        return list(cell)
    return [] if is_missing(cell) else [cell]


def _character(cell: Any) -> int:
    try:
        return int(cell)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"answer_start {cell!r} is not a position in the text; it counts characters from 0") from None


def _windows(question: str, context: str, preprocessor: Preprocessor) -> tuple[list[tuple[Row, Offsets]], int]:
    """Return the windows of a question with its context, and the number of tokens of both together."""
    tokenizer, max_length = preprocessor.tokenizer, preprocessor.max_length
    encoded = tokenizer(question, return_offsets_mapping=True, add_special_tokens=False)
    most = max_length // 2  # the context keeps the other half
    if len(encoded["input_ids"]) > most:
        question = question[: encoded["offset_mapping"][most - 1][1]]
    num_question = min(len(encoded["input_ids"]), most)
    encoded = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=max_length,
        stride=max(0, (max_length - num_question - 3) // 2),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=preprocessor.has_token_types,
    )
    windows: list[tuple[Row, Offsets]] = []
    for number, spans in enumerate(encoded["offset_mapping"]):
        segments = encoded.sequence_ids(number)
        offsets = [span if segment == 1 else None for span, segment in zip(spans, segments, strict=True)]
        windows.append(({name: encoded[name][number] for name in encoded if name.endswith("_ids")}, offsets))
    return windows, len(tokenizer(question, context)["input_ids"])


def _positions(answer: Answer, offsets: Offsets) -> tuple[int, int]:
    """Return the first and last token of the answer; position 0 ([CLS]) twice if the window lacks a part of it."""
    begin, end = answer.start, answer.start + len(answer.text)
    spans = [(position, *span) for position, span in enumerate(offsets) if span is not None]
    inside = [(position, first, stop) for position, first, stop in spans if first < end and stop > begin]
    if not inside or inside[0][1] > begin or inside[-1][2] < end:
        return 0, 0
    return inside[0][0], inside[-1][0]


def _spans(start_logits: np.ndarray, end_logits: np.ndarray, offsets: Offsets) -> list[tuple[float, int, int]]:
    """Return (score, first token, last token) of the most likely spans within the context; logits are (length,)."""
    starts = np.argsort(-start_logits)[:NUM_CANDIDATES].tolist()
    ends = np.argsort(-end_logits)[:NUM_CANDIDATES].tolist()
    return [
        (float(start_logits[start] + end_logits[end]), start, end)
        for start in starts
        for end in ends
        if offsets[start] is not None and offsets[end] is not None and start <= end < start + MAX_ANSWER_TOKENS
    ]
