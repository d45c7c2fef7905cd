"""Units of the map phase: enough for the workers, few enough for the number of files; small files share a unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_prep.documents.input_units import InputUnit, growth_of

MAX_UNITS = 4096
"""A unit holds at least this part of a large corpus; there are up to twice as many, since parts do not fill all."""
MAX_PARTS = 4096
"""Files, or parts of files, in a unit; bounds the size of a task."""


@dataclass(frozen=True)
class Unit:
    """A piece of work: consecutive parts of the inputs, of one source."""

    parts: tuple[InputUnit, ...]

    @property
    def source(self) -> int:
        """Number of the source in the plan."""
        return self.parts[0].source

    @property
    def bytes(self) -> int:
        """Its share of the files' sizes, for progress."""
        return sum(part.bytes for part in self.parts)


def unit_bytes_for(text_bytes: float, unit_bytes: int) -> int:
    """Return the bytes of text of a unit: those of the settings, more if there would be over `MAX_UNITS`."""
    return max(unit_bytes, -int(-text_bytes // MAX_UNITS))


def group_parts(parts: Sequence[InputUnit], unit_bytes: int) -> tuple[Unit, ...]:
    """Group consecutive parts of a source into units of at most `unit_bytes` of text.

    Any two neighbors of one source that are below `MAX_PARTS` hold more than `unit_bytes` together, so there are at
    most 2 * text bytes / unit_bytes + parts / MAX_PARTS + sources + 1 units.
    """
    return tuple(Unit(tuple(group)) for group in _groups(parts, unit_bytes))


def _groups(parts: Sequence[InputUnit], unit_bytes: int) -> Iterator[list[InputUnit]]:
    group: list[InputUnit] = []
    held = 0.0
    for part in parts:
        size = part.bytes * growth_of(part.url)
        if group and (part.source != group[0].source or held + size > unit_bytes or len(group) >= MAX_PARTS):
            yield group
            group, held = [], 0.0
        group.append(part)
        held += size
    if group:
        yield group
