"""Reading a configuration: YAML and `section.field=value` overrides in, a frozen pydantic model out.

Every mistake becomes one `UsageError`. `yaml_values` is imported where there is something to read, since its libraries
take a tenth of a second.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

import configs
from data_prep.base.errors import UsageError, UserError


class SettingError(ValueError):
    """A setting violates a rule: validators raise it, and `validate_settings` turns it into a `UsageError`.

    Args:
        problem: setting, value and violated rule, such as "data.a=1 exceeds data.b=0".
        fix: what to change, as an imperative.
        code: stable name of the rule in kebab case.
    """

    def __init__(self, problem: str, *, fix: str, code: str) -> None:
        super().__init__(problem)
        self.fix = fix
        self.code = code


class Settings(BaseModel):
    """Base of every section of a configuration: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @classmethod
    def explain_unknown(cls, name: str, value: object, values: Mapping[str, Any]) -> str | None:
        """Say as an imperative what to write instead of the unknown setting `name`; None where nothing is known.

        A schema overrides it to answer names that other projects use.

        Args:
            value: the value, or the text of it that was typed on the command line.
            values: the whole configuration, not validated.
        """
        return None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy without the values that cached properties computed from the fields."""
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: object, info: ValidationInfo) -> object:
        assert info.field_name is not None
        types = _plain_types(cls.model_fields[info.field_name].annotation)
        if types & {int, float} and isinstance(value, bool | str) and type(value) not in types:
            example = "a number such as 1e-4" if float in types else "an integer such as 100"
            raise ValueError(f"must be a number; write {example}")
        return value

    @field_validator("*")
    @classmethod
    def _check_integer_size(cls, value: object) -> object:
        if isinstance(value, int) and abs(value) > _LARGEST_INTEGER:
            raise ValueError(f"must be at most {_LARGEST_INTEGER:,}, the largest 64-bit integer")
        return value


Weight = Annotated[float, Field(gt=0.0, le=1e9)]
"""Share of a mixture's samples relative to its other components: data sets of a run, sources of a data set."""

SettingsType = TypeVar("SettingsType", bound=Settings)

_LARGEST_INTEGER = 2**63 - 1
_MIN_LIKENESS = 0.75  # of two names (difflib's ratio): below it, a suggestion misleads


def load_settings(schema: type[SettingsType], path: str | Path | None, overrides: Sequence[str] = ()) -> SettingsType:
    """Read `path` (a file, or the name of a preset), apply the overrides and validate.

    Raises:
        UsageError: the file is missing or not a mapping, an override is not `a.b=value`, or a value violates the
            schema.
    """
    source = str(path) if path is not None else "the command line"
    values: dict[str, Any] = {}
    if path is not None or overrides:
        from data_prep.base.yaml_values import read_yaml_with_overrides

        values = read_yaml_with_overrides(find_config(path, schema) if path is not None else None, overrides)
    _check_texts(values, source)
    typed = {name: text for name, _, text in (override.partition("=") for override in overrides)}
    return validate_settings(schema, values, source, typed)


def validate_settings(
    schema: type[SettingsType], values: dict[str, Any], source: str, typed: Mapping[str, str] | None = None
) -> SettingsType:
    """Validate plain values; `source` names their origin in the error.

    Args:
        typed: the texts of values that were typed on the command line, by setting: errors repeat them.

    Raises:
        UsageError: values violate the schema; all violations are listed, and the code is that of the first.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        found = _without_types(error.errors(), values)
        violations = [_explain(schema, item, values, typed or {}) for item in found]
    first = violations[0]
    if len(violations) == 1:
        raise UsageError(f"{source}: {first.problem}", fix=first.fix, code=first.code)
    paired = (f"{number}) {each.problem}: {each.fix}" for number, each in enumerate(violations, 1))
    raise UsageError(
        f"{source}: {len(violations)} settings are wrong: {'; '.join(paired)}",
        fix="make these changes",
        code=first.code,
    )


def find_config(path: str | Path, schema: type[BaseModel] | None = None) -> Path:
    """Return the file at `path`, or the installed preset of that name (`bert_large` or `configs/bert_large.yaml`).

    Raises:
        UsageError: neither exists; the error lists the presets of `schema`.
        UserError: the system denies access.
    """
    path = Path(path)
    try:
        if path.is_file():
            return path
    except OSError as error:
        raise UserError(
            f"configuration {path} cannot be read ({error.strerror})",
            fix="check its permissions and those of the directories above it",
            code="unreadable-file",
        ) from None
    presets = {file.stem: file for file in Path(configs.__path__[0]).glob("*.yaml")}
    if path.stem in presets and str(path) in (path.stem, f"{path.stem}.yaml", f"configs/{path.stem}.yaml"):
        return presets[path.stem]
    if path.is_dir():
        raise UsageError(f"configuration {path} is a directory", fix="give a YAML file in it", code="config-is-folder")
    known = sorted(name for name, file in presets.items() if schema is None or _is_of(schema, file))
    or_preset = f" or one of the presets {', '.join(known)}" if known else ""
    nearest = difflib.get_close_matches(path.stem.replace("-", "_"), known, 1, _MIN_LIKENESS)
    meant = f" (did you mean {nearest[0]}?)" if nearest and path.parent == Path() else ""
    raise UsageError(
        f"configuration {path} does not exist{meant}", fix=f"give a YAML file{or_preset}", code="missing-config"
    )


def _is_of(schema: type[BaseModel], file: Path) -> bool:
    from data_prep.base.yaml_values import read_yaml

    return read_yaml(file).keys() <= schema.model_fields.keys()


def to_yaml(settings: Settings) -> str:
    """Return the resolved configuration as YAML text that `load_settings` reads back to an equal value."""
    import yaml

    return yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def describe(schema: type[BaseModel], prefix: str = "", required: str = "required") -> Iterator[str]:
    """Yield one line per setting: its dotted name, default and description, for `--help`.

    `required` stands for the default of a setting that has none.
    """
    for name, field in schema.model_fields.items():
        nested = _nested_model(field.annotation)
        if nested is not None and not _is_list(field.annotation):
            is_optional = not field.is_required() and field.default is None
            within = f"required if {prefix}{name} is set" if is_optional else required
            yield from describe(nested, f"{prefix}{name}.", within)
            continue
        default = (
            required if field.is_required() else f"default {_display(field.get_default(call_default_factory=True))}"
        )
        choices = [_display(choice) for choice in _choices(field.annotation)]
        others = ", ".join(choice for choice in choices if choice != default.removeprefix("default "))
        yield f"  {prefix}{name}  ({default}{f', or {others}' if others else ''})  {field.description or ''}".rstrip()


def _check_texts(value: Any, source: str, where: str = "") -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_texts(item, source, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_texts(item, source, f"{where}.{number}")
    elif isinstance(value, str) and "${" in value:
        raise UsageError(
            f"{source}: {where}={value!r} contains an interpolation, which is not supported",
            fix="write the value itself",
            code="interpolation-in-config",
        )
    elif isinstance(value, str) and "\0" in value:
        raise UsageError(
            f"{source}: {where}={value!r} contains the character NUL", fix="remove it", code="nul-in-config"
        )


class _Violation(NamedTuple):
    problem: str
    fix: str
    code: str


def _without_types(errors: Sequence[Any], values: object) -> list[Any]:
    """Return the errors with names of settings alone in `loc`, and each value's errors as one of its types.

    Where a setting has two types, such as a path or a list, pydantic reports what is wrong with the value as each of
    them, and adds the type to `loc`. The type whose error lies deepest in the value is the one that was meant.
    """
    named = [(_names_of(error, values), error) for error in errors]
    found: dict[Any, Any] = {}
    for number, (names, error) in enumerate(named):
        if len(names) == len(error["loc"]):
            found[number] = error
        elif any(len(other) > len(names) and other[: len(names)] == names for other, _ in named):
            continue
        elif names in found:
            found[names]["wanted"] += f" or {_wanted(error)}".replace("must be ", "")
        else:
            found[names] = {**error, "loc": names, "wanted": _wanted(error)}
    return list(found.values())


def _names_of(error: Any, value: Any) -> tuple[int | str, ...]:
    """Return the parts of an error's `loc` that lead through the value; the others are types."""
    *parents, last = error["loc"] or ("",)
    names = []
    for part in parents:
        if isinstance(value, Mapping) or isinstance(part, int):
            value = value.get(part) if isinstance(value, Mapping) else value[part]
            names.append(part)
    is_name = error["type"] in ("missing", "extra_forbidden") or isinstance(last, int)
    return (*names, last) if is_name or (isinstance(value, Mapping) and last in value) else tuple(names)


def _explain(schema: type[BaseModel], error: Any, values: Mapping[str, Any], typed: Mapping[str, str]) -> _Violation:
    """State what pydantic found wrong with one value."""
    where = ".".join(str(part) for part in error["loc"])
    value = error.get("input")
    if error["type"] == "extra_forbidden":
        is_scalar = not isinstance(value, (dict, list)) and where in typed
        if "." in str(error["loc"][-1]):  # a dotted key in a file; overrides nest
            *sections, name = str(error["loc"][-1]).split(".")
            opened = "".join(f"{section}: {{" for section in sections)
            fix = f"nest it: {opened}{name}: {_display(value)}{'}' * len(sections)}"
            return _Violation(f"{where} is a dotted key in a file", fix, "dotted-key")
        return _explain_unknown(schema, where, typed[where] if is_scalar else value, values)
    if error["type"] == "missing":
        return _Violation(f"{where} is required and not set", f"set {where}", "missing-setting")
    cause = (error.get("ctx") or {}).get("error")
    if isinstance(cause, SettingError):
        item = re.match(r".*\.\d+(?=\.|$)", where)  # a rule does not know the item of a list that it looks at
        problem = str(cause) if item is None or item[0] in str(cause) else f"{item[0]}: {cause}"
        return _Violation(problem, cause.fix, cause.code)
    message: str = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    is_rule = error["type"] == "value_error" and isinstance(value, (dict, BaseModel))
    if not where or is_rule:  # a rule of a section names its settings
        problem, _, fix = message.partition("; ")  # a plain ValueError may state its fix behind a semicolon
        return _Violation(problem, fix or "change the value; --help lists the settings", "invalid-setting")
    rule, _, fix = (error.get("wanted") or _wanted(error) or message[:1].lower() + message[1:]).partition("; ")
    if error["type"] in ("dict_type", "model_type", "model_attributes_type") and not where.rpartition(".")[2].isdigit():
        # a name that other projects use as well
        meant = schema.explain_unknown(where, typed.get(where, value), values) if issubclass(schema, Settings) else None
        fix = meant or f"write {where}.SETTING=value"
    return _Violation(f"{where}={_display(value)} {rule}", fix or f"change {where}", "invalid-setting")


def _wanted(error: Any) -> str | None:
    """State the rule that pydantic's own check found violated; None for a rule that has no short form."""
    kind, context = error["type"], error.get("ctx") or {}
    if kind == "literal_error":
        return f"must be one of {context['expected']}"
    if kind in _LIMITS:
        return f"must be {_LIMITS[kind][0]} {context[_LIMITS[kind][1]]:,}"
    if kind == "value_error":
        return str(context["error"])
    if kind.startswith("model_") and isinstance(error["loc"][-1], int):
        return "must be a mapping; write it as {setting: value, ...}"
    prefix = next((prefix for prefix in _KINDS if kind.startswith(prefix)), None)
    return None if prefix is None else f"must be {_KINDS[prefix]}"


_LIMITS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_KINDS = {
    "string_too_short": "a non-empty string",
    "string_type": "a string",
    "int_": "an integer",
    "float_": "a number",
    "bool_": "true or false",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section of settings",
    "model_attributes_type": "a section of settings",
}
"""Prefixes of pydantic's error types, and what each asks for."""


def _explain_unknown(schema: type[BaseModel], where: str, value: object, values: Mapping[str, Any]) -> _Violation:
    """State what to write instead of an unknown setting."""
    known = schema.explain_unknown(where, value, values) if issubclass(schema, Settings) else None
    if known is not None:
        return _Violation(f"unknown setting {where}", known, "unknown-setting")
    nearest, siblings = _nearest_name(schema, where, is_section=isinstance(value, dict))
    if nearest is None:
        return _Violation(f"unknown setting {where}", f"use one of {', '.join(siblings)}", "unknown-setting")
    meant = f"{nearest}={value}" if isinstance(value, str | int | float) else nearest
    names = {_in_item(name, nearest) for name in setting_names(schema)}
    if isinstance(value, dict) and len(value) == 1 and f"{nearest}.{next(iter(value))}" in names:
        ((name, item),) = value.items()  # a section with a typing error: `trainig.max_steps=10`
        meant = f"{nearest}.{name}={_display(item)}"
    return _Violation(f"unknown setting {where} (did you mean {nearest}?)", f"write {meant}", "unknown-setting")


def _nearest_name(schema: type[BaseModel], where: str, is_section: bool) -> tuple[str | None, list[str]]:
    """Return a similar name of the same section, else that very name in a section around it, else the only setting of
    that very name in another section, else one with a similar last part, or None; and all names of the section. Only
    `is_section` may mean a section.
    """
    section, _, last = where.rpartition(".")
    known, outside_lists = (
        [_in_item(name, section) for name in setting_names(schema, with_items=with_items)]
        for with_items in (True, False)
    )
    siblings = [name for name in known if name.rpartition(".")[0] == section]
    sections = set() if is_section else {name.rpartition(".")[0] for name in outside_lists}
    near, elsewhere = ([name for name in names if name not in sections] for names in (siblings, outside_lists))
    namesakes = [name for name in elsewhere if name.rpartition(".")[2] == last]
    around = [f"{name}.{last}" for name in known if f"{name}.{last}" in known and where.startswith(f"{name}.")]
    start = section.rfind(".") + 1  # names that share more than their section's name are similar whatever they end in
    in_section = {name[start:]: name for name in near}
    found = (
        around
        or [in_section[name] for name in difflib.get_close_matches(where[start:], in_section, 1, _MIN_LIKENESS)]
        or (namesakes if len(namesakes) == 1 else [])
        or _similar_last_parts(last, near or elsewhere)
    )
    return (found[0] if found else None), siblings or [name for name in known if "." not in name]


def _in_item(name: str, section: str) -> str:
    """Return the name of a setting, within the items of lists that lead to `section` (`training.stages.0.steps`)."""
    found: list[str] = []
    for part in name.split("."):
        found.append(part)
        index = section.removeprefix(f"{'.'.join(found)}.").partition(".")[0]
        if index.isdigit() and section.startswith(f"{'.'.join(found)}."):
            found.append(index)
    return ".".join(found)


def _similar_last_parts(last: str, names: Sequence[str]) -> list[str]:
    """Return the name, if any, whose last part is similar to `last`: all names of a section share its name."""
    by_last_part = {name.rpartition(".")[2]: name for name in names}
    return [by_last_part[part] for part in difflib.get_close_matches(last, by_last_part, 1, _MIN_LIKENESS)]


def setting_names(schema: type[BaseModel], prefix: str = "", with_items: bool = True) -> Iterator[str]:
    """Yield the dotted names of all settings and sections; those of a list's items have no index."""
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}"
        nested = _nested_model(field.annotation)
        if nested is not None and (with_items or not _is_list(field.annotation)):
            yield from setting_names(nested, f"{prefix}{name}.", with_items)


def flatten(values: Mapping[str, Any], prefix: str = "", with_items: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield nested settings by dotted name; an empty section is a value, and so is a list.

    `with_items` opens the lists that have sections among their items; those are named by their index.
    """
    for name, value in values.items():
        if with_items and isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.", with_items)
        else:
            yield f"{prefix}{name}", value


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


def _display(value: Any) -> str:
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
