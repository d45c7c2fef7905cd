"""A small BERT trained by the project's own loader and step, in processes of their own: the two sides of contract 5.

Run as `python toy_pretraining.py PLAN.json` with the launcher's environment; the plan is {shards, jobs}. The jobs are
done one after another at one ZeRO stage: DeepSpeed's stage 3 leaves patches behind. `train_plainly` is the other side:
one process, no DeepSpeed, no ranks, whole global batches.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data_prep import open_dataset
from tests.support.objectives import all_objectives
from trainer.checkpoint import writer as checkpoints
from trainer.checkpoint.format import DataIdentity, TrainState
from trainer.checkpoint.restore import find_latest, load
from trainer.config.run_config import RunConfig
from trainer.config.schedule import learning_rate
from trainer.config.training_settings import DistributedSettings
from trainer.data.evaluation_batches import evaluation_batches, origins_of
from trainer.data.loader import Loader, Position
from trainer.data.shard_set import open_shard_set
from trainer.distributed.exit import run_rank
from trainer.distributed.process_group import Ranks, barrier, initialize_distributed, shut_down
from trainer.distributed.watchdog import Watchdog
from trainer.engine.engine import build_engine
from trainer.engine.optimizer import build_optimizer
from trainer.loop.step import Counting, seed_micro_batch, take_step
from trainer.loop.warmup import warmup_step
from trainer.metrics.throughput import WorkClock
from trainer.objectives.objective import Objective
from trainer.objectives.pretraining import PretrainingModel
from trainer.validation.loss import evaluate

LENGTH, GLOBAL_ROWS, MICRO_ROWS, STEPS = 64, 13, 4, 5
"""13 rows are 4 micro-batches: 1 rank x 4 or 2 ranks x 2 of 3 or 4 rows; 3 ranks take 6 micro-batches of 2 or 3."""
VALID_TOKENS = 37 * LENGTH
"""Of one evaluation: rows that neither ranks nor micro-batches divide."""
WARMUP = {"initial_tokens": 4 * LENGTH, "steps": 3}
"""Global batches of 4, 8, 12 and then 13 rows."""
BOUND = {
    "masking_law": {"name": "uniform", "from": 0.0, "to": 1.0},
    "loss_weight": "elbo",
    **{"mask_share": 1.0, "random_share": 0.0},
}
"""Masking rates from 0 to 1, and losses that are divided by the number of all tokens."""
CPU = torch.device("cpu")


def make_config(shards: str, job: dict[str, Any]) -> RunConfig:
    """The configuration of a job; what a job does not say is ZeRO 0 in fp32 without dropout, clipped at 0.5."""
    return RunConfig.model_validate(
        {
            "output_dir": job.get("output_dir", "none"),
            "model": {
                "vocab_size": open_dataset(shards).manifest.tokenizer.vocab_size,
                "hidden_size": 36,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 70,
                "max_position_embeddings": LENGTH,
                "hidden_dropout_prob": job.get("dropout", 0.0),
                "initializer_range": 0.1,
            },
            "data": {
                "shards": shards,
                "sequence_length": LENGTH,
                "sentence_pairs": "next_sentence",
                "num_workers": 0,
                **(BOUND if job.get("bound") else {}),
            },
            "training": {
                "max_steps": STEPS,
                "seed": 3,
                "micro_batch_tokens": MICRO_ROWS * LENGTH,
                "global_batch_tokens": GLOBAL_ROWS * LENGTH,
                "batch_warmup": WARMUP if job.get("batch_warmup") else None,
                "precision": job.get("precision", "fp32"),
                "gradient_clipping": job.get("gradient_clipping", 0.5),
                "activation_checkpointing": job.get("activation_checkpointing", False),
            },
            "optimizer": {"learning_rate": 3e-3, "beta2": 0.98, "weight_decay": 0.1, "eps": 1e-5},
            "schedule": {"name": "cosine", "warmup_steps": 2, "final_ratio": 0.1},
            "zero": {"stage": job.get("stage", 0), "offload_optimizer": job.get("offload", False)},
            "evaluation": {"length_bounds": [16, 32]},
            "deepspeed": job.get("deepspeed"),
        }
    )


def make_loader(config: RunConfig, state: TrainState, ranks: Ranks) -> Loader:
    shard_sets = [open_shard_set(config.data.shards)]
    position = Position(state.stage, state.epoch, state.next_sample)
    own = ranks.rank, ranks.world_size
    return Loader(shard_sets, config.stages[0], position, config.training.seed, own, state.step)


def make_model(config: RunConfig) -> PretrainingModel:
    model = PretrainingModel(
        config.model, config.all_objectives, activation_checkpointing=config.training.activation_checkpointing
    )
    model.initialize(config.training.seed)
    return model


def evaluated(engine: Any, objectives: Mapping[str, Objective], config: RunConfig, ranks: Ranks) -> dict[str, float]:
    shard_sets = [open_shard_set(config.data.shards)]
    batches = evaluation_batches(
        shard_sets, config.data, config.stages[0], config.training.seed, ranks.rank, ranks.world_size, VALID_TOKENS
    )
    return evaluate(engine, objectives, batches, ranks, origins_of(shard_sets), config.evaluation)


def rate(config: RunConfig, step: int) -> float:
    return learning_rate(step, config.max_steps, config.optimizer.learning_rate, config.schedule)


def run_job(shards: str, job: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Start or resume, take `steps` steps, save; what the steps gave, summed over ranks."""
    config = make_config(shards, job)
    model = make_model(config)
    objectives = all_objectives(model)
    engine = build_engine(model, config, ranks)
    warmup_step(engine, config, [open_shard_set(shards)], ranks, 0, Watchdog(config.health, ranks))
    found = find_latest(config.output_dir, ranks, zero_stage=engine.zero_stage)
    state = TrainState()
    if found is not None:
        load(engine, found)
        state = found.saved.state
    report: dict[str, Any] = {"first": state.step, "losses": [], "norms": [], "rows": []}
    if job.get("evaluate"):
        report["evaluation"] = evaluated(engine, objectives.objectives, config, ranks)
    engine.train()
    clock = WorkClock(ranks.device)
    for batch in itertools.islice(make_loader(config, state, ranks), job.get("steps", STEPS)):
        step = state.step
        result = take_step(
            engine,
            batch,
            Counting(batch, objectives, ranks).counts,
            objectives,
            step,
            rate(config, step),
            config.training.seed,
            ranks,
            clock,
            lambda text: None,
        )
        if ranks.world_size > 1:
            torch.distributed.all_reduce(result.sums)
        sums = dict(zip(objectives.columns, result.sums.tolist(), strict=True))
        means = [sums[name, "loss"] / number for name, number in result.counts.predictions.items()]
        report["losses"].append(sum(means))
        report["norms"].append(float(result.grad_norm))
        report["rows"].append(batch.last_sample - batch.first_sample + 1)
        position = batch.next_position
        state = TrainState(step=step + 1, epoch=position.epoch, next_sample=position.next_sample)
    identity = DataIdentity(manifest_digests=("d",), tokenizer_fingerprint="f")
    assert checkpoints.save(config.output_dir, engine, state, config, identity) is not None
    engine.destroy()
    barrier(ranks)
    return report


class PlainModel:
    """A model behind the engine's verbs for evaluation, in this process alone."""

    def __init__(self, model: nn.Module) -> None:
        self.forward, self.train, self.eval = model.__call__, model.train, model.eval


def train_plainly(shards: str, job: dict[str, Any]) -> dict[str, Any]:
    """The same samples in plain PyTorch: losses, norms before clipping, weights and evaluation.

    In bf16 the forward and backward are those of a bf16 copy, and master weights, gradients and AdamW are fp32.
    """
    config, alone = make_config(shards, job), Ranks(0, 1, 0, CPU)
    master = make_model(config)
    model = copy.deepcopy(master).bfloat16() if config.training.precision == "bf16" else master
    optimizer = build_optimizer(master, config.optimizer)
    report: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "evaluation": evaluated(PlainModel(model), model.objectives, config, alone),
    }
    model.train()
    for step, batch in enumerate(itertools.islice(make_loader(config, TrainState(), alone), STEPS)):
        masked = sum(int(micro.row_tokens.sum()) or micro.num_masked for micro in batch.micro_batches)
        pairs = sum(micro.num_pairs for micro in batch.micro_batches)
        total = 0.0
        optimizer.zero_grad()
        for number, micro in enumerate(batch.micro_batches):
            seed_micro_batch(config.training.seed, step, number)
            output = model(micro)
            loss = output["masked_lm"]["loss"] / masked + output["sentence_pairs"]["loss"] / pairs
            for weight, gradient in zip(
                master.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                weight.grad = gradient.float() if weight.grad is None else weight.grad + gradient.float()
            total += loss.item()
        limit = config.training.gradient_clipping or float("inf")
        report["norms"].append(float(nn.utils.clip_grad_norm_(master.parameters(), limit)))
        for group in optimizer.param_groups:
            group["lr"] = rate(config, step)
        optimizer.step()
        if model is not master:
            with torch.no_grad():
                for weight, fp32 in zip(model.parameters(), master.parameters(), strict=True):
                    weight.copy_(fp32)
        report["losses"].append(total)
    return report | {"weights": {name: weight.detach() for name, weight in master.named_parameters()}}


def main() -> int:
    torch.set_num_threads(1)
    path = Path(sys.argv[1])
    plan = json.loads(path.read_text())
    ranks = initialize_distributed(DistributedSettings(timeout_seconds=300))
    reports = [run_job(plan["shards"], job, ranks) for job in plan["jobs"]]
    if ranks.is_first:
        path.with_suffix(".out").write_text(json.dumps(reports))
    shut_down(ranks)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    run_rank(main)
