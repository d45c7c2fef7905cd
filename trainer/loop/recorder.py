"""The metrics of steps: results summed over ranks, and turned into metrics when they are flushed.

Loss sums stay on the device until `flush`, so that no step waits for the step before. They are summed over ranks in
float64, where sums of a few float32 numbers are exact in any order.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from trainer.data.sample_range import SampleRange
from trainer.distributed.memory import peak_memory_bytes
from trainer.distributed.process_group import Ranks, all_reduce_sum
from trainer.loop.step import StepResult
from trainer.metrics.throughput import Interval, RankWork, WorkClock


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step under their MLflow names; `step` counts completed steps, from 1."""

    step: int
    samples: SampleRange
    metrics: dict[str, float]


class Recorder:
    """Collects step results; all ranks make the same calls."""

    def __init__(self, ranks: Ranks, step: int) -> None:
        """`step` is the number of steps completed before this process's first."""
        self._ranks = ranks
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
        own = torch.stack(
            [torch.stack([r.mlm_loss_sum, r.pair_loss_sum, r.pair_correct]) for *_, r in self._pending]
        )  # (num_steps, 3)
        work = torch.zeros(self._ranks.world_size, 3, dtype=torch.float64)
        peak = float(peak_memory_bytes(self._ranks.device))
        work[self._ranks.rank] = torch.tensor([*self.clock.read(), peak], dtype=torch.float64)
        total = all_reduce_sum(torch.cat([own, work.to(own.device)]), self._ranks).tolist()
        sums, of_ranks = total[: len(own)], total[len(own) :]
        now = time.perf_counter()
        rows = sum(samples.stop - samples.first for _, samples, *_ in self._pending)
        seconds = max(now - self._flushed_at, 1e-9)
        worked = tuple(RankWork(data, forward, int(peak)) for data, forward, peak in of_ranks)
        interval = Interval(len(self._pending), seconds, self._tokens, rows, worked)
        lines = [
            StepMetrics(step, samples, _metrics(row, learning_rate, result))
            for row, (step, samples, learning_rate, result) in zip(sums, self._pending, strict=True)
        ]
        self._pending, self._tokens, self._flushed_at = [], 0, now
        return lines, interval

    def global_losses(self, result: StepResult) -> tuple[float, float]:
        """Return MLM and pair loss of one step over all ranks; a collective that waits for the device."""
        sums = all_reduce_sum(torch.stack([result.mlm_loss_sum, result.pair_loss_sum]), self._ranks).tolist()
        return sums[0] / max(result.counts.masked, 1), sums[1] / max(result.counts.pairs, 1)


def _metrics(sums: list[float], learning_rate: float, result: StepResult) -> dict[str, float]:
    counts = result.counts
    metrics = {"train/learning_rate": learning_rate}
    if counts.unreadable_rows:
        metrics["train/unreadable_rows"] = float(counts.unreadable_rows)
    if counts.is_empty:  # no loss, rather than 0
        return metrics
    mlm_loss = sums[0] / max(counts.masked, 1)
    metrics |= {"train/loss": mlm_loss, "train/mlm_loss": mlm_loss, "train/grad_norm": float(result.grad_norm)}
    if counts.pairs:
        pair_loss = sums[1] / counts.pairs
        metrics |= {
            "train/loss": mlm_loss + pair_loss,
            "train/pair_loss": pair_loss,
            "train/pair_accuracy": sums[2] / counts.pairs,
        }
    return metrics
