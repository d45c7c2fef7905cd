"""The largest micro-batch that fits into a device's memory, found by trying."""

from __future__ import annotations

from collections.abc import Callable

RESOLUTION = 1 / 8
"""How near the search comes to the limit, relative to it."""


def largest_that_fits(fits: Callable[[int], bool], first: int, limit: int) -> int:
    """Return the largest number of rows up to `limit` for which `fits` holds, to within `RESOLUTION`; 0 if none does.

    Doubles from `first` (halves where that is too large already) until one fits and one does not, then bisects. `fits`
    is asked of each number at most once.
    """
    good, bad = 0, limit + 1
    number = min(first, limit)
    while good < limit and bad - good > max(1, int(good * RESOLUTION)):
        if fits(number):
            good = number
        else:
            bad = number
        if good == 0:
            number = bad // 2
        elif bad > limit:
            number = min(2 * good, limit)
        else:
            number = (good + bad) // 2
    return good
