"""What a configuration may contain: the base of its sections, rules that validators state, and names of settings."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from data_prep.base.local_paths import expand_home


class SettingError(ValueError):
    """A setting violates a rule: validators raise it, and `data_prep.base.load_settings` turns it into a `UsageError`.

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

    earlier_names: ClassVar[Mapping[str, str]] = {}
    """Names of earlier releases that the section still reads, and the setting that each sets."""

    @classmethod
    def unsets(cls, name: str, value: object) -> bool:
        """Return whether this value of the earlier name means that it sets nothing."""
        return value is None

    @classmethod
    def explain_unknown(cls, name: str, value: object, values: Mapping[str, Any]) -> str | None:
        """Say as an imperative what to write instead of the unknown setting `name`; None where nothing is known.

        A schema overrides it to answer names that other projects use.

        Args:
            value: the value, or the text of it that was typed on the command line.
            values: the whole configuration, not validated.
        """
        return None

    @classmethod
    def type_of(cls, name: str, section: Mapping[str, Any]) -> Any:
        """Return the type of the setting `name`; Any where it is unknown.

        A schema overrides it where another setting of the section, such as the name of a task, decides.
        """
        return cls.model_fields[name].annotation if name in cls.model_fields else Any

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
        if isinstance(value, int) and abs(value) > LARGEST_INTEGER:
            raise ValueError(f"must be at most {LARGEST_INTEGER:,}, the largest 64-bit integer")
        return value


PathText = Annotated[str, AfterValidator(expand_home)]
"""A text that is a local path, or may be one: `~` is the home directory."""
Weight = Annotated[float, Field(gt=0.0, le=1e9)]
"""Share of a mixture's samples relative to its other components: data sets of a run, sources of a data set."""
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Seconds = Annotated[int, Field(ge=1, le=31_536_000)]
"""At most a year: clocks and timers of the libraries have limits."""
LISTS = (tuple, list, set, frozenset, Sequence)
LARGEST_INTEGER = 2**63 - 1


def to_yaml(settings: Settings) -> str:
    """Return the resolved configuration as YAML text that `load_settings` reads back to an equal value."""
    from data_prep.base.yaml_values import to_text

    return to_text(settings.model_dump(mode="json"))


def describe(schema: type[BaseModel], prefix: str = "", required: str = "required") -> Iterator[str]:
    """Yield one line per setting: its dotted name, default and description, for `--help`.

    `required` stands for the default of a setting that has none.
    """
    for name, field in schema.model_fields.items():
        nested = _nested_model(field.annotation)
        if nested is not None and not is_list(field.annotation):
            is_optional = not field.is_required() and field.default is None
            within = f"required if {prefix}{name} is set" if is_optional else required
            yield from describe(nested, f"{prefix}{name}.", within)
            continue
        default = (
            required if field.is_required() else f"default {display(field.get_default(call_default_factory=True))}"
        )
        choices = [display(choice) for choice in choices_of(field.annotation)]
        others = ", ".join(choice for choice in choices if choice != default.removeprefix("default "))
        yield f"  {prefix}{name}  ({default}{f', or {others}' if others else ''})  {field.description or ''}".rstrip()


def setting_names(schema: type[BaseModel], prefix: str = "", with_items: bool = True) -> Iterator[str]:
    """Yield the dotted names of all settings and sections; those in a list have no index, in a mapping `*`."""
    yield from (f"{prefix}{name}" for name in getattr(schema, "earlier_names", ()))
    for name, field in schema.model_fields.items():
        yield f"{prefix}{name}"
        nested = _nested_model(field.annotation)
        is_mapping = any(get_origin(each) is dict for each in alternatives(field.annotation))
        if nested is not None and (with_items or not (is_mapping or is_list(field.annotation))):
            yield from setting_names(nested, f"{prefix}{name}.*." if is_mapping else f"{prefix}{name}.", with_items)


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


def plain(value: Any) -> Any:
    """Return a value of a Python caller as those of a file are."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values in which those of `above` replace those of `below`."""
    both = {
        name: merged(below[name], value) if isinstance(value, dict) and isinstance(below.get(name), dict) else value
        for name, value in above.items()
    }
    return {**below, **both}


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        nested = _nested_model(argument)
        if nested is not None:
            return nested
    return None


def alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the types of which a value may be."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from alternatives(each)
    else:
        yield annotation


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """Return the values of a `Literal`, which may be one of several types."""
    return tuple(
        choice for each in alternatives(annotation) if get_origin(each) is Literal for choice in get_args(each)
    )


def is_list(annotation: Any) -> bool:
    """Return whether a value may be a list."""
    return any(get_origin(each) in LISTS or each in LISTS for each in alternatives(annotation))


def _plain_types(annotation: Any) -> set[type]:
    """The types of which a value may be, those of a list's items left out."""
    return {each for each in alternatives(annotation) if isinstance(each, type)} | set(
        map(type, choices_of(annotation))
    )


def display(value: Any) -> str:
    """A value as JSON, cut to 80 characters."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
