"""The memory that a rank needs in a stage, on paper, by what the configuration says."""

from __future__ import annotations

from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.objective_settings import MASKED_LM
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.config.training_settings import ZeroStage
from trainer.model.sizes import memory_per_rank
from trainer.objectives.pretraining import num_parameters

TENSORS_ONLY = "tensors only; add about 0.7 GiB for the process"


def heaviest_stage(config: RunConfig, zero_stage: ZeroStage, world_size: int) -> Stage:
    """The stage that needs the most memory per rank; the first of several that need as much."""
    return max(config.stages, key=lambda stage: sum(memory_in_stage(config, stage, zero_stage, world_size).values()))


def memory_in_stage(config: RunConfig, stage: Stage, zero_stage: ZeroStage, world_size: int) -> dict[str, int]:
    """Bytes on one rank by part, at a ZeRO stage and a number of ranks that need not be the run's.

    The configuration's precision is decided (`trainer.model.numerics.with_own_precision`).
    """
    precision = config.training.precision
    assert precision != "auto", "the precision of its numbers is not resolved"
    return memory_per_rank(
        config.model,
        num_parameters=num_parameters(config.model, config.all_objectives),
        zero_stage=zero_stage,
        world_size=world_size,
        micro_batch_tokens=batch_arithmetic(stage, world_size).micro_batch_tokens,
        sequence_length=stage.sequence_length,
        precision=precision,
        mlm_probability=stage.data.max_mlm_probability if stage.trains(MASKED_LM) else 0.0,
        activation_checkpointing=config.training.activation_checkpointing,
    )
