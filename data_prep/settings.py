"""Reading a configuration: YAML and `section.field=value` overrides in, a frozen pydantic model out.

OmegaConf reads the file (YAML without Python tags, `1e-4` a number); interpolations such as `${oc.env:HOME}` are
refused, so that a file from elsewhere reads no environment. Every mistake becomes one `UsageError`.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import omegaconf
import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError

from data_prep.errors import UsageError


class Settings(BaseModel):
    """Base of every section of a configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


SettingsType = TypeVar("SettingsType", bound=Settings)


def load_settings(schema: type[SettingsType], path: str | Path | None, overrides: Sequence[str] = ()) -> SettingsType:
    """Read `path` (a file, or the name of a preset), apply the overrides and validate.

    Raises:
        UsageError: the file is missing or no mapping, an override is not `a.b=value`, or the schema refuses.
    """
    source = str(path) if path is not None else "the command line"
    values = _merge(_read_yaml(find_config(path)) if path is not None else OmegaConf.create({}), overrides)
    _refuse_interpolations(values, source)
    return validate_settings(schema, values, source)


def validate_settings(schema: type[SettingsType], values: dict[str, Any], source: str) -> SettingsType:
    """Validate plain values; `source` says in the error where they came from."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{source}: " + "; ".join(_explain(schema, item) for item in error.errors())) from None


def find_config(path: str | Path) -> Path:
    """The file at `path`, or the preset of that name (`bert_large` or `configs/bert_large.yaml`) as installed."""
    path = Path(path)
    if path.is_file():
        return path
    # Not importlib.resources: it fails on a namespace package of an editable install, whose path has a place holder.
    folders = importlib.import_module("configs").__path__
    presets = {file.stem: file for folder in folders for file in Path(folder).glob("*.yaml")}
    if path.stem in presets and str(path) in (path.stem, f"{path.stem}.yaml", f"configs/{path.stem}.yaml"):
        return presets[path.stem]
    known = sorted(presets)
    raise UsageError(f"configuration {path} does not exist; give a YAML file or one of the presets {', '.join(known)}")


def to_yaml(settings: Settings) -> str:
    """The resolved configuration as YAML text that `load_settings` reads back to an equal value."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def describe(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield one line per setting: its dotted name, default and description, for `--help`."""
    for name, field in schema.model_fields.items():
        nested = _nested_model(field.annotation)
        if nested is not None and not _is_list(field.annotation):
            yield from describe(nested, f"{prefix}{name}.")
            continue
        default = (
            "required" if field.is_required() else f"default {_shown(field.get_default(call_default_factory=True))}"
        )
        yield f"  {prefix}{name}  ({default})  {field.description or ''}".rstrip()


def _read_yaml(path: Path) -> omegaconf.DictConfig:
    try:
        values = OmegaConf.load(path)
    except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(values, omegaconf.DictConfig):
        raise UsageError(f"{path} must hold a mapping of settings at its top, such as 'output_dir: runs/one'")
    return values


def _merge(values: omegaconf.DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        name, separator, _ = override.partition("=")
        if not separator or not name or name.startswith("-"):
            raise UsageError(f"override {override!r} is not of the form section.field=value")
    try:
        merged = OmegaConf.merge(values, OmegaConf.from_dotlist(list(overrides)))
        return OmegaConf.to_container(merged, resolve=False)  # type: ignore[return-value]
    except (yaml.YAMLError, omegaconf.errors.OmegaConfBaseException, ValueError) as error:
        raise UsageError(
            f"the overrides {' '.join(overrides)} cannot be read: {' '.join(str(error).split())}"
        ) from None


def _refuse_interpolations(value: Any, source: str, where: str = "") -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_interpolations(item, source, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _refuse_interpolations(item, source, f"{where}.{number}")
    elif isinstance(value, str) and "${" in value:
        raise UsageError(
            f"{source}: {where}={value!r} holds an interpolation, which is not allowed; write the value itself"
        )


def _explain(schema: type[BaseModel], error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"unknown setting {where}; did you mean {_nearest_name(schema, where)}?"
    if error["type"] == "missing":
        return f"{where} is required and not set"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if not where or isinstance(error.get("input"), (dict, BaseModel)):  # a rule of a section names its settings
        return message
    return f"{where}={_shown(error.get('input'))}: {message[:1].lower() + message[1:]}"


def _nearest_name(schema: type[BaseModel], where: str) -> str:
    """A name like the last part within the same section, else that very name in another section, else the nearest."""
    known = list(_names(schema))
    section = ".".join(part for part in where.split(".")[:-1] if not part.isdigit())
    last = where.rpartition(".")[2]
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    return (
        difflib.get_close_matches(f"{section}.{last}".lstrip("."), siblings, 1, 0.75)
        or [name for name in known if name.rpartition(".")[2] == last]
        or difflib.get_close_matches(where, siblings or known, 1, 0.0)
    )[0]


def _names(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}"
        nested = _nested_model(field.annotation)
        if nested is not None:
            yield from _names(nested, f"{prefix}{name}.")


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        nested = _nested_model(argument)
        if nested is not None:
            return nested
    return None


def _is_list(annotation: Any) -> bool:
    return annotation in (list, tuple) or any(
        getattr(item, "__origin__", None) in (list, tuple) for item in (annotation, *get_args(annotation))
    )


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
