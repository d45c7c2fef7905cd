"""`--skip-samples`: rows without predictions.

The rows keep their positions in the order and only lose their labels, so every rank still gets the same batches and a
resume stays exact. A global batch whose rows are all skipped changes nothing (`trainer/loop/step.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from trainer.data.batch import IGNORED, Batch
from trainer.data.loader import GlobalBatch
from trainer.data.sample_range import SampleRange


def without_skipped(batch: GlobalBatch, skipped: Sequence[SampleRange]) -> GlobalBatch:
    """Remove the labels in the rows of the skipped samples from a batch."""
    position = batch.position
    ranges = [r for r in skipped if (r.stage, r.epoch) == (position.stage, position.epoch)]
    if not any(r.first <= batch.last_sample and batch.first_sample < r.stop for r in ranges):
        return batch
    micro_batches = []
    for number, micro_batch in enumerate(batch.micro_batches, start=batch.first_slice):
        first, stop = (batch.first_sample + row for row in batch.arithmetic.slice_of(number))
        rows = [sample - first for sample in range(first, stop) if any(r.first <= sample < r.stop for r in ranges)]
        micro_batches.append(without_predictions(micro_batch, rows))
    return replace(batch, micro_batches=tuple(micro_batches))


def without_predictions(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return a micro-batch without the labels of `rows`."""
    if not rows:
        return batch
    chosen = torch.tensor(rows)

    def ignored(labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return labels.masked_fill(torch.isin(positions // batch.sequence_length, chosen), IGNORED)

    return replace(
        batch,
        labels=ignored(batch.labels, batch.masked_positions),
        next_sentence_labels=ignored(batch.next_sentence_labels, batch.cls_positions),
    )
