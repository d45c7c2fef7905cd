"""One optimizer step: the gradient of one global batch, the same on any number of ranks.

The loss of an objective is the sum over its predictions divided by their number in the *global* batch; the loss of a
step is the weighted sum over its objectives. One sum over ranks carries these counts (and the ranks' requests) while
the step before runs, so every rank scales its sums by the same factors. DeepSpeed averages gradients over ranks,
hence the factor `world_size`.

`Recorder` collects the results of steps. Loss sums stay on the device until a line is due, so that no step waits for
the step before. They are summed over ranks in float64, where sums of a few float32 numbers are exact in any order.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch

from trainer.data.batch import on_device
from trainer.data.loader import GlobalBatch
from trainer.data.sample_range import SampleRange
from trainer.distributed.memory import peak_memory_bytes
from trainer.distributed.process_group import Ranks, all_reduce_sum, begin_sum_on_hosts
from trainer.metrics.throughput import Interval, RankWork, WorkClock
from trainer.objectives.objective import Objective, StageObjectives, seed_micro_batch


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


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step under their MLflow names; `step` counts completed steps, from 1."""

    step: int
    samples: SampleRange
    metrics: dict[str, float]


class Recorder:
    """Collects step results; all ranks make the same calls."""

    def __init__(self, ranks: Ranks, objectives: Mapping[str, Objective], step: int) -> None:
        """`step` is the number of steps completed before this process's first; `objectives` of the run, by name."""
        self._ranks = ranks
        self._metrics = {name: objective.metric for name, objective in objectives.items()}
        self.columns = StageObjectives(objectives, {}).columns
        """Columns of `StepResult.sums`: objective and value."""
        self.last_step = step
        self._pending: list[tuple[int, SampleRange, float, StepResult]] = []
        self._flushed_at = time.perf_counter()
        self._tokens = 0
        self.clock = WorkClock(ranks.device)

    def add(self, step: int, samples: SampleRange, learning_rate: float, result: StepResult) -> None:
        self.last_step = step
        self._pending.append((step, samples, learning_rate, result))
        self._tokens += result.counts.tokens

    def restart_clock(self) -> None:
        """Exclude the time since the last flush (an evaluation, a checkpoint) from the next interval."""
        self._flushed_at = time.perf_counter()

    def flush(self) -> tuple[list[StepMetrics], Interval]:
        """Return the metrics of every step since the last flush (at least one), and their speed."""
        own = torch.stack([result.sums for *_, result in self._pending])  # (num_steps, len(self.columns))
        work = torch.zeros(self._ranks.world_size, 3, dtype=torch.float64)
        peak = float(peak_memory_bytes(self._ranks.device))
        work[self._ranks.rank] = torch.tensor([*self.clock.read(), peak], dtype=torch.float64)
        total = all_reduce_sum(torch.cat([own.flatten(), work.to(own.device).flatten()]), self._ranks)
        sums, of_ranks = total[: own.numel()].view_as(own).tolist(), total[own.numel() :].view_as(work).tolist()
        now = time.perf_counter()
        rows = sum(samples.stop - samples.first for _, samples, *_ in self._pending)
        seconds = max(now - self._flushed_at, 1e-9)
        worked = tuple(RankWork(data, forward, int(peak)) for data, forward, peak in of_ranks)
        interval = Interval(len(self._pending), seconds, self._tokens, rows, worked)
        lines = [
            StepMetrics(step, samples, self._metrics_of(row, learning_rate, result))
            for row, (step, samples, learning_rate, result) in zip(sums, self._pending, strict=True)
        ]
        self._pending, self._tokens, self._flushed_at = [], 0, now
        return lines, interval

    def global_losses(self, result: StepResult) -> tuple[float, ...]:
        """Return the loss of each objective in one step over all ranks; a collective that waits for the device."""
        means = self._means(all_reduce_sum(result.sums, self._ranks).tolist(), result)
        return tuple(mean for (_, value), mean in means.items() if value == "loss")

    def _means(self, sums: list[float], result: StepResult) -> dict[tuple[str, str], float]:
        """Return the mean over all predictions by column, of the objectives that predicted anything."""
        counts = result.counts.predictions
        named = zip(self.columns, sums, strict=True)
        return {(name, value): total / counts[name] for (name, value), total in named if counts[name]}

    def _metrics_of(self, sums: list[float], learning_rate: float, result: StepResult) -> dict[str, float]:
        metrics = {"train/learning_rate": learning_rate}
        if result.counts.unreadable_rows:
            metrics["train/unreadable_rows"] = float(result.counts.unreadable_rows)
        means = self._means(sums, result)
        if not means:  # no loss, rather than 0
            return metrics
        losses = [result.weights[name] * mean for (name, value), mean in means.items() if value == "loss"]
        metrics |= {"train/loss": sum(losses), "train/grad_norm": float(result.grad_norm)}
        return metrics | {f"train/{self._metrics[name]}_{value}": mean for (name, value), mean in means.items()}
