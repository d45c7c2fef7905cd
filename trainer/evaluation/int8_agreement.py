"""Agreement of a model's int8 graph with its float32 graph on a file of texts, with size and speed on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import storage
from trainer.evaluation.labeled_file import LabeledFile, read_file
from trainer.finetuning.examples import Columns, Examples, read_examples, text_of
from trainer.finetuning.fitted_model import FittedModel
from trainer.finetuning.tasks import ExamplePrediction, Task
from trainer.hf_export.onnx_export import (
    INT8_FILE,
    ONNX_FILE,
    OnnxModel,
    Part,
    add_int8,
    append_to_onnx_section,
    describe,
    size_of,
)
from trainer.inference.preprocessor import Preprocessor, Row
from trainer.model.model_folder import FITTED_CLASSES, read_config

MIN_AGREEMENT = 0.99
"""Default share of predictions that must be the same."""
FEW = 100
"""Of fewer compared predictions each one is more than 1%."""
BATCH_SIZE = 32
MASKED_BATCH_SIZE = 8
"""Rows for which the logits of a large vocabulary fit in memory."""
MASK_EVERY = 7
"""Every seventh token is masked, about 15% as in pretraining."""
SAME_VECTOR = 0.99
"""Least cosine of two vectors that count as the same."""
SAME_NUMBER = 0.1
"""Largest difference of two numbers that count as the same, in standard deviations of the float32 predictions."""
_TIMED_ROWS, _ROUNDS = 256, 3


@dataclass(frozen=True)
class Int8Report:
    """Agreement, and for each file of `model.onnx` and `model_quantized.onnx` its size, speed and scores."""

    data: str
    data_sha256: str
    num_rows: int
    num_compared: int
    agreement: float
    unit: str
    """What is compared, in the plural: rows, words, masked tokens."""
    megabytes: dict[str, float]
    milliseconds_per_row: dict[str, float]
    scores: dict[str, dict[str, float]]
    """Scores against the labels by file; those of masked tokens need no labels."""
    batch_size: int
    tokens_per_row: float
    num_threads: int
    processor: str


@dataclass(frozen=True)
class _Comparison:
    """Parts that agree, of how many, with the rows for the measurement of speed."""

    num_equal: int
    num_compared: int
    unit: str
    rows: Sequence[Row]
    preprocessor: Preprocessor
    scores: dict[str, dict[str, float]]
    num_rows: int
    batch_size: int = BATCH_SIZE


def add_checked_int8(folder: Path, part: Part, data: LabeledFile, min_agreement: float) -> Int8Report:
    """Write model_quantized.onnx beside model.onnx if its predictions on the data agree with those of model.onnx.

    Raises:
        UserError: they do not, or the data cannot be read; the directory must then be removed.
    """
    sides = {ONNX_FILE: OnnxModel(folder / ONNX_FILE), INT8_FILE: OnnxModel(add_int8(folder))}
    classes = read_config(folder).get("architectures") or [""]
    if part == "encoder":
        compared = _compare_vectors(folder, data, sides)
    elif str(classes[0]).endswith(FITTED_CLASSES):
        compared = _compare_predictions(folder, data, sides)
    else:
        compared = _compare_masked(folder, data, sides)
    agreement = compared.num_equal / compared.num_compared
    if agreement < min_agreement:
        raise UserError(
            f"the int8 model gives {agreement:.2%} of the float32 predictions of {compared.num_compared:,} "
            f"{compared.unit} of {data.path}, fewer than --min-agreement {min_agreement:g}; nothing was exported",
            fix="export without --int8, or lower --min-agreement",
            code="int8-differs",
        )
    milliseconds, tokens_per_row = _speed(sides, compared)
    report = Int8Report(
        data=data.path.name,
        data_sha256=storage.sha256_of(data.path),
        num_rows=compared.num_rows,
        num_compared=compared.num_compared,
        agreement=agreement,
        unit=compared.unit,
        megabytes={name: round(size_of(folder / name) / 1e6, 3) for name in sides},
        milliseconds_per_row=milliseconds,
        scores=compared.scores,
        batch_size=compared.batch_size,
        tokens_per_row=tokens_per_row,
        num_threads=torch.get_num_threads(),
        processor=_processor(),
    )
    describe(folder, {"int8": asdict(report)})
    append_to_onnx_section(folder, _section(report))
    return report


def lines_of(report: Int8Report) -> list[str]:
    """Return the table of both files as lines of Markdown."""
    metrics = list(report.scores.get(ONNX_FILE, {}))
    rows = [["file", "MB", "ms per row", *metrics]]
    for name in (ONNX_FILE, INT8_FILE):
        scores = [f"{report.scores[name][metric]:.4f}" for metric in metrics]
        rows.append([f"`{name}`", f"{report.megabytes[name]:.1f}", f"{report.milliseconds_per_row[name]:.2f}", *scores])
    table = [f"| {' | '.join(row)} |" for row in rows]
    return [table[0], f"|{'---|' * len(rows[0])}", *table[1:]]


def summary(report: Int8Report) -> str:
    """Return the agreement as a sentence, with a remark on few predictions."""
    few = f" (few: {FEW:,} or more show the agreement)" if report.num_compared < FEW else ""
    return (
        f"{report.agreement:.2%} of {report.num_compared:,} {report.unit} of {report.data} have the same prediction in "
        f"int8 as in float32{few}"
    )


def _section(report: Int8Report) -> str:
    table = "\n".join(lines_of(report))
    return (
        f"`{INT8_FILE}` has the matrices of weights as int8 (dynamic quantization, a scale per column). "
        f"{summary(report)}.{_meaning(report.unit)}\n\n{table}\n\nSpeed on the CPU ({report.processor}, "
        f"{report.num_threads} threads, batches of {report.batch_size}, {report.tokens_per_row:.0f} tokens per row in "
        f"the mean), the best of {_ROUNDS} rounds."
    )


def _meaning(unit: str) -> str:
    if unit == "texts":
        return f" Texts count as equal if the cosine of the means of their hidden states is at least {SAME_VECTOR}."
    if unit == "numbers":
        return (
            f" Numbers count as equal if they differ by at most {SAME_NUMBER} standard deviations of the predictions."
        )
    if unit == "masked tokens":
        return f" Every {MASK_EVERY}th token of the texts was masked."
    return ""


def _compare_predictions(folder: Path, data: LabeledFile, sides: Mapping[str, OnnxModel]) -> _Comparison:
    """Compare the predictions of a fitted model."""
    fitted = FittedModel.load(folder)
    task = fitted.task
    examples = read_file(data, folder, task)
    predictions = {
        name: replace(fitted, model=graph).predict(examples, BATCH_SIZE)[0]  # type: ignore[arg-type]  # called alike
        for name, graph in sides.items()
    }
    equal, total, unit = equal_predictions(task, *predictions.values())
    labels = examples.labels
    scores = {} if labels is None else {name: task.score(labels, each) for name, each in predictions.items()}
    encoded = task.encode(examples.take(_spread(len(examples))), fitted.preprocessor)
    return _Comparison(equal, total, unit, encoded.rows, fitted.preprocessor, scores, len(examples))


def equal_predictions(
    task: Task, first: Sequence[ExamplePrediction], second: Sequence[ExamplePrediction]
) -> tuple[int, int, str]:
    """Return how many predictions are equal, of how many, and what they are of."""
    pairs = [(one.label, other.label) for one, other in zip(first, second, strict=True)]
    if task.name == "token_classification":
        words = [pair for tags, others in pairs for pair in zip(tags, others, strict=True)]
        return sum(tag == other for tag, other in words), len(words), "words"
    if task.name == "regression":
        allowed = SAME_NUMBER * statistics.pstdev([float(one) for one, _ in pairs])
        return sum(abs(one - other) <= allowed for one, other in pairs), len(pairs), "numbers"
    return sum(one == other for one, other in pairs), len(pairs), "rows"


def _compare_masked(folder: Path, data: LabeledFile, sides: Mapping[str, OnnxModel]) -> _Comparison:
    """Compare the likeliest token at masked positions, and with the token that was there."""
    preprocessor = Preprocessor.load(folder)
    mask = preprocessor.tokenizer.mask_token_id
    if mask is None:
        raise UserError(f"{folder} has no mask token", fix="export without --int8", code="no-mask-token")
    special = set(preprocessor.tokenizer.all_special_ids)
    hidden: list[dict[int, int]] = []  # for each row the token by masked position
    rows = []
    for row in preprocessor.rows(_texts(data).texts)[0]:
        ids = list(row["input_ids"])
        places = [place for place, token in enumerate(ids) if token not in special]
        chosen = places[MASK_EVERY // 2 :: MASK_EVERY] or places[len(places) // 2 :][:1]
        hidden.append({place: ids[place] for place in chosen})
        rows.append({**row, "input_ids": [mask if place in hidden[-1] else token for place, token in enumerate(ids)]})
    guesses: dict[str, list[int]] = {name: [] for name in sides}
    truth: list[int] = []
    for indices, batch in preprocessor.collate.by_length(rows, MASKED_BATCH_SIZE, torch.device("cpu")):
        marked = [(row, place) for row, index in enumerate(indices) for place in hidden[index]]
        truth += [token for index in indices for token in hidden[index].values()]
        at = tuple(torch.tensor(marked).reshape(-1, 2).T)
        for name, graph in sides.items():
            guesses[name] += graph(**batch)["logits"][at].argmax(-1).tolist()
    if not truth:
        raise UsageError(f"{data.path} has no token to mask", fix="give a table with texts", code="no-examples")
    first, second = guesses.values()
    scores = {name: {"accuracy": float(np.mean(np.equal(each, truth)))} for name, each in guesses.items()}
    equal = sum(one == other for one, other in zip(first, second, strict=True))
    timed = [rows[index] for index in _spread(len(rows))]
    return _Comparison(
        equal, len(truth), "masked tokens", timed, preprocessor, scores, len(rows), batch_size=MASKED_BATCH_SIZE
    )


def _compare_vectors(folder: Path, data: LabeledFile, sides: Mapping[str, OnnxModel]) -> _Comparison:
    """Compare the means of the hidden states."""
    preprocessor = Preprocessor.load(folder)
    rows = preprocessor.rows(_texts(data).texts)[0]
    equal = 0
    for _, batch in preprocessor.collate.by_length(rows, BATCH_SIZE, torch.device("cpu")):
        mask = batch["attention_mask"].unsqueeze(-1)
        first, second = ((graph(**batch)["last_hidden_state"] * mask).sum(1) for graph in sides.values())
        equal += int((torch.nn.functional.cosine_similarity(first, second) >= SAME_VECTOR).sum())
    timed = [rows[index] for index in _spread(len(rows))]
    return _Comparison(equal, len(rows), "texts", timed, preprocessor, {}, len(rows))


def _texts(data: LabeledFile) -> Examples:
    columns = Columns(data.text_column or "text", None, "")
    return read_examples(data.path, columns, text_of, None, data.quoting is not False, skip_bad=True)


def _spread(num_rows: int) -> list[int]:
    """Return the indices of the rows that are timed, evenly over all."""
    return [int(index) for index in np.linspace(0, num_rows - 1, min(num_rows, _TIMED_ROWS))]


def _speed(sides: Mapping[str, OnnxModel], compared: _Comparison) -> tuple[dict[str, float], float]:
    """Return the milliseconds per row of each graph, in turn on the same batches, and the mean tokens of a row."""
    device = torch.device("cpu")
    batches = [
        batch for _, batch in compared.preprocessor.collate.by_length(compared.rows, compared.batch_size, device)
    ]
    seconds: dict[str, list[float]] = {name: [0.0] * _ROUNDS for name in sides}
    for current in range(_ROUNDS):
        for batch in batches:
            for name, graph in sides.items():
                began = time.perf_counter()
                graph(**batch)
                seconds[name][current] += time.perf_counter() - began
    num_tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    per_row = {name: 1000 * min(each) / len(compared.rows) for name, each in seconds.items()}
    return per_row, num_tokens / len(compared.rows)


def _processor() -> str:
    """Return the name of the processor, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "processor unknown"
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "processor unknown"
    )
