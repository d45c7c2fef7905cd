"""Load a Hugging Face directory as a model: safetensors only, no code of its own, no look-up elsewhere."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from data_prep.base.errors import UserError
from data_prep.tokenizer.untrusted_file import check_steps, panics_as_errors, try_out
from trainer.model.model_folder import INDEX_SUFFIX, check_code, read_config, read_json
from trainer.model.quiet_transformers import quiet_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SAFELY: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
_AS_USED: dict[str, Any] = {"return_dict": True, "output_hidden_states": False, "chunk_size_feed_forward": 0}
"""Outputs and computation that this project needs, in place of the settings of config.json."""
MOST_LAYERS = 1_000
"""A layer of any size takes a millisecond to build."""
MOST_LABELS = 1_000_000
_SMALL_MODEL = 100_000_000
"""Parameters that may be missing in any folder: heads that are yet to be trained."""
_COUNTS = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size", "vocab_size")
_OF_A_MODULE = (".weight", ".bias")
_IMPLEMENTATION = re.compile(r'_implementation\w*":')
_BETWEEN_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")
_OF_A_LAYER = re.compile(r"\blayers?\.\d+\.")
LARGEST_WEIGHT = 1e6
"""No trained encoder has a weight near it; a bit that was changed in an exponent makes 1e38 of one."""


class Opened(NamedTuple):
    """A model of transformers' and what it lacks and leaves of its folder."""

    model: PreTrainedModel
    missing: frozenset[str]
    """Weights of the model that the folder lacks; they are random."""
    left: frozenset[str]
    """Weights of the folder that the model does not have."""


def load_pretrained(
    auto_class: str, folder: Path, purpose: str, **options: Any
) -> tuple[PreTrainedModel, frozenset[str]]:
    """Load a model as `open_pretrained` does; return it and the names of weights that the folder lacks."""
    model, missing, _ = open_pretrained(auto_class, folder, purpose, **options)
    return model, missing


def open_pretrained(auto_class: str, folder: Path, purpose: str, headers_alone: bool = False, **options: Any) -> Opened:
    """Load a model in evaluation mode, float32.

    `auto_class` is one of transformers' (`AutoModel`, `AutoModelForSequenceClassification`), `purpose` says in an
    error what the folder was to be loaded as. With `headers_alone` only the names and shapes of the weights are read,
    and the model has no memory for those that the folder has: all their numbers are one zero.

    Raises:
        UserError: transformers cannot load such a model, a weight is an integer, not finite or implausibly large, or
            there are weights of layers that the model does not have.
    """
    config = load_config(folder, **options)  # whose numbers are looked at, before a model of so many layers is made
    for name, value in _AS_USED.items():
        if hasattr(config, name):
            setattr(config, name, value)
    with quiet_transformers():
        import torch
        import transformers

        auto = getattr(transformers, auto_class)
        try:
            if auto_class.startswith("Auto") and type(config) not in getattr(transformers, _table_of(auto_class)):
                raise UserError(
                    f"{folder} is a {config.model_type} model, which transformers cannot load as {purpose}",
                    fix="give a model of another kind, such as BERT, RoBERTa or ModernBERT",
                    code="model-not-loadable",
                )
            _check_kinds(folder)
            _check_size(auto, config, folder)
            model, info = auto.from_pretrained(
                None if headers_alone else str(folder),
                config=config,
                state_dict=_zeros_of(folder) if headers_alone else None,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below with their names
                dtype=torch.float32,
                **SAFELY,
            )
        except UserError:
            raise
        except Exception as error:  # a file from elsewhere makes the libraries raise whatever there is
            raise _cannot_load(folder, purpose, error) from error
    if info["mismatched_keys"]:
        name, there, described = min(info["mismatched_keys"])
        shapes = f"{name} is {tuple(there)}, and {tuple(described)} by config.json"
        raise _cannot_load(folder, purpose, ValueError(shapes))
    if not headers_alone:
        _check_finite(model, folder)
    left_over = sorted(name for name in info["unexpected_keys"] if _OF_A_LAYER.search(name))
    if left_over:
        raise UserError(
            f"{folder} has weights of layers that its config.json does not describe ({', '.join(left_over[:3])})",
            fix="copy configuration and weights from the same model",
            code="weights-do-not-match",
        )
    return Opened(model.eval(), frozenset(info["missing_keys"]), frozenset(info["unexpected_keys"]))


def _table_of(auto_class: str) -> str:
    """Return the name of transformers' table of the configurations that an Auto class takes.

    That of AutoModelForMaskedLM is MODEL_FOR_MASKED_LM_MAPPING.
    """
    return f"{_BETWEEN_WORDS.sub('_', auto_class.removeprefix('Auto')).upper()}_MAPPING"


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers reads the weights of a checked folder from; some may not be there."""
    name = read_config(folder).get("transformers_weights") or "model.safetensors"
    index = name if name.endswith(INDEX_SUFFIX) else f"model{INDEX_SUFFIX}"
    if name != index and ((folder / name).is_file() or not (folder / index).is_file()):
        return [folder / name]
    return [folder / each for each in sorted({*read_json(folder / index)["weight_map"].values()})]


def refuse_random_weights(missing: frozenset[str], folder: Path, purpose: str, but: Sequence[str] = ()) -> None:
    """Refuse a folder that lacks weights, which would be random: it was trained as something else.

    `but` are parts of names that may be missing, since they are not used or are yet to be trained.

    Raises:
        UserError: naming some of them.
    """
    random = sorted(name for name in missing if not any(part in name for part in but))
    if random:
        raise UserError(
            f"{folder} lacks {', '.join(random[:3])} ({len(random)} in all), so as {purpose} it would "
            "have random weights",
            fix=f"give a model that was trained as {purpose}",
            code="missing-weights",
        )


def load_config(folder: Path, attn_implementation: str | None = None, **options: Any) -> Any:
    """Load the configuration of a folder, with `options` in place of the values there.

    What config.json says of the implementation of attention and experts is not used: a value such as "owner/name"
    makes transformers fetch code of that name, where the package `kernels` is installed.

    Raises:
        UserError: transformers cannot read it, it needs code from elsewhere, or a number in it is impossible.
    """
    check_code(folder)
    num_labels = read_config(folder).get("num_labels", 2)
    if isinstance(num_labels, int) and num_labels > MOST_LABELS:  # a name is made for each
        raise UserError(
            f"{folder / 'config.json'} has num_labels={num_labels!r:.40}, more than {MOST_LABELS:,}",
            fix="correct the file, or copy or export the model again",
            code="invalid-model-config",
        )
    with quiet_transformers():
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(str(folder), **SAFELY, **options)
        except Exception as error:  # as above
            raise _cannot_load(folder, "a model", error) from error
    config._attn_implementation, config._experts_implementation = attn_implementation, None
    vars(config).pop("auto_map", None)  # not used (`check_code`), and not to be saved with a fitted model
    _check_numbers(config, folder)
    return config


def is_used_as_written(folder: Path) -> bool:
    """Return whether transformers alone, with the folder's config.json, makes the model that `load_pretrained` makes.

    It would compute otherwise if config.json names an implementation of attention or experts, or other outputs.
    """
    values = read_config(folder)
    return not _IMPLEMENTATION.search(json.dumps(values)) and all(
        values.get(name, used) == used for name, used in _AS_USED.items()
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder; it reads "[MASK]" and the like in a text as special tokens.

    Raises:
        UserError: transformers cannot read it, or its ids exceed the model's vocabulary.
    """
    # Before the tokenizer is made, for which transformers reads it too.
    vocab_size = getattr(load_config(folder), "vocab_size", None) if (folder / "config.json").is_file() else None
    check_code(folder)
    file = folder / "tokenizer.json"
    if file.is_file():
        check_steps(file.read_bytes(), str(file))
    with quiet_transformers():
        from transformers import AutoTokenizer

        try:
            with panics_as_errors(str(file)):
                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), **SAFELY)
                _ = tokenizer.all_special_ids  # loops forever if the unknown token is not in the vocabulary
                if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
                    try_out(backend)
                written = [*tokenizer("")["input_ids"], *tokenizer([("", "")])["input_ids"][0]]  # by the post-processor
        except UserError:
            raise
        except Exception as error:  # as above; tokenizers raises plain `Exception`
            raise _cannot_load(folder, "a tokenizer", error) from error
    _check_ids(tokenizer, written, vocab_size, folder)
    return tokenizer


def _check_numbers(config: Any, folder: Path) -> None:
    """Refuse numbers with which libraries build endlessly, fail when the model is used, or return NaN silently."""
    values = {**config.to_dict(), **{name: getattr(config, name, None) for name in _COUNTS}}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        most = MOST_LAYERS if name == "num_hidden_layers" else math.inf
        if value != value or abs(value) == math.inf:
            rule = "a finite number"
        elif name in _COUNTS and not 1 <= value <= most:
            rule = f"an integer from 1 to {most:,}" if most < math.inf else "an integer of at least 1"
        elif name.endswith(("_eps", "_dropout", "_dropout_prob")) and not 0 <= value <= 1:
            rule = "a number from 0 to 1"
        else:
            continue
        raise UserError(
            f"{folder / 'config.json'} has {name}={value!r:.40}, which must be {rule}",
            fix="correct the file, or copy or export the model again",
            code="invalid-model-config",
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of weights, whose header must agree with its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except SafetensorError as error:
        raise UserError(
            f"{path} is not a whole file of weights ({error})",
            fix="copy, export or register the model again",
            code="damaged-model",
        ) from None


def _check_kinds(folder: Path) -> None:
    """Refuse integers as weights: transformers reads the numbers of a quantized file without their scales."""
    for path in sorted(folder.glob("*.safetensors")):
        with _opened(path) as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}
        integers = [name for name, kind in kinds.items() if name.endswith(_OF_A_MODULE) and kind[0] in "IU"]
        if integers:
            raise UserError(
                f"{path} has integers in {', '.join(integers[:3])} ({len(integers)} in all), not trained numbers",
                fix="give the model as it was before it was quantized",
                code="weights-are-integers",
            )


def _zeros_of(folder: Path) -> dict[str, Any]:
    """Return a tensor without memory in the shape of each weight of a folder, by name."""
    import torch

    zeros: dict[str, Any] = {}
    for path in weight_files(folder):
        with _opened(path) as file:
            zeros |= {name: torch.zeros(()).expand(file.get_slice(name).get_shape()) for name in file.keys()}
    return zeros


def _check_size(auto: Any, config: Any, folder: Path) -> None:
    """Refuse a model of many times the weights that the folder has: the missing ones would be made at random.

    `auto` is one of transformers' Auto classes, or a model class, as of the beginning of a run.
    """
    import torch

    with torch.device("meta"):
        make = auto.from_config if hasattr(auto, "from_config") else auto._from_config
        model = make(copy.deepcopy(config))
    described = sum(parameter.numel() for parameter in model.parameters())
    there = sum(path.stat().st_size for path in folder.glob("*.safetensors"))  # at least one byte per number
    if described > 4 * there + _SMALL_MODEL:
        raise UserError(
            f"{folder / 'config.json'} describes a model of {described:,} parameters, and the weights have {there:,} "
            "bytes",
            fix="copy configuration and weights from the same model",
            code="weights-do-not-match",
        )


def _check_finite(model: PreTrainedModel, folder: Path) -> None:
    """Refuse weights that are not finite, or so large that products of them are not: all outputs would be NaN."""
    for name, weight in model.named_parameters():
        if not (weight.abs() <= LARGEST_WEIGHT).all():
            what = "not finite (NaN, infinity)" if not weight.isfinite().all() else f"beyond {LARGEST_WEIGHT:g}"
            raise UserError(
                f"{folder} has values in {name} that are {what}: its training diverged, or the file is damaged",
                fix="use an earlier checkpoint, or another model",
                code="weights-not-finite",
            )


def _check_ids(
    tokenizer: PreTrainedTokenizerBase, written: Sequence[int], vocab_size: int | None, folder: Path
) -> None:
    added = tokenizer.get_added_vocab().keys() - set(tokenizer.all_special_tokens)  # of which a text may have none
    of_pieces = (number for piece, number in tokenizer.get_vocab().items() if piece not in added)
    highest = max([*of_pieces, *written], default=0)
    if vocab_size is not None and highest >= vocab_size:
        raise UserError(
            f"{folder} has a tokenizer with ids up to {highest:,} and a model with vocab_size={vocab_size:,}",
            fix="copy both from the same model",
            code="other-tokenizer",
        )


def _cannot_load(folder: Path, purpose: str, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:300]
    return UserError(
        f"{folder} cannot be loaded as {purpose} ({reason})",
        fix="copy, export or register the model again",
        code="model-not-loadable",
    )
