"""Checks of a Hugging Face directory: is it safe to load; its digest, its card, its configuration, its provenance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import regex
from pydantic import BaseModel, Field, ValidationError

from data_prep.base.errors import UsageError, UserError
from data_prep.base.validation import first_problem
from data_prep.storage import storage
from trainer.config.families.registry import published_families

FINETUNE_FILE = "finetune.json"  # of fitted models alone
CARD_FILE = "README.md"
CONFIG_FILES = ("config.json", "tokenizer_config.json")
MODULES_FILE = "modules.json"  # of sentence-transformers
INDEX_SUFFIX = ".safetensors.index.json"
FITTED_CLASSES = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
_OTHER_FOLDERS = {"manifest.json": "a data set", "tokenizer.json": "a tokenizer", "tokenizer.model": "a tokenizer"}
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".msgpack", ".h5", ".pyd")

PROVENANCE_FILE = "provenance.json"
FILES_SHA256 = "files_sha256"
"""Field of the provenance with `file_digests`: what passed the checks of an export, or was scored."""
ADAPTER_FILE = "adapter_config.json"
_CODE_FIELDS = {  # found in transformers 5.17 to 5.23: configuration_utils, pipelines, quantizers, dynamic_module_utils
    "auto_map": "code of its own",
    "custom_pipelines": "a pipeline of its own",
    "quantization_config": "the code of a quantization library",
}
"""Fields of a configuration that bring in code, and what that is. `attn_implementation` and `experts_implementation`
may name code of the Hub too, and are not used (`trainer/model/pretrained.py::load_config`)."""

_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_UNREADABLE_NAMES = r"[#%?\\\p{Cc}\p{Cs}]"
"""In a file's name MLflow takes these and cannot read them back."""


def check_model_folder(folder: Path, strict: bool = False, name: str | None = None) -> None:
    """Refuse a directory without a model, with weights elsewhere or only as pickles, or that needs code of its own.

    With `strict`, for what goes into a registry or comes from one, it must contain no pickle and no code at all.

    Raises:
        UserError: naming what was found; `name` is what the user called the folder.
    """
    name = name or str(folder)
    if not (folder / "config.json").is_file():
        other = next((what for file, what in _OTHER_FOLDERS.items() if (folder / file).is_file()), None)
        raise UsageError(
            f"{name} is {other}, not a model"
            if other
            else f"{name} has no config.json, so it is not a Hugging Face directory",
            fix=f"give {folder / 'model'}"
            if (folder / "model" / "config.json").is_file()  # the output directory of `clozeworks finetune`
            else "give a directory that `clozeworks export` wrote, or the copy of a model from the Hub",
            code="not-a-model-folder",
        )
    check_code(folder, name, strict)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    _check_weight_names(folder, name)
    pickles = [path.name for path in files if path.suffix.lower() in PICKLE_SUFFIXES]
    if not any(path.suffix == ".safetensors" for path in files if path.parent == folder):
        only_pickles = f" (only {', '.join(pickles)}, and a pickle can run code)" if pickles else ""
        raise UserError(
            f"{name} has no .safetensors weights{only_pickles}",
            fix="save the model as safetensors (save_pretrained does)",
            code="weights-not-safetensors",
        )
    unwanted = pickles + [path.name for path in files if path.suffix == ".py"]
    if strict and unwanted:
        raise UserError(
            f"{name} contains {', '.join(unwanted)}, which can run code",
            fix="remove these files; the weights as .safetensors are enough",
            code="code-in-model",
        )


def check_code(folder: Path, name: str | None = None, strict: bool = False) -> None:
    """Refuse a folder whose configuration makes transformers run code, or load weights, from elsewhere.

    The published EuroBERT names code of its own (`auto_map`) although transformers has its class. With
    `trust_remote_code=False`, transformers then loads its own class and neither reads nor fetches that code, so for the
    families of this project the field is not a reason to refuse, unless `strict`.

    Raises:
        UserError: naming the field and its file; `name` is what the user called the folder.
    """
    name = name or str(folder)
    for config in CONFIG_FILES:
        values = read_json(folder / config)
        if not strict and config == "config.json" and isinstance(values, dict) and values.get("model_type") in _known():
            values = {key: value for key, value in values.items() if key != "auto_map"}
        field = _first_code_field(values)
        if field is not None:
            raise UserError(
                f"{name} needs {_CODE_FIELDS[field]} ({field} in {config}), which is never run here",
                fix="export or save the model without it",
                code="code-in-model",
            )
    if (folder / ADAPTER_FILE).is_file():
        raise UserError(
            f"{name} is an adapter ({ADAPTER_FILE}), whose base model transformers would load from elsewhere",
            fix="merge the adapter into its base model (merge_and_unload of the package peft) and save that",
            code="code-in-model",
        )


def _known() -> list[Any]:
    """Return the values of `model_type` for which transformers' own classes are used."""
    return [each for family in published_families() for each in (family.name, *family.decoders)]


def _first_code_field(values: Any) -> str | None:
    """Return the first field that names code, at any depth (a model may have several configurations in one)."""
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            for name, inner in value.items():
                if name in _CODE_FIELDS and isinstance(inner, dict | list | str):  # a label may have any name
                    return str(name)
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    return None


@dataclass(frozen=True)
class VectorRule:
    """How a folder of sentence-transformers makes the vector of a text of the last hidden states."""

    pooling: str
    """`mean` or `cls`."""
    is_unit: bool = False
    """Whether vectors have length 1."""
    max_length: int | None = None
    """Tokens to which a text is truncated, if the folder says it."""


def read_vectors(folder: Path) -> VectorRule | None:
    """Return how a folder of sentence-transformers makes vectors; None for any other folder.

    Raises:
        UserError: it does it in a way that this project does not know.
    """
    try:
        modules = json.loads((folder / MODULES_FILE).read_text(encoding="utf-8"))
        kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
        places = [str(module["path"]) for module in modules]
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, TypeError, KeyError):
        kinds, places = [], []
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]) or places[0] not in ("", "."):
        raise _unknown_vectors(folder, f"the modules {', '.join(kinds) or 'of an unknown form'}")
    pooling = read_json(folder / places[1] / "config.json")
    named = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
    others = [key for key in pooling if key.startswith("pooling_mode_") and key not in named and pooling[key]]
    modes = [name for key, name in named.items() if pooling.get(key)] + others
    given = pooling.get("pooling_mode", modes[0] if len(modes) == 1 else modes)
    if given not in ("mean", "cls"):
        raise _unknown_vectors(folder, f"the pooling {given}")
    if read_json(folder / "config_sentence_transformers.json").get("default_prompt_name") is not None:
        raise _unknown_vectors(folder, "a prompt before every text")
    length = read_json(folder / "sentence_bert_config.json").get("max_seq_length")
    is_length = isinstance(length, int) and not isinstance(length, bool) and length > 0
    return VectorRule(str(given), "Normalize" in kinds, length if is_length else None)


def _unknown_vectors(folder: Path, what: str) -> UserError:
    return UserError(
        f"{folder} has {what}, but vectors here come only from mean or cls pooling of hidden states",
        fix="use sentence-transformers, or give another model",
        code="unknown-vectors",
    )


def check_registrable(folder: Path) -> None:
    """Check a directory before anything is sent: that it is safe, and that MLflow gives back what it takes.

    Raises:
        UserError: it is not a safe model directory, or has names or links that MLflow cannot read back.
    """
    check_model_folder(folder, strict=True)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() and not path.is_file():
            raise UserError(
                f"{folder} contains the link {name!r} to a directory, or to nothing",
                fix="replace it by a copy of its target, or remove it",
                code="link-in-model",
            )
        if not path.is_file() and not path.is_dir():
            raise UserError(
                f"{folder} contains {name!r}, which is neither a file nor a directory",
                fix="remove it",
                code="special-file-in-model",
            )
        if regex.search(_UNREADABLE_NAMES, name):
            raise UserError(
                f"{folder} contains {name!r}: MLflow takes a file of that name and cannot read it back",
                fix=r"rename it without # % ? \ and control characters, or remove it",
                code="unreadable-file-name",
            )


def check_fine_tuned(folder: Path, name: str | None = None) -> None:
    """Refuse a model whose config.json names another class than those of fine-tuned models, before it is loaded.

    Raises:
        UsageError: it is an encoder; `name` is what the user called the folder.
    """
    if read_json(folder / FINETUNE_FILE).get("task") == "embedding":
        raise gives_vectors(name or str(folder))
    classes = read_config(folder).get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    if isinstance(first, str) and not first.endswith(FITTED_CLASSES) and not (folder / FINETUNE_FILE).is_file():
        raise not_fine_tuned(f"{name or folder} is of class {first}, which was not fine-tuned for a task")


def check_not_fine_tuned(folder: Path, name: str) -> None:
    """Refuse a fine-tuned model, which fills no masks, before it is loaded.

    Raises:
        UsageError: it is one; `name` is what the user called the folder.
    """
    task = read_json(folder / FINETUNE_FILE).get("task")
    classes = read_config(folder).get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    if task is not None or (isinstance(first, str) and first.endswith(FITTED_CLASSES)):
        command = "embed" if task == "embedding" else "predict"
        kind = str(task).replace("_", " ") if task is not None else first
        raise UsageError(
            f"{name} is a fine-tuned {kind} model, which fills no masks",
            fix=f"use `clozeworks {command}`, or give the model that was fine-tuned",
            code="fine-tuned-model",
        )


def check_fills_masks(folder: Path, name: str) -> None:
    """Refuse a model whose config.json names a class that fills no masks, before it is loaded.

    Raises:
        UsageError: it is fine-tuned, predicts the next token, or tells replaced tokens from others; `name` is what the
            user called the folder.
    """
    check_not_fine_tuned(folder, name)
    classes = read_config(folder).get("architectures")
    first = str(classes[0]) if isinstance(classes, list) and classes else ""
    if first == "ElectraForPreTraining":
        raise UsageError(
            f"{name} is the discriminator of ELECTRA ({first}), which tells replaced tokens from others and fills no "
            "masks",
            fix="give its generator, which is of class ElectraForMaskedLM and has a folder of its own",
            code="fills-no-masks",
        )
    if first.endswith(("LMHeadModel", "ForCausalLM")) and not first.endswith("WithLMHeadModel"):  # XLM and FlauBERT
        raise UsageError(
            f"{name} is of class {first}, which predicts the tokens that follow and fills no masks",
            fix="give a masked language model, such as BERT, RoBERTa or ModernBERT",
            code="fills-no-masks",
        )


def gives_vectors(name: str) -> UsageError:
    return UsageError(
        f"{name} was fine-tuned for vectors of texts, and labels nothing",
        fix="use `clozeworks embed`, or `compare --suite` with tasks of retrieval or sts, or give a model that was "
        "fine-tuned for labels",
        code="not-fine-tuned",
    )


def not_fine_tuned(problem: str) -> UsageError:
    return UsageError(problem, fix="give a directory that `clozeworks finetune` wrote", code="not-fine-tuned")


def _check_weight_names(folder: Path, name: str) -> None:
    """Refuse an index, or a config.json, that leads to weights outside the folder or to a pickle."""
    explicit = read_config(folder).get("transformers_weights")
    named = [] if explicit is None else [("config.json", explicit)]
    is_whole = explicit is None and (folder / "model.safetensors").is_file()  # no index is read beside it
    for path in [] if is_whole else sorted(folder.glob(f"*{INDEX_SUFFIX}")):
        shards = read_json(path).get("weight_map")
        if not isinstance(shards, dict):
            raise UserError(
                f"{path.name} in {name} has no weight_map",
                fix="copy or export the model again",
                code="damaged-model",
            )
        named += [(path.name, shard) for shard in shards.values()]
    for file, weights in named:
        is_plain = isinstance(weights, str) and Path(weights).name == weights
        is_plain = is_plain and weights.endswith((".safetensors", INDEX_SUFFIX))
        if not is_plain or not (folder / weights).is_file():
            raise UserError(
                f"{file} of {name} names the weights {weights!r}, which are not a .safetensors file in that directory",
                fix="copy or export the model again",
                code="damaged-model",
            )


def folder_digest(folder: Path, without: Collection[str] = ()) -> str:
    """Return the sha256 over the names and contents of all files except those named in `without`.

    Raises:
        UserError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in without):
        digest.update(f"{storage.sha256_of(path)}  {path.relative_to(folder).as_posix()}\n".encode())
    return digest.hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """Return the sha256 of every file by its path, without the card, which people edit, and the provenance."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: storage.sha256_of(path) for name, path in names.items() if name not in (CARD_FILE, PROVENANCE_FILE)}


def read_card(folder: Path) -> str:
    """Return the model card (README.md) without the metadata at the top; empty if there is none."""
    path = folder / CARD_FILE
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    if text.startswith("---\n"):
        text = text.partition("\n---\n")[2]
    return text.strip()


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json; empty if there is none."""
    return read_json(folder / "config.json")


def named_mask_token(folder: Path) -> str | None:
    """Return the mask token that tokenizer_config.json names; None where it names none."""
    token = read_json(folder / "tokenizer_config.json").get("mask_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if there is no file or another value.

    Raises:
        UserError: it is not JSON, or nested too deep.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is not valid JSON ({error})",
            fix="copy or export the model again",
            code="damaged-model",
        ) from None
    return value if isinstance(value, dict) else {}


class _Taught(BaseModel):
    sha256: _Digest


class _Provenance(BaseModel):
    """The fields that this project reads; the others become tags unchanged."""

    mlflow_run_id: str | None = None
    data_digests: dict[str, str] | None = None
    data_lineage: list[str] | None = None
    teacher: _Taught | None = None
    teachers_sha256: list[_Digest] | None = None
    scores: dict[str, float] | None = None
    evaluation: dict[str, str] | None = None


def read_provenance(folder: Path) -> dict[str, Any]:
    """Return what the export recorded about the origin of the model; empty for a folder from elsewhere.

    Raises:
        UserError: the file does not have the form that an export writes; people edit it.
    """
    provenance = read_json(folder / PROVENANCE_FILE)
    try:
        _Provenance.model_validate(provenance)
    except ValidationError as error:
        raise UserError(
            f"{folder / PROVENANCE_FILE} does not have the form that an export writes ({first_problem(error)})",
            fix="export the model again, or correct the file",
            code="damaged-provenance",
        ) from None
    return provenance


def data_lineage(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the manifest digests of all data that the weights saw; empty if the provenance has none."""
    digests: dict[str, str] = provenance.get("data_digests") or {}
    return tuple(dict.fromkeys([*digests.values(), *(provenance.get("data_lineage") or [])]))


def teachers(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sha256 of every teacher of the weights, in order; empty if the provenance has none."""
    last = provenance.get("teacher")
    return tuple(provenance.get("teachers_sha256") or ([last["sha256"]] if last else []))
