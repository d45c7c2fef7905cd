"""Why documents are left out: the step that drops one, and its reason.

The code that drops a document names both. The reason of a step may equal that of another one: a filter may return
"empty" or "removed". Manifests and work files of earlier releases have reasons alone (`earlier_drop`).
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from data_prep.documents.rejects import READING_REASONS

READING = "reading"
FILTERED_TEXT = "filtered text"
"""The check of what the filters and transforms made of a document."""
TAKEDOWNS = "takedowns"
"""An addition leaves out what was removed from the data set."""
CLEANING = "cleaning"
ENCODING = "encoding"
DEDUPLICATION = "deduplication"
NEAR_DUPLICATES = "near duplicates"
REMOVAL = "removal"
"""The command `remove`."""
EARLIER_FILTERING = "filtering"
"""All filters of a preparation by an earlier release, whose reasons name the filter."""

_ORDER = (
    READING,
    EARLIER_FILTERING,
    FILTERED_TEXT,
    TAKEDOWNS,
    CLEANING,
    ENCODING,
    DEDUPLICATION,
    NEAR_DUPLICATES,
    REMOVAL,
)
_FILTER = re.compile("filter ([1-9][0-9]{0,8}) (.*)", re.DOTALL)
_FILTER_PREFIX = "filter "
_EARLIER: dict[str, tuple[str, ...]] = {
    READING: READING_REASONS,
    EARLIER_FILTERING: (),
    CLEANING: ("empty", "too short", "too long"),
    DEDUPLICATION: ("duplicate", "near duplicate", "in the data set already", "removed earlier"),
    REMOVAL: ("removed",),
}
_SUMMARIES = {
    reason: (number, place) for number, reasons in enumerate(_EARLIER.values()) for place, reason in enumerate(reasons)
}
_TODAY = {"removed earlier": TAKEDOWNS, "near duplicate": NEAR_DUPLICATES}
"""Steps of reasons that were those of deduplication."""
_UNNAMED = (READING, EARLIER_FILTERING, CLEANING, DEDUPLICATION, NEAR_DUPLICATES, REMOVAL)
"""Steps that messages leave out: their reasons say enough."""


class Drop(NamedTuple):
    """Why a document is left out."""

    step: str
    reason: str

    @property
    def summary(self) -> str:
        """The reason without the step, as "filter metadata: not score >= 3", by which manifests add drops up."""
        name = name_of_filter(self.step)
        return self.reason if name is None else f"{_FILTER_PREFIX}{name}: {self.reason}"

    def __str__(self) -> str:
        return self.reason if self.step in _UNNAMED else f"{self.step}: {self.reason}"


def filter_step(number: int, name: str) -> str:
    """Return the step of a filter or transform: its place in the chain, from 1, and its name."""
    return f"{_FILTER_PREFIX}{number} {name}"


def place_of_filter(step: str) -> int | None:
    """Return the place of a filter in its chain, from 1; None for another step."""
    found = _FILTER.fullmatch(step)
    return None if found is None else int(found[1])


@functools.lru_cache(maxsize=4096)
def name_of_filter(step: str) -> str | None:
    """Return the name of the filter of a step; None for another step."""
    found = _FILTER.fullmatch(step)
    return None if found is None else found[2]


@functools.lru_cache(maxsize=4096)
def step_order(step: str) -> tuple[int, int, str]:
    """Return a key that sorts steps in the order in which documents pass them; an unknown step is the last."""
    place = place_of_filter(step)
    if place is not None:
        return _ORDER.index(FILTERED_TEXT), place - (1 << 32), step
    return (_ORDER.index(step) if step in _ORDER else len(_ORDER)), 0, step


def by_step(drops: Mapping[Drop, int]) -> dict[str, dict[str, int]]:
    """Return the counts by step and reason, both in order."""
    found: dict[str, dict[str, int]] = {}
    for drop in sorted(drops, key=lambda each: (step_order(each.step), each.reason)):
        found.setdefault(drop.step, {})[drop.reason] = drops[drop]
    return found


def by_summary(drops: Mapping[Drop, int]) -> dict[str, int]:
    """Return the counts by `Drop.summary`, in alphabetical order."""
    found = Counter[str]()
    for drop, count in drops.items():
        found[drop.summary] += count
    return dict(sorted(found.items()))


def of_step(step: str, reasons: Mapping[str, int]) -> Counter[Drop]:
    """Return the counts of the reasons of one step."""
    return Counter({Drop(step, reason): count for reason, count in reasons.items()})


def drops_of_json(values: Mapping[str, int] | Sequence[tuple[str, str, int]]) -> Counter[Drop]:
    """Return the counts of a work file: (step, reason, count) each, or those of an earlier release by reason."""
    if isinstance(values, Mapping):
        return Counter({drop_of_earlier_work(reason): count for reason, count in values.items()})
    return Counter({Drop(step, reason): count for step, reason, count in values})


def drop_of_earlier_work(reason: str) -> Drop:
    """Return the drop of which a work file of an earlier release has the reason, in the step that has it today."""
    return Drop(_TODAY[reason], reason) if reason in _TODAY else earlier_drop(reason)


def with_places(drops: Mapping[Drop, int], names: Sequence[str]) -> Counter[Drop]:
    """Return drops in which those of earlier work are in the steps of a chain, where one filter alone has the name."""
    found = Counter[Drop]()
    for drop, count in drops.items():
        named = enumerate(names, 1) if drop.step == EARLIER_FILTERING else ()
        possible = [each for each in named if drop.reason.startswith(f"{_FILTER_PREFIX}{each[1]}: ")]
        if len(possible) == 1:
            ((number, name),) = possible
            drop = Drop(filter_step(number, name), drop.reason.removeprefix(f"{_FILTER_PREFIX}{name}: "))
        found[drop] += count
    return found


def earlier_drop(reason: str) -> Drop:
    """Return the drop of which a manifest or a work file of an earlier release has the reason.

    Their reasons of filters name the filter; every reason that no later step had is one of reading.
    """
    if reason.startswith(_FILTER_PREFIX):
        return Drop(EARLIER_FILTERING, reason)
    return Drop([*_EARLIER][_SUMMARIES[reason][0]] if reason in _SUMMARIES else READING, reason)


def summary_order(reason: str) -> tuple[int, int, str]:
    """Return a key that sorts the reasons by which manifests add drops up, in the order of the steps."""
    number, place = _SUMMARIES.get(reason, ([*_EARLIER].index(earlier_drop(reason).step), 0))
    return number, place, reason
