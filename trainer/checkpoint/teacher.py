"""Load a teacher: the model in a Hugging Face folder of any published family, frozen, on every rank.

Rank 0 finds and reads the folder once and broadcasts the weights, as for `init_from`, so only it needs the folder. The
teacher is computed by this project's own encoder, so that it sees the packed sequences as the model does. It must have
the tokenizer of the shards, positions for the rows that it reads, and all weights of its MLM head; sizes and family may
be others than the model's. What identifies it is `digest_of`, whatever address led to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError

from data_prep.base.errors import UserError
from data_prep.base.validation import first_problem
from data_prep.storage import storage
from data_prep.tokenizer.foreign_files import TOKENIZER_NAME
from data_prep.tokenizer.foreign_tokenizer import is_written_again
from data_prep.tokenizer.tokenizer import INFO_NAME, Tokenizer
from trainer.config.families.family import PublishedFamily
from trainer.config.families.registry import published_families
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import HIDDEN_STATES, is_taught
from trainer.config.run_config import RunConfig
from trainer.distributed.process_group import Ranks, broadcast_object
from trainer.model.hugging_face import from_hugging_face
from trainer.model.model_folder import check_not_fine_tuned
from trainer.model.pretrained import load_config, load_pretrained
from trainer.model.sizes import DTYPES
from trainer.objectives.distillation import Teacher
from trainer.objectives.pretraining import PretrainingModel

_SETTINGS = {"key_value_heads": "num_key_value_heads"}
_DERIVED = ("attention_kinds", "head_size")


OpenTokenizer = Callable[[], Tokenizer]
"""Returns the tokenizer of the shards."""


class _Shards(NamedTuple):
    """The tokenizer of the shards."""

    fingerprint: str | None
    open_tokenizer: OpenTokenizer | None


class _Found(NamedTuple):
    """The result of reading on rank 0: the architecture, our weights by name and what identifies them, or the error."""

    settings: dict[str, Any]
    weights: dict[str, torch.Tensor]
    num_tokens: int = 0
    digest: str = ""
    error: UserError | None = None


def load_teacher(
    config: RunConfig,
    find_folder: Callable[[], Path],
    tokenizer_fingerprint: str,
    ranks: Ranks,
    open_tokenizer: OpenTokenizer | None = None,
) -> Teacher:
    """Return the teacher of a run on this rank's device, in the precision of the run; all ranks together.

    `find_folder` returns the local folder of `config.teacher`, checked; called on rank 0 alone. `open_tokenizer`
    returns the tokenizer of the shards, to compare its files where the fingerprints differ.

    Raises:
        UserError: it does not exist, lacks weights, has another tokenizer or too few positions, or is of no family
            that is computed here.
    """
    shards = _Shards(tokenizer_fingerprint, open_tokenizer)
    own = _read_or_explain(config, find_folder, shards) if ranks.is_first else None
    found = broadcast_object(own, ranks)
    if found.error is not None:
        raise found.error
    settings = ModelSettings.model_validate(found.settings)
    with torch.device("meta"):
        model = PretrainingModel(settings)
    model.load_state_dict(found.weights, assign=True)
    model.requires_grad_(False).eval().to(ranks.device)
    return Teacher(settings, model.encoder, model.masked_lm.mlm_head, found.num_tokens, found.digest)


def look_at_teacher(
    config: RunConfig,
    find_folder: Callable[[], Path | None],
    tokenizer_fingerprint: str | None,
    open_tokenizer: OpenTokenizer | None = None,
) -> ModelSettings | None:
    """Return the architecture of the teacher without loading a weight; None if it exists and is not downloaded.

    `find_folder` returns a folder that may lack the weights. None as the fingerprint compares no tokenizers;
    `open_tokenizer` is that of `load_teacher`.

    Raises:
        UserError: as `load_teacher`, as far as config.json and the tokenizer show it.
    """
    folder = find_folder()
    return None if folder is None else _check(folder, config, _Shards(tokenizer_fingerprint, open_tokenizer))[1]


def digest_of(folder: Path) -> str:
    """Return the sha256 over names and contents of config.json and the weights: what the teacher predicts with."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(f"{storage.sha256_of(path)}  {path.name}\n".encode())
    return digest.hexdigest()


def _read_or_explain(config: RunConfig, find_folder: Callable[[], Path], shards: _Shards) -> _Found:
    """Read the teacher, or return the error, which has to reach the ranks that wait for it."""
    try:
        return _read(config, find_folder(), shards)
    except UserError as error:
        return _Found({}, {}, error=error)


def _read(config: RunConfig, folder: Path, shards: _Shards) -> _Found:
    address = _address(config)
    family, settings, num_tokens = _check(folder, config, shards)
    check_not_fine_tuned(folder, address)
    digest = digest_of(folder)
    loaded, missing = load_pretrained(family.masked_lm_class, folder, "a teacher")
    weights = {name: weight for name, weight in loaded.state_dict().items() if name not in missing}
    with torch.device("meta"):
        model = PretrainingModel(settings)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    converted, incomplete = from_hugging_face(weights, shapes, family, loaded.config.pad_token_id or 0)
    lacks = [*(name for names in incomplete.values() for name in names)]
    lacks += [name for name, weight in converted.items() if weight.shape != shapes[name]]
    if lacks:
        raise UserError(
            f"{address} lacks {', '.join(lacks[:3])} ({len(lacks)} in all), so it cannot predict tokens",
            fix="give a complete encoder with its MLM head, such as an export of `clozeworks export`",
            code="missing-weights",
        )
    if digest_of(folder) != digest:
        raise UserError(
            f"{address} changed while it was read", fix="start again once it is complete", code="teacher-changed"
        )
    assert config.training.precision != "auto", "with_precision_decided comes first"
    dtype = DTYPES[config.training.precision]
    values = {name: weight.detach().to(dtype, copy=True) for name, weight in converted.items()}
    return _Found(settings.model_dump(), values, num_tokens, digest)


def _check(folder: Path, config: RunConfig, shards: _Shards) -> tuple[PublishedFamily, ModelSettings, int]:
    """Check config.json and the tokenizer; return the family, the architecture, and the number of tokens."""
    family, settings = _architecture(folder, config)
    num_tokens = _check_tokenizer(folder, config, settings, shards)
    for stage in config.stages:
        if is_taught(stage.objectives) and stage.sequence_length > settings.max_position_embeddings:
            raise UserError(
                f"{_address(config)} has {settings.max_position_embeddings:,} positions, and {stage.label} has rows of "
                f"{stage.sequence_length:,} tokens: it was trained on none beyond",
                fix="give a teacher of that length, or train longer rows in a stage without distillation",
                code="teacher-too-short",
            )
    for each in config.all_objectives:
        if each.name == HIDDEN_STATES:
            expected = each.settings.get("teacher_hidden_size", config.model.hidden_size)
            if expected != settings.hidden_size:
                raise UserError(
                    f"{_address(config)} has hidden_size={settings.hidden_size}, and the objective {each.name} expects "
                    f"{expected}",
                    fix=f"set `settings: {{teacher_hidden_size: {settings.hidden_size}}}` of {each.name}",
                    code="other-width-of-teacher",
                )
    return family, settings, num_tokens


def _architecture(folder: Path, config: RunConfig) -> tuple[PublishedFamily, ModelSettings]:
    address, theirs = _address(config), load_config(folder).to_dict()
    family = next((each for each in published_families() if each.name == theirs["model_type"]), None)
    if family is None:
        titles = " or ".join(each.title for each in published_families())
        raise UserError(
            f"{address} is a {theirs['model_type']}, which this project cannot compute",
            fix=f"give a trained {titles}",
            code="other-architecture",
        )
    stated = family.settings_of(theirs)
    values = {_SETTINGS.get(name, name): value for name, value in stated.items() if name not in _DERIVED}
    values |= {"family": family.name, "vocab_size": theirs["vocab_size"], "pad_vocab_size_to_multiple_of": 1}
    values.setdefault("max_position_embeddings", theirs["max_position_embeddings"])
    values["tie_word_embeddings"] = theirs.get("tie_word_embeddings", True)
    values["global_attn_every_n_layers"] = _period(stated)
    try:
        settings = ModelSettings.model_validate(values)
        wrong = [f"{name}={value}" for name, value in stated.items() if getattr(settings, name) != value]
    except ValidationError as error:
        wrong = [first_problem(error)]
    if wrong:
        raise UserError(
            f"{address} is of an architecture that is not computed here: {', '.join(wrong)}",
            fix=f"give a {family.title} as it was published, or an export",
            code="other-architecture",
        )
    return family, settings


def _period(stated: Mapping[str, Any]) -> int:
    """Return n where every n-th layer is global; 1 where all are, or where no number describes the layers."""
    kinds = stated.get("attention_kinds", ())
    fits = (n for n in range(1, len(kinds) + 1) if all((k == "local") == (i % n > 0) for i, k in enumerate(kinds)))
    return next(fits, 1)


def _check_tokenizer(folder: Path, config: RunConfig, settings: ModelSettings, shards: _Shards) -> int:
    """Refuse a teacher whose ids mean other tokens than those of the shards; return the number of tokens."""
    address = _address(config)
    if not any((folder / name).is_file() for name in (INFO_NAME, TOKENIZER_NAME)):
        raise UserError(
            f"{address} has no {TOKENIZER_NAME}, so its ids cannot be compared with the ids of the shards",
            fix="copy the files of its tokenizer into it",
            code="no-tokenizer-of-teacher",
        )
    tokenizer = Tokenizer.load(folder)
    fingerprint, open_tokenizer = shards
    is_same = fingerprint is None or tokenizer.is_named(fingerprint)
    if not is_same and not (open_tokenizer is not None and is_written_again(tokenizer, open_tokenizer())):
        raise UserError(
            f"{address} has a tokenizer with fingerprint {tokenizer.fingerprint}, and the shards were made with "
            f"{fingerprint}: the same ids are other tokens",
            fix="give a teacher that was trained with the tokenizer of the shards, or make shards with the "
            f"teacher's (`clozeworks shards --tokenizer {quote(str(config.teacher))} ...`)",
            code="other-tokenizer",
        )
    if tokenizer.vocab_size > settings.vocab_size:
        raise UserError(
            f"{address} has a tokenizer of {tokenizer.vocab_size:,} tokens and a model of {settings.vocab_size:,}",
            fix="copy both from the same model",
            code="other-tokenizer",
        )
    return tokenizer.vocab_size


def _address(config: RunConfig) -> str:
    return f"teacher={storage.redact(str(config.teacher))}"
