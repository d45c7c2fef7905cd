"""Seconds of a program's parts, each watched from outside."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any


class Stopwatch:
    """Adds up seconds by part; the seconds of a part within another are its own alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running: list[str] = []
        self._since = time.perf_counter()

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._running:
            self.seconds[self._running[-1]] = self.seconds.get(self._running[-1], 0.0) + now - self._since
        self._since = now

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Time every call of a function, or every step of the iterator that `__iter__` gives."""
        function = getattr(owner, name)

        def timed(*values: Any, **named: Any) -> Any:
            self._switch()
            self._running.append(part)
            try:
                return function(*values, **named)
            finally:
                self._switch()
                self._running.pop()

        def timed_iterator(*values: Any) -> Iterator[Any]:
            iterator = function(*values)
            while True:
                self._switch()
                self._running.append(part)
                try:
                    item = next(iterator, self)
                finally:
                    self._switch()
                    self._running.pop()
                if item is self:
                    return
                yield item

        setattr(owner, name, timed_iterator if name == "__iter__" else timed)
