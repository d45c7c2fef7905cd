"""The model of a registered folder as MLflow serves it: a transformers pipeline, chosen by the kind of the head.

Question answering has no pipeline in transformers 5. MLflow's function (`mlflow.pyfunc`, `mlflow models serve`) is in
`served_rows.py`: for fill-mask that of the pipeline, for all others its own, which reads a text as `predict` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data_prep.base.errors import UserError
from trainer.inference.embedding import Embedder
from trainer.inference.fill_mask import MASK_TOKEN, FillMask
from trainer.inference.preprocessor import max_length
from trainer.model.model_folder import FINETUNE_FILE, VectorRule, read_config, read_json, read_vectors
from trainer.model.pretrained import load_pretrained, load_tokenizer, refuse_random_weights
from trainer.model.quiet_transformers import quiet_transformers

INPUT_EXAMPLE = f"It was a {MASK_TOKEN} day."
FILLING = ("ForMaskedLM", "ForPreTraining")
TEXT_EXAMPLE = "It was a fine day."
PAIR_EXAMPLE = {"text": TEXT_EXAMPLE, "text_pair": "The sun shone."}
QUESTION_EXAMPLE = {"question": "How was the day?", "context": TEXT_EXAMPLE}
PipelineTask = Literal["fill-mask", "text-classification", "token-classification"]
PIPELINES: dict[str, PipelineTask | None] = {
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": None,
}
"""Pipeline by the ending of a class name, which is also the ending of the Auto class."""


@dataclass(frozen=True)
class ServedModel:
    """A loaded model; `pipeline_task` is None where transformers has no pipeline for it."""

    model: Any
    tokenizer: Any
    pipeline_task: PipelineTask | None
    example: str | dict[str, str]
    """A text; for a model of pairs, a pair."""
    max_length: int | None = None
    """Number of tokens to which MLflow's function truncates a text."""
    function: str | None = None
    """The function of `served_rows.py` that answers; None for that of the pipeline."""
    vectors: VectorRule | None = None
    """For the function `embedding`, how it makes vectors."""

    @property
    def example_text(self) -> str:
        """The example on one line."""
        return self.example if isinstance(self.example, str) else " | ".join(self.example.values())

    @property
    def model_config(self) -> dict[str, Any]:
        """The arguments of MLflow's function, or of the pipeline with which it answers."""
        if self.function is not None:
            how = {} if self.vectors is None else {"pooling": self.vectors.pooling, "is_unit": self.vectors.is_unit}
            return {"task": self.function, "max_length": self.max_length, **how}
        return {"tokenizer_kwargs": {"truncation": True, "max_length": self.max_length}}

    def pipeline(self) -> Any:
        from transformers import pipeline

        assert self.pipeline_task is not None, "the caller checks"
        with quiet_transformers():
            return pipeline(self.pipeline_task, model=self.model, tokenizer=self.tokenizer)


def load_served(folder: Path) -> ServedModel:
    """Load a folder as what its configuration says: a masked language model, a classifier, a tagger, a reader.

    A folder of sentence-transformers with an encoder alone gives vectors.

    Raises:
        UserError: transformers cannot load it, or weights are missing.
    """
    architecture = _architecture(folder)
    for ending, task in PIPELINES.items():
        if architecture.endswith(ending):
            purpose = f"a model for {task or 'question answering'}"
            model, missing = load_pretrained(f"AutoModel{ending}", folder, purpose)
            refuse_random_weights(missing, folder, purpose)
            tokenizer = load_tokenizer(folder)
            facts, longest = read_json(folder / FINETUNE_FILE), max_length(model.config, tokenizer)
            tokenizer.model_max_length = longest  # to which a tagger's pipeline truncates
            example: str | dict[str, str] = PAIR_EXAMPLE if facts.get("pair_column") else TEXT_EXAMPLE
            if ending == "ForQuestionAnswering":
                example = QUESTION_EXAMPLE
            longest = min(_fitted_length(folder, facts) or longest, longest)
            return ServedModel(model, tokenizer, task, example, longest, _function(ending, model.config))
    vectors = None if architecture.endswith(FILLING) else read_vectors(folder)
    if vectors is not None:
        embedder = Embedder.load(folder)
        tokenizer = load_tokenizer(folder)
        return ServedModel(embedder.model, tokenizer, None, TEXT_EXAMPLE, embedder.max_length, "embedding", vectors)
    filler = FillMask.load(folder)
    example = INPUT_EXAMPLE.replace(MASK_TOKEN, filler.mask_token)
    longest = max_length(filler.model.config, filler.tokenizer)
    return ServedModel(filler.model, filler.tokenizer, "fill-mask", example, longest)


def _function(ending: str, config: Any) -> str:
    if ending == "ForSequenceClassification":
        if config.problem_type == "multi_label_classification":
            return "multilabel_classification"
        is_number = config.problem_type == "regression" or config.num_labels == 1
        return "regression" if is_number else "classification"
    return "token_classification" if ending == "ForTokenClassification" else "question_answering"


def _architecture(folder: Path) -> str:
    """Return the class name of the folder's model; empty if config.json has none."""
    named = read_config(folder).get("architectures") or [""]
    if not isinstance(named, list):
        raise UserError(
            f"{folder}/config.json has architectures={named!r}, which is not a list of names",
            fix="export the model again",
            code="invalid-model-config",
        )
    return str(named[0])


def _fitted_length(folder: Path, facts: dict[str, Any]) -> int | None:
    """Return the number of tokens to which fine-tuning truncated a text; None if its file does not say."""
    length = facts.get("max_length")
    if length is not None and not isinstance(length, int):
        raise UserError(
            f"{folder / FINETUNE_FILE} has max_length={length!r}, which is not a number of tokens",
            fix="correct the file",
            code="damaged-model",
        )
    return length
