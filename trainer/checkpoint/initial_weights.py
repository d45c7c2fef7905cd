"""Initialize from trained weights: a Hugging Face checkpoint of a published family becomes the weights of a new run.

Rank 0 reads a local folder, which `trainer/api.py` finds, and broadcasts the weights, so only it needs the folder.
transformers loads them: it knows old names of weights, sharded files and models without heads. Only safetensors are
read. Parameters that the checkpoint lacks keep their initial values and are listed. Rows that pad the vocabulary get a
bias of `SHUT`, so the first loss is that of the checkpoint. If the checkpoint has a tokenizer, the shards must have the
same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch

from data_prep.base.errors import UserError
from data_prep.storage import storage
from data_prep.tokenizer.foreign_files import TOKENIZER_NAME
from data_prep.tokenizer.tokenizer import INFO_NAME, Tokenizer
from trainer.config.custom_code import is_custom
from trainer.config.families.family import PublishedFamily
from trainer.config.families.registry import published_families
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import MASKED_LM
from trainer.distributed.process_group import Ranks, broadcast_object
from trainer.model.hugging_face import family_in_transformers, from_hugging_face
from trainer.model.model_folder import data_lineage, read_provenance
from trainer.model.pretrained import load_config, load_pretrained
from trainer.objectives.pretraining import PretrainingModel

SHUT = -10_000.0
"""Bias of a row that only pads the vocabulary: its probability is 0 in every precision, and so is its gradient."""

_WORDS = "encoder.embeddings.word_embeddings.weight"


class InitialWeights(NamedTuple):
    """Facts about the initial weights of a run."""

    notes: list[str]
    """Lines for the log."""
    data_lineage: tuple[str, ...]
    """Manifest digests of the data that the weights saw; empty if the provenance has none."""


class _Found(NamedTuple):
    """The result of reading on rank 0: our parameters by name, perhaps with fewer vocabulary rows, or the error."""

    weights: dict[str, torch.Tensor]
    data_lineage: tuple[str, ...] = ()
    note: str | None = None
    error: UserError | None = None


def load_initial_weights(
    model: PretrainingModel,
    source: str,
    find_folder: Callable[[], Path],
    ranks: Ranks,
    tokenizer_fingerprint: str | None = None,
) -> InitialWeights:
    """Put the weights of `source` into `model` (fp32, on the CPU), all ranks together.

    Args:
        source: what `init_from` names, for messages.
        find_folder: returns the local folder of `source`, checked; called on rank 0 alone.
        tokenizer_fingerprint: that of the shards; None compares nothing.

    Raises:
        UserError: `source` does not exist, is not a checkpoint of a published family, or has another architecture than
            the model or another tokenizer than the shards.
    """
    own = _read_or_explain(model, source, find_folder, tokenizer_fingerprint) if ranks.is_first else None
    outcome = broadcast_object(own, ranks)
    if outcome.error is not None:
        raise outcome.error
    parameters = dict(model.named_parameters())
    filled_up = []
    with torch.no_grad():
        for name, weight in outcome.weights.items():
            parameters[name][: len(weight)].copy_(weight)
            if len(weight) < len(parameters[name]):
                filled_up.append(f"{name} from row {len(weight):,} of {len(parameters[name]):,}")
        # Those of the checkpoint's rows that only pad are as trained; a decoder without a bias pads the same.
        num_rows = len(outcome.weights[_WORDS])
        if MASKED_LM in model.objectives:
            parameters["mlm_head.bias"][max(num_rows, model.config.vocab_size) :] = SHUT
    fresh = [name for name in parameters if name not in outcome.weights] + filled_up
    lines = [f"initializing from {storage.redact(source)}: {len(outcome.weights)} of {len(parameters)} tensors"]
    lines += [f"newly initialized (missing there): {', '.join(fresh)}"] if fresh else []
    return InitialWeights(lines + ([outcome.note] if outcome.note else []), outcome.data_lineage)


def look_at_initial_weights(
    config: ModelSettings,
    source: str,
    find_folder: Callable[[], Path | None],
    tokenizer_fingerprint: str | None = None,
) -> list[str]:
    """Describe what `load_initial_weights` would load, without loading a weight.

    `find_folder` returns a folder that may lack the weights, or None if `source` exists and is not downloaded.

    Raises:
        UserError: `source` would be refused: it does not exist, or config.json or the tokenizer differs.
    """
    address = storage.redact(source)
    family_in_transformers(config, next_sentence=False)
    folder = find_folder()
    if folder is None:
        return [f"{address} exists; the run checks whether it fits this model"]
    family, note = _check(folder, source, config, tokenizer_fingerprint)
    return [f"{address} is a {family.name} of this architecture"] + ([note] if note else [])


def _read_or_explain(
    model: PretrainingModel, source: str, find_folder: Callable[[], Path], tokenizer_fingerprint: str | None
) -> _Found:
    """Read the weights, or return the error, which has to reach the ranks that wait for the weights."""
    try:
        return _read(model, source, find_folder(), tokenizer_fingerprint)
    except UserError as error:
        return _Found({}, error=error)


def _names_in_published_models(model: PretrainingModel) -> Iterator[str]:
    """Yield the names of all parameters but those of the user's own objectives."""
    own = {name for each in model.objectives if is_custom(each) for name, _ in model.objectives[each].named_children()}
    for name, _ in model.named_parameters():
        if name.partition(".")[0] not in own:
            yield name


def _read(model: PretrainingModel, source: str, folder: Path, tokenizer_fingerprint: str | None) -> _Found:
    family, note = _check(folder, source, model.config, tokenizer_fingerprint)
    class_name = family.pairs_class or family.masked_lm_class
    loaded, missing = load_pretrained(class_name, folder, "the beginning of a run (init_from)")
    weights = {name: weight for name, weight in loaded.state_dict().items() if name not in missing}
    pad_token_id = loaded.config.pad_token_id or 0
    converted, incomplete = from_hugging_face(weights, _names_in_published_models(model), family, pad_token_id)
    if of_encoder := [names for name, names in incomplete.items() if name.startswith("encoder.")]:
        raise UserError(
            f"init_from={storage.redact(source)} lacks {', '.join(of_encoder[0])} of the encoder",
            fix="give a complete checkpoint of this architecture",
            code="missing-weights",
        )
    return _Found(converted, data_lineage(read_provenance(folder)), note)


def _check(
    folder: Path, source: str, config: ModelSettings, tokenizer_fingerprint: str | None
) -> tuple[PublishedFamily, str | None]:
    """Return the family of both sides, and a note if the tokenizer could not be checked."""
    family = _check_architecture(folder, source, config)
    return family, None if tokenizer_fingerprint is None else _compare_tokenizers(folder, source, tokenizer_fingerprint)


def _compare_tokenizers(folder: Path, source: str, expected: str) -> str | None:
    """Refuse weights whose ids mean other tokens than those of the shards; return a note if that cannot be checked."""
    address = storage.redact(source)
    if not any((folder / name).is_file() for name in (INFO_NAME, TOKENIZER_NAME)):
        return f"{address} carries no {TOKENIZER_NAME}: cannot check that its ids are those of the shards"
    fingerprint = Tokenizer.load(folder).fingerprint
    if fingerprint != expected:
        raise UserError(
            f"init_from={address} has a tokenizer with fingerprint {fingerprint}, and the shards were made "
            f"with {expected}: the same ids are other tokens",
            fix=f"make shards with its tokenizer (`clozeworks shards --tokenizer {quote(str(address))} ...`), or give "
            "another checkpoint",
            code="other-tokenizer",
        )
    return None


def _check_architecture(folder: Path, source: str, config: ModelSettings) -> PublishedFamily:
    """Return the family of both sides; config.json must agree with `config`."""
    address = storage.redact(source)
    family = family_in_transformers(config, next_sentence=False)
    theirs: dict[str, Any] = load_config(folder).to_dict()
    if theirs["model_type"] != family.name:
        titles = " or ".join(each.title for each in published_families())
        raise UserError(
            f"init_from={address} is a {theirs['model_type']}, and the model is a {family.name} "
            f"(model.family={config.family})",
            fix=f"give a checkpoint of {titles}, and set model.family to its family",
            code="other-architecture",
        )
    settings = family.settings_of(theirs)
    differences = [
        f"model.{name} is {getattr(config, name)} and there {value}"
        for name, value in settings.items()
        if getattr(config, name) != value
    ]
    if theirs["vocab_size"] > config.padded_vocab_size:
        differences.append(f"model.vocab_size is {config.vocab_size} and there {theirs['vocab_size']}")
    if not theirs.get("tie_word_embeddings", True):
        differences.append("the MLM decoder is the word matrix and there a matrix of its own")
    if differences:
        raise UserError(
            f"init_from={address} is of another architecture: {'; '.join(differences)}",
            fix="set these settings as in the checkpoint, or give another checkpoint",
            code="other-architecture",
        )
    return family
