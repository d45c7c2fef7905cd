"""The folder of a fitted model, in the Hugging Face format, which other programs load without this project.

config.json model.safetensors              the encoder with the head; class names in id2label
tokenizer.json tokenizer.model ...         the tokenizer of the encoder, byte for byte
README.md finetune.json provenance.json    the origin
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from transformers import PreTrainedConfig, PreTrainedModel

from data_prep.base.errors import UserError
from data_prep.base.validation import first_problem
from data_prep.storage import storage
from trainer.config.comparability import examples_fact
from trainer.finetuning.examples import Examples
from trainer.finetuning.fit import predict
from trainer.finetuning.fitted_card import FitFacts, fitted_card
from trainer.finetuning.task_data import make_task
from trainer.finetuning.tasks import ExamplePrediction, Task
from trainer.inference.preprocessor import Preprocessor
from trainer.model.model_folder import (
    CARD_FILE,
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

HEAD_WEIGHTS = "classifier."
_INHERITED = ("data_digests", "data_lineage", "teacher", "teachers_sha256")
"""Fields of the encoder's provenance that hold for a model fitted from it."""
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "added_tokens.json")


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
            **{name: base[name] for name in _INHERITED if name in base and not is_scratch},
            "scores": {f"{facts.scored_on}/{name}": value for name, value in facts.scores.items()},
            "evaluation": {"task": facts.task}
            | ({examples_fact(facts.scored_on): facts.scored_sha256} if facts.scored_sha256 else {}),
            "train_sha256": facts.train_sha256,
            "model_safetensors_sha256": storage.sha256_of(output / "model.safetensors"),
            FILES_SHA256: file_digests(output),
        }
        _write_json(output / PROVENANCE_FILE, provenance)
        names = make_task(facts.task, [str(name) for _, name in sorted((model.config.id2label or {}).items())]).names
        (output / CARD_FILE).write_text(fitted_card(facts, names), encoding="utf-8")
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


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
