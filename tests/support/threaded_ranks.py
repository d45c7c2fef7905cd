"""Ranks that are threads of this process, for what ranks do together on disks and in stores."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, TypeVar

import pytest
import torch

from trainer.distributed.process_group import Ranks

Result = TypeVar("Result")
_OPERATIONS = (
    "gather_objects",
    "broadcast_object",
    "barrier",
    "gather_bytes",
    "broadcast_bytes",
    "all_reduce_sum",
    "begin_sum_on_hosts",
    "exchange",
    "patient_collectives",
)


class ThreadedRanks:
    """As many nodes of one rank each, that speak with each other as `trainer.distributed.process_group` does."""

    def __init__(self, num_nodes: int, modules: tuple[ModuleType, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        """`modules` are those whose functions are called."""
        self._num_nodes = num_nodes
        self._met = threading.Barrier(num_nodes, timeout=20)
        self._said: list[Any] = [None] * num_nodes
        for module in modules:
            for name in _OPERATIONS:
                monkeypatch.setattr(module, name, getattr(self, name), raising=False)

    def run(self, function: Callable[[Ranks], Result]) -> list[Result]:
        """What each rank returns."""
        ranks = [Ranks(rank, self._num_nodes, 0, torch.device("cpu")) for rank in range(self._num_nodes)]
        with ThreadPoolExecutor(self._num_nodes) as pool:
            return list(pool.map(function, ranks))

    def gather_objects(self, value: Any, ranks: Ranks) -> list[Any]:
        self._said[ranks.rank] = value
        self._met.wait()
        said = list(self._said)
        self._met.wait()
        return said

    def broadcast_object(self, value: Any, ranks: Ranks) -> Any:
        return self.gather_objects(value, ranks)[0]

    def gather_bytes(self, value: bytes, ranks: Ranks) -> list[bytes]:
        gathered = self.gather_objects(value, ranks)
        assert len({len(each) for each in gathered}) == 1 and value, "all ranks give the same number of bytes"
        return gathered

    def broadcast_bytes(self, value: bytes, ranks: Ranks, source: int) -> bytes:
        return self.gather_objects(value, ranks)[source]

    def all_reduce_sum(self, values: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        return torch.stack(self.gather_objects(values, ranks)).sum(0)

    def begin_sum_on_hosts(self, values: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
        return lambda: self.all_reduce_sum(values, ranks)

    def patient_collectives(self, *_: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def exchange(self, sent: Sequence[torch.Tensor], sizes: Sequence[int], ranks: Ranks) -> list[torch.Tensor]:
        received = [by_rank[ranks.rank] for by_rank in self.gather_objects(sent, ranks)]
        assert [each.numel() for each in received] == list(sizes)
        return received

    def barrier(self, ranks: Ranks) -> None:
        self._met.wait()
