"""Configurations: YAML and `section.field=value` overrides in, a frozen pydantic model out.

OmegaConf reads the file (YAML without Python tags, `1e-4` is a number). Interpolations such as `${oc.env:HOME}` are
errors, so that a foreign file cannot read the environment. Every mistake becomes one `UsageError`.
"""

from __future__ import annotations

import difflib
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import omegaconf
import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

import configs
from data_prep.base.errors import UsageError, UserError


class Settings(BaseModel):
    """Base of every section of a configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _require_numbers(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        types = _plain_types(cls.model_fields[info.field_name].annotation)
        if types & {int, float} and isinstance(value, bool | str) and type(value) not in types:
            raise ValueError(f"must be a number, got {_display(value)}")
        return value

    @field_validator("*")
    @classmethod
    def _limit_integers(cls, value: object) -> object:
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise ValueError(f"must be at most {_LARGEST_INTEGER:,}, the largest 64-bit integer")
        return value


SettingsType = TypeVar("SettingsType", bound=Settings)

_LARGEST_INTEGER = 2**63 - 1
_MAX_LEVELS = 100  # of a document's nesting
_MIN_SIMILARITY = 0.6  # of two names (difflib's ratio); below it a suggestion misleads
_MAX_QUOTED_CHARACTERS = 500  # characters of a file or of the command line in a message
# PyYAML's constructors of tagged values (`!!timestamp x`, `!!bool x`, `!!int ''`) raise any of these.
_YAML_FAULTS = (
    *(yaml.YAMLError, omegaconf.errors.OmegaConfBaseException, ValueError, LookupError, AttributeError, TypeError),
    *(ArithmeticError, RecursionError),
)


def load_settings(schema: type[SettingsType], path: str | Path | None, overrides: Sequence[str] = ()) -> SettingsType:
    """Read `path` (a file, or the name of a preset), apply the overrides and validate.

    Raises:
        UsageError: the file is missing or not a mapping, an override is not `a.b=value`, or a value is invalid.
    """
    source = str(path) if path is not None else "the command line"
    values = _merge(_read_yaml(find_config(path, schema)) if path is not None else OmegaConf.create({}), overrides)
    _refuse_texts(values, source)
    return validate_settings(schema, values, source)


def validate_settings(schema: type[SettingsType], values: dict[str, Any], source: str) -> SettingsType:
    """Validate plain values; errors name `source`, where they came from."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        faults = [_explain(schema, item) for item in error.errors()]
        raise UsageError(
            f"{source}: " + "; ".join(fault.problem for fault in faults),
            fix="; ".join(dict.fromkeys(fault.fix for fault in faults)),
            code=faults[0].code,
        ) from None


def find_config(path: str | Path, schema: type[BaseModel] | None = None) -> Path:
    """Return the file at `path`, or the installed preset of that name (`bert_large` or `configs/bert_large.yaml`).

    Raises:
        UsageError: there is neither; the fix names the presets of `schema`.
        UserError: the path cannot be read.
    """
    path = Path(path)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise UserError(
            f"configuration {path} cannot be read: {error.strerror}",
            fix="check the path and its permissions",
            code="unreadable-file",
        ) from None
    presets = {file.stem: file for file in Path(configs.__path__[0]).glob("*.yaml")}
    if path.stem in presets and str(path) in (path.stem, f"{path.stem}.yaml", f"configs/{path.stem}.yaml"):
        return presets[path.stem]
    if path.is_dir():
        raise UsageError(f"configuration {path} is a folder", fix="name a YAML file in it", code="config-is-folder")
    known = sorted(name for name, file in presets.items() if schema is None or _is_of(schema, file))
    or_preset = f" or one of the presets {', '.join(known)}" if known else ""
    raise UsageError(f"configuration {path} does not exist", fix=f"give a YAML file{or_preset}", code="missing-config")


def _is_of(schema: type[BaseModel], file: Path) -> bool:
    return read_yaml(file).keys() <= schema.model_fields.keys()


def to_yaml(settings: Settings) -> str:
    """Return the resolved configuration as YAML text, which `load_settings` reads back to an equal value."""
    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def describe(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield one line per setting: its dotted name, default and description, for `--help`."""
    for name, field in schema.model_fields.items():
        nested = _nested_model(field.annotation)
        if nested is not None and not _is_list(field.annotation):
            yield from describe(nested, f"{prefix}{name}.")
            continue
        default = (
            "required" if field.is_required() else f"default {_display(field.get_default(call_default_factory=True))}"
        )
        choices = [_display(choice) for choice in _choices(field.annotation)]
        others = ", ".join(choice for choice in choices if choice != default.removeprefix("default "))
        yield f"  {prefix}{name}  ({default}{f', or {others}' if others else ''})  {field.description or ''}".rstrip()


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the values of a configuration file.

    Raises:
        UsageError: the file is missing, or is not YAML with a mapping at its top.
    """
    return OmegaConf.to_container(_read_yaml(path), resolve=False)  # type: ignore[return-value]  # a mapping


def _read_yaml(path: Path) -> omegaconf.DictConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror}",
            fix="check the path and its permissions",
            code="unreadable-file",
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 (byte {error.start})", fix="convert it, for example with iconv", code="not-utf8"
        ) from None
    try:
        _refuse_depth(text)
        values: Any = OmegaConf.load(io.StringIO(text))
    except OSError:  # a number or a date
        values = None
    except _YAML_FAULTS as error:
        raise UsageError(
            f"{path} is not valid YAML: {_in_one_line(error)}", fix="correct its syntax", code="invalid-yaml"
        ) from None
    if not isinstance(values, omegaconf.DictConfig) or (values and _is_bare_text(text)):
        raise UsageError(
            f"{path} has no mapping of settings at its top",
            fix="write settings such as 'output_dir: runs/one'",
            code="config-not-a-mapping",
        )
    return values


def _is_bare_text(text: str) -> bool:
    """Whether the YAML is a single scalar, which OmegaConf reads as a setting of that name."""
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return isinstance(next((event for event in events if isinstance(event, yaml.NodeEvent)), None), yaml.ScalarEvent)


def _refuse_depth(text: str) -> None:
    """Raise if the YAML is nested too deeply: libyaml recurses and crashes the process at 20,000 levels."""
    level = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > _MAX_LEVELS:
            assert event.start_mark is not None, "events of a text have a start mark"
            raise ValueError(f"it is nested more than {_MAX_LEVELS} levels deep at line {event.start_mark.line + 1}")


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return _cut(text if isinstance(error, (yaml.YAMLError, ValueError)) else f"{type(error).__name__}: {text}")


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_QUOTED_CHARACTERS else f"{text[:_MAX_QUOTED_CHARACTERS]}..."


def _merge(values: omegaconf.DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        name, separator, _ = override.partition("=")
        if not separator or not name or name.startswith("-"):
            raise UsageError(
                f"override {override!r} is not of the form section.field=value",
                fix="write overrides such as train.seed=1",
                code="invalid-override",
            )
    try:
        for override in overrides:
            _refuse_depth(override.partition("=")[2])
        merged = OmegaConf.merge(values, OmegaConf.from_dotlist(list(overrides)))
        return OmegaConf.to_container(merged, resolve=False)  # type: ignore[return-value]  # a mapping
    except _YAML_FAULTS as error:
        raise UsageError(
            f"the overrides {_cut(' '.join(overrides))} cannot be read: {_in_one_line(error)}",
            fix="write them as section.field=value with a YAML value",
            code="invalid-override",
        ) from None


def _refuse_texts(value: Any, source: str, where: str = "") -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_texts(item, source, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _refuse_texts(item, source, f"{where}.{number}")
    elif isinstance(value, str) and "${" in value:
        raise UsageError(
            f"{source}: {where}={value!r} contains an interpolation",
            fix="write the value itself",
            code="interpolation-in-config",
        )
    elif isinstance(value, str) and "\0" in value:
        raise UsageError(
            f"{source}: {where}={value!r} contains the character NUL", fix="remove it", code="nul-in-config"
        )


class _Fault(NamedTuple):
    problem: str
    fix: str
    code: str


def _explain(schema: type[BaseModel], error: Any) -> _Fault:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        nearest, siblings = _nearest_name(schema, where)
        fix = f"use {nearest}" if nearest else f"use one of {', '.join(siblings)}"
        hint = f" (did you mean {nearest}?)" if nearest else ""
        return _Fault(f"unknown setting {where}{hint}", fix, "unknown-setting")
    if error["type"] == "missing":
        return _Fault(f"{where} is required and not set", f"set {where}", "missing-setting")
    message: str = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    message = re.sub("^Input should ", "must ", message)
    # A rule of the schema may state its own fix behind a semicolon.
    problem, _, fix = message.partition("; ")
    fix = fix or "change the value; --help lists the settings"
    is_rule = error["type"] == "value_error" and isinstance(error.get("input"), (dict, BaseModel))
    if not where or is_rule:  # a rule of a section names its settings
        return _Fault(problem, fix, "invalid-setting")
    colon = "" if problem.startswith("must ") else ":"
    return _Fault(
        f"{where}={_display(error.get('input'))}{colon} {problem[:1].lower() + problem[1:]}", fix, "invalid-setting"
    )


def _nearest_name(schema: type[BaseModel], where: str) -> tuple[str | None, list[str]]:
    """Return the most similar setting, or None, and all names of the section.

    The order of preference is a similar name in the same section, the same name in another section, a similar name
    anywhere.
    """
    known = list(setting_names(schema))
    section = ".".join(part for part in where.split(".")[:-1] if not part.isdigit())
    last = where.rpartition(".")[2]
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    found = (
        difflib.get_close_matches(f"{section}.{last}".lstrip("."), siblings, 1, 0.75)
        or [name for name in known if name.rpartition(".")[2] == last]
        or _similar_last_parts(last, siblings or known)
    )
    return (found[0] if found else None), siblings or [name for name in known if "." not in name]


def _similar_last_parts(last: str, names: Sequence[str]) -> list[str]:
    """Return the name, if any, whose last part is similar to `last`; a shared section name does not count."""
    by_last_part = {name.rpartition(".")[2]: name for name in names}
    return [by_last_part[part] for part in difflib.get_close_matches(last, by_last_part, 1, _MIN_SIMILARITY)]


def setting_names(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings and sections; those of a list's items have no index."""
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}"
        nested = _nested_model(field.annotation)
        if nested is not None:
            yield from setting_names(nested, f"{prefix}{name}.")


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        nested = _nested_model(argument)
        if nested is not None:
            return nested
    return None


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, possibly inside a union."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    parts = () if _is_list(annotation) else get_args(annotation)
    return tuple(choice for part in parts for choice in _choices(part))


def _plain_types(annotation: Any) -> set[type]:
    """The types that a value may have, without those of a list's items."""
    if get_origin(annotation) is Literal:
        return {type(choice) for choice in get_args(annotation)}
    if isinstance(annotation, type):
        return {annotation}
    parts = () if _is_list(annotation) else get_args(annotation)
    return {found for part in parts for found in _plain_types(part)}


def _is_list(annotation: Any) -> bool:
    return annotation in (list, tuple) or any(
        getattr(item, "__origin__", None) in (list, tuple) for item in (annotation, *get_args(annotation))
    )


def _display(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
