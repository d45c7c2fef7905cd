"""What is wrong with a configuration, as a person reads it: pydantic's errors in, problems with fixes out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from data_prep.base.settings import SettingError, Settings, choices_of, display, setting_names
from data_prep.base.typed_values import type_of_items, type_within

MIN_LIKENESS = 0.75  # of two names (difflib's ratio): below it, a suggestion misleads
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


class Violation(NamedTuple):
    """One setting that is wrong: the problem, the fix as an imperative, and the rule's stable name in kebab case.

    Attributes:
        is_typed: the value was typed on the command line.
    """

    problem: str
    fix: str
    code: str
    is_typed: bool = False


def violations(
    schema: type[BaseModel], error: ValidationError, values: Mapping[str, Any], typed: Mapping[str, str]
) -> list[Violation]:
    """All that `error` says about `values`.

    Args:
        typed: the texts of values that were typed on the command line, by setting: problems repeat them.
    """
    return [
        _explain(schema, item, values, typed)._replace(is_typed=_is_typed(item["loc"], typed))
        for item in _without_types(error.errors(), values)
    ]


def _is_typed(names: Sequence[int | str], typed: Iterable[str]) -> bool:
    """Return whether a setting, or a section that holds it, is among those that were typed."""
    parents = {".".join(map(str, names[:length])) for length in range(1, len(names) + 1)}
    return any(name.replace("[", ".").replace("]", "") in parents for name in typed)


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


def within_item(fix: str, item: str, section: str) -> str:
    """Name the settings of a section in a fix as those of an item of a list, such as a stage."""
    return re.sub(rf"(?<![\w.]){section}\.(?=[a-z])", f"{item}.{section}.", fix) if section else fix


def _explain(schema: type[BaseModel], error: Any, values: Mapping[str, Any], typed: Mapping[str, str]) -> Violation:
    """State what pydantic found wrong with one value."""
    where = ".".join(str(part) for part in error["loc"])
    value = error.get("input")
    if error["type"] == "extra_forbidden":
        is_scalar = not isinstance(value, (dict, list)) and where in typed
        if "." in str(error["loc"][-1]):  # a dotted key in a file; overrides nest
            *sections, name = str(error["loc"][-1]).split(".")
            opened = "".join(f"{section}: {{" for section in sections)
            fix = f"nest it: {opened}{name}: {display(value)}{'}' * len(sections)}"
            return Violation(f"{where} is a dotted key in a file", fix, "dotted-key")
        return _explain_unknown(schema, where, typed[where] if is_scalar else value, values)
    if error["type"] == "missing":
        return Violation(f"{where} is required and not set", f"set {where}", "missing-setting")
    cause = (error.get("ctx") or {}).get("error")
    if isinstance(cause, SettingError):
        item = re.match(r".*\.\d+(?=\.|$)", where)  # a rule does not know the item of a list that it looks at
        if item is None or item[0] in str(cause):
            return Violation(str(cause), cause.fix, cause.code)
        section = where[item.end() :].strip(".").partition(".")[0]
        return Violation(f"{item[0]}: {cause}", within_item(cause.fix, item[0], section), cause.code)
    message: str = error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    is_rule = error["type"] == "value_error" and isinstance(value, (dict, BaseModel))
    if not where or is_rule:  # a rule of a section names its settings
        problem, _, fix = message.partition("; ")  # a plain ValueError may state its fix behind a semicolon
        return Violation(problem, fix or "change the value; --help lists the settings", "invalid-setting")
    rule, _, fix = (error.get("wanted") or _wanted(error) or message[:1].lower() + message[1:]).partition("; ")
    if error["type"] in ("dict_type", "model_type", "model_attributes_type") and not where.rpartition(".")[2].isdigit():
        # a name that other projects use as well
        meant = schema.explain_unknown(where, typed.get(where, value), values) if issubclass(schema, Settings) else None
        fix = meant or f"write {where}.SETTING=value"
    fix = fix or _choice(schema, where, typed.get(where, value)) or f"change {where}"
    return Violation(f"{where}={display(value)} {rule}", fix, "invalid-setting")


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
    if kind == "too_short" and isinstance(error.get("input"), str):
        return "must be a non-empty string"
    prefix = next((prefix for prefix in _KINDS if kind.startswith(prefix)), None)
    return None if prefix is None else f"must be {_KINDS[prefix]}"


def _explain_unknown(schema: type[BaseModel], where: str, value: object, values: Mapping[str, Any]) -> Violation:
    """State what to write instead of an unknown setting."""
    known = schema.explain_unknown(where, value, values) if issubclass(schema, Settings) else None
    if known is not None:
        return Violation(f"unknown setting {where}", known, "unknown-setting")
    nearest, siblings = _nearest_name(schema, where, is_section=isinstance(value, dict))
    if nearest is None:
        return Violation(f"unknown setting {where}", f"use one of {', '.join(siblings)}", "unknown-setting")
    if isinstance(value, str | int | float) and (meant_choice := _choice(schema, nearest, value)):
        return Violation(f"unknown setting {where} (did you mean {nearest}?)", meant_choice, "unknown-setting")
    meant = f"{nearest}={value}" if isinstance(value, str | int | float) else nearest
    names = {_in_item(name, nearest) for name in setting_names(schema)}
    if isinstance(value, dict) and len(value) == 1 and f"{nearest}.{next(iter(value))}" in names:
        ((name, item),) = value.items()  # a section with a typing error: `trainig.max_steps=10`
        meant = f"{nearest}.{name}={display(item)}"
    return Violation(f"unknown setting {where} (did you mean {nearest}?)", f"write {meant}", "unknown-setting")


def _choice(schema: type[BaseModel], name: str, value: object) -> str | None:
    """Return the fix for a value that is none of the setting's choices; None if it is one, or the setting has none.

    The only choice whose name is a part of the value is what was meant: `whole_word` means `word`.
    """
    wanted: Any = schema
    for part in name.split("."):
        wanted = type_of_items(wanted) if part.isdigit() else type_within(wanted, part, {})
    choices = [text if isinstance(text, str) else display(text) for text in choices_of(wanted)]
    if not choices or str(value).lower() in choices:
        return None
    parts = re.split(r"[^a-z0-9]+", str(value).lower())
    fitting = [choice for choice in choices if choice in parts]
    if len(fitting) == 1:
        return f"write {name}={fitting[0]}"
    return (
        f"set {name} to {', '.join(choices[:-1])} or {choices[-1]}"
        if len(choices) > 1
        else f"write {name}={choices[0]}"
    )


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
        or [in_section[name] for name in difflib.get_close_matches(where[start:], in_section, 1, MIN_LIKENESS)]
        or (namesakes if len(namesakes) == 1 else [])
        or _similar_last_parts(last, near or elsewhere)
    )
    return (found[0] if found else None), siblings or [name for name in known if "." not in name]


def _in_item(name: str, section: str) -> str:
    """Return the name of a setting, within the items of lists and mappings that lead to `section`, such as
    `training.stages.0.steps`."""
    found: list[str] = []
    for part in name.split("."):
        found.append(_key_within(found, section) or part if part == "*" else part)
        if (index := _key_within(found, section)).isdigit():
            found.append(index)
    return ".".join(found)


def _key_within(parts: Sequence[str], section: str) -> str:
    """Return the next part of a section's name after these; empty if it does not begin with them."""
    named = section.split(".")
    return named[len(parts)] if named[: len(parts)] == list(parts) and len(named) > len(parts) else ""


def _similar_last_parts(last: str, names: Sequence[str]) -> list[str]:
    """Return the name, if any, whose last part is similar to `last`: all names of a section share its name."""
    by_last_part = {name.rpartition(".")[2]: name for name in names}
    return [by_last_part[part] for part in difflib.get_close_matches(last, by_last_part, 1, MIN_LIKENESS)]
