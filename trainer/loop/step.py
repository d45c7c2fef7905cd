"""One optimizer step: the gradient of one global batch, the same on any number of ranks.

The loss is the sum over predicted tokens divided by their number in the *global* batch, next-sentence loss likewise
by pairs. One sum carries these counts (and the ranks' requests) while the step before runs, so every rank scales its
sums alike; DeepSpeed averages gradients over ranks, hence the factor `world_size`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from trainer.data.batch import on_device
from trainer.data.loader import GlobalBatch
from trainer.distributed.host_sums import begin_sum_on_hosts
from trainer.distributed.process_group import Ranks
from trainer.metrics.throughput import WorkClock


@dataclass(frozen=True)
class StepRequests:
    """What one rank asks of all of them after the step that runs; the wish of any counts for all."""

    stop: bool = False
    save: bool = False
    log: bool = False
    fail: bool = False
    """Whether the run ends with the error with which a rank could not read the next global batch."""


@dataclass(frozen=True)
class GlobalCounts:
    """What one global batch holds over all ranks."""

    masked: int
    pairs: int
    tokens: int
    unreadable_rows: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be predicted, as where all its samples are skipped."""
        return not self.masked and not self.pairs


@dataclass(frozen=True)
class StepResult:
    """Counts over all ranks; sums of this rank alone, float64, shape ()."""

    counts: GlobalCounts
    mlm_loss_sum: torch.Tensor
    pair_loss_sum: torch.Tensor
    pair_correct: torch.Tensor
    grad_norm: torch.Tensor | float
    applied: bool
    """Whether the weights changed: not where the loss or the gradient is not finite, or the batch is empty."""

    @property
    def is_nonfinite(self) -> bool:
        """Whether the step was skipped because its loss or its gradient is not finite; the same on all ranks."""
        return not self.applied and not self.counts.is_empty


class Steppable(Protocol):
    """What a step needs of an engine; `trainer.engine.engine.Engine` says what each does."""

    @property
    def was_step_applied(self) -> bool: ...
    def set_learning_rate(self, learning_rate: float) -> None: ...
    def forward(self, batch: Any) -> Any: ...
    def backward(self, loss: torch.Tensor, is_last_micro_batch: bool) -> None: ...
    def step(self) -> float | torch.Tensor: ...


class Counting:
    """The sum over all ranks of what their parts of a global batch hold, and of their requests; it is begun here.

    Whoever asks for a result waits for it. Nothing goes to the device, so that its queue never runs dry.
    """

    def __init__(self, global_batch: GlobalBatch | None, ranks: Ranks, requests: StepRequests | None = None) -> None:
        """Without a `global_batch` the ranks only agree on requests."""
        micro_batches = () if global_batch is None else global_batch.micro_batches
        local = [
            sum(batch.num_masked for batch in micro_batches),
            sum(batch.num_pairs for batch in micro_batches),
            sum(batch.num_tokens for batch in micro_batches),
            sum(batch.num_unreadable_rows for batch in micro_batches),
            *astuple(requests or StepRequests()),
        ]
        wait = begin_sum_on_hosts(torch.tensor(local, dtype=torch.int64), ranks)
        self._sums: Callable[[], list[int]] = functools.cache(lambda: wait().tolist())

    @property
    def counts(self) -> GlobalCounts:
        """What the global batch holds."""
        return GlobalCounts(*self._sums()[:4])

    @property
    def requests(self) -> StepRequests:
        """What any rank asks for."""
        return StepRequests(*(number > 0 for number in self._sums()[4:]))


def take_step(
    engine: Steppable,
    global_batch: GlobalBatch,
    counts: GlobalCounts,
    step: int,
    learning_rate: float,
    seed: int,
    ranks: Ranks,
    clock: WorkClock,
    mark: Callable[[str], None],
) -> StepResult:
    """Forward and backward over this rank's micro-batches, then the update.

    `counts` are those of all ranks; `step` is the number of completed steps; `mark` takes what comes next
    (`trainer/distributed/watchdog.py`).
    """
    engine.set_learning_rate(learning_rate)
    mlm_loss_sum, pair_loss_sum, pair_correct = torch.zeros(3, dtype=torch.float64, device=ranks.device).unbind()
    if counts.is_empty:
        # A batch consumed: not even an update by Adam's momentum, which a gradient of zero would be.
        return StepResult(counts, mlm_loss_sum, pair_loss_sum, pair_correct, grad_norm=0.0, applied=False)
    last = len(global_batch.micro_batches) - 1
    for number, batch in enumerate(on_device(global_batch.micro_batches, ranks.device)):
        mark(f"step {step + 1}: micro-batch {number}")
        seed_micro_batch(seed, step, global_batch.first_slice + number)
        with clock.forward():
            output = engine.forward(batch)
        loss = output.mlm_loss_sum / max(counts.masked, 1) + output.pair_loss_sum / max(counts.pairs, 1)
        engine.backward(poisoned_unless_finite(loss) * ranks.world_size, is_last_micro_batch=number == last)
        mlm_loss_sum += output.mlm_loss_sum.detach()
        pair_loss_sum += output.pair_loss_sum.detach()
        pair_correct += output.pair_correct
    mark(f"step {step + 1}: update")
    grad_norm = engine.step()
    return StepResult(counts, mlm_loss_sum, pair_loss_sum, pair_correct, grad_norm, engine.was_step_applied)


def poisoned_unless_finite(loss: torch.Tensor) -> torch.Tensor:
    """The loss itself; where it is not finite, one whose gradient is NaN.

    An infinite loss may have a finite gradient, and only a norm that is not finite has all ranks skip the step. It is
    done on the device, so that no step waits for it.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)


def seed_micro_batch(seed: int, step: int, slice_number: int) -> None:
    """Seed torch's generators from (seed, step, micro-batch in the global batch), so dropout depends on no rank."""
    state = np.random.SeedSequence([seed, step, slice_number]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))
