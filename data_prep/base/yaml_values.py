"""Plain values of YAML files and of `section.field=value` overrides.

OmegaConf reads them (YAML without Python tags, `1e-4` a number); interpolations such as `${oc.env:HOME}` stay text, so
that a file from elsewhere reads no environment.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import omegaconf
import yaml
from omegaconf import OmegaConf

from data_prep.base.errors import UsageError

_MAX_NESTING = 100  # levels of a YAML document
_LONGEST_QUOTATION = 500  # characters of a file or of the command line in a message
# PyYAML's constructors of tagged values (`!!timestamp x`, `!!bool x`, `!!int ''`) raise many classes of errors.
_YAML_FAULTS = (
    *(yaml.YAMLError, omegaconf.errors.OmegaConfBaseException, ValueError, LookupError, AttributeError, TypeError),
    *(ArithmeticError, RecursionError),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file as plain values, without a schema.

    Raises:
        UsageError: the file is missing, or is not YAML with a mapping at its top level.
    """
    return OmegaConf.to_container(_read_yaml(path), resolve=False)  # type: ignore[return-value]  # a mapping


def read_yaml_with_overrides(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """Read a configuration file, if any, and apply overrides such as "optimizer.learning_rate=1e-4".

    Raises:
        UsageError: as `read_yaml`; or an override is not `a.b=value`.
    """
    values = OmegaConf.create({}) if path is None else _read_yaml(path)
    for override in overrides:
        name, separator, _ = override.partition("=")
        if not separator or not name or name.startswith("-"):
            raise UsageError(
                f"override {override!r} is not of the form section.field=value",
                fix="write settings as in optimizer.learning_rate=1e-4; --help lists all",
                code="invalid-override",
            )
    try:
        for override in overrides:
            _check_depth(override.partition("=")[2])
            values = _overridden(values, override)
        return OmegaConf.to_container(values, resolve=False)  # type: ignore[return-value]  # a mapping
    except _YAML_FAULTS as error:
        raise UsageError(
            f"the overrides {_cut(' '.join(overrides))} cannot be parsed: {_in_one_line(error)}",
            fix="quote values that hold special characters, as in 'name=\"a: b\"'",
            code="invalid-override",
        ) from None


def _overridden(values: Any, override: str) -> Any:
    """Apply an override; its path may lead through a list, by index or by name (`training.stages.decay.tokens=1`).

    Raises:
        UsageError: a list on the path has no such item.
    """
    name, _, text = override.partition("=")
    parts = name.split(".")
    within: Any = values
    is_in_list = False
    for depth, part in enumerate(parts):
        if isinstance(within, omegaconf.ListConfig):
            parts[depth] = part = str(_index(within, part, ".".join(parts[:depth]), override))
            is_in_list = True
            within = within[int(part)]
        elif isinstance(within, omegaconf.DictConfig):
            within = within._get_node(part)
        else:
            break
    new = OmegaConf.from_dotlist([f"value={text}"])._get_node("value")
    is_container = isinstance(within, omegaconf.Container) and isinstance(new, omegaconf.Container)
    is_other_kind = is_container and type(within) is not type(new)
    if not is_in_list and not is_other_kind:
        return OmegaConf.merge(values, OmegaConf.from_dotlist([override]))
    OmegaConf.update(values, ".".join(parts), new, force_add=True, merge=not is_other_kind)
    return values


def _index(items: omegaconf.ListConfig, part: str, where: str, override: str) -> int:
    """Return the index of the item that `part` names by number or by its `name`."""
    names = [item.get("name") if isinstance(item, omegaconf.DictConfig) else None for item in items]
    if part.isdecimal() and int(part) < len(names):
        return int(part)
    if part in names:
        return names.index(part)
    known = ", ".join(f"{number} ({name})" if name else str(number) for number, name in enumerate(names))
    raise UsageError(
        f"override {override!r}: {where} has no item {part}",
        fix=f"use one of its items: {known}" if known else f"set {where} first",
        code="invalid-override",
    )


def _read_yaml(path: Path) -> omegaconf.DictConfig:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror})", fix="check path and permissions", code="unreadable-config"
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 (byte {error.start})", fix="convert it, such as with iconv", code="not-utf8"
        ) from None
    try:
        _check_depth(text)
        values: Any = OmegaConf.load(io.StringIO(text))
    except OSError:  # a number or a date
        values = None
    except _YAML_FAULTS as error:
        raise UsageError(
            f"{path} is not valid YAML: {_in_one_line(error)}",
            fix="correct the file at that position",
            code="invalid-yaml",
        ) from None
    if not isinstance(values, omegaconf.DictConfig) or (values and _is_bare_text(text)):
        raise UsageError(
            f"{path} has no mapping of settings at its top level",
            fix="write settings such as 'output_dir: runs/one'",
            code="config-not-a-mapping",
        )
    return values


def _is_bare_text(text: str) -> bool:
    """Whether the YAML is a single string, which OmegaConf takes for a setting of that name."""
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return isinstance(next((event for event in events if isinstance(event, yaml.NodeEvent)), None), yaml.ScalarEvent)


def _check_depth(text: str) -> None:
    """Raise ValueError for deep nesting: libyaml recurses per level, and crashes the process at 20,000."""
    level = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > _MAX_NESTING:
            assert event.start_mark is not None, "events of a text have a position"
            raise ValueError(f"nested more than {_MAX_NESTING} levels deep at line {event.start_mark.line + 1}")


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return _cut(text if isinstance(error, (yaml.YAMLError, ValueError)) else f"{type(error).__name__}: {text}")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTATION else f"{text[:_LONGEST_QUOTATION]}..."
