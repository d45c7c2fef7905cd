"""MLflow's function of a registered model: what it answers for each task, for texts and for batches with bad rows.

Each registered model contains a copy of this file, and works without this project. So this file imports nothing of the
project.

A masked language model answers through MLflow's transformers flavor, as classifiers of earlier releases do. A tagger
answers with the words of a text and their places, question answering with a span of the context, and regression with a
number: transformers has no pipeline that does. A classifier answers as its pipeline, but with the names of special
tokens in a text as text. An encoder of a folder of sentence-transformers answers with vectors.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pandas
import torch
from mlflow import transformers
from mlflow.exceptions import MlflowException

LOG = logging.getLogger(__name__)
BATCH_SIZE = 16
MAX_ANSWER_TOKENS = 30
NUM_CANDIDATES = 20


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> RowByRow:
    """Load the function of a model's folder; MLflow calls it by this name.

    `model_config` has the arguments of a pipeline, or for the tasks of this file `task`, `max_length` (tokens) and the
    `folder` of the model.
    """
    settings = dict(model_config or {})
    function = FUNCTIONS.get(settings.get("task"))
    if function is None:
        return RowByRow(transformers._load_pyfunc(path, model_config))
    how = {name: settings[name] for name in ("pooling", "is_unit") if name in settings}
    return RowByRow(function(Path(path), settings["folder"], settings["max_length"], **how))


class RowByRow:
    """Answers batches with a function of texts.

    A row whose text is missing or empty, or that the function cannot answer, has None in a list of answers and missing
    values in a table of answers. A batch in which no row has an answer fails.
    """

    def __init__(self, function: Any) -> None:
        self.function = function

    def get_raw_model(self) -> Any:
        """Return the transformers pipeline, or the model where transformers has none."""
        return self.function.get_raw_model()

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """Return the answers of a text, of a pair, or of a batch of them (a list or a table)."""
        if not isinstance(data, list | pandas.DataFrame) or len(data) == 0:
            return self.function.predict(data, params)
        every = range(len(data))
        numbers = [number for number in every if _has_text(_rows(data, [number]))]
        if not numbers:
            raise MlflowException.invalid_parameter_value("no row has a text")
        try:
            answers = self.function.predict(_rows(data, numbers), params)
        except Exception:  # noqa: BLE001  # its class, and which row caused it, depend on the libraries
            outcomes = self._one_by_one(data, numbers, params)
            numbers, parts = list(outcomes), list(outcomes.values())
            if isinstance(parts[0], pandas.DataFrame):
                answers = pandas.concat(parts)
            else:  # the answer of a text with several masks is a list, in a batch and alone
                answers = [part[0] if len(part) == 1 else part for part in parts]
        if len(numbers) == len(data):
            return answers
        LOG.warning("%d of %d rows have no answer", len(data) - len(numbers), len(data))
        if isinstance(answers, pandas.DataFrame):
            return answers.set_axis(numbers).reindex(every)
        of_number = dict(zip(numbers, answers, strict=True))
        return [of_number.get(number) for number in every]

    def _one_by_one(self, data: Any, numbers: Sequence[int], params: dict[str, Any] | None) -> dict[int, Any]:
        """Return the answers by the number of their row; rows that fail have none."""
        outcomes = {}
        errors = []
        for number in numbers:
            try:
                outcomes[number] = self.function.predict(_rows(data, [number]), params)
            except Exception as error:  # noqa: BLE001  # as above
                errors.append(error)
        if not outcomes:
            raise errors[0]
        return outcomes


class TaskFunction:
    """A model and its tokenizer, which reads the names of special tokens in a text as text, as in fine-tuning."""

    auto_class: str

    def __init__(self, path: Path, folder: str, max_length: int) -> None:
        import transformers as library

        place = str(path / folder)
        model = getattr(library, self.auto_class).from_pretrained(
            place, dtype=torch.float32, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
        self.tokenizer = library.AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
        self.tokenizer.split_special_tokens = True
        self.tokenizer.model_max_length = 1 << 30  # texts are cut here; transformers would warn of each
        if self.tokenizer.is_fast:
            _cut_names(self.tokenizer.backend_tokenizer, self.tokenizer.all_special_tokens)
        self.max_length = max_length
        self.has_token_types = getattr(model.config, "type_vocab_size", 0) > 1

    def get_raw_model(self) -> Any:
        """Return the model."""
        return self.model

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """Return an answer for each row: a list, or a table."""
        rows = [[_SURROGATE.sub("\ufffd", cell) for cell in row] for row in _cells(data)]
        if not all(cell.strip() for row in rows for cell in row):
            raise MlflowException.invalid_parameter_value("a text is empty")
        return self.answers(rows)

    def answers(self, rows: Sequence[Sequence[str]]) -> Any:
        """Return an answer for each row of one or two texts."""
        raise NotImplementedError

    def encode(self, *texts: Any, **options: Any) -> Any:
        """Return what the tokenizer makes of texts or pairs, as lists."""
        return self.tokenizer(
            *texts, return_token_type_ids=self.has_token_types, return_attention_mask=False, **options
        )

    def logits(self, rows: Sequence[Sequence[str]]) -> list[Any]:
        """Return the logits of each text or pair, of which the end of a longer one than the model takes is not read."""
        columns = [list(column) for column in zip(*rows, strict=True)]
        encoded = self.encode(*columns, truncation="longest_first", max_length=self.max_length)
        taken = [{name: encoded[name][number] for name in encoded} for number in range(len(rows))]
        return [output["logits"] for output in self.outputs(taken)]

    def outputs(self, rows: Sequence[dict[str, list[int]]]) -> Iterator[Any]:
        """Yield for each row the outputs of the model by name, without padding, in float32."""
        pads = {"input_ids": self.tokenizer.pad_token_id or 0, "token_type_ids": 0, "attention_mask": 0}
        for start in range(0, len(rows), BATCH_SIZE):
            some = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows[start : start + BATCH_SIZE]]
            longest = max(len(row["input_ids"]) for row in some)
            batch = {
                name: torch.tensor([[*row[name], *[pads[name]] * (longest - len(row[name]))] for row in some])
                for name in some[0]
            }
            with torch.inference_mode():
                result = self.model(**{name: value.to(self.model.device) for name, value in batch.items()})
            named = self.named(result, batch)
            values = {name: value.float().cpu().numpy() for name, value in named.items()}
            for number, row in enumerate(some):
                length = len(row["input_ids"])
                yield {
                    name: value[number] if name == "logits" else value[number, :length]  # of starts and ends
                    for name, value in values.items()
                }

    def named(self, result: Any, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors of a batch that `outputs` yields by row."""
        return {name: value for name, value in result.items() if "logits" in name}


class Numbers(TaskFunction):
    """Regression: a number for each text or pair; the end of a longer text than the model takes is not read."""

    auto_class = "AutoModelForSequenceClassification"

    def answers(self, rows: Sequence[Sequence[str]]) -> list[float]:
        return [float(logits[0]) for logits in self.logits(rows)]


class Classes(TaskFunction):
    """Classification: a table of the class of each text or pair and its probability, as the pipeline's."""

    auto_class = "AutoModelForSequenceClassification"

    def answers(self, rows: Sequence[Sequence[str]]) -> pandas.DataFrame:
        names = self.model.config.id2label
        probabilities = [_softmax(logits) for logits in self.logits(rows)]
        best = [int(each.argmax()) for each in probabilities]
        scores = [float(each[number]) for each, number in zip(probabilities, best, strict=True)]
        return pandas.DataFrame({"label": [str(names[number]) for number in best], "score": scores})


class Labels(TaskFunction):
    """Multi-label classification: the classes of each text whose probability is at least a half."""

    auto_class = "AutoModelForSequenceClassification"

    def answers(self, rows: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
        names = self.model.config.id2label
        return [
            [
                {"label": str(names[number]), "score": float(score)}
                for number, score in enumerate(1.0 / (1.0 + numpy.exp(-logits.astype(float))))
                if score >= 0.5
            ]
            for logits in self.logits(rows)
        ]


class Words(TaskFunction):
    """Tagging: the words of each text, which white space separates, with their places and tags.

    A word's tag is predicted at its first token, as in fine-tuning. A word behind the end of what the model takes, or
    of which the tokenizer keeps nothing, has the tag None.
    """

    auto_class = "AutoModelForTokenClassification"

    def answers(self, rows: Sequence[Sequence[str]]) -> list[list[dict[str, Any]]]:
        words = [[(match[0], match.start(), match.end()) for match in re.finditer(r"\S+", text)] for (text,) in rows]
        joined = [" ".join(word for word, _, _ in some) for some in words]
        encoded = self.encode(joined, return_offsets_mapping=True)
        taken, firsts = [], []
        for number, some in enumerate(words):
            offsets = encoded["offset_mapping"][number]
            length = len(offsets)
            kept = range(length) if length <= self.max_length else [*range(self.max_length - 1), length - 1]
            at = {token: position for position, token in enumerate(kept)}
            firsts.append({word: at[token] for token, word in _words_of_tokens(some, offsets) if token in at})
            names = [name for name in encoded if name.endswith("_ids")]
            taken.append({name: [encoded[name][number][token] for token in kept] for name in names})
        return [
            [self._tagged(word, first.get(number), output["logits"]) for number, word in enumerate(some)]
            for some, first, output in zip(words, firsts, self.outputs(taken), strict=True)
        ]

    def _tagged(self, word: tuple[str, int, int], position: int | None, logits: Any) -> dict[str, Any]:
        text, start, end = word
        place = {"word": text, "start": start, "end": end}
        if position is None:
            return {**place, "tag": None, "score": None}
        probabilities = _softmax(logits[position])
        best = int(probabilities.argmax())
        return {**place, "tag": str(self.model.config.id2label[best]), "score": float(probabilities[best])}


class Answers(TaskFunction):
    """Question answering: the span of each context that answers its question.

    A long context is read in windows that overlap by half, and of a long question the first half of what the model
    takes. There is always an answer, if the context has a token.
    """

    auto_class = "AutoModelForQuestionAnswering"

    def answers(self, rows: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
        taken: list[dict[str, list[int]]] = []
        windows: list[tuple[int, list[Any]]] = []  # the number of the row, and the place of each token in the context
        for number, (question, context) in enumerate(rows):
            for row, offsets in self._windows(question, context):
                taken.append(row)
                windows.append((number, offsets))
        best: dict[int, tuple[float, dict[str, Any]]] = {}
        for (number, offsets), output in zip(windows, self.outputs(taken), strict=True):
            starts, ends = output["start_logits"], output["end_logits"]
            for first, last in _spans(starts, ends, offsets):
                score = float(starts[first] + ends[last])
                if number in best and score <= best[number][0]:
                    continue
                begin, text = offsets[first][0], rows[number][1][offsets[first][0] : offsets[last][1]]
                begin, text = begin + len(text) - len(text.lstrip()), text.strip()
                sure = float(_softmax(starts)[first] * _softmax(ends)[last])
                best[number] = (score, {"answer": text, "start": begin, "end": begin + len(text), "score": sure})
        nothing = {"answer": "", "start": None, "end": None, "score": 0.0}
        return [best[number][1] if number in best else dict(nothing) for number in range(len(rows))]

    def _windows(self, question: str, context: str) -> Iterator[tuple[dict[str, list[int]], list[Any]]]:
        """Yield the rows of a question with the windows of its context, and the places of their tokens."""
        alone = self.encode(question, return_offsets_mapping=True, add_special_tokens=False)
        most = self.max_length // 2
        if len(alone["input_ids"]) > most:
            question = question[: alone["offset_mapping"][most - 1][1]]
        stride = max(0, (self.max_length - min(len(alone["input_ids"]), most) - 3) // 2)
        encoded = self.encode(
            question,
            context,
            truncation="only_second",
            max_length=self.max_length,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        names = [name for name in encoded if name.endswith("_ids")]
        for number, spans in enumerate(encoded["offset_mapping"]):
            segments = encoded.sequence_ids(number)
            offsets = [span if segment == 1 else None for span, segment in zip(spans, segments, strict=True)]
            yield {name: encoded[name][number] for name in names}, offsets


class Vectors(TaskFunction):
    """Embedding: a vector for each text; the end of a longer text than the model takes is not read."""

    auto_class = "AutoModel"

    def __init__(self, path: Path, folder: str, max_length: int, pooling: str = "mean", is_unit: bool = False) -> None:
        super().__init__(path, folder, max_length)
        self.pooling, self.is_unit = pooling, is_unit

    def answers(self, rows: Sequence[Sequence[str]]) -> list[list[float]]:
        return [vector.astype(float).tolist() for vector in self.logits(rows)]

    def named(self, result: Any, batch: dict[str, Any]) -> dict[str, Any]:
        hidden = result.last_hidden_state  # (num_texts, length, hidden_size)
        if self.pooling == "cls":
            vectors = hidden[:, 0]
        else:
            weights = batch["attention_mask"].to(hidden.device).unsqueeze(-1).to(hidden.dtype)
            vectors = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
        if self.is_unit:
            vectors = torch.nn.functional.normalize(vectors, dim=1)
        return {"logits": vectors}


FUNCTIONS: dict[Any, type[TaskFunction]] = {
    "classification": Classes,
    "regression": Numbers,
    "multilabel_classification": Labels,
    "token_classification": Words,
    "question_answering": Answers,
    "embedding": Vectors,
}
_SURROGATE = re.compile("[\ud800-\udfff]")


def _words_of_tokens(words: Sequence[tuple[str, int, int]], offsets: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield (token, number of its word), last token first; a token belongs to the word of its last character."""
    word_at: list[int] = []
    for number, (word, _, _) in enumerate(words):
        word_at += [number] * len(word) + [-1]
    for token in reversed(range(len(offsets))):
        begin, end = offsets[token]
        if end > begin and word_at[end - 1] >= 0:
            yield token, word_at[end - 1]


def _spans(starts: Any, ends: Any, offsets: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """Yield (first token, last token) of the most likely spans within the context."""
    for first in numpy.argsort(-starts)[:NUM_CANDIDATES].tolist():
        for last in numpy.argsort(-ends)[:NUM_CANDIDATES].tolist():
            is_inside = offsets[first] is not None and offsets[last] is not None
            if is_inside and first <= last < first + MAX_ANSWER_TOKENS:
                yield first, last


def _softmax(logits: Any) -> Any:
    values = numpy.exp(logits - logits.max())
    return values / values.sum()


def _cut_names(encoder: Any, names: Sequence[str]) -> None:
    """Let a Unigram model encode the name of a special token in a text as characters; it is a piece like others."""
    from tokenizers import Regex, models, pre_tokenizers

    halves = "|".join(f"{re.escape(name[:1])}(?={re.escape(name[1:])})" for name in names if len(name) > 1)
    if halves and isinstance(encoder.model, models.Unigram):
        cut = pre_tokenizers.Split(Regex(halves), behavior="merged_with_previous")
        own = encoder.pre_tokenizer
        encoder.pre_tokenizer = cut if own is None else pre_tokenizers.Sequence([own, cut])


def _cells(data: Any) -> list[list[str]]:
    """Return the texts of each row, of a text, a pair, a list of them, or a table."""
    if isinstance(data, pandas.DataFrame):
        rows = [list(row) for row in data.itertuples(index=False)]
    else:
        rows = [list(row.values()) if isinstance(row, dict) else [row] for row in _listed(data)]
    if not all(isinstance(cell, str) for row in rows for cell in row):
        raise MlflowException.invalid_parameter_value("a text is missing, or is not a string")
    return rows


def _listed(data: Any) -> list[Any]:
    return data if isinstance(data, list) else [data]


def _rows(data: Any, numbers: Sequence[int]) -> Any:
    """Return these rows of a list or a table."""
    return data.iloc[list(numbers)] if isinstance(data, pandas.DataFrame) else [data[number] for number in numbers]


def _has_text(row: Any) -> bool:
    """Return whether every cell of a batch of one row is a text that is not empty."""
    cells = row.iloc[0].tolist() if isinstance(row, pandas.DataFrame) else row
    texts = [cell for each in cells for cell in (each.values() if isinstance(each, dict) else [each])]
    return all(isinstance(text, str) and text.strip() for text in texts)
