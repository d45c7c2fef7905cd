"""Units of the map phase, and their division among an array of jobs.

There are enough units for the workers and few enough for the number of files; small files share a unit.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from data_prep.base.errors import UsageError
from data_prep.documents.input_files import InputUnit
from data_prep.storage import storage

MAX_UNITS = 4096
"""A unit holds at least this part of a large corpus; there are up to twice as many, since parts do not fill all."""
MAX_PARTS = 4096
"""Files, or parts of files, in a unit; bounds the size of a task."""


@dataclass(frozen=True)
class Unit:
    """A piece of work: consecutive parts of the inputs, of one source; numbered in the order of the inputs.

    Attributes:
        name: of its result: 20 digits, a hash of all that the result depends on, the stamps of the files among it.
    """

    number: int
    parts: tuple[InputUnit, ...]
    name: str = ""

    @property
    def source(self) -> int:
        """Number of the source in the plan."""
        return self.parts[0].source

    @property
    def absolute(self) -> Unit:
        """The unit with absolute names of files, as other processes need them."""
        return replace(self, parts=tuple(replace(part, url=storage.absolute(part.url)) for part in self.parts))

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
    groups, held = list[list[InputUnit]](), 0.0
    for part in parts:
        size = part.bytes * part.format.growth
        last = groups[-1] if groups else []
        if not last or part.source != last[0].source or held + size > unit_bytes or len(last) >= MAX_PARTS:
            groups.append([])
            held = 0.0
        groups[-1].append(part)
        held += size
    return tuple(Unit(number, tuple(group)) for number, group in enumerate(groups))


# Cost of a unit besides its bytes, in bytes, so that many tiny files are also divided evenly by number.
_UNIT_OVERHEAD_BYTES = 1 << 16
_MOST_RANGES = 100_000  # more than schedulers allow for an array


@dataclass(frozen=True)
class ShardRange:
    """Range `number` (from 1) of `num_ranges`: the units that one job of an array reads."""

    number: int
    num_ranges: int

    @classmethod
    def parse(cls, text: str) -> ShardRange:
        """Read "3/16"."""
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]) <= _MOST_RANGES:
            raise UsageError(
                f"--shard-range={text} is not a range",
                fix=f"give I/N with I from 1 to N and N at most {_MOST_RANGES:,}, such as 3/16",
                code="malformed-shard-range",
            )
        return cls(int(match[1]), int(match[2]))

    @property
    def name(self) -> str:
        """Name of its lock, such as range-003-of-016."""
        return f"range-{self.number:03d}-of-{self.num_ranges:03d}"

    def __str__(self) -> str:
        return f"{self.number}/{self.num_ranges}"


def assign_ranges(unit_bytes: Sequence[int], num_ranges: int) -> list[int]:
    """Return the range (from 1) of each unit, by number.

    A function of the sizes alone, so that jobs agree without communication. Each unit, largest first, goes to the range
    with the least work so far (Graham 1969): no range gets more than 4/3 of the optimum.
    """
    loads = [(0, number) for number in range(1, num_ranges + 1)]
    ranges = [0] * len(unit_bytes)
    for unit in sorted(range(len(unit_bytes)), key=lambda unit: (-unit_bytes[unit], unit)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + unit_bytes[unit] + _UNIT_OVERHEAD_BYTES, number))
        ranges[unit] = number
    return ranges
