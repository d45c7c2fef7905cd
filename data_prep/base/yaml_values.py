"""Plain values of YAML texts.

Every scalar keeps its text until the schema says what it is. What YAML may drop from a value in silence (a comment, an
anchor, a tag, the first of two equal keys) is an error. Interpolations such as `${oc.env:HOME}` stay text, so that a
file from elsewhere reads no environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml

from data_prep.base.errors import UsageError
from data_prep.base.typed_values import Scalar

_MAX_NESTING = 100  # levels of a YAML document
_LONGEST_QUOTATION = 500  # characters of a file or of the command line in a message
_TAG = "tag:yaml.org,2002:"
_COMMENT = re.compile(r"[ \t]+#([^\s#].*)")
# PyYAML's constructors of tagged values (`!!bool x`, `!!int ''`) raise many classes of errors.
YAML_FAULTS = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _PlainLoader(_Loader):  # type: ignore[misc]  # libyaml's, where it is installed
    """PyYAML's loader, in which `1e-4` is a number and `3:30`, `007` and `2026-05-01` are texts."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _name, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", list("yYnNtTfFoO")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
        r"|\.[0-9_]+(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
):
    _PlainLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file as plain values, without a schema: what YAML makes of each."""
    return without_scalars(read_scalars(path))  # type: ignore[no-any-return]  # a mapping


def to_text(values: Mapping[str, Any]) -> str:
    """Return plain values as YAML that `read_yaml`, and readers of YAML 1.1 and 1.2, read back to the same."""
    return yaml.dump(values, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True)


class _PlainDumper(yaml.SafeDumper):
    """PyYAML's writer, which quotes every text that a reader takes for something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML declares it without ClassVar
        first: [*_PlainLoader.yaml_implicit_resolvers.get(first, ()), *others.get(first, ())]
        for others in [yaml.SafeDumper.yaml_implicit_resolvers]
        for first in {**_PlainLoader.yaml_implicit_resolvers, **others}
    }


_PlainDumper.add_implicit_resolver(f"{_TAG}int", re.compile(r"0o[0-7_]+\Z"), ["0"])  # of YAML 1.2
_PlainDumper.add_implicit_resolver(f"{_TAG}bool", re.compile(r"[yYnN]\Z"), list("yYnN"))  # of Go's YAML


def read_scalars(path: Path) -> dict[str, Any]:
    """As `read_yaml`, with each number, null and plain text as a `Scalar`, which keeps what was written."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror})", fix="check path and permissions", code="unreadable-config"
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 (byte {error.start})", fix="convert it, such as with iconv", code="not-utf8"
        ) from None
    try:
        values = parsed(text)
        anchors = {event.anchor: event.start_mark.line for event in _events(text) if _is_scalar_with_anchor(event)}
        for event in _events(text) if anchors else ():
            if isinstance(event, yaml.AliasEvent):
                anchors.pop(event.anchor, None)
        for anchor, line in anchors.items():
            raise ValueError(f"line {line + 1} begins a value with &{anchor}, an anchor that nothing refers to")
    except YAML_FAULTS as error:
        raise UsageError(
            f"{path} is not valid YAML: {in_one_line(error)}",
            fix="correct the file at that position, or write the text in quotes",
            code="invalid-yaml",
        ) from None
    if isinstance(values, Scalar) and values.value is None:
        return {}
    if not isinstance(values, dict):
        raise UsageError(
            f"{path} has no mapping of settings at its top level",
            fix="write settings such as 'output_dir: runs/one'",
            code="config-not-a-mapping",
        )
    return values


def _is_scalar_with_anchor(event: Any) -> bool:
    return isinstance(event, yaml.ScalarEvent) and event.anchor is not None


def parsed(text: str) -> Any:
    """Return the dictionaries, lists, strings and `Scalar`s of a YAML text.

    Raises:
        ValueError: it is deeper or larger than a configuration; others of `YAML_FAULTS`: it is not YAML.
    """
    num_events = _check_depth(text)
    loader = _PlainLoader(text)
    try:
        node = loader.get_single_node()
        return Scalar("", None) if node is None else _Builder(loader, text, 10_000 + 10 * num_events).build(node)
    finally:
        loader.dispose()


class _Builder:
    """Makes plain values of PyYAML's nodes; aliases are written out, up to `max_nodes` nodes in all."""

    def __init__(self, loader: Any, text: str, max_nodes: int) -> None:
        self._loader, self._text, self._nodes_left = loader, text, max_nodes
        self._open: set[int] = set()

    def build(self, node: Any) -> Any:
        self._nodes_left -= 1
        if self._nodes_left < 0 or id(node) in self._open:
            raise ValueError(f"aliases repeat too much of the document at line {node.start_mark.line + 1}")
        tag = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, tag)
        if tag not in ("seq", "map"):
            raise ValueError(f"the tag {node.tag} at line {node.start_mark.line + 1} is not supported")
        self._open.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            built: Any = [self.build(item) for item in node.value]
        else:
            built = self._mapping(node)
        self._open.discard(id(node))
        return built

    def _mapping(self, node: Any) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key, item in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ValueError(f"a name at line {line} is a list or a mapping")
            if key.tag == f"{_TAG}merge":
                bases = self.build(item)
                bases = bases if isinstance(bases, list) else [bases]
                if not all(isinstance(base, dict) for base in bases):
                    raise ValueError(f"<< at line {line} must be followed by mappings")
                merged = {name: value for base in [*reversed(bases), merged] for name, value in base.items()}
            elif key.value in own:
                raise ValueError(f"found duplicate key {key.value} at line {line}")
            else:
                own[key.value] = self.build(item)
        return {**merged, **own}

    def _scalar(self, node: Any, tag: str) -> Any:
        if tag not in ("str", "int", "float", "bool", "null", "merge"):
            raise ValueError(f"the tag {node.tag} at line {node.start_mark.line + 1} is not supported")
        is_text = tag in ("str", "merge")
        value = node.value if is_text else getattr(self._loader, f"construct_yaml_{tag}")(node)
        if node.style:
            return value
        comment = _COMMENT.match(self._text, node.end_mark.index)
        return Scalar(node.value, value, comment[1].rstrip() if comment else "")


def without_scalars(value: Any) -> Any:
    """Return the value with what YAML makes of each `Scalar`."""
    if isinstance(value, dict):
        return {key: without_scalars(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_scalars(item) for item in value]
    return value.value if isinstance(value, Scalar) else value


def dropped_part(text: str) -> str:
    """Name what YAML drops from the text of a value: a comment, an anchor, an alias, a tag; empty if nothing."""
    rest, end = [], 0
    for event in _events(text):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            return f"the anchor {event.anchor}"
        if getattr(event, "tag", None) is not None:
            return f"the tag {event.tag.replace(_TAG, '!!')}"
        if isinstance(event, yaml.DocumentStartEvent | yaml.DocumentEndEvent) and event.explicit:
            return "the marker of a document"
        if isinstance(event, yaml.ScalarEvent):
            assert event.start_mark is not None and event.end_mark is not None, "events of a text have positions"
            rest.append(text[end : event.start_mark.index])
            end = event.end_mark.index
    comment = "".join([*rest, text[end:]]).partition("#")
    return f"the comment #{comment[2]}" if comment[1] else ""


def _events(text: str) -> Iterator[Any]:
    return yaml.parse(text, Loader=_Loader)


def _check_depth(text: str) -> int:
    """Return the number of events; raise ValueError for deep nesting: libyaml recurses per level, and crashes the
    process at 20,000.
    """
    level = number = 0
    for event in _events(text):
        number += 1
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > _MAX_NESTING:
            raise ValueError(f"nested more than {_MAX_NESTING} levels deep at line {event.start_mark.line + 1}")
    return number


def in_one_line(error: Exception) -> str:
    """Return the text of an error of PyYAML for a message."""
    text = " ".join(str(error).split())
    return cut(text if isinstance(error, (yaml.YAMLError, ValueError)) else f"{type(error).__name__}: {text}")


def cut(text: str) -> str:
    """Return the beginning of a long text for a message."""
    return text if len(text) <= _LONGEST_QUOTATION else f"{text[:_LONGEST_QUOTATION]}..."
