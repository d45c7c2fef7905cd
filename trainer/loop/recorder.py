"""The metrics of steps: results summed over ranks, and turned into metrics when they are flushed.

Loss sums stay on the device until `flush`, so that no step waits for the step before. They are summed over ranks in
float64, where sums of a few float32 numbers are exact in any order.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainer.data.sample_range import SampleRange
from trainer.distributed.memory import peak_memory_bytes
from trainer.distributed.process_group import Ranks, all_reduce_sum
from trainer.loop.step import StepResult
from trainer.metrics.throughput import Interval, RankWork, WorkClock
from trainer.objectives.objective import Objective, StageObjectives


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
        """What a step sums (`StepResult.sums`)."""
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
