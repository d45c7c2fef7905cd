"""One optimizer step: the gradient of one global batch, the same on any number of ranks.

The loss of an objective is the sum over its predictions divided by their number in the *global* batch; the loss of a
step is the weighted sum over its objectives. One sum over ranks carries these counts (and the ranks' requests) while
the step before runs, so every rank scales its sums by the same factors. DeepSpeed averages gradients over ranks,
hence the factor `world_size`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch

from trainer.data.batch import on_device
from trainer.data.loader import GlobalBatch
from trainer.distributed.host_sums import begin_sum_on_hosts
from trainer.distributed.process_group import Ranks
from trainer.metrics.throughput import WorkClock
from trainer.objectives.objective import StageObjectives, seed_micro_batch


@dataclass(frozen=True)
class StepRequests:
    """What a rank requests of all ranks after the running step; one rank's request is enough."""

    stop: bool = False
    save: bool = False
    log: bool = False
    fail: bool = False
    """Whether the run ends because a rank could not read the next global batch."""


@dataclass(frozen=True)
class GlobalCounts:
    """Counts of one global batch over all ranks."""

    predictions: Mapping[str, int]
    """Number of predictions by objective of the run; 0 for an objective that the stage does not train."""
    tokens: int
    unreadable_rows: int

    @property
    def is_empty(self) -> bool:
        """Whether the batch has no prediction, for example because all its samples are skipped."""
        return not any(self.predictions.values())


@dataclass(frozen=True)
class StepResult:
    """What a step computed, and whether it was applied."""

    counts: GlobalCounts
    sums: torch.Tensor
    """(len(columns),) float64 by `StageObjectives.columns`, of this rank alone."""
    weights: Mapping[str, float]
    """Weights of the objectives that the step trains, by name."""
    grad_norm: torch.Tensor | float
    applied: bool
    """Whether the weights changed; False if the loss or the gradient is not finite, or the batch is empty."""

    @property
    def is_nonfinite(self) -> bool:
        """Whether the step was skipped because its loss or its gradient is not finite; the same on all ranks."""
        return not self.applied and not self.counts.is_empty


class Steppable(Protocol):
    """What a step needs of an engine; `trainer.engine.engine.Engine` documents each method."""

    @property
    def was_step_applied(self) -> bool: ...
    def set_learning_rate(self, learning_rate: float) -> None: ...
    def forward(self, batch: Any, *, objectives: Any) -> Any: ...
    def backward(self, loss: torch.Tensor, is_last_micro_batch: bool) -> None: ...
    def step(self) -> float | torch.Tensor: ...


class Counting:
    """The sum over all ranks of their counts of a global batch and of their requests; the constructor starts it.

    Reading a result waits for the sum. It runs on the hosts, so the device's queue never runs empty.
    """

    def __init__(
        self,
        global_batch: GlobalBatch | None,
        objectives: StageObjectives,
        ranks: Ranks,
        requests: StepRequests | None = None,
    ) -> None:
        """Without a `global_batch` the ranks only agree on requests; `objectives` are those of its stage."""
        self._names = tuple(objectives.objectives)
        micro_batches = () if global_batch is None else global_batch.micro_batches
        local = [
            *objectives.num_predictions(micro_batches).values(),
            sum(batch.num_tokens for batch in micro_batches),
            sum(batch.num_unreadable_rows for batch in micro_batches),
            *astuple(requests or StepRequests()),
        ]
        wait = begin_sum_on_hosts(torch.tensor(local, dtype=torch.int64), ranks)
        self._sums: Callable[[], list[int]] = functools.cache(lambda: wait().tolist())

    @property
    def counts(self) -> GlobalCounts:
        """The counts of the global batch."""
        sums, number = self._sums(), len(self._names)
        return GlobalCounts(dict(zip(self._names, sums, strict=False)), *sums[number : number + 2])

    @property
    def requests(self) -> StepRequests:
        """The requests of any rank."""
        return StepRequests(*(number > 0 for number in self._sums()[len(self._names) + 2 :]))


def take_step(
    engine: Steppable,
    global_batch: GlobalBatch,
    counts: GlobalCounts,
    objectives: StageObjectives,
    step: int,
    learning_rate: float,
    seed: int,
    ranks: Ranks,
    clock: WorkClock,
    mark: Callable[[str], None],
) -> StepResult:
    """Forward and backward over this rank's micro-batches, then the update.

    Args:
        counts: over all ranks.
        objectives: those of the stage.
        step: number of completed steps.
        mark: records the next operation for the watchdog (`trainer/distributed/watchdog.py`).
    """
    engine.set_learning_rate(learning_rate)
    sums = torch.zeros(len(objectives.columns), dtype=torch.float64, device=ranks.device)
    if counts.is_empty:
        # A batch consumed: not even an update by Adam's momentum, which a gradient of zero would be.
        return StepResult(counts, sums, objectives.weights, grad_norm=0.0, applied=False)
    last = len(global_batch.micro_batches) - 1
    for number, batch in enumerate(on_device(global_batch.micro_batches, ranks.device)):
        mark(f"step {step + 1}: micro-batch {number}")
        seed_micro_batch(seed, step, global_batch.first_slice + number)
        with clock.forward():
            output = engine.forward(batch, objectives=objectives.weights)
        loss = objectives.loss(output, counts.predictions)
        engine.backward(poisoned_unless_finite(loss) * ranks.world_size, is_last_micro_batch=number == last)
        sums += objectives.stacked(output, like=sums)
    mark(f"step {step + 1}: update")
    grad_norm = engine.step()
    return StepResult(counts, sums, objectives.weights, grad_norm, engine.was_step_applied)


def poisoned_unless_finite(loss: torch.Tensor) -> torch.Tensor:
    """Return a finite loss unchanged, and replace one that is not finite by a loss whose gradient is NaN.

    An infinite loss may have a finite gradient, and ranks skip a step only if the norm is not finite. The comparison is
    on the device, so that no step waits for it.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, torch.nan)
