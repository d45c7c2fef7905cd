"""A few steps of a small model through DeepSpeed on one rank, eager and compiled, for the tests of compilation.

Run as `python compiled_worker.py FOLDER BACKEND STAGE...`; prints losses, gradient norms and graphs by stage as JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from tests.support.objectives import all_objectives, loss_sum
from trainer import load_config
from trainer.benchmark.synthetic import DocumentLengths, write_synthetic_shards
from trainer.config.run_config import RunConfig
from trainer.data.loader import GlobalBatch, Loader, Position
from trainer.data.shard_set import open_shard_set
from trainer.distributed.exit import run_rank
from trainer.distributed.process_group import Ranks, initialize_distributed, shut_down
from trainer.engine.engine import build_engine
from trainer.loop.step import Counting, take_step
from trainer.metrics.throughput import WorkClock
from trainer.objectives.pretraining import PretrainingModel

STEPS = 4
SETTINGS = [
    *("data.sequence_length=32", "data.num_workers=0", "data.sentence_pairs=none", "training.stages=[]"),
    *("training.micro_batch_tokens=128", "training.global_batch_tokens=256", f"training.max_steps={STEPS}"),
    *("model.vocab_size=300", "model.output_bias=zeros", "model.hidden_size=32", "model.num_attention_heads=2"),
    *("model.intermediate_size=64", "model.hidden_dropout_prob=0.0", "training.precision=fp32"),
]


def train(config: RunConfig, batches: list[GlobalBatch], ranks: Ranks, backend: str | None) -> dict[str, Any]:
    """Losses and norms of some steps; the graphs that there are after each, and how often tracing broke off."""
    torch._dynamo.reset()
    counters.clear()
    model = PretrainingModel(config.model)
    model.initialize(0)
    if backend is not None:
        model.compile_blocks(backend)
    objectives = all_objectives(model)
    engine = build_engine(model, config, ranks)
    engine.warmup_step(lambda: loss_sum(engine.forward(batches[0].micro_batches[0])))
    found: dict[str, Any] = {"losses": [], "norms": [], "graphs": []}
    for step, batch in enumerate(batches):
        counts, clock = Counting(batch, objectives, ranks).counts, WorkClock(ranks.device)
        result = take_step(engine, batch, counts, objectives, step, 1e-2, 0, ranks, clock, lambda text: None)
        found["losses"].append(float(result.sums[0]) / result.counts.predictions["masked_lm"])
        found["norms"].append(float(result.grad_norm))
        found["graphs"].append(counters["stats"]["unique_graphs"])
    engine.destroy()
    return found | {"graph_breaks": sum(counters["graph_break"].values())}


def main() -> int:
    folder, backend, *stages = sys.argv[1:]
    torch.set_num_threads(1)
    write_synthetic_shards(Path(folder), 300, 5_000, DocumentLengths(15, 0.8))
    config = load_config("tiny_cpu", SETTINGS)
    (stage,) = config.stages
    shard_sets = [open_shard_set(folder)]
    loader = Loader(shard_sets, stage, Position(0, 0, 0), 0)
    batches = list(itertools.islice(loader, STEPS))
    assert len({tuple(batch.micro_batches[0].cu_seqlens.tolist()) for batch in batches}) == STEPS, "equal documents"
    ranks = initialize_distributed(config.distributed)
    found = {}
    for stage in stages:
        staged = load_config("tiny_cpu", [*SETTINGS, f"zero.stage={stage}"])
        found[stage] = {
            "eager": train(staged, batches, ranks, None),
            "compiled": train(staged, batches, ranks, backend),
        }
    print(json.dumps(found))
    shut_down(ranks)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    run_rank(main)
