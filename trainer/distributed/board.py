"""Messages between ranks through the store at the launcher's address, beside the collectives of their group."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch.distributed

Name = TypeVar("Name", str, int)
_POLL_SECONDS = 0.05


class Board:
    """Texts of one topic by name, such as a rank; a text may be replaced by a newer one, and none is removed.

    Every method raises a `RuntimeError` of torch if the store's owner is gone.
    """

    def __init__(self, store: torch.distributed.Store, topic: str) -> None:
        self._store, self._topic = store, topic
        self._seen: set[str] = set()

    def post(self, name: str | int, text: str) -> None:
        """Post a text for all ranks."""
        self._store.set(self._key(name), text)

    def post_first(self, name: str | int, text: str) -> None:
        """Post a text unless there is one of this name."""
        self._store.compare_set(self._key(name), "", text)

    def read(self, name: str | int) -> str | None:
        """Return the text of this name; None if no rank has posted it."""
        key = self._key(name)
        return self._store.get(key).decode() if self._is_there(key) else None

    def read_all(self, names: Iterable[Name]) -> dict[Name, str]:
        """Return the posted texts of these names: in two requests if all are there, in one if all were seen before."""
        names = list(names)
        unseen: set[str] = {self._key(name) for name in names} - self._seen
        if len(unseen) > 1 and self._store.check([*unseen]):
            self._seen |= unseen
        there = [name for name in names if self._is_there(self._key(name))]
        texts = self._store.multi_get([self._key(name) for name in there]) if there else []
        return {name: text.decode() for name, text in zip(there, texts, strict=True)}

    def has_all(self, names: Sequence[str | int]) -> bool:
        """Return whether all of these names are posted."""
        return self._store.check([self._key(name) for name in names])

    def wait(self, names: Sequence[str | int], seconds: float) -> bool:
        """Wait until all of these names are posted, for at most `seconds`; return whether they are."""
        deadline = time.monotonic() + seconds
        while not (are_there := self.has_all(names)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return are_there

    def _is_there(self, key: str) -> bool:
        """Return whether a key exists, without a request once it was seen: a store would wait for a missing key."""
        if key not in self._seen and self._store.check([key]):
            self._seen.add(key)
        return key in self._seen

    def _key(self, name: str | int) -> str:
        return f"clozeworks/{self._topic}/{name}"
