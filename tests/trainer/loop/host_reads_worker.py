"""Optimizer steps through DeepSpeed on one CPU rank, with everything counted that would wait for a GPU.

Run as `python host_reads_worker.py FOLDER [section.field=value ...]`; prints as JSON, for each step after the second,
the device synchronizations and how often the host reads a value of the device.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.objectives import all_objectives, loss_sum
from trainer import load_config
from trainer.benchmark.synthetic import DocumentLengths, write_synthetic_shards
from trainer.data.loader import Loader, Position
from trainer.data.shard_set import open_shard_set
from trainer.distributed.exit import run_rank
from trainer.distributed.process_group import initialize_distributed, shut_down
from trainer.engine.engine import build_engine
from trainer.loop.step import Counting, take_step
from trainer.metrics.throughput import WorkClock
from trainer.objectives.pretraining import PretrainingModel

STEPS = 4
MICRO_BATCHES = 3
SETTINGS = [
    *("data.sequence_length=32", "data.num_workers=0", "data.sentence_pairs=none", "training.stages=[]"),
    *("training.micro_batch_tokens=128", f"training.global_batch_tokens={MICRO_BATCHES * 128}"),
    *(f"training.max_steps={STEPS}", "training.precision=bf16", "training.gradient_clipping=1.0"),
    *("model.vocab_size=300", "model.output_bias=zeros", "model.hidden_size=32", "model.num_attention_heads=2"),
    "model.intermediate_size=64",
]
READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "aten.equal", "masked_select")


class HostReads(TorchDispatchMode):
    """Counts the operators whose result the host has to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        indices = args[1] if name.startswith("aten.index") and len(args) > 1 else ()
        by_mask = isinstance(indices, (list, tuple)) and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices
        )
        if by_mask or any(read in name for read in READS):
            self.count += 1
        return func(*args, **(kwargs or {}))


def main() -> int:
    folder, *overrides = sys.argv[1:]
    write_synthetic_shards(Path(folder), 300, 8_000, DocumentLengths(15, 0.8))
    config = load_config("tiny_cpu", [f"data.shards={folder}", *SETTINGS, *overrides])
    ranks = initialize_distributed(config.distributed)
    shard_sets = [open_shard_set(folder)]
    loader = Loader(shard_sets, config.stages[0], Position(0, 0, 0), 0)
    batches = list(itertools.islice(loader, STEPS))
    model = PretrainingModel(config.model)
    model.initialize(0)
    objectives = all_objectives(model)
    engine = build_engine(model, config, ranks)
    engine.warmup_step(lambda: loss_sum(engine.forward(batches[0].micro_batches[0])))
    synchronizations = 0

    def synchronize(*arguments: Any, **options: Any) -> None:
        nonlocal synchronizations
        synchronizations += 1

    type(get_accelerator()).synchronize = synchronize
    found = []
    for step, batch in enumerate(batches):
        assert len(batch.micro_batches) == MICRO_BATCHES
        synchronizations, clock = 0, WorkClock(ranks.device)
        counts = Counting(batch, objectives, ranks).counts  # of tensors that are on the host
        with HostReads() as reads:
            result = take_step(engine, batch, counts, objectives, step, 1e-3, 0, ranks, clock, lambda text: None)
        assert result.applied
        if step >= 2:  # DeepSpeed's throughput timer, where it runs, begins with the third step
            found.append({"synchronizations": synchronizations, "reads": reads.count})
    print(json.dumps(found), flush=True)
    engine.destroy()
    shut_down(ranks)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    run_rank(main)
