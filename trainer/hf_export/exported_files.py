"""The files of an exported folder, each written from the model, the tokenizer and the training's facts."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from data_prep.base.packages import installed_version
from data_prep.base.settings import to_yaml
from data_prep.storage import storage
from data_prep.tokenizer.foreign_files import FILE_NAMES, TOKENIZER_CONFIG_NAME
from data_prep.tokenizer.hugging_face_tokenizer import write_hugging_face_tokenizer
from data_prep.tokenizer.tokenizer import MODEL_NAME, Tokenizer
from data_prep.tokenizer.tokenizer_report import REPORT_NAME
from trainer.config.objective_settings import SENTENCE_PAIRS
from trainer.config.run_config import RunConfig, without_secrets
from trainer.hf_export.model_card import TrainingFacts, model_card
from trainer.hf_export.parity import ParityReport
from trainer.model.hugging_face import family_in_transformers, hugging_face_config, to_hugging_face
from trainer.objectives.pretraining import PretrainingModel

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "sentencepiece")


def write_model(folder: Path, config: RunConfig, model: PretrainingModel, tokenizer: Tokenizer) -> None:
    """config.json, with the ids of the tokenizer's special tokens, and model.safetensors."""
    has_pairs = SENTENCE_PAIRS in model.objectives
    _write_json(folder / "config.json", hugging_face_config(config.model, has_pairs, tokenizer.special_tokens))
    weights = to_hugging_face(model.state_dict(), family_in_transformers(config.model, has_pairs))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, tokenizer: Tokenizer, config: RunConfig) -> None:
    """The SentencePiece model, and the Hugging Face files made from it; or a foreign one's; and their description.

    The export is a tokenizer's folder too, so its description carries the checksums of the files as they are here.
    """
    for name in (MODEL_NAME, REPORT_NAME):
        if (tokenizer.folder / name).is_file():  # a foreign one has no model, one of earlier releases no report
            shutil.copyfile(tokenizer.folder / name, folder / name)
    write_hugging_face_tokenizer(tokenizer.folder, folder, model_max_length=config.longest_sequence)
    if config.model.type_vocab_size == 0:  # the model would refuse the token types that the tokenizer gives
        path = folder / TOKENIZER_CONFIG_NAME
        settings = json.loads(path.read_text(encoding="utf-8"))
        _write_json(path, settings | {"model_input_names": ["input_ids", "attention_mask"]})
    written = [name for name in (MODEL_NAME, REPORT_NAME, *FILE_NAMES) if (folder / name).is_file()]
    checksums = {name: storage.sha256_of(folder / name) for name in written}
    tokenizer.info.model_copy(update={"files": checksums}).write(folder)


def write_sentence_transformer(folder: Path, config: RunConfig) -> None:
    """What `SentenceTransformer(folder)` reads: mean pooling over the hidden states."""
    types = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{types}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{types}.Pooling"},
    ]
    _write_json(folder / "modules.json", modules)
    lengths = {"max_seq_length": config.longest_sequence, "do_lower_case": False}
    _write_json(folder / "sentence_bert_config.json", lengths)
    (folder / "1_Pooling").mkdir()
    pooling = {
        "word_embedding_dimension": config.model.hidden_size,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    _write_json(folder / "1_Pooling" / "config.json", pooling)


def write_origin(
    folder: Path,
    name: str,
    config: RunConfig,
    facts: TrainingFacts,
    tokenizer: Tokenizer,
    parity: ParityReport,
) -> None:
    """The model card, the resolved configuration, and where all of it comes from."""
    (folder / "training_config.yaml").write_text(to_yaml(without_secrets(config)), encoding="utf-8")
    card = model_card(name, config, facts, tokenizer)
    (folder / "README.md").write_text(card + "\n", encoding="utf-8")
    provenance = {
        "clozeworks_version": installed_version("clozeworks"),
        "libraries": {library: installed_version(library) for library in LIBRARIES},
        "checkpoint": facts.checkpoint,
        "step": facts.step,
        **({"merged": dict(facts.averaged)} if facts.averaged else {}),
        "tokens_seen": facts.tokens_seen,
        "mlflow_run_id": facts.mlflow_run_id,
        "git_revision": facts.git_revision,
        "data_digests": dict(facts.data_digests),
        "data_lineage": list(facts.data_lineage),
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "scores": dict(facts.scores),
        "evaluation": dict(facts.evaluation),
        "parity": asdict(parity),
        "model_safetensors_sha256": storage.sha256_of(folder / "model.safetensors"),
    }
    _write_json(folder / "provenance.json", provenance)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
