"""`training`, `optimizer`, `schedule`, `zero` and `distributed`: how the weights are changed, and by whom."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from data_prep.base.settings import Settings
from trainer.config.setting_types import NonNegativeInt, Probability, Seconds


class BatchWarmup(Settings):
    """A global batch that grows to its full size in multiples of its first size, each for the same number of steps.

    So ModernBERT grew from 768 to 4,608 rows (Warner et al. 2024, section 3.2: every size has the same number of
    update steps); GPT-3 grew its batch linearly too (Brown et al. 2020, appendix B). The size is a function of the
    step alone, on any number of ranks; the learning rate follows the step and knows nothing of it.
    """

    initial_tokens: PositiveInt = Field(
        description="places in the first global batches; a multiple of sequence_length, at least a micro-batch and "
        "less than global_batch_tokens"
    )
    steps: PositiveInt = Field(description="optimizer steps before the global batch has its full size")


class Stage(Settings):
    """A stretch of optimizer steps at one sequence length and batch size."""

    steps: PositiveInt = Field(description="optimizer steps of this stage")
    sequence_length: PositiveInt = Field(description="places in a row")
    micro_batch_tokens: PositiveInt = Field(
        description="most places in one forward of one rank; a multiple of sequence_length"
    )
    global_batch_tokens: PositiveInt = Field(
        description="places in one optimizer step of all ranks; a multiple of sequence_length"
    )
    batch_warmup: BatchWarmup | None = Field(
        None, description="{initial_tokens, steps}: smaller global batches in the first steps of this stage"
    )


class TrainingSettings(Settings):
    """How long, how much at once, in which precision."""

    max_steps: PositiveInt | None = Field(
        None, description="optimizer steps of the run; by default the sum of the stages"
    )
    seed: NonNegativeInt = Field(0, description="seed of initialization, data order, masking and dropout")
    micro_batch_tokens: PositiveInt | None = Field(None, description="most places in one forward of one rank")
    global_batch_tokens: PositiveInt | None = Field(None, description="places in one optimizer step of all ranks")
    batch_warmup: BatchWarmup | None = Field(
        None, description="{initial_tokens, steps}: smaller global batches in the first steps of the run"
    )
    stages: tuple[Stage, ...] = Field(
        (), description="list of {steps, sequence_length, micro_batch_tokens, global_batch_tokens, batch_warmup}"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "bf16",
        description="arithmetic of forward and backward; master weights are fp32; auto: bf16 on CUDA and on CPUs that "
        "are fast in it (AMX, or AMD with AVX-512 BF16), else fp32; a resumed run keeps that of its checkpoint",
    )
    gradient_clipping: Annotated[float, Field(ge=0.0)] = Field(
        1.0, description="largest global gradient norm; 0 clips nothing"
    )
    activation_checkpointing: bool = Field(False, description="recompute each block in the backward to save memory")
    deterministic: bool = Field(False, description="deterministic kernels on CUDA (bitwise resume there; slower)")
    compile: Literal["auto", True, False] = Field(
        "auto",
        description="torch.compile the blocks and the MLM head with its loss; auto: where every rank has CUDA, Triton "
        "and a C compiler (true needs a C++ compiler on the CPU)",
    )


class OptimizerSettings(Settings):
    """AdamW; decay on matrices only, not on biases and norms."""

    learning_rate: PositiveFloat = Field(1e-4, description="peak learning rate")
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="decay of the first moment")
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.999, description="decay of the second moment")
    eps: PositiveFloat = Field(1e-6, description="epsilon of Adam")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(0.01, description="decoupled weight decay")


class ScheduleSettings(Settings):
    """The learning rate as a pure function of the step."""

    name: Literal["linear", "cosine", "warmup_stable_decay"] = Field("linear", description="shape after the warm-up")
    warmup_steps: NonNegativeInt | None = Field(
        None, description="steps of linear warm-up from 0; where it is set, it counts and not warmup_ratio"
    )
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="warm-up as a share of the run's steps"
    )
    decay_steps: NonNegativeInt = Field(0, description="steps of the final decay of warmup_stable_decay")
    final_ratio: Probability = Field(0.0, description="learning rate at the end, as a share of the peak")

    @model_validator(mode="after")
    def _decay_belongs_to_one_shape(self) -> ScheduleSettings:
        if self.decay_steps and self.name != "warmup_stable_decay":
            raise ValueError(
                f"schedule.decay_steps={self.decay_steps} is for schedule.name=warmup_stable_decay, and the name is "
                f"{self.name}, which decays from the end of the warm-up; set decay_steps=0 or the other name"
            )
        return self

    def num_warmup_steps(self, max_steps: int) -> int:
        """Steps of the warm-up in a run of `max_steps`."""
        return self.warmup_steps if self.warmup_steps is not None else round(self.warmup_ratio * max_steps)


ZeroStage = Literal[0, 1, 2, 3]


class ZeroSettings(Settings):
    """How DeepSpeed ZeRO divides the training state over the ranks."""

    stage: ZeroStage = Field(1, description="0 divides nothing, 1 optimizer state, 2 and gradients, 3 and weights")
    offload_optimizer: bool = Field(False, description="keep the optimizer state in the CPU's memory")


class DistributedSettings(Settings):
    """The process groups."""

    timeout_seconds: Seconds = Field(1800, description="a collective that waits longer ends the run")
    meeting_timeout_seconds: Seconds = Field(
        600, description="how long the ranks wait for each other at the start before those that are missing are named"
    )
    connect_timeout_seconds: Seconds = Field(
        30,
        description="how long a rank retries at the start to resolve MASTER_ADDR and to connect to it, and to connect "
        "the process groups once all ranks have met; raise it where hosts start or names appear much later than others",
    )
