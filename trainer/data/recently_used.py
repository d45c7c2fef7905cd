"""A memory of a few values that are dear to make."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentlyUsed(Generic[Key, Value]):
    """Values made on demand, of which the `capacity` used last are kept."""

    def __init__(self, make: Callable[[Key], Value], capacity: int) -> None:
        self._make = make
        self._capacity = capacity
        self._values: OrderedDict[Key, Value] = OrderedDict()

    def get(self, key: Key) -> Value:
        if key not in self._values:
            self._values[key] = self._make(key)
            if len(self._values) > self._capacity:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]
