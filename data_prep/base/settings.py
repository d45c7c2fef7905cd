"""Reading a configuration: YAML and `section.field=value` overrides in, a frozen pydantic model out.

OmegaConf reads the file (YAML without Python tags, `1e-4` a number); interpolations such as `${oc.env:HOME}` are
refused, so that a file from elsewhere reads no environment. Every mistake becomes one `UsageError`.
"""

from __future__ import annotations

import difflib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

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
    def _number_where_one_is_wanted(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        types = _plain_types(cls.model_fields[info.field_name].annotation)
        if types & {int, float} and isinstance(value, bool | str) and type(value) not in types:
            raise ValueError(f"is {'a text' if isinstance(value, str) else 'true or false'}, and a number is wanted")
        return value

    @field_validator("*")
    @classmethod
    def _countable(cls, value: object) -> object:
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise ValueError(f"is beyond {_LARGEST_INTEGER:,}, the largest integer of 64 bits; lower it")
        return value


SettingsType = TypeVar("SettingsType", bound=Settings)

_LARGEST_INTEGER = 2**63 - 1
_MOST_LEVELS = 100  # of a document's nesting
_LEAST_LIKENESS = 0.6  # of two names (difflib's ratio): below it, a suggestion misleads
_LONGEST_QUOTATION = 500  # characters of a file or of the command line in a message
# PyYAML's constructors of tagged values (`!!timestamp x`, `!!bool x`, `!!int ''`) let whatever they meet pass.
_YAML_FAULTS = (
    *(yaml.YAMLError, omegaconf.errors.OmegaConfBaseException, ValueError, LookupError, AttributeError, TypeError),
    *(ArithmeticError, RecursionError),
)


def load_settings(schema: type[SettingsType], path: str | Path | None, overrides: Sequence[str] = ()) -> SettingsType:
    """Read `path` (a file, or the name of a preset), apply the overrides and validate.

    Raises:
        UsageError: the file is missing or no mapping, an override is not `a.b=value`, or the schema refuses.
    """
    source = str(path) if path is not None else "the command line"
    values = _merge(_read_yaml(find_config(path, schema)) if path is not None else OmegaConf.create({}), overrides)
    _refuse_texts(values, source)
    return validate_settings(schema, values, source)


def validate_settings(schema: type[SettingsType], values: dict[str, Any], source: str) -> SettingsType:
    """Validate plain values; `source` says in the error where they came from."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{source}: " + "; ".join(_explain(schema, item) for item in error.errors())) from None


def find_config(path: str | Path, schema: type[BaseModel] | None = None) -> Path:
    """The file at `path`, or the preset of that name (`bert_large` or `configs/bert_large.yaml`) as installed.

    Raises:
        UsageError: there is neither; it names the presets that are of `schema`.
        UserError: the system forbids to look.
    """
    path = Path(path)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise UserError(f"configuration {path} cannot be read: {error.strerror}; give one that can") from None
    presets = {file.stem: file for file in Path(configs.__path__[0]).glob("*.yaml")}
    if path.stem in presets and str(path) in (path.stem, f"{path.stem}.yaml", f"configs/{path.stem}.yaml"):
        return presets[path.stem]
    if path.is_dir():
        raise UsageError(f"configuration {path} is a folder; name a YAML file in it")
    known = sorted(name for name, file in presets.items() if schema is None or _is_of(schema, file))
    or_preset = f" or one of the presets {', '.join(known)}" if known else ""
    raise UsageError(f"configuration {path} does not exist; give a YAML file{or_preset}")


def _is_of(schema: type[BaseModel], file: Path) -> bool:
    return read_yaml(file).keys() <= schema.model_fields.keys()


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
        choices = [_shown(choice) for choice in _choices(field.annotation)]
        others = ", ".join(choice for choice in choices if choice != default.removeprefix("default "))
        yield f"  {prefix}{name}  ({default}{f', or {others}' if others else ''})  {field.description or ''}".rstrip()


def read_yaml(path: Path) -> dict[str, Any]:
    """What a configuration file says, as it stands there.

    Raises:
        UsageError: it is missing, or no YAML with a mapping at its top.
    """
    return OmegaConf.to_container(_read_yaml(path), resolve=False)  # type: ignore[return-value]  # a mapping


def _read_yaml(path: Path) -> omegaconf.DictConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start}); convert it, such as with iconv") from None
    try:
        _refuse_depth(text)
        values: Any = OmegaConf.load(io.StringIO(text))
    except OSError:  # a number or a date
        values = None
    except _YAML_FAULTS as error:
        raise UsageError(f"{path} is not valid YAML: {_in_one_line(error)}") from None
    if not isinstance(values, omegaconf.DictConfig) or (values and _is_bare_text(text)):
        raise UsageError(f"{path} must hold a mapping of settings at its top, such as 'output_dir: runs/one'")
    return values


def _is_bare_text(text: str) -> bool:
    """Whether YAML is a text and nothing more, which OmegaConf takes for a setting of that name."""
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return isinstance(next((event for event in events if isinstance(event, yaml.NodeEvent)), None), yaml.ScalarEvent)


def _refuse_depth(text: str) -> None:
    """Refuse what is nested too deeply: libyaml goes down its stack level by level, and ends the process at 20,000."""
    level = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > _MOST_LEVELS:
            assert event.start_mark is not None, "an event of a text has its place in it"
            raise ValueError(f"it is nested more than {_MOST_LEVELS} levels deep at line {event.start_mark.line + 1}")


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return _cut(text if isinstance(error, (yaml.YAMLError, ValueError)) else f"{type(error).__name__}: {text}")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTATION else f"{text[:_LONGEST_QUOTATION]}..."


def _merge(values: omegaconf.DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    for override in overrides:
        name, separator, _ = override.partition("=")
        if not separator or not name or name.startswith("-"):
            raise UsageError(f"override {override!r} is not of the form section.field=value")
    try:
        for override in overrides:
            _refuse_depth(override.partition("=")[2])
        merged = OmegaConf.merge(values, OmegaConf.from_dotlist(list(overrides)))
        return OmegaConf.to_container(merged, resolve=False)  # type: ignore[return-value]  # a mapping
    except _YAML_FAULTS as error:
        raise UsageError(f"the overrides {_cut(' '.join(overrides))} cannot be read: {_in_one_line(error)}") from None


def _refuse_texts(value: Any, source: str, where: str = "") -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_texts(item, source, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _refuse_texts(item, source, f"{where}.{number}")
    elif isinstance(value, str) and "${" in value:
        raise UsageError(
            f"{source}: {where}={value!r} holds an interpolation, which is not allowed; write the value itself"
        )
    elif isinstance(value, str) and "\0" in value:
        raise UsageError(f"{source}: {where}={value!r} holds the character NUL, which no name may; take it out")


def _explain(schema: type[BaseModel], error: Any) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        nearest, siblings = _nearest_name(schema, where)
        hint = f"did you mean {nearest}?" if nearest else f"the settings there are {', '.join(siblings)}"
        return f"unknown setting {where}; {hint}"
    if error["type"] == "missing":
        return f"{where} is required and not set"
    message: str = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    is_rule = error["type"] == "value_error" and isinstance(error.get("input"), (dict, BaseModel))
    if not where or is_rule:  # a rule of a section names its settings
        return message
    return f"{where}={_shown(error.get('input'))}: {message[:1].lower() + message[1:]}"


def _nearest_name(schema: type[BaseModel], where: str) -> tuple[str | None, list[str]]:
    """A name like the last part within the same section, else that very name in another section, else one that is like
    the whole; or None where none is. Beside it all names of the section.
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
    """The name, if any, whose last part is like `last`: a section's name, which all share, is no likeness."""
    by_last_part = {name.rpartition(".")[2]: name for name in names}
    return [by_last_part[part] for part in difflib.get_close_matches(last, by_last_part, 1, _LEAST_LIKENESS)]


def setting_names(schema: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings and sections; those of a list's items stand without a place."""
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
    """The values of a `Literal`, which may be one of several types."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    parts = () if _is_list(annotation) else get_args(annotation)
    return tuple(choice for part in parts for choice in _choices(part))


def _plain_types(annotation: Any) -> set[type]:
    """The types of which a value may be, those of a list's items left out."""
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


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
