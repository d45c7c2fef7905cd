"""Cutting one labeled file in parts: by seed, every class in proportion."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Sequence


def split(groups: Sequence[Hashable], fractions: Sequence[float], seed: int) -> list[list[int]]:
    """Deal the places 0 to len(groups) - 1 out: a part for each fraction, and first of all what is left of them.

    Each group (a class) is shuffled and cut for itself; what a fraction leaves of a group's example is carried to the
    next group, so that the parts have their sizes within one example. Every place is in exactly one part.
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        places[group].append(place)
    draw = random.Random(seed)
    parts: list[list[int]] = [[] for _ in range(len(fractions) + 1)]
    owed = [0.0] * len(fractions)
    for group in sorted(places, key=str):
        members = places[group]
        draw.shuffle(members)
        start = 0
        for number, fraction in enumerate(fractions):
            owed[number] += fraction * len(members)
            taken = min(round(owed[number]), len(members) - start - 1)  # training keeps one of each group
            taken = max(taken, 0)
            owed[number] -= taken
            parts[number + 1] += members[start : start + taken]
            start += taken
        parts[0] += members[start:]
    return [sorted(part) for part in parts]
