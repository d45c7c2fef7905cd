"""The memory that a rank needs in a phase, on paper, by what the configuration says."""

from __future__ import annotations

from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.run_config import RunConfig
from trainer.config.training_settings import Phase, ZeroStage
from trainer.model.sizes import memory_per_rank


def heaviest_phase(config: RunConfig, stage: ZeroStage, world_size: int) -> Phase:
    """The phase that needs the most memory per rank; the first of several that need as much."""
    return max(config.phases, key=lambda phase: sum(memory_in_phase(config, phase, stage, world_size).values()))


def memory_in_phase(config: RunConfig, phase: Phase, stage: ZeroStage, world_size: int) -> dict[str, int]:
    """Bytes on one rank by part, at a ZeRO stage and a number of ranks that need not be the run's.

    The configuration's precision is decided (`trainer.model.numerics.with_own_precision`).
    """
    precision = config.training.precision
    assert precision != "auto", "its numbers have no size yet"
    return memory_per_rank(
        config.model,
        stage=stage,
        world_size=world_size,
        micro_batch_tokens=batch_arithmetic(phase, world_size).micro_batch_tokens,
        sequence_length=phase.sequence_length,
        precision=precision,
        mlm_probability=config.data.max_mlm_probability,
        next_sentence=config.data.has_sentence_pairs,
        activation_checkpointing=config.training.activation_checkpointing,
    )
