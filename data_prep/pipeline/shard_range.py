"""A range of an array of jobs: its share of the units of the map phase."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

from data_prep.base.errors import UsageError

# Cost of a unit besides its bytes, in bytes, so that many tiny files are also divided evenly by number.
_UNIT_OVERHEAD_BYTES = 1 << 16
_MOST_RANGES = 100_000  # more than schedulers allow for an array


@dataclass(frozen=True)
class ShardRange:
    """Range `number` (from 1) of `num_ranges`."""

    number: int
    num_ranges: int

    @classmethod
    def parse(cls, text: str) -> ShardRange:
        """Read "3/16".

        Raises:
            UsageError: it is something else.
        """
        match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]) <= _MOST_RANGES:
            raise UsageError(
                f"--shard-range={text} is no range",
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
