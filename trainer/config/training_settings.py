"""`training`, `optimizer`, `schedule`, `zero` and `distributed`: how weights are updated, and on which ranks."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from data_prep.base.settings import NonNegativeInt, PathText, Probability, Seconds, SettingError, Settings
from trainer.config.custom_code import is_custom
from trainer.config.data_settings import MaskingRate, MaskUnit, Shards
from trainer.config.duration import Duration, DurationSettings
from trainer.config.masking_law import LossWeight, MaskingLaw
from trainer.config.objective_settings import Objectives


class BatchWarmup(DurationSettings):
    """Batch-size ramp-up: the global batch grows in multiples of its first size, each for the same number of steps.

    ModernBERT grew from 768 to 4,608 rows in this way (Warner et al. 2024, section 3.2: every size has the same number
    of update steps); GPT-3 grew its batch linearly too (Brown et al. 2020, appendix B). The size is a function of the
    step alone, on any number of ranks; the learning rate does not depend on it.
    """

    section = "batch_warmup."
    earlier_names: ClassVar = {"steps": "duration", "tokens": "duration"}

    initial_tokens: PositiveInt = Field(
        description="tokens in the first global batches; a multiple of sequence_length, at least "
        "micro_batch_tokens and less than global_batch_tokens"
    )
    duration: Duration = Field(description="steps or tokens until the global batch has its full size")


SCHEDULE_ALIASES = {
    **dict.fromkeys(("constant", "constant_with_warmup", "wsd", "WSD", "warmup_decay"), "warmup_stable_decay"),
    **dict.fromkeys(("cosine_with_restarts", "cosine_with_min_lr"), "cosine"),
    "linear_with_warmup": "linear",
}
"""Names of other projects, and the schedule that each means."""


class ScheduleSettings(DurationSettings):
    """The learning rate as a pure function of the step."""

    section = "schedule."
    units = ("steps", "tokens", "share")
    earlier_names: ClassVar = {
        "warmup_steps": "warmup",
        "warmup_tokens": "warmup",
        "warmup_ratio": "warmup",
        "decay_steps": "decay_duration",
        "decay_tokens": "decay_duration",
        "decay_ratio": "decay_duration",
    }

    name: Literal["linear", "cosine", "one_minus_sqrt", "warmup_stable_decay"] = Field(
        "linear",
        description="learning-rate schedule after the warmup: a decay until the end, or warmup_stable_decay (constant, "
        "then `decay` over decay_duration); extend a run only with warmup_stable_decay",
    )
    warmup: Duration = Field(
        Duration(0),
        description="linear learning-rate warmup: steps, tokens (rounded up to steps), or a share of the steps of the "
        "run",
    )
    decay_duration: Duration = Field(
        Duration(0),
        description="length of the final decay with schedule.name=warmup_stable_decay: steps, tokens, or a share of "
        "the steps of the run",
    )
    decay: Literal["linear", "cosine", "one_minus_sqrt"] = Field(
        "linear", description="shape of the final decay with schedule.name=warmup_stable_decay"
    )
    final_ratio: Probability = Field(0.0, description="final learning rate as a share of the peak")

    @field_validator("name", mode="before")
    @classmethod
    def _check_name(cls, name: object) -> object:
        if isinstance(name, str) and name in SCHEDULE_ALIASES:
            raise ValueError(f"is unknown; write schedule.name={SCHEDULE_ALIASES[name]}")
        return name

    @model_validator(mode="after")
    def _check_decay(self) -> ScheduleSettings:
        unused = {self.decay_duration.setting: "0"} if self.decay_duration.number else {}
        unused |= {f"decay={self.decay}": "linear"} if self.decay != "linear" else {}
        if unused and self.name != "warmup_stable_decay":
            defaults = (f"schedule.{each.partition('=')[0]}={default}" for each, default in unused.items())
            raise SettingError(
                f"{', '.join(f'schedule.{each}' for each in unused)} has no effect with schedule.name={self.name}, "
                "which decays from the end of the warmup",
                fix=f"set {' '.join(defaults)}, or schedule.name=warmup_stable_decay",
                code="setting-without-effect",
            )
        return self

    @property
    def shape(self) -> str:
        """Shape of the decay: linear, cosine or one_minus_sqrt."""
        return self.decay if self.name == "warmup_stable_decay" else self.name


class StageData(Settings):
    """The data of a stage: what `data` sets for the whole run."""

    shards: Shards = Field(description="as data.shards")
    sampling_alpha: Probability = Field(1.0, description="as data.sampling_alpha")


class StageEvaluation(Settings):
    """How often and how much a stage evaluates."""

    every_steps: PositiveInt | None = Field(None, description="as evaluation.every_steps")
    max_tokens: PositiveInt | None = Field(None, description="as evaluation.max_tokens")


class StageSettings(DurationSettings):
    """An item of `training.stages`: what differs in a part of the run; the settings of the run apply to the rest."""

    section = ""
    units = ("steps", "tokens", "epochs")
    earlier_names: ClassVar = {"steps": "duration", "tokens": "duration"}

    name: str | None = Field(None, description="name for logs and --stage; letters, digits, - and _")
    duration: Duration = Field(description="length of this stage: steps, tokens (rounded up to steps) or epochs")
    data: StageData | None = Field(None, description="{shards, sampling_alpha}: other data than data.shards")
    sequence_length: PositiveInt | None = Field(None, description="tokens per sequence (row)")
    micro_batch_tokens: PositiveInt | None = Field(
        None, description="maximum tokens in one forward pass of one rank; a multiple of sequence_length"
    )
    global_batch_tokens: PositiveInt | None = Field(
        None, description="tokens in one optimizer step over all ranks; a multiple of sequence_length"
    )
    batch_warmup: BatchWarmup | None = Field(
        None,
        description="{initial_tokens, duration}: batch-size ramp-up in the first steps of this stage; the first "
        "stage inherits training.batch_warmup",
    )
    mlm_probability: MaskingRate | None = Field(
        None, description="masking rate; constant in this stage, or its start with final_mlm_probability"
    )
    final_mlm_probability: MaskingRate | None = Field(
        None, description="masking rate at the last step of this stage, reached linearly; needs mlm_probability"
    )
    masking_law: MaskingLaw | None = Field(
        None,
        description="as data.masking_law; a stage that sets mlm_probability or masking_law does not inherit it",
    )
    loss_weight: LossWeight | None = Field(None, description="as data.loss_weight")
    mask_unit: MaskUnit | None = Field(None, description="as data.mask_unit")
    objectives: Objectives | None = Field(
        None, description="what this stage trains, as objectives; other heads of the run get zero gradients"
    )
    masking: str | None = Field(None, description="as data.masking, which is the default")
    learning_rate: PositiveFloat | None = Field(None, description="peak learning rate, as optimizer.learning_rate")
    weight_decay: Annotated[float, Field(ge=0.0)] | None = Field(None, description="as optimizer.weight_decay")
    schedule: ScheduleSettings | None = Field(
        None,
        description="a schedule that begins and ends with this stage; without it the stage has its part of the run's "
        "schedule",
    )
    global_rope_theta: PositiveFloat | None = Field(None, description="as model.global_rope_theta")
    local_rope_theta: PositiveFloat | None = Field(None, description="as model.local_rope_theta")
    gradient_clipping: Annotated[float, Field(ge=0.0)] | None = Field(None, description="as training.gradient_clipping")
    evaluation: StageEvaluation | None = Field(None, description="{every_steps, max_tokens}: as evaluation")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
            raise ValueError("must begin with a letter and contain only letters, digits, - and _; rename the stage")
        return name

    @property
    def has_own_rate(self) -> bool:
        """Whether it sets how the masking rate is chosen."""
        return self.mlm_probability is not None or self.masking_law is not None

    @model_validator(mode="after")
    def _check_masking_rate(self) -> StageSettings:
        if self.final_mlm_probability is not None and self.mlm_probability is None:
            raise SettingError(
                f"final_mlm_probability={self.final_mlm_probability} is set without mlm_probability, its start",
                fix="set mlm_probability in the same stage",
                code="masking-rate-without-start",
            )
        return self


class BranchSettings(Settings):
    """Start from a checkpoint of another run and train one stage; `--branch-from RUN:STEP --stage NAME` sets it."""

    run: PathText = Field(min_length=1, description="output directory of the other run")
    step: PositiveInt = Field(description="step of its checkpoint; this run counts on from there")
    stage: str = Field(min_length=1, description="name of the one stage of training.stages that this run trains")


class TrainingSettings(DurationSettings):
    """Length, batch sizes, precision and determinism of the run."""

    section = "training."
    units = ("steps", "tokens", "epochs")
    earlier_names: ClassVar = {"max_steps": "duration"}

    duration: Duration | None = Field(
        None,
        description="length of the run: steps, tokens (rounded up to steps) or epochs; by default the sum over "
        "training.stages. training.max_steps=N means N steps",
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
        None, description="{initial_tokens, duration}: batch-size ramp-up in the first steps of the run"
    )
    stages: tuple[StageSettings, ...] = Field(
        (),
        description="parts of the run one after another: a list of {name, duration, data, sequence_length, ...} "
        "(settings of an item: configs/README.md)",
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
        description="torch.compile for the blocks and the MLM head with its loss; auto: if every rank has CUDA, "
        "Triton, gcc or clang, Python.h and libcuda (true on the CPU needs a C++ compiler)",
    )


OPTIMIZERS = ("adamw", "stable_adamw", "muon")
"""Names of the built-in optimizers."""

OPTIMIZER_ALIASES = dict.fromkeys(("adam", "adamw_torch", "adamw_torch_fused", "adamw_hf", "fusedadam"), "adamw")
"""Names of other projects, and the built-in optimizer that each means."""


class OptimizerSettings(Settings):
    """The optimizer; weight decay applies to matrices, not to biases and norms."""

    name: str = Field(
        "adamw",
        description="adamw, stable_adamw (AdamW with its step clipped per parameter), muon (for the matrices inside "
        "the blocks; AdamW for the other parameters), or module:function of your own",
    )
    learning_rate: PositiveFloat = Field(1e-4, description="peak learning rate")
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.9, description="decay rate of the first moment of Adam")
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.999, description="decay rate of the second moment of Adam")
    eps: PositiveFloat = Field(1e-6, description="epsilon of Adam")
    momentum: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.95, description="decay rate of the momentum of Muon")
    weight_decay: Annotated[float, Field(ge=0.0)] = Field(0.01, description="decoupled weight decay of matrices")

    @model_validator(mode="after")
    def _check_name(self) -> OptimizerSettings:
        if self.name not in OPTIMIZERS and not is_custom(self.name):
            raise SettingError(
                f"optimizer.name={self.name} is unknown",
                fix=f"set optimizer.name={OPTIMIZER_ALIASES[self.name.lower()]}"
                if self.name.lower() in OPTIMIZER_ALIASES
                else f"set one of {', '.join(OPTIMIZERS)}, or module:function of your own",
                code="unknown-optimizer",
            )
        return self


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
    connect_timeout_seconds: Seconds | None = Field(
        None,
        description="how long a rank retries to connect at the start: to resolve and reach MASTER_ADDR, and to connect "
        "the process groups; raise it if hosts or DNS names appear much later than others; default: 30 and 1 more per "
        "4 ranks",
    )

    def connect_seconds(self, world_size: int) -> int:
        """Return `connect_timeout_seconds`; its default grows with the connections that each rank makes."""
        return self.connect_timeout_seconds or 30 + world_size // 4
