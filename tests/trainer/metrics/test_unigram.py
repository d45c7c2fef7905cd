from __future__ import annotations

import math

import numpy as np
import pytest

from tests.support.toy_run import tiny_config
from trainer.data.shard_set import open_shard_set
from trainer.metrics.unigram import entropy_nats, mixed_counts, training_entropy_nats


def test_a_mixture_counts_by_its_weights_and_not_by_its_sizes():
    large, small = np.array([900, 0, 100]), np.array([0, 10, 0])
    mixed = mixed_counts([large, small], [1.0, 3.0])
    assert mixed / mixed.sum() == pytest.approx([0.225, 0.75, 0.025])
    assert mixed.sum() == pytest.approx(1010)


def test_the_entropy_of_a_mixture_is_over_the_mean_of_its_parts_which_cannot_be_told_apart_without_context():
    one, other = np.array([50, 50, 0, 0]), np.array([0, 0, 7, 7])
    assert entropy_nats(one) == pytest.approx(math.log(2)) == entropy_nats(other)
    assert entropy_nats(mixed_counts([one, other], [0.5, 0.5])) == pytest.approx(math.log(4))
    assert entropy_nats(mixed_counts([one, other], [1.0, 0.0])) == pytest.approx(math.log(2))
    assert entropy_nats(np.zeros(4)) is None


def test_a_plain_data_set_and_a_mixture_with_itself_have_the_entropy_of_its_manifest(small_shards):
    shard_set = open_shard_set(str(small_shards))
    expected = shard_set.manifest.train.unigram_entropy_nats
    assert training_entropy_nats(tiny_config(data={"shards": str(small_shards)}).data, [shard_set]) == expected
    parts = [{"url": str(small_shards), "weight": weight} for weight in (0.2, 0.8)]
    assert training_entropy_nats(tiny_config(data={"shards": parts}).data, [shard_set] * 2) == pytest.approx(expected)
    tempered = [{"url": str(small_shards)}] * 2
    assert training_entropy_nats(tiny_config(data={"shards": tempered}).data, [shard_set] * 2) == pytest.approx(
        expected
    )
