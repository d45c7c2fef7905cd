"""Evaluation on the valid shards, with masks fixed by seed: the same tasks every time, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from trainer.data.batch import Batch
from trainer.distributed import Ranks, all_reduce_sum
from trainer.engine import Engine


def evaluate(engine: Engine, batches: Iterable[Batch], ranks: Ranks) -> dict[str, float]:
    """Metrics over all ranks by name: `valid/mlm_loss` (nats), `valid/mlm_accuracy`, `valid/mlm_perplexity`, and with
    sentence pairs `valid/nsp_loss` and `valid/nsp_accuracy`.

    Every rank must give the same number of batches. Dropout is off.
    """
    totals = torch.zeros(6, dtype=torch.float64, device=ranks.device)
    engine.eval()
    with torch.no_grad():
        for batch in batches:
            output = engine.forward(batch.to(ranks.device))
            totals += torch.stack(
                [
                    output.mlm_loss_sum.double(),
                    output.mlm_correct.double(),
                    torch.as_tensor(batch.num_masked, dtype=torch.float64, device=ranks.device),
                    output.nsp_loss_sum.double(),
                    output.nsp_correct.double(),
                    torch.as_tensor(batch.num_pairs, dtype=torch.float64, device=ranks.device),
                ]
            )
    engine.train()
    return metrics_of(all_reduce_sum(totals, ranks).tolist())


def metrics_of(totals: list[float]) -> dict[str, float]:
    """From (MLM loss sum, correct, masked, NSP loss sum, correct, pairs) to metrics; without pairs none about them."""
    mlm_loss_sum, mlm_correct, masked, nsp_loss_sum, nsp_correct, pairs = totals
    metrics = {
        "valid/mlm_loss": mlm_loss_sum / max(masked, 1),
        "valid/mlm_accuracy": mlm_correct / max(masked, 1),
        "valid/mlm_perplexity": perplexity(mlm_loss_sum / max(masked, 1)),
    }
    if pairs:
        metrics["valid/nsp_loss"] = nsp_loss_sum / pairs
        metrics["valid/nsp_accuracy"] = nsp_correct / pairs
    return metrics


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
