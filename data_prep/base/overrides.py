"""The settings of a file, over those of its base and under `section.field=value` overrides, as plain values.

The schema names the type of each value, the items of a list by number or name, and the earlier names of settings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.setting_errors import MIN_LIKENESS
from data_prep.base.settings import is_list, plain
from data_prep.base.typed_values import (
    NULLS,
    Scalar,
    section_of,
    takes_null,
    takes_text,
    type_of_items,
    type_within,
    typed_value,
)
from data_prep.base.yaml_values import (
    YAML_FAULTS,
    cut,
    dropped_part,
    in_one_line,
    parsed,
    read_scalars,
    without_scalars,
)

BASE = "base"
"""Key of a file for the file whose values it replaces."""
_INDEX = re.compile(r"\[([^\[\]]+)\](?=[.\[]|$)")


def read_settings(
    schema: Any,
    path: Path | None,
    overrides: Sequence[str] | Mapping[str, Any],
    source: str,
    find: Callable[[str], Path] = Path,
) -> dict[str, Any]:
    """Read a configuration file, if any, apply overrides, and return plain values of the schema's types.

    A file may name another one as its `base`: its own values replace those of the base, a list as a whole.

    Args:
        overrides: `["optimizer.learning_rate=1e-4"]`, or values by dotted name, which stay what they are.
        source: name of the file, for errors.
        find: the file of a name that is not a file beside the one that names it as its base.
    """
    values = {} if path is None else _with_base(schema, path, find)
    if isinstance(overrides, Mapping):
        for name, value in overrides.items():
            _set(schema, values, name, lambda wanted, value=value: plain(value), f"{name}={value!r}")
    else:
        for override in overrides:
            name, separator, _ = override.partition("=")
            if not separator or not name or name.startswith("-"):
                raise UsageError(
                    f"override {override!r} is not of the form section.field=value",
                    fix="write settings as in optimizer.learning_rate=1e-4; --help lists all",
                    code="invalid-override",
                )
        for override in overrides:
            name, _, text = override.partition("=")
            _set(schema, values, name, lambda wanted, text=text, name=name: _read_typed(wanted, name, text), override)
    return typed_value(schema, values, source=source)  # type: ignore[no-any-return]  # a mapping


def _set(schema: Any, values: dict[str, Any], name: str, read: Any, override: str) -> None:
    """Apply an override; its path may lead through a list, by index or by name (`training.stages.decay.tokens=1`)."""
    *sections, last = _INDEX.sub(r".\1", name).split(".")
    wanted, path = schema, list[str]()
    within: Any = values
    for part in sections:
        key, wanted = _step(wanted, within, part, ".".join(path), override)
        path.append(str(key))
        is_in_list = isinstance(within, list)
        following = within[key] if is_in_list else within.get(key)
        if not isinstance(following, dict | list):
            within[key] = following = [] if is_list(wanted) else {}
        within = following
    section = wanted
    key, wanted = _step(section, within, last, ".".join(path), override)
    value = read(wanted)
    _drop_other_names(section, within, {key: value})
    before = within[key] if isinstance(within, list) else within.get(key)
    within[key] = _merged(wanted, before, value) if isinstance(before, dict) and isinstance(value, dict) else value


def _merged(wanted: Any, below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section of the type `wanted` in which values of `above` replace those of `below`, under any name."""
    values = dict(below)
    _drop_other_names(wanted, values, above)
    for name, value in above.items():
        before = values.get(name)
        if isinstance(before, dict) and isinstance(value, dict):
            value = _merged(type_within(wanted, name, values), before, value)
        values[name] = value
    return values


def _drop_other_names(wanted: Any, section: Any, above: Mapping[Any, Any]) -> None:
    """Remove from a section of the type `wanted` what `above` sets by another name (`Settings.earlier_names`).

    A null under an earlier name, or what else sets nothing (`Settings.unsets`), unsets the setting of today, and no
    other earlier name.
    """
    schema = section_of(wanted)
    earlier_names = schema.earlier_names
    unset = {
        name for name, value in above.items() if name in earlier_names and schema.unsets(name, without_scalars(value))
    }
    replaced = {earlier_names.get(name, name) for name in {*above} - unset}
    for name in {*earlier_names, *earlier_names.values()} - {*above}:
        if earlier_names.get(name, name) in replaced or name in {earlier_names[each] for each in unset}:
            section.pop(name, None)


def _step(wanted: Any, within: Any, part: str, where: str, override: str) -> tuple[Any, Any]:
    """Return the key or index that `part` of a path means in `within`, and the type of what is there."""
    if isinstance(within, list):
        return _index(within, part, where, override), type_of_items(wanted)
    return part, type_within(wanted, part, within)


def _index(items: list[Any], part: str, where: str, override: str) -> int:
    """Return the index of the item that `part` names by number or by its `name`."""
    named = [item.get("name") if isinstance(item, dict) else None for item in items]
    names = [name.text if isinstance(name, Scalar) else name for name in named]
    if part.isdecimal() and int(part) < len(names):
        return int(part)
    if part in names:
        return names.index(part)
    known = ", ".join(f"{number} ({name})" if name else str(number) for number, name in enumerate(names))
    near = difflib.get_close_matches(part.casefold(), [name for name in names if name], 1, MIN_LIKENESS)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise UsageError(
        f"override {override!r}: {where} has no item {part}{meant}",
        fix=f"use one of its items: {known}" if known else f"write {where}=[{{SETTING: VALUE, ...}}, ...] first",
        code="invalid-override",
    )


def _read_typed(wanted: Any, name: str, text: str) -> Any:
    """Return the value of an override whose setting has the type `wanted`.

    A text is what was typed, without the quotes that enclose the whole of it.
    """
    try:
        tree, dropped = parsed(text), dropped_part(text)
    except YAML_FAULTS as error:
        tree, dropped = error, ""
    if takes_text(wanted, text):
        if text in NULLS and takes_null(wanted):
            return None
        return tree if isinstance(tree, str) and not dropped else text
    if isinstance(tree, Exception):
        raise UsageError(
            f"the override {cut(f'{name}={text}')} cannot be parsed: {in_one_line(tree)}",
            fix="quote values that hold special characters, as in 'name=\"a: b\"'",
            code="invalid-override",
        )
    if dropped:
        raise UsageError(
            f"the override {cut(f'{name}={text}')} holds {dropped}, which YAML drops from the value",
            fix="leave it out, or quote a text that holds it",
            code="value-cut-by-yaml",
        )
    return tree


def _with_base(schema: Any, path: Path, find: Callable[[str], Path], above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a file over its base, over the base of that, and so on; `above` are the files that led to it."""
    values = read_scalars(path)
    base = values.pop(BASE, None)
    if base is None:
        return values
    name = base.text if isinstance(base, Scalar) else base
    if not isinstance(name, str) or not name:
        raise UsageError(
            f"{path}: {BASE}={without_scalars(base)!r} is not the name of a file",
            fix="name a preset or a YAML file, such as 'base: bert_large'",
            code="invalid-base",
        )
    beside = path.parent / name
    try:
        found = beside if beside.is_file() else find(name)
    except UsageError as error:
        raise UsageError(f"{path}: {BASE}: {error.problem}", fix=error.fix, code=error.code) from None
    if any(found.samefile(other) for other in (*above, path)):
        raise UsageError(f"{path}: {BASE}={name} leads back to itself", fix="name another base", code="invalid-base")
    return _merged(schema, _with_base(schema, found, find, (*above, path)), values)
