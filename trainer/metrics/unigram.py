"""The best prediction without context: how often each piece comes up in what a run reads.

A mixture is read by its weights, not by the sizes of its components. A model that uses no context cannot tell the
components apart, so what it can reach is the entropy of the mixed frequencies, which is more than the weighted mean of
the components' entropies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trainer.config.data_settings import DataSettings
from trainer.data.components import data_set_weights
from trainer.data.shard_set import ShardSet


def training_entropy_nats(data: DataSettings, shard_sets: Sequence[ShardSet]) -> float | None:
    """Unigram entropy of the training data as the run reads it; None where there are no tokens.

    Raises:
        UserError: a component's counts are damaged.
    """
    if len(shard_sets) == 1:
        return shard_sets[0].manifest.train.unigram_entropy_nats
    return entropy_nats(training_counts(data, shard_sets))


def training_counts(data: DataSettings, shard_sets: Sequence[ShardSet]) -> np.ndarray:
    """How often each piece comes up, (vocab_size,) float64: as many as there are tokens, in the shares that are read.

    Raises:
        UserError: a component's counts are damaged.
    """
    counts = [shard_set.token_counts("train") for shard_set in shard_sets]
    return mixed_counts(counts, data_set_weights(data, shard_sets))


def mixed_counts(counts: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """The counts of components, each (vocab_size,), in the shares of their weights; as many in all as there are."""
    shares = np.asarray(weights, np.float64) / sum(weights)
    mixed = sum(share * count / max(count.sum(), 1) for share, count in zip(shares, counts, strict=True))
    return np.asarray(mixed * sum(count.sum() for count in counts))


def entropy_nats(counts: np.ndarray) -> float | None:
    """Entropy of frequencies (vocab_size,), in nats; None where nothing was counted."""
    total = float(counts.sum())
    if not total:
        return None
    shares = counts[counts > 0] / total
    return -math.fsum(share * math.log(share) for share in shares.tolist())
