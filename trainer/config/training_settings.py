"""`training`, `optimizer`, `schedule`, `zero` and `distributed`: how weights are updated, and on which ranks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from data_prep.base.settings import SettingError, Settings
from trainer.config.setting_types import NonNegativeInt, Probability, Seconds


class BatchWarmup(Settings):
    """Batch-size ramp-up: the global batch grows in multiples of its first size, each for the same number of steps.

    ModernBERT grew from 768 to 4,608 rows in this way (Warner et al. 2024, section 3.2: every size has the same number
    of update steps); GPT-3 grew its batch linearly too (Brown et al. 2020, appendix B). The size is a function of the
    step alone, on any number of ranks; the learning rate does not depend on it.
    """

    initial_tokens: PositiveInt = Field(
        description="tokens in the first global batches; a multiple of sequence_length, at least "
        "micro_batch_tokens and less than global_batch_tokens"
    )
    steps: PositiveInt = Field(description="optimizer steps until the global batch has its full size")


class Stage(Settings):
    """A part of the run with one sequence length and batch size."""

    steps: PositiveInt = Field(description="optimizer steps of this stage")
    sequence_length: PositiveInt = Field(description="tokens per sequence (row)")
    micro_batch_tokens: PositiveInt = Field(
        description="maximum tokens in one forward pass of one rank; a multiple of sequence_length"
    )
    global_batch_tokens: PositiveInt = Field(
        description="tokens in one optimizer step over all ranks; a multiple of sequence_length"
    )
    batch_warmup: BatchWarmup | None = Field(
        None, description="{initial_tokens, steps}: batch-size ramp-up in the first steps of this stage"
    )


class TrainingSettings(Settings):
    """Length, batch sizes, precision and determinism of the run."""

    max_steps: PositiveInt | None = Field(
        None, description="optimizer steps of the run; by default the sum over training.stages"
    )
    seed: NonNegativeInt = Field(0, description="seed of initialization, data order, masking and dropout")
    micro_batch_tokens: PositiveInt | None = Field(
        None,
        description="maximum tokens in one forward pass of one rank (rows x data.sequence_length); gradient "
        "accumulation follows from it and global_batch_tokens",
    )
    global_batch_tokens: PositiveInt | None = Field(
        None, description="tokens in one optimizer step over all ranks (rows x data.sequence_length)"
    )
    batch_warmup: BatchWarmup | None = Field(
        None, description="{initial_tokens, steps}: batch-size ramp-up in the first steps of the run"
    )
    stages: tuple[Stage, ...] = Field(
        (),
        description="list of {steps, sequence_length, micro_batch_tokens, global_batch_tokens, batch_warmup}",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "bf16",
        description="precision of forward and backward; master weights are fp32; auto: bf16 on CUDA and on CPUs with "
        "fast bf16 (AMX, or AMD with AVX-512 BF16), else fp32; a resumed run keeps the precision of its checkpoint",
    )
    gradient_clipping: Annotated[float, Field(ge=0.0)] = Field(
        1.0, description="maximum global gradient norm; 0 disables clipping"
    )
    activation_checkpointing: bool = Field(
        False, description="recompute each block in the backward pass to save memory"
    )
    deterministic: bool = Field(False, description="deterministic CUDA kernels (bitwise resume on CUDA; slower)")
    compile: Literal["auto", True, False] = Field(
        "auto",
        description="torch.compile for the blocks and the MLM head with its loss; auto: if every rank has CUDA, Triton "
        "and a C compiler (true on the CPU needs a C++ compiler)",
    )


class OptimizerSettings(Settings):
    """The optimizer; weight decay applies to matrices, not to biases and norms."""

    name: Literal["adamw", "stable_adamw"] = Field(
        "adamw", description="adamw, or stable_adamw (AdamW with its step clipped per parameter)"
    )
    learning_rate: PositiveFloat = Field(1e-4, description="peak learning rate")
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="decay rate of the first moment of Adam")
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.999, description="decay rate of the second moment of Adam")
    eps: PositiveFloat = Field(1e-6, description="epsilon of Adam")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(0.01, description="decoupled weight decay of matrices")


class ScheduleSettings(Settings):
    """The learning rate as a pure function of the step."""

    name: Literal["linear", "cosine", "warmup_stable_decay"] = Field(
        "linear", description="learning-rate schedule after the warmup; extend a run only with warmup_stable_decay"
    )
    warmup_steps: NonNegativeInt | None = Field(
        None, description="steps of linear learning-rate warmup; overrides warmup_ratio"
    )
    warmup_ratio: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="learning-rate warmup as a share of the steps of the run"
    )
    decay_steps: NonNegativeInt = Field(
        0, description="steps of the final decay with schedule.name=warmup_stable_decay"
    )
    final_ratio: Probability = Field(0.0, description="final learning rate as a share of the peak")

    @model_validator(mode="after")
    def _check_decay(self) -> ScheduleSettings:
        if self.decay_steps and self.name != "warmup_stable_decay":
            raise SettingError(
                f"schedule.decay_steps={self.decay_steps} has no effect with schedule.name={self.name}, which decays "
                "from the end of the warmup",
                fix="set schedule.decay_steps=0, or schedule.name=warmup_stable_decay",
                code="setting-without-effect",
            )
        return self

    def num_warmup_steps(self, max_steps: int) -> int:
        """Return the warmup steps of a run of `max_steps` steps."""
        return self.warmup_steps if self.warmup_steps is not None else round(self.warmup_ratio * max_steps)


ZeroStage = Literal[0, 1, 2, 3]


class ZeroSettings(Settings):
    """How DeepSpeed ZeRO partitions the training state over ranks."""

    stage: ZeroStage = Field(
        1, description="0 partitions nothing, 1 the optimizer state, 2 also gradients, 3 also weights"
    )
    offload_optimizer: bool = Field(False, description="keep the optimizer state in CPU memory")


class DistributedSettings(Settings):
    """The process groups."""

    timeout_seconds: Seconds = Field(1800, description="timeout of a collective; a longer wait ends the run")
    meeting_timeout_seconds: Seconds = Field(
        600, description="how long ranks wait for each other at the start before the run ends and lists missing ranks"
    )
    connect_timeout_seconds: Seconds = Field(
        30,
        description="how long a rank retries at the start to resolve and reach MASTER_ADDR, and to connect the process "
        "groups; raise it if hosts or DNS names appear much later than others",
    )
