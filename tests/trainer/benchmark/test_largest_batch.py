from __future__ import annotations

import pytest

from trainer.benchmark.largest_batch import RESOLUTION, largest_that_fits


@pytest.mark.parametrize("first", [1, 3, 64, 1000])
@pytest.mark.parametrize("capacity", [0, 1, 2, 7, 33, 100, 1000])
def test_the_largest_is_found_to_within_the_resolution_and_nothing_is_tried_twice(first: int, capacity: int) -> None:
    limit, asked = 100, []

    def fits(rows: int) -> bool:
        asked.append(rows)
        return rows <= capacity

    found = largest_that_fits(fits, first, limit)
    best = min(capacity, limit)
    assert best - max(1, best * RESOLUTION) <= found <= best
    assert found == 0 or found in asked
    assert len(asked) == len(set(asked)) and all(1 <= rows <= limit for rows in asked)
