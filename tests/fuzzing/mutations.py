"""Strategies that damage a small valid file: bytes changed anywhere, or the values of a JSON document."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("CLOZEWORKS_FUZZ_EXAMPLES", "0"))
"""Examples of a test, of a slow one a tenth; 0: the few that continuous integration has time for."""

DEEP = 100_000
_DIGITS = 5_000  # more than Python turns into a number
_MOST_BYTES = 40  # of what is inserted, and of a slice that is moved

HOSTILE_TEXTS = (
    "",
    "x",
    "12",
    "nan",
    "../../outside",
    "/etc/passwd",
    "file:///etc/passwd",
    "a/../../b",
    "\x1b[31m\r\n",
    "\x00",
    "\u202e\ufeff",
    "${oc.env:HOME}",
    "???",
    "$(touch outside)",
    "!!python/object/apply:os.system ['true']",
    "a" * 10_000,
)

HOSTILE_JSON = (
    *("null", "true", "false", "0", "-1", "1", "1.5", "-0.0", "1e999", "-1e999", "NaN", "Infinity", "1e-400"),
    *("2147483648", "18446744073709551616", "1" + "0" * 400, "9" * _DIGITS, "4" + "0" * 15, '"\\ud800"'),
    *("[]", "{}", "[[]]", '{"":0}', "[1,2,3]", "[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP),
    *(json.dumps(text) for text in HOSTILE_TEXTS),
)
"""JSON values as they are written: Python's own writer makes neither numbers of 5,000 digits nor such depths."""

_INTERESTING = [
    *(
        bytes(8),
        b"\xff" * 8,
        b"\x7f" + b"\xff" * 7,
        b"\xff" * 7 + b"\x7f",
        b"\0\0\0\0\0\0\0\x80",
        b"\x80",
        b"\0",
        b"\xff",
    ),
    *(b"\n", b"\r\n", b"{", b"}", b"[", b'"', b"\\", b"'", b"-", b"..", b"../", b"99999999", b"%", b"&a", b"*a", b"!!"),
    *("\ud7ff\u202e".encode(), b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1b[31m"),
]


def fuzz(examples: int, slow: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Settings of a fuzzing test: so many examples in continuous integration, `EXAMPLES` where that is set.

    A test that is `slow` (tens of milliseconds an example) takes a tenth of these, and none fewer than by default. The
    time of an example is bounded by `tests.fuzzing.watching`, in seconds of CPU, which a busy machine does not change.
    """
    most = max(examples, EXAMPLES // (10 if slow else 1)) if EXAMPLES else examples
    return settings(
        max_examples=most,
        deadline=None,
        derandomize=not EXAMPLES,  # finds today what it found yesterday
        database=None,
        print_blob=bool(EXAMPLES),  # what another run does not find again by itself
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def mutated_bytes(draw: st.DrawFn, data: bytes, most_edits: int = 3) -> bytes:
    """`data` after one to `most_edits` edits; never equal to it."""
    found = data
    for _ in range(draw(st.integers(1, most_edits))):
        found = draw(st.sampled_from(_EDITS))(draw, found)
    return found if found != data else data[: draw(st.integers(0, max(len(data) - 1, 0)))]


@st.composite
def mutated_json(draw: st.DrawFn, values: Any, most_edits: int = 2) -> bytes:
    """A JSON document with values of other types and sizes, and keys that are gone, new, renamed or there twice."""
    values = copy.deepcopy(values)
    raw: dict[str, str] = {}
    for number in range(draw(st.integers(1, most_edits))):
        holders = list(_places(values)) or [([values], 0)]
        holder, key = draw(st.sampled_from(holders))
        mark = f"@{number}@"
        match draw(st.sampled_from(("replace", "replace", "replace", "delete", "add", "wrap", "twice"))):
            case "delete":
                del holder[key]
            case "add" if isinstance(holder, dict):
                holder[draw(st.sampled_from(HOSTILE_TEXTS))] = mark
            case "wrap":
                holder[key] = [holder[key]]
            case "twice" if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case _:
                holder[key] = mark
        raw[json.dumps(mark)] = draw(st.sampled_from(HOSTILE_JSON))
    text = json.dumps(values, default=str)
    for mark, written in raw.items():
        text = text.replace(mark, written)
    return text.encode()


def mutated_document(values: Any) -> st.SearchStrategy[bytes]:
    """Either kind of damage to a JSON document."""
    return mutated_json(values) | mutated_bytes(json.dumps(values).encode())


def damage(data: st.DataObject, path: Path) -> bool:
    """Put damage into a file, of either kind where it holds JSON; whether its bytes are others than before."""
    original = path.read_bytes()
    is_json = path.suffix == ".json"
    changed = data.draw(mutated_document(json.loads(original)) if is_json else mutated_bytes(original))
    path.write_bytes(changed)
    return changed != original


def says_the_same(read: Any, said: Any) -> bool:
    """Whether what was read is what a JSON document says; defaults may be added, and "12" may be read as 12, or 12 as
    a text.
    """
    if isinstance(said, dict):
        return isinstance(read, dict) and all(says_the_same(read.get(key), value) for key, value in said.items())
    if isinstance(said, (list, tuple)):
        return isinstance(read, (list, tuple)) and len(read) == len(said) and all(map(says_the_same, read, said))
    if isinstance(said, str) and isinstance(read, (int, float)):
        return float(said) == float(read)
    if isinstance(read, str) and isinstance(said, (bool, int, float)):
        return bool(json.loads(read) == said)
    return read == said or (read != read and said != said)


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a document, as its holder and the key or number in it."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield values, key
        yield from _places(value)


def _place(draw: st.DrawFn, data: bytes) -> int:
    return draw(st.integers(0, len(data)))


def _slice(draw: st.DrawFn, data: bytes) -> tuple[int, int]:
    start = _place(draw, data)
    return start, min(len(data), start + draw(st.integers(1, _MOST_BYTES)))


def _flip(draw: st.DrawFn, data: bytes) -> bytes:
    place = _place(draw, data)
    return (
        data[:place]
        + bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[place : place + 1])
        + data[place + 1 :]
    )


def _truncate(draw: st.DrawFn, data: bytes) -> bytes:
    return data[: _place(draw, data)]


def _insert(draw: st.DrawFn, data: bytes) -> bytes:
    place = _place(draw, data)
    new = draw(st.sampled_from(_INTERESTING) | st.binary(min_size=1, max_size=_MOST_BYTES))
    return data[:place] + new + data[place:]


def _overwrite(draw: st.DrawFn, data: bytes) -> bytes:
    place = _place(draw, data)
    new = draw(st.sampled_from(_INTERESTING) | st.binary(min_size=1, max_size=_MOST_BYTES))
    return data[:place] + new + data[place + len(new) :]


def _delete(draw: st.DrawFn, data: bytes) -> bytes:
    start, stop = _slice(draw, data)
    return data[:start] + data[stop:]


def _duplicate(draw: st.DrawFn, data: bytes) -> bytes:
    start, stop = _slice(draw, data)
    return data[:stop] + data[start:stop] * draw(st.integers(1, 3)) + data[stop:]


def _move(draw: st.DrawFn, data: bytes) -> bytes:
    start, stop = _slice(draw, data)
    place = _place(draw, data)
    return data[:place] + data[start:stop] + data[place + stop - start :]


_EDITS: list[Callable[[st.DrawFn, bytes], bytes]] = [
    _flip,
    _flip,
    _truncate,
    _insert,
    _overwrite,
    _delete,
    _duplicate,
    _move,
]
