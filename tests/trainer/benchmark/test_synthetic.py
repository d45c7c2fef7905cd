from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainer.benchmark.synthetic import DocumentLengths, write_synthetic_shards
from trainer.data.shard_set import open_shard_set


def test_lengths_have_the_mean_and_the_spread_that_they_state() -> None:
    lengths = DocumentLengths(mean=600, sigma=0.8).sample(np.random.default_rng(1), 100_000)
    assert (lengths == 1).mean() == pytest.approx(0.01, rel=0.2)
    others = lengths[lengths > 1]
    assert others.mean() == pytest.approx(600, rel=0.02)
    assert np.log(others).std() == pytest.approx(0.8, rel=0.02)
    assert lengths.min() == 1
    assert set(DocumentLengths(mean=510, sigma=0).sample(np.random.default_rng(1), 9)) == {510}


@pytest.mark.parametrize(("vocab_size", "dtype"), [(300, "uint16"), (70_000, "uint32")])
def test_shards_open_with_the_requested_content(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    write_synthetic_shards(tmp_path, vocab_size, 150_000, DocumentLengths(400, 1.0))
    shard_set = open_shard_set(str(tmp_path))
    (shard,) = shard_set.shards("train")
    assert shard_set.token_dtype == np.dtype(dtype)
    assert 150_000 <= shard.record.tokens < 350_000
    assert len(np.unique(shard.read_index().document_ids)) == shard.record.documents


def test_the_same_seed_gives_the_same_shards(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_synthetic_shards(tmp_path / name, 300, 70_000, DocumentLengths())
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()
