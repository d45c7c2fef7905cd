"""One optimizer step: the gradient of one global batch, the same on any number of ranks.

The loss is the sum over predicted tokens divided by their number in the *global* batch, next-sentence loss likewise
by pairs. One all-reduce before the first forward carries these counts (and the wish to stop), so every rank scales
its sums alike; DeepSpeed averages gradients over ranks, hence the factor `world_size`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trainer.data.loader import GlobalBatch
from trainer.distributed import Ranks, all_reduce_sum
from trainer.engine import Engine


@dataclass(frozen=True)
class GlobalCounts:
    """What one global batch holds over all ranks."""

    masked: int
    pairs: int
    tokens: int
    stop: bool


@dataclass(frozen=True)
class StepResult:
    """Counts over all ranks; loss sums of this rank alone, float64, shape ()."""

    counts: GlobalCounts
    mlm_loss_sum: torch.Tensor
    nsp_loss_sum: torch.Tensor
    grad_norm: torch.Tensor | float


def take_step(
    engine: Engine, global_batch: GlobalBatch, step: int, learning_rate: float, seed: int, ranks: Ranks, stop: bool
) -> StepResult:
    """Forward and backward over this rank's micro-batches, then the update.

    `step` is the number of completed steps; `stop` is this rank's wish, `StepResult.counts.stop` all ranks' answer.
    """
    counts = count_globally(global_batch, ranks, stop)
    engine.set_learning_rate(learning_rate)
    mlm_loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
    nsp_loss_sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
    last = len(global_batch.micro_batches) - 1
    for number, batch in enumerate(global_batch.micro_batches):
        seed_micro_batch(seed, step, global_batch.first_slice + number)
        output = engine.forward(batch.to(ranks.device))
        loss = output.mlm_loss_sum / max(counts.masked, 1) + output.nsp_loss_sum / max(counts.pairs, 1)
        engine.backward(loss * ranks.world_size, is_last_micro_batch=number == last)
        mlm_loss_sum += output.mlm_loss_sum.detach()
        nsp_loss_sum += output.nsp_loss_sum.detach()
    return StepResult(counts, mlm_loss_sum, nsp_loss_sum, grad_norm=engine.step())


def count_globally(global_batch: GlobalBatch, ranks: Ranks, stop: bool) -> GlobalCounts:
    """Sum over all ranks what their micro-batches hold; any rank's wish to stop counts for all."""
    local = torch.tensor(
        [
            sum(batch.num_masked for batch in global_batch.micro_batches),
            sum(batch.num_pairs for batch in global_batch.micro_batches),
            sum(batch.num_tokens for batch in global_batch.micro_batches),
            int(stop),
        ],
        dtype=torch.int64,
    )
    masked, pairs, tokens, stops = all_reduce_sum(local, ranks).tolist()
    return GlobalCounts(masked=masked, pairs=pairs, tokens=tokens, stop=stops > 0)


def seed_micro_batch(seed: int, step: int, slice_number: int) -> None:
    """Seed torch's generators from (seed, step, micro-batch in the global batch), so dropout depends on no rank."""
    state = np.random.SeedSequence([seed, step, slice_number]).generate_state(1, np.uint64)
    torch.manual_seed(int(state[0]))
