"""Initialize from trained weights: a Hugging Face checkpoint of a published family becomes the weights of a new run.

Rank 0 reads a local folder, which `trainer/api.py` finds, and broadcasts the weights, so only it needs the folder.
transformers loads them: it knows old names of weights, sharded files and models without heads. Only safetensors are
read. Parameters that the checkpoint lacks keep their initial values and are listed. Rows that pad the vocabulary get a
bias of `SHUT`, so the first loss is that of the checkpoint; a decoder without a bias gets no such rows. If the
checkpoint has a tokenizer, the shards must have the same one. What `adopt` names may differ
(`trainer/checkpoint/adoption.py`); any other difference is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import numpy as np
import torch

from data_prep.base.errors import UserError
from data_prep.storage import storage
from data_prep.tokenizer.foreign_files import TOKENIZER_NAME
from data_prep.tokenizer.foreign_tokenizer import ForeignTokenizer, is_foreign, is_written_again
from data_prep.tokenizer.tokenizer import INFO_NAME, Tokenizer
from trainer.checkpoint.adoption import (
    FOLLOWS_COUNTS,
    WORDS,
    Adoption,
    TokenMap,
    Weights,
    describe_positions,
    describe_size,
    tiling_obstacles,
    token_map,
)
from trainer.config.custom_code import is_custom
from trainer.config.families.family import PublishedFamily
from trainer.config.families.registry import published_families
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import HIDDEN_STATES, MASKED_LM_ALONE, OF_TOKENS, Objectives
from trainer.config.run_config import Adoptable, RunConfig
from trainer.config.stages import ROPE_BASES
from trainer.distributed.process_group import Ranks, broadcast_object
from trainer.model.hugging_face import family_in_transformers, from_hugging_face
from trainer.model.model_folder import data_lineage, read_provenance, teachers
from trainer.model.pretrained import Opened, load_config, open_pretrained, weight_files
from trainer.objectives.pretraining import PretrainingModel

SHUT = -10_000.0
"""Bias of a row that only pads the vocabulary: its probability is 0 in every precision, and so is its gradient."""

MOST_DROPPED = 8
"""Tensors that a line names."""

_ITEMS: dict[str, Adoptable] = {
    "hidden_size": "size",
    "num_hidden_layers": "size",
    "num_attention_heads": "size",
    "key_value_heads": "size",
    "intermediate_size": "size",
    "global_rope_theta": "rope",
    "local_rope_theta": "rope",
    "max_position_embeddings": "positions",
}
"""What of the architecture may differ, and the item of `adopt` that allows it."""
_SETTINGS = {"key_value_heads": "num_key_value_heads"}
"""The setting of a value that has a default of its own."""


class Wanted(NamedTuple):
    """What the initial weights must fit beside the model, and what may differ."""

    tokenizer_fingerprint: str | None = None
    """Fingerprint of the shards' tokenizer; None compares nothing."""
    open_tokenizer: Callable[[], Tokenizer] | None = None
    """Returns that tokenizer; called where another one is adopted."""
    adopt: tuple[Adoptable, ...] = ()
    token_counts: Callable[[], np.ndarray] | None = None
    """Returns how often each token of that tokenizer occurs in the training data, (vocab_size,); called on rank 0 where
    another tokenizer is adopted. None: unknown."""
    rope_bases: Mapping[str, float] = MappingProxyType({})
    """Bases of the first stage that are not those of the model, by name."""


ANY_TOKENIZER = Wanted()
"""The tokenizer is not compared, and nothing may differ."""


def wanted_of(
    config: RunConfig,
    tokenizer_fingerprint: str | None,
    open_tokenizer: Callable[[], Tokenizer],
    token_counts: Callable[[], np.ndarray],
) -> Wanted:
    """Return what the initial weights of a run must fit; the arguments are those of `Wanted`."""
    first = next(iter(config.training.stages or ()), None)
    bases = {name: base for name in ROPE_BASES if (base := getattr(first, name, None)) is not None}
    own = {name: base for name, base in bases.items() if base != getattr(config.model, name)}
    return Wanted(tokenizer_fingerprint, open_tokenizer, config.adopt, token_counts, own)


class InitialWeights(NamedTuple):
    """Facts about the initial weights of a run."""

    notes: list[str]
    """Lines for the log."""
    data_lineage: tuple[str, ...]
    """Manifest digests of the data that the weights saw; empty if the provenance has none."""
    adopted: tuple[str, ...] = ()
    """How the weights were made of others, a line for each item of `adopt`."""
    teachers: tuple[str, ...] = ()
    """sha256 of every teacher of the weights, in order; empty if the provenance has none."""


class _Checked(NamedTuple):
    """What config.json and the tokenizer of a checkpoint say."""

    family: PublishedFamily
    adoption: Adoption
    adopted: tuple[str, ...]
    """What each item of `adopt` does."""
    note: str | None
    """Why the tokenizer could not be checked."""


class _Found(NamedTuple):
    """The result of reading on rank 0: our parameters by name, perhaps with fewer vocabulary rows, or the error."""

    weights: dict[str, torch.Tensor]
    dropped: tuple[str, ...] = ()
    """Tensors of the checkpoint of which nothing is used, by transformers' names."""
    data_lineage: tuple[str, ...] = ()
    adopted: tuple[str, ...] = ()
    teachers: tuple[str, ...] = ()
    note: str | None = None
    error: UserError | None = None


def load_initial_weights(
    model: PretrainingModel,
    source: str,
    find_folder: Callable[[], Path],
    ranks: Ranks,
    wanted: Wanted = ANY_TOKENIZER,
) -> InitialWeights:
    """Put the weights of `source` into `model` (fp32, on the CPU), all ranks together.

    Args:
        source: what `init_from` names, for messages.
        find_folder: returns the local folder of `source`, checked; called on rank 0 alone.
        wanted: the tokenizer of the shards, and what may differ.

    Raises:
        UserError: `source` does not exist, is not a checkpoint of a published family, has another architecture than
            the model or another tokenizer than the shards and `adopt` does not name it, or cannot be adopted.
    """
    own = _read_or_explain(model, source, find_folder, wanted) if ranks.is_first else None
    outcome = broadcast_object(own, ranks)
    if outcome.error is not None:
        raise outcome.error
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in outcome.weights.items():
            parameters[name][: len(weight)].copy_(weight)
        # Those of the checkpoint's rows that only pad are as trained; a decoder without a bias pads the same.
        num_rows = len(outcome.weights[WORDS])
        is_of_tokens = not model.objectives.keys().isdisjoint(OF_TOKENS)
        if is_of_tokens and (bias := parameters.get("mlm_head.bias")) is not None:
            # With an adopted tokenizer no row from its number on is of a token; else model.vocab_size may say more.
            bias[num_rows if "tokenizer" in wanted.adopt else max(num_rows, model.config.vocab_size) :] = SHUT
    rows = {name: len(weight) for name, weight in outcome.weights.items()}
    count, *others = _describe_tensors(rows, parameters, outcome.dropped)
    lines = [f"initializing from {storage.redact(source)}: {count}", *others]
    lines += [f"adopting {line}" for line in outcome.adopted]
    lines += [outcome.note] if outcome.note else []
    return InitialWeights(lines, outcome.data_lineage, outcome.adopted, outcome.teachers)


def look_at_initial_weights(
    config: ModelSettings,
    source: str,
    find_folder: Callable[[], Path | None],
    wanted: Wanted = ANY_TOKENIZER,
    objectives: Objectives = MASKED_LM_ALONE,
) -> list[str]:
    """Describe what `load_initial_weights` would load, copy, make and drop, by the names and shapes of the weights.

    `find_folder` returns a folder that may lack the weights, or None if `source` exists and is not downloaded.

    Raises:
        UserError: `source` would be refused: it does not exist, config.json or the tokenizer differs, or a tensor is
            missing or has another shape.
    """
    address = storage.redact(source)
    family_in_transformers(config, next_sentence=False)
    folder = find_folder()
    if folder is None:
        return [f"{address} exists; the run checks whether it fits this model"]
    checked = _check(folder, source, config, wanted)
    found, family = load_config(folder).model_type, checked.family.name
    becomes = "" if found == family else f", and its weights are converted to {family}"
    lines = [f"{address} is a {found} of {'an adoptable' if wanted.adopt else 'this'} architecture{becomes}"]
    if all(path.is_file() for path in weight_files(folder)):
        with torch.device("meta"):
            model = PretrainingModel(config, objectives)
        fresh = _parameters_of_published_models(model)
        converted, dropped = _convert(_open(checked, folder, headers_alone=True), checked, fresh, source)
        rows = checked.adoption.rows(converted, fresh)
        count, *others = _describe_tensors(rows, dict(model.named_parameters()), dropped)
        lines += [f"initializes {count}", *others]
    else:
        lines.append("its weights are not downloaded; the run checks its tensors")
    lines += [f"adopts {line}" for line in checked.adopted]
    return lines + ([checked.note] if checked.note else [])


def _read_or_explain(model: PretrainingModel, source: str, find_folder: Callable[[], Path], wanted: Wanted) -> _Found:
    """Read the weights, or return the error, which has to reach the ranks that wait for the weights."""
    try:
        return _read(model, source, find_folder(), wanted)
    except UserError as error:
        return _Found({}, error=error)


def _parameters_of_published_models(model: PretrainingModel) -> dict[str, torch.Tensor]:
    """Return all parameters by name but those of the user's own objectives, and what learns from a teacher alone."""
    others = [each for name, each in model.objectives.items() if is_custom(name) or name == HIDDEN_STATES]
    left_out = {name for each in others for name, _ in each.named_children()}
    return {name: each.detach() for name, each in model.named_parameters() if name.partition(".")[0] not in left_out}


def _read(model: PretrainingModel, source: str, folder: Path, wanted: Wanted) -> _Found:
    checked = _check(folder, source, model.config, wanted)
    adoption, fresh = checked.adoption, _parameters_of_published_models(model)
    if adoption.tokens is not None and wanted.token_counts is not None:
        adoption = adoption._replace(token_counts=wanted.token_counts())
    converted, dropped = _convert(_open(checked, folder), checked, fresh, source)
    provenance = read_provenance(folder)
    origin = data_lineage(provenance), checked.adopted, teachers(provenance)
    return _Found(adoption.apply(converted, fresh), dropped, *origin, checked.note)


def _open(checked: _Checked, folder: Path, headers_alone: bool = False) -> Opened:
    family = checked.family
    decoder = family.decoders.get(load_config(folder).model_type)
    class_name = decoder or family.pairs_class or family.masked_lm_class
    return open_pretrained(class_name, folder, "the beginning of a run (init_from)", headers_alone)


def _convert(
    opened: Opened, checked: _Checked, fresh: Weights, source: str
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return our parameters of the checkpoint, and transformers' names of those that become none of ours.

    Raises:
        UserError: the checkpoint lacks a weight of the encoder.
    """
    family, names = checked.family, checked.adoption.names(fresh)
    device = fresh[WORDS].device  # meta where only headers were read
    there = opened.model.state_dict()
    weights = {name: weight.to(device) for name, weight in there.items() if name not in opened.missing}
    pad_token_id = opened.model.config.pad_token_id or 0
    converted, incomplete = from_hugging_face(weights, names, family, pad_token_id)
    if of_encoder := [names for name, names in incomplete.items() if name.startswith("encoder.")]:
        raise UserError(
            f"init_from={storage.redact(source)} lacks {', '.join(of_encoder[0])} of the encoder",
            fix="give a complete checkpoint of this architecture",
            code="missing-weights",
        )
    used = {each for name in converted for each in family.tensor_names(name)}
    every = dict(opened.model.named_parameters(remove_duplicate=False))
    used |= {name for name, weight in every.items() if id(weight) in {id(every[each]) for each in used & every.keys()}}
    return converted, tuple(
        sorted((every.keys() & weights.keys() | opened.left) - used)
    )  # a tied one has several names


def _describe_tensors(rows: Mapping[str, int], parameters: Weights, dropped: Sequence[str]) -> list[str]:
    """Return how many tensors are of the checkpoint, which are new, and which of the checkpoint are dropped.

    Args:
        rows: the rows of each parameter that the checkpoint fills.
        parameters: those of the model.
        dropped: transformers' names.
    """
    partial = {name: len(parameters[name]) for name, number in rows.items() if number < len(parameters[name])}
    fresh = [name for name in parameters if name not in rows]
    fresh += [f"{name} from row {rows[name]:,} of {number:,}" for name, number in partial.items()]
    lines = [f"{len(rows)} of {len(parameters)} tensors"]
    lines += [f"newly initialized (missing there): {', '.join(fresh)}"] if fresh else []
    more = f" and {len(dropped) - MOST_DROPPED:,} more" if len(dropped) > MOST_DROPPED else ""
    return lines + ([f"dropped (not in this model): {', '.join(dropped[:MOST_DROPPED])}{more}"] if dropped else [])


def _check(folder: Path, source: str, config: ModelSettings, wanted: Wanted) -> _Checked:
    """Check config.json and the tokenizer; find out what each item of `adopt` does."""
    family, old = _check_architecture(folder, source, config, wanted)
    tokens, note = _compare_tokenizers(folder, source, config.padded_vocab_size, wanted)
    lines: dict[Adoptable, list[str]] = {item: [] for item in wanted.adopt}
    if "tokenizer" in lines:
        num_rows = load_config(folder).vocab_size if tokens is None else len(tokens.copied)
        has_counts = config.decoder_bias and wanted.token_counts is not None
        described = [] if tokens is None else [tokens.describe(), *([FOLLOWS_COUNTS] if has_counts else [])]
        lines["tokenizer"] = described + _describe_padding(num_rows, config)
    if "size" in lines:
        lines["size"] = describe_size(old, config)
    if "rope" in lines:
        first = {name: wanted.rope_bases.get(name, getattr(config, name)) for name in ROPE_BASES}
        changed = [
            f"{_setting_of(name, wanted)} from {getattr(old, name):,g} to {base:,g}"
            for name, base in first.items()
            if getattr(old, name) != base
        ]
        used = [name for name in first if name != "local_rope_theta" or "local" in config.attention_kinds]
        same = [f"{_setting_of(name, wanted)} is {first[name]:,g} there already" for name in used]
        lines["rope"] = changed or same
    if "positions" in lines:
        before, after = old.max_position_embeddings, config.max_position_embeddings
        is_rotary = config.position_embedding == "rotary"
        if is_rotary:  # no part of the architecture, so `old` has those of the new model
            before = load_config(folder).max_position_embeddings
        if before == after:
            lines["positions"] = [f"model.max_position_embeddings is {after:,} there already"]
        elif is_rotary:
            change = f"from {before:,} to {after:,}"
            lines["positions"] = [f"model.max_position_embeddings {change}; rotary ones have no weights"]
        else:
            lines["positions"] = [describe_positions(old, config)]
    unread = {"tokenizer"} if note else set[str]()
    adopted = [f"{item}: {'; '.join(lines[item] or ['nothing differs'])}" for item in lines if item not in unread]
    return _Checked(family, Adoption(old, config, tokens), tuple(adopted), note)


def _describe_padding(num_rows: int, config: ModelSettings) -> list[str]:
    """Say which rows of the vocabulary are of no token and are predicted all the same; a decoder's bias shuts them."""
    if config.decoder_bias or config.padded_vocab_size <= num_rows:
        return []
    return [
        f"rows {num_rows:,} to {config.padded_vocab_size - 1:,} of the vocabulary are of no token and random, and stay "
        "in the softmax, which a decoder without a bias cannot close to them"
    ]


def _compare_tokenizers(
    folder: Path, source: str, most_rows: int, wanted: Wanted
) -> tuple[TokenMap | None, str | None]:
    """Refuse weights whose ids mean other tokens than those of the shards, or return where the rows come from.

    The second result is a note if that cannot be checked.
    """
    address, expected, adopts = storage.redact(source), wanted.tokenizer_fingerprint, "tokenizer" in wanted.adopt
    if expected is None:
        return None, "the tokenizers are compared once the shards can be read" if adopts else None
    if not any((folder / name).is_file() for name in (INFO_NAME, TOKENIZER_NAME)):
        if adopts:
            raise UserError(
                f"init_from={address} has no {TOKENIZER_NAME}, so the tokens of its embeddings are unknown",
                fix="copy the files of its tokenizer into it, or remove tokenizer from adopt if the shards have the "
                "same ids",
                code="no-tokenizer-to-adopt",
            )
        return None, f"{address} has no {TOKENIZER_NAME}: its ids cannot be compared with the ids of the shards"
    theirs = load_config(folder)
    is_of_decoder = any(theirs.model_type in each.decoders for each in published_families()) and is_foreign(str(folder))
    tokenizer = ForeignTokenizer.open(str(folder), is_of_decoder=True) if is_of_decoder else Tokenizer.load(folder)
    num_rows = theirs.vocab_size
    is_same = tokenizer.is_named(expected) or (
        wanted.open_tokenizer is not None and is_written_again(tokenizer, wanted.open_tokenizer())
    )
    if is_same and num_rows <= most_rows:
        return None, None
    if not adopts:
        raise UserError(
            f"init_from={address} has a tokenizer with fingerprint {tokenizer.fingerprint}, and the shards were made "
            f"with {expected}: the same ids are other tokens",
            fix=f"make shards with its tokenizer (`clozeworks shards --tokenizer {quote(str(address))} ...`), give "
            f"another checkpoint, or add tokenizer to adopt ({_setting(wanted.adopt, ['tokenizer'])})",
            code="other-tokenizer",
        )
    if tokenizer.vocab_size > num_rows:
        raise UserError(
            f"init_from={address} has a tokenizer of {tokenizer.vocab_size:,} tokens and a model of {num_rows:,}",
            fix="copy both from the same model",
            code="other-tokenizer",
        )
    assert wanted.open_tokenizer is not None
    return token_map(tokenizer, wanted.open_tokenizer()), None


def _check_architecture(
    folder: Path, source: str, config: ModelSettings, wanted: Wanted
) -> tuple[PublishedFamily, ModelSettings]:
    """Return the family of both sides, and `config` with the sizes, bases and positions of the checkpoint.

    config.json must agree with `config`, and with the bases of the first stage, but for what `wanted.adopt` names.
    """
    address, adopt = storage.redact(source), wanted.adopt
    config = config.model_copy(update=dict(wanted.rope_bases))
    family = family_in_transformers(config, next_sentence=False)
    theirs: dict[str, Any] = load_config(folder).to_dict()
    if theirs["model_type"] not in (family.name, *family.decoders):
        known = published_families()
        titles = " or ".join(each.title for each in known)
        decoders = (f"{' or '.join(each.decoders.values())} as {each.name}" for each in known if each.decoders)
        raise UserError(
            f"init_from={address} is a {theirs['model_type']}, and the model is a {family.name} "
            f"(model.family={config.family})",
            fix=f"give a checkpoint of {titles} (a {', '.join(decoders)}), and set model.family to its family",
            code="other-architecture",
        )
    settings = family.settings_of(theirs)
    numbers = {name: value for name, value in settings.items() if name in _ITEMS and isinstance(value, int | float)}
    old = config.model_copy(update={_SETTINGS.get(name, name): value for name, value in numbers.items()})
    differences = [
        (
            f"{_setting_of(name, wanted)} is {getattr(config, name)} and there {value}",
            _ITEMS.get(name) if name in numbers else None,
        )
        for name, value in settings.items()
        if getattr(config if name in numbers else old, name) != value  # others may follow from those numbers
    ]
    if theirs["vocab_size"] > config.padded_vocab_size:
        differences.append((f"model.vocab_size is {config.vocab_size} and there {theirs['vocab_size']}", "tokenizer"))
    if not config.decoder_bias and config.padded_vocab_size > max(config.vocab_size, theirs["vocab_size"]):
        more = (
            f"model.pad_vocab_size_to_multiple_of={config.pad_vocab_size_to_multiple_of} adds rows to the "
            f"{theirs['vocab_size']} there, which a decoder without a bias cannot keep out of the softmax"
        )
        differences.append((more, "tokenizer"))
    if theirs.get("tie_word_embeddings", True) != config.tie_word_embeddings:
        kinds = ("a matrix of its own", "the word matrix")
        ours, there = kinds[config.tie_word_embeddings], kinds[not config.tie_word_embeddings]
        differences.append((f"the MLM decoder is {ours} and there {there} (model.tie_word_embeddings)", None))
    refused = [(text, item) for text, item in differences if item not in adopt]
    if refused:
        missing = [item for item in get_args(Adoptable) if item in {item for _, item in refused}]
        allowed = f", or add {', '.join(missing)} to adopt ({_setting(adopt, missing)})"
        raise UserError(
            f"init_from={address} is of another architecture: {'; '.join(text for text, _ in refused)}",
            fix="set these settings as in the checkpoint, or give another checkpoint"
            + (allowed if all(item for _, item in refused) else ""),
            code="other-architecture",
        )
    if obstacles := tiling_obstacles(old, config):
        raise UserError(
            f"init_from={address} cannot be tiled to this size: {'; '.join(obstacles)}",
            fix="choose sizes that are at least as large, with the same head size, or give another checkpoint",
            code="size-not-tileable",
        )
    return family, old


def _setting_of(name: str, wanted: Wanted) -> str:
    """Return the setting of a value of the architecture by its name."""
    section = "training.stages.0" if name in wanted.rope_bases else "model"
    return f"{section}.{_SETTINGS.get(name, name)}"


def _setting(adopt: tuple[Adoptable, ...], missing: Sequence[Adoptable]) -> str:
    """Return the setting that adopts these items too."""
    return f"adopt=[{','.join((*adopt, *missing))}]"
