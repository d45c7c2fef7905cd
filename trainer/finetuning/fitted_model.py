"""The folder of a fitted model, in the Hugging Face format, which other programs load without this project.

config.json model.safetensors              the encoder with the head; class names in id2label
tokenizer.json tokenizer.model ...         the tokenizer of the encoder, byte for byte
README.md finetune.json provenance.json    the origin
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from transformers import PreTrainedConfig, PreTrainedModel

from data_prep.base.errors import UserError
from data_prep.base.validation import first_problem
from data_prep.storage import storage
from trainer.config.comparability import examples_fact
from trainer.finetuning.examples import Examples
from trainer.finetuning.fit import predict
from trainer.finetuning.task_data import make_task
from trainer.finetuning.tasks import ExamplePrediction, Task, TaskName
from trainer.inference.preprocessor import SHORTEST, Preprocessor
from trainer.model.model_folder import (
    FILES_SHA256,
    FINETUNE_FILE,
    PROVENANCE_FILE,
    file_digests,
    gives_vectors,
    not_fine_tuned,
    read_json,
    read_provenance,
)
from trainer.model.pretrained import load_config, load_pretrained
from trainer.model.quiet_transformers import quiet_transformers

_SHOWN_NAMES = 30
HEAD_WEIGHTS = "classifier."
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json")


@dataclass(frozen=True)
class FitFacts:
    """Origin of a fitted model; finetune.json."""

    task: TaskName
    base_model: str
    """As the user named it: models:/NAME@ALIAS or a folder's name."""
    variant: str
    text_column: str
    pair_column: str | None
    label_column: str
    max_length: Annotated[int, Field(ge=SHORTEST)]
    learning_rate: float
    seed: int
    best_epoch: int
    num_examples: dict[str, int]
    valid_scores: dict[str, float]
    scores: dict[str, float]
    scored_on: str
    train_sha256: str
    scored_sha256: str | None = None
    """Digest of the examples that `scores` were measured on, by `Files.examples_sha256`."""
    quoting: bool = True
    """Whether quotation marks in the tables enclose cells."""
    baseline: str = ""
    """What the yardstick of the scores predicts."""
    baseline_scores: dict[str, float] = field(default_factory=dict)
    pooling: str | None = None
    """For embedding: `mean` or `cls`."""
    matryoshka: list[int] = field(default_factory=list)
    """For embedding: sizes to which vectors may be cut."""


def read_facts(folder: Path) -> FitFacts | None:
    """Read finetune.json; return None if there is none, as in folders from elsewhere."""
    path = folder / FINETUNE_FILE
    values = read_json(path)
    try:
        return TypeAdapter(FitFacts).validate_python(values) if values else None
    except ValidationError as error:
        raise UserError(
            f"{path} does not have the form that `clozeworks finetune` writes ({first_problem(error)})",
            fix="copy the file again, or remove it: the model is then described by config.json",
            code="damaged-model",
        ) from None


def save_fitted_model(model: PreTrainedModel, source: Path, output: Path, facts: FitFacts, run_id: str | None) -> None:
    """Write the folder; tokenizer and origin are those of the encoder in the folder `source`."""
    try:
        with quiet_transformers():
            model.save_pretrained(str(output))
        _copy_tokenizer(source, output)
        _write_json(output / FINETUNE_FILE, asdict(facts))
        base = read_provenance(source)
        is_scratch = facts.variant == "scratch"  # its weights have not seen the data of the encoder
        provenance: dict[str, Any] = {
            "task": facts.task,
            "variant": facts.variant,
            "base_model": facts.base_model,
            "base": {name: value for name, value in base.items() if name not in ("parity", "libraries", FILES_SHA256)},
            "mlflow_run_id": run_id,
            "tokenizer_fingerprint": base.get("tokenizer_fingerprint"),
            # The fitted model has seen the data of its encoder: `register --trained-on` must find both.
            **{name: base[name] for name in ("data_digests", "data_lineage") if name in base and not is_scratch},
            "scores": {f"{facts.scored_on}/{name}": value for name, value in facts.scores.items()},
            "evaluation": {"task": facts.task}
            | ({examples_fact(facts.scored_on): facts.scored_sha256} if facts.scored_sha256 else {}),
            "train_sha256": facts.train_sha256,
            "model_safetensors_sha256": storage.sha256_of(output / "model.safetensors"),
            FILES_SHA256: file_digests(output),
        }
        _write_json(output / PROVENANCE_FILE, provenance)
        names = make_task(facts.task, [str(name) for _, name in sorted((model.config.id2label or {}).items())]).names
        (output / "README.md").write_text(_card(facts, names), encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{output} cannot be written ({error.strerror or error})",
            fix="give another --output",
            code="unwritable-file",
        ) from None


def save_without_head(model: PreTrainedModel, source: Path, output: Path) -> None:
    """Write a fitted model without the weights of the classifier, as a start for fits to other labels.

    `source` is the folder of the encoder, whose tokenizer is copied.

    Raises:
        OSError: it cannot be written.
    """
    kept = {name: weight for name, weight in model.state_dict().items() if not name.startswith(HEAD_WEIGHTS)}
    with quiet_transformers():
        model.save_pretrained(str(output), state_dict=kept)
    _copy_tokenizer(source, output)


def _copy_tokenizer(source: Path, output: Path) -> None:
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, output / path.name)


@dataclass(frozen=True)
class FittedModel:
    """A fitted model, ready to predict."""

    model: PreTrainedModel
    task: Task
    preprocessor: Preprocessor

    @classmethod
    def load(cls, folder: Path) -> FittedModel:
        """Load a folder that `save_fitted_model` wrote, or a classifier, tagger or question answerer from elsewhere."""
        facts, task = read_facts(folder), read_fitted_task(folder)
        model, missing = load_pretrained(task.auto_class, folder, f"a model for {task.name}")
        if missing:
            names = ", ".join(sorted(missing)[:3])
            raise not_fine_tuned(f"{folder} lacks the weights {names}, so it was not fine-tuned for {task.name}")
        preprocessor = Preprocessor.load(folder)
        if facts is not None:
            preprocessor = replace(preprocessor, max_length=min(facts.max_length, preprocessor.max_length))
        return cls(model, task, preprocessor)

    def predict(self, examples: Examples, batch_size: int = 32) -> tuple[list[ExamplePrediction], int]:
        """Return a prediction for each example, and the number of texts that exceeded the maximum length."""
        with quiet_transformers():
            encoded = self.task.encode(examples, self.preprocessor)
        outputs, _ = predict(self.model, encoded.rows, self.preprocessor.collate, batch_size)
        return self.task.decode(outputs, encoded, examples), encoded.num_truncated


def read_fitted_task(folder: Path) -> Task:
    """Return the task of a fitted model with its labels; the weights are not read.

    Raises:
        UserError: the model was not fine-tuned, or for vectors.
    """
    config, facts = load_config(folder), read_facts(folder)
    name = facts.task if facts else _task_of(config, folder)
    if name == "embedding":
        raise gives_vectors(str(folder))
    return make_task(name, [str(text) for _, text in sorted(config.id2label.items())])


def _task_of(config: PreTrainedConfig, folder: Path) -> str:
    architecture = str((config.architectures or ["a model without architectures"])[0])
    if architecture.endswith("ForSequenceClassification"):
        if config.problem_type == "multi_label_classification":
            return "multilabel_classification"
        one_number = config.problem_type == "regression" or config.num_labels == 1
        return "regression" if one_number else "classification"
    if architecture.endswith("ForTokenClassification"):
        return "token_classification"
    if architecture.endswith("ForQuestionAnswering"):
        return "question_answering"
    raise not_fine_tuned(f"{folder} is of class {architecture}, which was not fine-tuned for a task")


def _card(facts: FitFacts, names: Sequence[str]) -> str:
    base = facts.base_model.removeprefix("models:/").removeprefix("runs:/")
    task = facts.task.replace("_", " ")
    tag = {name: name.replace("_", "-") for name in ("token_classification", "question_answering")}
    tag["embedding"] = "sentence-similarity"
    library = "sentence-transformers" if facts.task == "embedding" else "transformers"
    long = make_task(facts.task).of_long_texts
    beside = {metric: f" ({facts.baseline}: {value:.4g})" for metric, value in facts.baseline_scores.items()}
    scores = "\n".join(
        f"- {metric} on {facts.scored_on}: {value:.4g}{beside.get(metric, '')}"
        for metric, value in facts.scores.items()
    )
    counts = ", ".join(f"{count:,} {part}" for part, count in facts.num_examples.items())
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: {tag.get(facts.task, 'text-classification')}\n"
        f"tags:\n- clozeworks\n---\n\n# {base}, fine-tuned for {task}\n\n"
        f"`{facts.base_model}`, fine-tuned for {task} with clozeworks ({facts.variant}, learning "
        f"rate {facts.learning_rate:g}, seed {facts.seed}, epoch {facts.best_epoch}).\n\n"
        f"## Scores\n\n{scores}\n\nExamples: {counts}. Texts longer than {facts.max_length} tokens: {long}.\n\n"
        f"## Answers and limits\n\n{_limits(facts, names)}\n\n"
        "The model knows only the task and language of its training examples, and repeats their errors and biases. "
        "`provenance.json` has its origin, `finetune.json` how it was fine-tuned.\n"
    )


_ANSWERS = {
    "classification": "A text has exactly one class",
    "multilabel_classification": "A text has each class whose probability is at least 0.5, perhaps none",
    "pair_classification": "A pair of texts has exactly one class",
    "regression": "The answer is a number in the unit of the training labels; nothing keeps it within their range",
    "token_classification": (
        "Every word has one tag; words are what white space separates, so text of a language without spaces must be "
        'split into words first, as in the training data. `pipeline("token-classification", aggregation_strategy='
        '"first")` joins tags to entities if lines are joined by spaces first; words behind the longest text have none'
    ),
    "question_answering": (
        "The answer is always a span of the context, also where the context has no answer to the question"
    ),
    "embedding": (
        "A text has one vector, whose cosine with others ranks them; it is not of length 1. Cosines are no "
        "probabilities, and unrelated texts may have a cosine far above 0"
    ),
}


def _limits(facts: FitFacts, names: Sequence[str]) -> str:
    """Return what the answers mean: their kind, their labels, their scores."""
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN_NAMES])
    more = f" and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else ""
    meaning = f" Labels: {shown}{more}, as in column `{facts.label_column}` of the training data."
    if facts.task == "embedding":
        sizes = ", ".join(f"{size:,}" for size in facts.matryoshka)
        cut = f" The first {sizes} numbers of a vector are a vector too." if sizes else ""
        return f"{_ANSWERS[facts.task]}.{cut} `SentenceTransformer(folder)` computes it ({facts.pooling} pooling)."
    scores = " Scores are the model's probabilities as they are; they are not calibrated."
    return f"{_ANSWERS[facts.task]}.{meaning if names else ''}{'' if facts.task == 'regression' else scores}"


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
