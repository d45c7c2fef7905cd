"""From the scalars of a YAML file or of the command line to values of the schema's types: a text arrives as typed.

YAML reads `007`, `yes`, `3:30` and `2026-05-01` as other things than they look; the type of the setting decides.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from data_prep.base.errors import UsageError
from data_prep.base.settings import LISTS, Settings, alternatives, choices_of

NULLS = ("", "~", "null", "Null", "NULL")
_WORDS_OF_OLD_YAML, _IN_NUMBERS = ("yes", "no", "on", "off"), "_"


@dataclass(frozen=True)
class Scalar:
    """A scalar that is written without quotes.

    Attributes:
        text: its characters.
        value: what YAML reads: a string, a number, a Boolean value or None.
        comment: what follows on its line behind " #", if that begins without a space: it may belong to the text.
    """

    text: str
    value: str | int | float | bool | None
    comment: str = ""


def typed_value(wanted: Any, value: Any, name: str = "", source: str = "") -> Any:
    """Return plain values: each `Scalar` in `value` becomes its text where the type `wanted` is a text.

    Args:
        name: dotted name of the setting, for errors; `source` names the file.
    """
    if isinstance(value, Scalar):
        return _of_scalar(wanted, value, name, source)
    if isinstance(value, Mapping):
        return {
            key: typed_value(type_within(wanted, key, value), item, f"{name}.{key}".lstrip("."), source)
            for key, item in value.items()
        }
    if isinstance(value, list):
        within = type_of_items(wanted)
        return [typed_value(within, item, f"{name}.{number}", source) for number, item in enumerate(value)]
    return value


def type_within(wanted: Any, key: str, section: Mapping[str, Any]) -> Any:
    """Return the type of the setting `key` of a section whose type is `wanted`; Any where it is open."""
    for alternative in alternatives(wanted):
        if isinstance(alternative, type) and issubclass(alternative, Settings):
            return alternative.type_of(key, section)
        if get_origin(alternative) in (dict, Mapping):
            return get_args(alternative)[1]
    return Any


def section_of(wanted: Any) -> type[Settings]:
    """Return the schema of a section whose type is `wanted`; `Settings` where it is open."""
    sections = (each for each in alternatives(wanted) if isinstance(each, type) and issubclass(each, Settings))
    return next(sections, Settings)


def type_of_items(wanted: Any) -> Any:
    """Return the type of the items of a list of the type `wanted`; Any where it is open."""
    lists = [each for each in alternatives(wanted) if get_origin(each) in LISTS]
    return get_args(lists[0])[0] if lists else Any


def takes_text(wanted: Any, text: str) -> bool:
    """Whether a setting of the type `wanted` takes these characters of the command line for a text.

    A setting that is a text or a list, such as `data.shards`, takes what begins with a bracket for the list.
    """
    possible = list(alternatives(wanted))
    is_text = _has_text(possible) or (str in map(type_of_items, possible))
    if any(each in (int, float, bool, Any) or _other_choices(each) for each in possible):
        return False
    is_only_text = all(each in (str, types.NoneType) or _text_choices(each) for each in possible)
    return is_text and (is_only_text or not text.lstrip().startswith(("[", "{")))


def takes_null(wanted: Any) -> bool:
    """Whether a setting of the type `wanted` can be None."""
    return types.NoneType in alternatives(wanted)


def _of_scalar(wanted: Any, scalar: Scalar, name: str, source: str) -> Any:
    possible = list(alternatives(wanted))
    if scalar.value is None:  # the schema refuses it where it must be a text
        return None
    if Any in possible:
        is_word = isinstance(scalar.value, bool) and scalar.text.lower() in _WORDS_OF_OLD_YAML
        if is_word or (_IN_NUMBERS in scalar.text and isinstance(scalar.value, int | float)):
            kind, value = ("Boolean value", str(scalar.value).lower()) if is_word else ("number", scalar.value)
            raise UsageError(
                f"{source}: {name}={scalar.text} is a {kind} in YAML 1.1 and a text in YAML 1.2",
                fix=f"write {value}, or the text in quotes: '{scalar.text}'",
                code="ambiguous-value",
            )
        result: Any = scalar.value
    else:
        is_choice = scalar.text in (choice for each in possible for choice in _text_choices(each))
        result = scalar.text if is_choice or _is_text(possible, wanted, scalar) else scalar.value
    if scalar.comment and isinstance(result, str):
        raise UsageError(
            f"{source}: {name}: {scalar.text} #{scalar.comment} is the text {scalar.text!r} and a comment in YAML",
            fix=f"write '{scalar.text} #{scalar.comment}' in quotes, or a space after the # of a comment",
            code="text-cut-by-comment",
        )
    return result


def _is_text(possible: Sequence[Any], wanted: Any, scalar: Scalar) -> bool:
    if bool in possible or any(map(_other_choices, possible)):
        return False
    if {int, float} & set(possible) and type(scalar.value) in (int, float):
        return False
    return _has_text(possible) or str in alternatives(type_of_items(wanted))


def _has_text(possible: Sequence[Any]) -> bool:
    return any(each is str or _text_choices(each) for each in possible)


def _text_choices(alternative: Any) -> tuple[str, ...]:
    return tuple(choice for choice in choices_of(alternative) if isinstance(choice, str))


def _other_choices(alternative: Any) -> bool:
    return any(not isinstance(choice, str) for choice in choices_of(alternative))
