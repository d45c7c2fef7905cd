"""A rank of a large world in one process: a fake process group, whose collectives return at once.

Run as `python fake_ranks.py JOBS.json` with the launcher's variables RANK, WORLD_SIZE and LOCAL_RANK; the jobs are done
one after another, each in a group of its own. What other ranks would send never comes, so weights are not those of a
real run: a job proves that this rank steps, saves and loads what it holds.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.toy_training import ToyModel, global_batch, make_config
from trainer import load_config
from trainer.checkpoint import writer as checkpoints
from trainer.checkpoint.format import DataIdentity, TrainState
from trainer.checkpoint.restore import load
from trainer.checkpoint.tensors import read_fragments
from trainer.distributed import gradient_reduction
from trainer.distributed.process_group import Ranks, forget_groups
from trainer.engine import fragments, stable_adamw, whole_parameters
from trainer.engine.engine import build_engine
from trainer.objectives.pretraining import PretrainingModel


def start_fake_group() -> Ranks:
    """The group that RANK and WORLD_SIZE describe."""
    import deepspeed.ops
    from deepspeed.runtime.zero import partitioned_param_coordinator

    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    torch.distributed.broadcast_object_list = lambda *arguments, **options: None  # as if rank 0 had sent the same
    whole_parameters.gather_objects = rank_0_holds_the_matrices
    gradient_reduction.gather_objects = lambda local_rank, ranks: [rank % 8 for rank in range(world_size)]
    # As if the trace of ZeRO 3 were rank 0's.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    return Ranks(rank, world_size, local_rank, torch.device("cpu"))


def rank_0_holds_the_matrices(held: list[dict[str, tuple[int, int]]], ranks: Ranks) -> list[Any]:
    """What ranks would gather of Muon's matrices: this one holds none of the toy model's hidden matrices."""
    assert not any(stop > start for parts in held for start, stop in parts.values())
    whole = [{} for _ in held]
    whole[next((number for number, parts in enumerate(held) if parts), 0)] = {
        name: (0, parameter.numel())
        for name, parameter in ToyModel().named_parameters()
        if name in ("gated.weight", "dense.weight")
    }
    return [whole, *[held] * (ranks.world_size - 1)]


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    """Step twice, save, change all that is held, load; report what this rank holds and whether it came back."""
    ranks = start_fake_group()
    if preset := job.get("preset"):
        config = load_config(preset, ["data.shards=none", f"output_dir={job['output_dir']}"])
        model: torch.nn.Module = PretrainingModel(config.model)
        model.initialize(1)
    else:
        config = make_config(job["output_dir"], job["stage"], job["precision"], optimizer=job["optimizer"])
        model = ToyModel()
    engine = build_engine(model, config, ranks)

    def loss() -> torch.Tensor:
        if preset:  # every parameter has a gradient, without a forward
            return sum(parameter.float().sum() for parameter in engine.module.parameters())
        return engine.forward(global_batch(0)[:2])

    meetings: list[int] = []
    stable_adamw.all_reduce_sum = lambda sums, ranks: meetings.append(len(sums)) or sums
    engine.warmup_step(loss)
    for _ in range(2):
        engine.set_learning_rate(1e-3)
        engine.backward(loss() * 1e-3, is_last_micro_batch=True)
        engine.step()
    held = engine.fragments()
    before = {(f.name, kind): f.view(kind).clone() for f in held for kind in f.kinds}
    identity = DataIdentity(manifest_digests=("d",), tokenizer_fingerprint="f")
    saved = checkpoints.save(job["output_dir"], engine, TrainState(step=2), config, identity)
    assert saved is not None
    for fragment in held:
        for kind in fragment.kinds:
            fragment.fill(kind, 9.0)
    load(engine, saved)
    tensors = fragments.partition_of(engine.module, engine._engine.optimizer, config.zero.stage, ranks).tensors
    with_numbers = {id(fragment.held_in) for fragment in held if fragment.owned_start < fragment.owned_stop}
    report = {
        "steps": engine.optimizer_steps,
        "meetings": len(meetings),
        "groups": len(tensors),
        "groups_of_padding": sum(id(tensor) not in with_numbers for tensor in tensors),
        "same": all(torch.equal(f.view(kind), before[f.name, kind]) for f in held for kind in f.kinds),
        "fragments": len(list(read_fragments(saved.folder / saved.tensor_files[0]))),
        "finite": all(bool(torch.isfinite(tensor).all()) for tensor in tensors),
    }
    engine.destroy()
    forget_groups()
    return report


def main() -> None:
    torch.set_num_threads(1)
    plan = Path(sys.argv[1])
    plan.with_suffix(".out").write_text(json.dumps([run_job(job) for job in json.loads(plan.read_text())]))


if __name__ == "__main__":
    main()
