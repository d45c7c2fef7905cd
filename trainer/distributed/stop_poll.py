"""Stop requests during a long operation between two steps, such as an evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from trainer.distributed.host_sums import begin_sum_on_hosts
from trainer.distributed.process_group import Ranks
from trainer.distributed.stop_signal import StopSignal

POLL_SECONDS = 0.5
MOST_CALLS = 8
"""Several ranks agree at every call that takes as long as `POLL_SECONDS`, and after this many calls at the latest."""


class StopPoll:
    """Returns whether any rank has a stop request; all ranks call it before each micro-batch and stop at the same one.

    One rank looks at its own request. Several sum their requests on the hosts, every few calls: how many follows from
    the mean time between calls, which they sum too. A sum is awaited at the next such call, so that no micro-batch
    waits for the network. With `most_calls=1` the sum is awaited at the same call, for ranks that cannot take part in
    the next micro-batch.
    """

    def __init__(self, signal: StopSignal, ranks: Ranks, most_calls: int = MOST_CALLS) -> None:
        self._signal, self._ranks, self._most_calls = signal, ranks, most_calls
        self.is_agreed = False
        """Whether a call has returned True; from then on all do."""
        self._calls, self._calls_per_poll = 0, 1
        self._polled_at: float | None = None
        self._under_way: tuple[Callable[[], torch.Tensor], int] | None = None
        """Waits for the sum, and how many calls it is about; 0 if none was measured."""

    def __call__(self) -> bool:
        if self._ranks.world_size == 1:
            self.is_agreed = self.is_agreed or self._signal.is_requested
        elif not self.is_agreed:
            self._calls += 1
            if self._calls >= self._calls_per_poll:
                self._agree(waits=self._most_calls == 1)
        return self.is_agreed

    @property
    def is_requested(self) -> bool:
        """Whether this rank has a stop request; the other ranks may not know yet."""
        return self._signal.is_requested

    def conclude(self) -> None:
        """Agree once more after the last call, because a rank may have left before it; all ranks together."""
        if self._ranks.world_size > 1 and not self.is_agreed:
            self._agree(waits=True)

    def _agree(self, waits: bool) -> None:
        self._learn()
        if self.is_agreed:
            return
        now = time.monotonic()
        microseconds = 0 if self._polled_at is None else int((now - self._polled_at) * 1e6)
        own = torch.tensor([int(self._signal.is_requested), microseconds])
        self._under_way = begin_sum_on_hosts(own, self._ranks), self._calls if self._polled_at is not None else 0
        self._calls, self._polled_at = 0, now
        if waits:
            self._learn()

    def _learn(self) -> None:
        """Wait for the running sum."""
        if self._under_way is None:
            return
        (wait, calls), self._under_way = self._under_way, None
        requests, total = wait().tolist()
        self.is_agreed = requests > 0
        if calls:
            seconds_per_call = total / self._ranks.world_size / calls / 1e6
            fitting = max(1, int(POLL_SECONDS / max(seconds_per_call, 1e-3)))
            self._calls_per_poll = min(self._most_calls, 2 * self._calls_per_poll, fitting)
