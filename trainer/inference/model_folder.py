"""A Hugging Face folder from elsewhere: is it safe to load, is it the one meant, where does it come from."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from data_prep.base.errors import UserError

FINETUNE_FILE = "finetune.json"  # of fitted models alone
CARD_FILE = "README.md"
CONFIG_FILES = ("config.json", "tokenizer_config.json")
INDEX_SUFFIX = ".safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".msgpack", ".h5", ".pyd")


def check_model_folder(folder: Path, strict: bool = False, name: str | None = None) -> None:
    """Refuse a folder that is no model, has its weights elsewhere or as pickle only, or asks for code of its own.

    With `strict` (what goes into a registry or comes from one) it must hold no pickle and no code at all.

    Raises:
        UserError: naming what was found; `name` is what the user called the folder.
    """
    name = name or str(folder)
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} holds no config.json, so it is no Hugging Face folder; give one that was exported")
    for config in CONFIG_FILES:
        if "auto_map" in read_json(folder / config):
            raise UserError(
                f"{name} asks for code of its own (auto_map in {config}), which is never run here; export the model "
                "without it"
            )
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    _check_weight_names(folder, name)
    pickles = [path.name for path in files if path.suffix.lower() in PICKLE_SUFFIXES]
    if not any(path.suffix == ".safetensors" for path in files if path.parent == folder):
        found = f" (only {', '.join(pickles)}, and a pickle can run code)" if pickles else ""
        raise UserError(f"{name} holds no weights as .safetensors{found}; save the model with safe_serialization")
    unwanted = pickles + [path.name for path in files if path.suffix == ".py"]
    if strict and unwanted:
        raise UserError(f"{name} holds {', '.join(unwanted)}, which can run code; take it out and use safetensors only")


def _check_weight_names(folder: Path, name: str) -> None:
    """Refuse an index, or a config.json, that leads to weights outside the folder or to a pickle."""
    explicit = read_config(folder).get("transformers_weights")
    named = [] if explicit is None else [("config.json", explicit)]
    is_whole = explicit is None and (folder / "model.safetensors").is_file()  # no index is read beside it
    for path in [] if is_whole else sorted(folder.glob(f"*{INDEX_SUFFIX}")):
        shards = read_json(path).get("weight_map")
        if not isinstance(shards, dict):
            raise UserError(f"{name} holds {path.name} without a weight_map; copy or export the model again")
        named += [(path.name, shard) for shard in shards.values()]
    for where, weights in named:
        is_plain = isinstance(weights, str) and Path(weights).name == weights
        is_plain = is_plain and weights.endswith((".safetensors", INDEX_SUFFIX))
        if not is_plain or not (folder / weights).is_file():
            raise UserError(
                f"{where} of {name} names the weights {weights!r}, which is no .safetensors file in that folder; copy "
                "or export the model again"
            )


def folder_digest(folder: Path) -> str:
    """sha256 over the names and contents of all files."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{content}  {path.relative_to(folder).as_posix()}\n".encode())
    return digest.hexdigest()


def read_card(folder: Path) -> str:
    """The model card (README.md) without the metadata on top; empty where there is none."""
    path = folder / CARD_FILE
    if not path.is_file():
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    if text.startswith("---\n"):
        text = text.partition("\n---\n")[2]
    return text.strip()


def read_config(folder: Path) -> dict[str, Any]:
    """config.json; empty where there is none."""
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no file, or none.

    Raises:
        UserError: it is not JSON, or nested too deep.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); the folder is damaged; copy or export it again") from None
    return value if isinstance(value, dict) else {}
