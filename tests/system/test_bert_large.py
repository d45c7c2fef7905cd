"""A true bert_large run on a machine with two cores and 24 GiB: 335M parameters, two ranks, ZeRO 1, bf16."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.launcher, pytest.mark.timeout(1800)]


def test_bert_large_takes_three_steps_on_real_shards(training, corpora, tmp_path):
    def data_prep(*arguments: str) -> None:
        subprocess.run([sys.executable, "-m", "data_prep", *arguments], check=True, cwd=REPOSITORY)

    corpus, tokenizer, shards = str(corpora / "pack_small.jsonl.gz"), str(tmp_path / "tokenizer"), tmp_path / "shards"
    data_prep("tokenizer", "--input", corpus, "--output", tokenizer, "--vocab-size", "30522")
    data_prep("shards", "--input", corpus, "--tokenizer", tokenizer, "--output", str(shards))
    large = training()
    large.preset, large.shards = "bert_large", shards
    large.overrides = (
        "training.max_steps=3",
        "training.global_batch_tokens=2048",
        "training.micro_batch_tokens=512",
        "evaluation.max_tokens=1024",
        "logging.every_steps=1",
        "data.num_workers=0",
    )
    output = large.run()
    losses = [json.loads(line)["m"].get("train/loss") for line in (large.output_dir / "tracking/points.jsonl").open()]
    losses = [loss for loss in losses if loss is not None]
    assert len(losses) == 3 and all(math.isfinite(loss) for loss in losses)
    assert losses[2] < losses[0]
    assert "335,180,608 parameters" in output
    peaks = re.search(r"peak memory per rank: ([\d.]+) to ([\d.]+) GiB", output)
    assert peaks and sum(map(float, peaks.groups())) < 24
