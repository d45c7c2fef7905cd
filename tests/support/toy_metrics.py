"""Metrics as a user may bring them, `tests.support.toy_metrics:NAME`."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch

from trainer.objectives.pretraining import PretrainingModel


def perplexity(step: int, metrics: Mapping[str, float], model: PretrainingModel) -> dict[str, float]:
    """Return e to the loss, and the norm of the word embeddings."""
    words = model.encoder.embeddings.word_embeddings.weight
    return {"toy/perplexity": 2.718281828459045 ** metrics["train/mlm_loss"], "toy/word_norm": float(words.norm())}


def noisy(step: int, metrics: Mapping[str, float], model: PretrainingModel) -> dict[str, float]:
    """Draw from every generator, and leave the model without dropout."""
    model.eval()
    torch.manual_seed(step)
    np.random.seed(step)  # noqa: NPY002 - as a user may
    random.seed(step)
    return {"toy/draw": float(torch.rand(())) + random.random()}


def fails_on_rank_1(step: int, metrics: Mapping[str, float], model: PretrainingModel) -> dict[str, float]:
    """Raise an exception at step 2 on rank 1 alone."""
    if step == 2 and torch.distributed.get_rank() == 1:
        raise ZeroDivisionError("toy")
    return {}
