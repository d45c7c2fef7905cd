"""What the ranks of a small BERT send in one optimizer step: `python toy_traffic.py PLAN.json`.

Every collective of torch.distributed is wrapped and its bytes counted as a ring sends them: (W - 1) / W of the whole
tensor for a gather, a reduction or a broadcast, twice that for an all-reduce; of an all-to-all those for other ranks.
The plan is {shards, jobs}, the jobs of `toy_pretraining.py` with `rows`, those of a global batch; the report of each is
the bytes of its last step by name.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed

SENT: Counter[str] = Counter()


def num_bytes(value: torch.Tensor | Sequence[torch.Tensor]) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(num_bytes, value))


RINGS: dict[str, tuple[int, int]] = {
    "all_reduce": (0, 2),
    "reduce": (0, 1),
    "broadcast": (0, 1),
    "all_gather": (0, 1),
    "all_gather_into_tensor": (0, 1),
    "_all_gather_base": (0, 1),
    "reduce_scatter": (1, 1),
    "reduce_scatter_tensor": (1, 1),
    "_reduce_scatter_base": (1, 1),
    "all_reduce_coalesced": (0, 2),
    "all_gather_coalesced": (0, 1),
}
"""Collectives, with the place of the argument that is the whole, and how many times a ring sends it."""
FORBIDDEN = ("all_to_all", "gather", "scatter", "send", "isend", "batch_isend_irecv")
"""Not counted, so that none may be used."""


def counted(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    place, times = RINGS[name]

    @functools.wraps(collective)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        whole = arguments[place] if len(arguments) > place else list(named.values())[place]
        group = named.get("group") or torch.distributed.group.WORLD
        ranks = torch.distributed.get_world_size(group)
        SENT[name] += times * num_bytes(whole) * (ranks - 1) // ranks
        return collective(*arguments, **named)

    return wrapped


def counted_all_to_all(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def wrapped(received: Any, sent: Any, received_sizes: Any, sent_sizes: Any, group: Any, async_op: bool) -> Any:
        equal = [len(sent) // torch.distributed.get_world_size(group)] * torch.distributed.get_world_size(group)
        own = (sent_sizes or equal)[torch.distributed.get_rank(group)]
        SENT["all_to_all_single"] += num_bytes(sent) - own * sent.element_size()
        return collective(received, sent, received_sizes, sent_sizes, group, async_op)

    return wrapped


def forbidden(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise AssertionError(f"{name} is not counted")

    return refuse


def wrap() -> None:
    """Before deepspeed is imported, which keeps some of these functions by name."""
    for name in (*RINGS, *FORBIDDEN):
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            if hasattr(module, name):
                original = getattr(module, name)
                setattr(module, name, counted(name, original) if name in RINGS else forbidden(name))
    torch.distributed.all_to_all_single = counted_all_to_all(torch.distributed.all_to_all_single)


if __name__ == "__main__":
    wrap()  # before what follows imports deepspeed

from tests.support.objectives import all_objectives  # noqa: E402
from tests.support.toy_pretraining import LENGTH, make_config, make_loader, make_model, rate  # noqa: E402
from trainer.checkpoint.format import TrainState  # noqa: E402
from trainer.config.run_config import RunConfig  # noqa: E402
from trainer.config.training_settings import DistributedSettings  # noqa: E402
from trainer.data.shard_set import open_shard_set  # noqa: E402
from trainer.distributed.exit import run_rank  # noqa: E402
from trainer.distributed.process_group import Ranks, barrier, initialize_distributed, shut_down  # noqa: E402
from trainer.distributed.watchdog import Watchdog  # noqa: E402
from trainer.engine.engine import build_engine  # noqa: E402
from trainer.loop.step import Counting, take_step  # noqa: E402
from trainer.loop.warmup import warmup_step  # noqa: E402
from trainer.metrics.throughput import WorkClock  # noqa: E402
from trainer.objectives.pretraining import num_parameters  # noqa: E402

MICRO_ROWS, STEPS = 2, 3
"""DeepSpeed records at stage 3 in the first steps what it uses when; the last one is counted."""


def wide_config(shards: str, job: dict[str, Any]) -> RunConfig:
    """The toy's configuration with matrices that stage 3 divides: those under 100,000 numbers stay whole."""
    values = make_config(shards, job).model_dump()
    values["model"] |= {"hidden_size": 320, "num_attention_heads": 4, "intermediate_size": 640}
    values["training"] |= {"micro_batch_tokens": MICRO_ROWS * LENGTH, "global_batch_tokens": job["rows"] * LENGTH}
    return RunConfig.model_validate(values)


def measure(shards: str, job: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    config = wide_config(shards, job)
    engine = build_engine(make_model(config), config, ranks)
    warmup_step(engine, config, [open_shard_set(shards)], ranks, 0, Watchdog(config.health, ranks))
    engine.train()
    objectives = all_objectives(engine.module)
    batches = make_loader(config, TrainState(), ranks)
    for step, batch in enumerate(itertools.islice(batches, STEPS)):
        SENT.clear()
        counts, clock = Counting(batch, objectives, ranks).counts, WorkClock(ranks.device)
        take_step(engine, batch, counts, objectives, step, rate(config, step), 3, ranks, clock, lambda _: None)
        num_micro_batches = len(batch.micro_batches)
    sent = dict(SENT)
    engine.destroy()
    barrier(ranks)
    return {
        "sent": sent,
        "micro_batches": num_micro_batches,
        "parameters": num_parameters(config.model, config.all_objectives),
        "tied": config.model.padded_vocab_size * config.model.hidden_size,
    }


def main() -> int:
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    plan = json.loads(path.read_text())
    ranks = initialize_distributed(DistributedSettings(timeout_seconds=300))
    reports = [measure(plan["shards"], job, ranks) for job in plan["jobs"]]
    if ranks.is_first:
        path.with_suffix(".out").write_text(json.dumps(reports))
    shut_down(ranks)


if __name__ == "__main__":
    run_rank(main)
