"""A configuration as `pretraining.py` runs it: a budget of tokens, and what only one side knows put aside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_prep.base.errors import UsageError
from trainer.config.run_config import RunConfig

DROPPED_SECTIONS = ("registry", "init_from", "deepspeed")


@dataclass(frozen=True)
class Budget:
    """How much is trained, and what follows from machine and shards."""

    tokens: int
    """Places that each side reads."""
    num_points: int
    processes: int
    vocab_size: int


def budgeted(config: RunConfig, budget: Budget, shards: str, work: str) -> RunConfig:
    """The configuration for so many tokens, saved at about `num_points` steps, with everything under `work`.

    Of a configuration with stages or a growing batch the first stage's shape at its full batch is taken. The peer has
    neither sentence pairs nor masks by word or span, so ours does without them too.
    Warm-up and decay keep their share of the run, and the vocabulary is that of the shards.

    Raises:
        UsageError: the budget holds no step for each point.
    """
    stage = config.stages[0]
    steps = budget.tokens // stage.global_batch_tokens
    if steps < budget.num_points:
        raise UsageError(
            f"--tokens {budget.tokens:,} are {steps} steps of {stage.global_batch_tokens:,} places, fewer than the "
            f"--points {budget.num_points}; give more tokens or fewer points"
        )
    rows = -(-stage.global_batch_tokens // (stage.sequence_length * budget.processes))
    share = steps / config.max_steps
    values: dict[str, Any] = config.model_dump(mode="json", exclude=set(DROPPED_SECTIONS))
    values["output_dir"] = f"{work}/ours"
    values["model"]["vocab_size"] = budget.vocab_size
    values["data"] |= {"shards": shards, "sequence_length": stage.sequence_length, "sentence_pairs": "none"}
    values["data"] |= {"mask_unit": "token", "mask_share": 0.8, "random_share": 0.1}
    values["training"] |= {
        "stages": [],
        "batch_warmup": None,
        "max_steps": steps,
        "global_batch_tokens": stage.global_batch_tokens,
        "micro_batch_tokens": min(stage.micro_batch_tokens, rows * stage.sequence_length),
    }
    schedule = values["schedule"]
    schedule["decay_steps"] = round(schedule["decay_steps"] * share)
    if schedule["warmup_steps"] is not None:
        schedule["warmup_steps"] = round(schedule["warmup_steps"] * share)
    every = steps // budget.num_points
    values["checkpoint"] = {"every_steps": every, "keep_last": steps // every + 2}
    values["logging"] |= {"every_steps": every}
    values["evaluation"] |= {"every_steps": steps, "max_tokens": stage.sequence_length}  # both are judged alike later
    values["tracking"] |= {"uri": f"sqlite:///{work}/mlflow.db"}
    return RunConfig.model_validate(values)
