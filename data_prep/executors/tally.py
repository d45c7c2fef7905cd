"""Sums of what tasks counted: one kind of sum for all phases, which goes to files as JSON."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Counts = Counter[tuple[str | int, ...]]


@dataclass
class Tally:
    """What tasks counted; `+=` adds what others counted, in the order of the tasks.

    Attributes:
        counts: by a name and what is counted, such as ("dropped", 2, "duplicate") of the source 2.
        arrays: int64 counts by name, of one shape in all tasks.
        lists: JSON values by name.
    """

    counts: Counts = field(default_factory=Counter)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    lists: dict[str, list[Any]] = field(default_factory=dict)

    def __iadd__(self, other: Tally) -> Tally:
        self.counts.update(other.counts)
        for name, array in other.arrays.items():
            self.arrays[name] = self.arrays.get(name, 0) + array
        for name, values in other.lists.items():
            self.lists.setdefault(name, []).extend(values)
        return self

    def of(self, name: str) -> Counter[Any]:
        """Return the counts of a name by the one thing that is counted, such as the number of a source."""
        return Counter({key[1]: count for key, count in self.counts.items() if key[0] == name})

    def dropped(self, num_sources: int) -> tuple[Counter[str], ...]:
        """Return the counts of the name "dropped" of each source by reason."""
        found = tuple(Counter[str]() for _ in range(num_sources))
        for key, count in self.counts.items():
            if key[0] == "dropped":
                found[int(key[1])][str(key[2])] = count
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "counts": [[*key, count] for key, count in self.counts.items()],
            "arrays": {name: {"shape": each.shape, **pack_counts(each)} for name, each in self.arrays.items()},
            "lists": self.lists,
        }

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> Tally:
        counts = Counter({(*key,): count for *key, count in values["counts"]})
        arrays = {name: unpack_counts(each).reshape(each["shape"]) for name, each in values["arrays"].items()}
        return cls(counts, arrays, values["lists"])


def pack_counts(counts: np.ndarray) -> dict[str, str]:
    """Return int64 counts, none negative, as JSON values that take less time than a list of numbers."""
    dtype = np.min_scalar_type(counts.max(initial=0)).newbyteorder("<")
    return {"dtype": dtype.str, "base64": base64.b64encode(counts.astype(dtype).tobytes()).decode()}


def unpack_counts(values: Mapping[str, str]) -> np.ndarray:
    """Return the counts of `pack_counts`, (n,) int64."""
    return np.frombuffer(base64.b64decode(values["base64"]), values["dtype"]).astype(np.int64)
