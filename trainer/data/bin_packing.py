"""Packing of items into rows of a fixed length."""

from __future__ import annotations

import numpy as np

Rooms = dict[int, list[np.ndarray]]
"""Rows with free positions, by their number."""


def pack_rows(lengths: np.ndarray, sequence_length: int) -> np.ndarray:
    """Pack items of `lengths` (K,) positions into rows of `sequence_length`; return the row of each item, (K,) int64.

    Best fit decreasing (Johnson 1973), all items of a size at once: they go to the rows with the least sufficient room,
    then to new rows.
    """
    if not len(lengths):
        return np.empty(0, np.int64)
    order = np.argsort(-lengths, kind="stable")
    sizes, firsts = np.unique(-lengths[order], return_index=True)
    result = np.empty(len(lengths), np.int64)
    rooms: Rooms = {}  # room left -> rows with it
    num_rows = 0
    for size, items in zip((-sizes).tolist(), np.split(order, firsts[1:]), strict=True):
        for room in sorted(room for room in rooms if room >= size):
            taken = np.concatenate(rooms.pop(room))
            # A row with room for several takes several.
            each = room // size
            used = min(len(taken), -(-len(items) // each))
            if used < len(taken):
                rooms[room] = [taken[used:]]
            _fill(result, items[: used * each], taken[:used], size, room, rooms)
            items = items[used * each :]
            if not len(items):
                break
        if len(items):
            each = sequence_length // size
            new = num_rows + np.arange(-(-len(items) // each))
            num_rows += len(new)
            _fill(result, items, new, size, sequence_length, rooms)
    return result


def _fill(result: np.ndarray, items: np.ndarray, rows: np.ndarray, size: int, room: int, rooms: Rooms) -> None:
    """Put `room // size` of the items into each row, the rest into the last, and update the remaining room."""
    each = room // size
    result[items] = rows[np.arange(len(items)) // each]
    in_last = len(items) - each * (len(rows) - 1)
    for left, part in ((room - size * each, rows[:-1]), (room - size * in_last, rows[-1:])):
        if left and len(part):
            rooms.setdefault(left, []).append(part)
