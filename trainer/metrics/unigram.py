"""The best prediction without context: the frequency of each token in the data that a run reads.

A mixture is read by its weights, not by the sizes of its components. A model that uses no context cannot distinguish
the components, so the lowest loss that it can reach is the entropy of the mixed frequencies. This entropy is higher
than the weighted mean of the components' entropies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trainer.config.data_settings import DataSettings
from trainer.config.run_config import RunConfig
from trainer.data.components import data_set_weights
from trainer.data.shard_set import ShardSet


def training_entropy_nats(data: DataSettings, shard_sets: Sequence[ShardSet]) -> float | None:
    """Return the unigram entropy of the training data as the run reads it; None without tokens.

    Raises:
        UserError: a component's counts are damaged.
    """
    if len(shard_sets) == 1:
        return shard_sets[0].manifest.train.unigram_entropy_nats
    return entropy_nats(training_counts(data, shard_sets))


def training_counts(data: DataSettings, shard_sets: Sequence[ShardSet]) -> np.ndarray:
    """Return the count of each token in the shares that are read, (vocab_size,) float64; the sum is that of the data.

    Raises:
        UserError: a component's counts are damaged.
    """
    counts = [shard_set.token_counts("train") for shard_set in shard_sets]
    return mixed_counts(counts, data_set_weights(data, shard_sets))


def counts_of_first_stage(config: RunConfig, shard_sets: Sequence[ShardSet]) -> np.ndarray:
    """Return what `training_counts` says of the data of a run's first stage."""
    first = config.stages[0]
    return training_counts(first.data, first.select(shard_sets))


def mixed_counts(counts: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Mix the counts of components, each (vocab_size,), in the shares of their weights; the sum stays the same."""
    shares = np.asarray(weights, np.float64) / sum(weights)
    mixed = sum(share * count / max(count.sum(), 1) for share, count in zip(shares, counts, strict=True))
    return np.asarray(mixed * sum(count.sum() for count in counts))


def entropy_nats(counts: np.ndarray) -> float | None:
    """Return the entropy of frequencies (vocab_size,), in nats; None if nothing was counted."""
    total = float(counts.sum())
    if not total:
        return None
    shares = counts[counts > 0] / total
    return -math.fsum(share * math.log(share) for share in shares.tolist())
