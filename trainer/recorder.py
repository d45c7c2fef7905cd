"""The curve of a run: what the steps gave, summed over ranks and turned into metrics when it is read.

Loss sums stay on the device until `flush`, so that no step waits for the step before. They are summed over ranks in
float64, where sums of a few float32 numbers are exact in any order.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from trainer.distributed import Ranks, all_reduce_sum
from trainer.step import StepResult


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one optimizer step under their MLflow names; `step` counts completed steps, from 1."""

    step: int
    metrics: dict[str, float]


class Recorder:
    """Collects step results; all ranks call it alike."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: list[tuple[int, float, StepResult]] = []
        self._flushed_at = time.perf_counter()
        self._tokens = 0
        self.seconds_a_step = 0.0
        """Between the last two flushes."""

    def add(self, step: int, learning_rate: float, result: StepResult) -> None:
        self._pending.append((step, learning_rate, result))
        self._tokens += result.counts.tokens

    def restart_clock(self) -> None:
        """Leave out of the tokens a second what has passed since the last flush (an evaluation, a checkpoint)."""
        self._flushed_at = time.perf_counter()

    def flush(self) -> tuple[list[StepMetrics], float]:
        """The metrics of every step since the last flush, and the tokens a second in that time."""
        if not self._pending:
            return [], 0.0
        sums = torch.stack([torch.stack([result.mlm_loss_sum, result.nsp_loss_sum]) for _, _, result in self._pending])
        sums = all_reduce_sum(sums, self._ranks).tolist()
        now = time.perf_counter()
        elapsed_seconds = max(now - self._flushed_at, 1e-9)
        tokens_per_second = self._tokens / elapsed_seconds
        self.seconds_a_step = elapsed_seconds / len(self._pending)
        lines = [
            StepMetrics(step, {**_metrics(pair, learning_rate, result), "train/tokens_per_second": tokens_per_second})
            for pair, (step, learning_rate, result) in zip(sums, self._pending, strict=True)
        ]
        self._pending, self._tokens, self._flushed_at = [], 0, now
        return lines, tokens_per_second


def _metrics(sums: list[float], learning_rate: float, result: StepResult) -> dict[str, float]:
    mlm_loss = sums[0] / max(result.counts.masked, 1)
    metrics = {
        "train/loss": mlm_loss,
        "train/mlm_loss": mlm_loss,
        "train/learning_rate": learning_rate,
        "train/grad_norm": float(result.grad_norm),
    }
    if result.counts.pairs:
        nsp_loss = sums[1] / result.counts.pairs
        metrics |= {"train/loss": mlm_loss + nsp_loss, "train/nsp_loss": nsp_loss}
    return metrics
