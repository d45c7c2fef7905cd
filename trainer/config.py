"""What a training run is: one YAML file, its schema, and the rules between its settings.

The schema is the source of truth for DeepSpeed too (`trainer/deepspeed_config.py` derives its dict from here).
Nothing is repaired in silence: a contradiction is an error that names setting, value, rule and remedy.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from data_prep import storage
from data_prep.settings import Settings

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class ModelSettings(Settings):
    """The encoder, in the words of BERT's published configuration (Devlin et al. 2018)."""

    family: Literal["bert"] = Field("bert", description="architecture: bert (post-norm, learned positions, GELU)")
    vocab_size: PositiveInt = Field(30522, description="pieces of the tokenizer; at least the shards' vocabulary")
    pad_vocab_size_to_multiple_of: PositiveInt = Field(64, description="rows of the embedding are rounded up to this")
    hidden_size: PositiveInt = Field(768, description="width of the residual stream")
    num_hidden_layers: PositiveInt = Field(12, description="transformer blocks")
    num_attention_heads: PositiveInt = Field(12, description="heads; divides hidden_size")
    intermediate_size: PositiveInt = Field(3072, description="width of the feed-forward layer")
    max_position_embeddings: PositiveInt = Field(
        512, description="longest sequence the model knows positions for, places"
    )
    type_vocab_size: PositiveInt = Field(2, description="segments (A and B)")
    hidden_act: Literal["gelu"] = Field("gelu", description="activation of feed-forward and MLM head")
    hidden_dropout_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.1, description="dropout after embeddings and sublayers"
    )
    attention_probs_dropout_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="attention dropout; over 0 takes the reference attention, which is slower"
    )
    layer_norm_eps: PositiveFloat = Field(1e-12, description="epsilon of every LayerNorm")
    initializer_range: PositiveFloat = Field(
        0.02, description="standard deviation of the truncated normal initialisation"
    )
    output_bias: Literal["zeros", "frequencies"] = Field(
        "zeros",
        description="beginning of the MLM decoder's bias: zeros as published, or the log of each piece's frequency in "
        "the shards, which saves the first few hundred steps",
    )

    @model_validator(mode="after")
    def _heads_divide_hidden_size(self) -> ModelSettings:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}; choose heads that divide it"
            )
        return self

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding matrix: `vocab_size` rounded up to `pad_vocab_size_to_multiple_of`."""
        multiple = self.pad_vocab_size_to_multiple_of
        return -(-self.vocab_size // multiple) * multiple


class WeightedShards(Settings):
    """One component of a mixture of data sets."""

    url: str = Field(description="folder or URL of a shard set (it holds manifest.json)")
    weight: PositiveFloat = Field(1.0, description="share of the samples, relative to the other components")


class DataSettings(Settings):
    """Which shards are read, and what a sample is."""

    shards: str | tuple[WeightedShards, ...] = Field(
        description="folder or URL of the shards, or a list of {url, weight}"
    )
    tokenizer: str | None = Field(None, description="tokenizer folder; by default the copy that the shards carry")
    sequence_length: PositiveInt = Field(
        512, description="places in a row, special tokens included; a run with training.phases takes theirs"
    )
    sentence_pairs: Literal["none", "next_sentence"] = Field(
        "none", description="next_sentence adds next-sentence prediction over packed sentence pairs"
    )
    short_seq_probability: Probability = Field(
        0.1, description="share of sentence pairs with a shortened target length"
    )
    mlm_probability: Annotated[float, Field(gt=0.0, le=0.8)] = Field(
        0.15, description="share of the tokens that are predicted"
    )
    mask_share: Probability = Field(0.8, description="share of the predicted tokens replaced by [MASK]")
    random_share: Probability = Field(0.1, description="share of the predicted tokens replaced by a random token")
    num_workers: NonNegativeInt = Field(
        1, description="processes a rank that build batches; 0 builds them in the rank itself"
    )
    cache_dir: str | None = Field(
        None, description="folder for copies of remote shards; by default the user's cache folder"
    )

    @model_validator(mode="after")
    def _shares(self) -> DataSettings:
        if self.mask_share + self.random_share > 1.0 + 1e-9:
            raise ValueError(
                f"data.mask_share={self.mask_share} and data.random_share={self.random_share} sum to more than 1; "
                "lower one of them (the rest of the predicted tokens is kept as it is)"
            )
        return self

    @property
    def components(self) -> tuple[WeightedShards, ...]:
        """The mixture, one entry for a plain folder."""
        return (WeightedShards(url=self.shards),) if isinstance(self.shards, str) else self.shards


class Phase(Settings):
    """A stretch of optimizer steps at one sequence length and batch size."""

    steps: PositiveInt = Field(description="optimizer steps of this phase")
    sequence_length: PositiveInt = Field(description="places in a row")
    micro_batch_tokens: PositiveInt = Field(
        description="places in one forward of one rank; a multiple of sequence_length"
    )
    global_batch_tokens: PositiveInt = Field(
        description="places in one optimizer step of all ranks; a multiple of sequence_length"
    )


class TrainingSettings(Settings):
    """How long, how much at once, in which precision."""

    max_steps: PositiveInt | None = Field(
        None, description="optimizer steps of the run; by default the sum of the phases"
    )
    seed: NonNegativeInt = Field(0, description="seed of initialisation, data order, masking and dropout")
    micro_batch_tokens: PositiveInt | None = Field(None, description="places in one forward of one rank")
    global_batch_tokens: PositiveInt | None = Field(None, description="places in one optimizer step of all ranks")
    phases: tuple[Phase, ...] = Field(
        (), description="list of {steps, sequence_length, micro_batch_tokens, global_batch_tokens}"
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "bf16", description="arithmetic of forward and backward; master weights are fp32"
    )
    gradient_clipping: Annotated[float, Field(ge=0.0)] = Field(
        1.0, description="largest global gradient norm; 0 clips nothing"
    )
    activation_checkpointing: bool = Field(False, description="recompute each block in the backward to save memory")
    deterministic: bool = Field(False, description="deterministic kernels on CUDA (bitwise resume there; slower)")
    compile: bool = Field(False, description="torch.compile the blocks (needs a C++ compiler on CPU)")


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


class ZeroSettings(Settings):
    """How DeepSpeed ZeRO divides the training state over the ranks."""

    stage: Literal[0, 1, 2, 3] = Field(
        1, description="0 divides nothing, 1 optimizer state, 2 and gradients, 3 and weights"
    )
    offload_optimizer: bool = Field(False, description="keep the optimizer state in the CPU's memory")


class CheckpointSettings(Settings):
    """When the state is saved and how much of it is kept; the last step is always saved."""

    every_steps: PositiveInt = Field(1000, description="steps between checkpoints")
    keep_last: PositiveInt = Field(2, description="newest complete checkpoints that are kept")


class EvaluationSettings(Settings):
    """The valid shards, masked by seed, so that every evaluation sees the same tasks."""

    every_steps: PositiveInt = Field(1000, description="steps between evaluations; the last step is always evaluated")
    max_tokens: PositiveInt | None = Field(
        None, description="places read in one evaluation; by default the whole valid split"
    )


class TrackingSettings(Settings):
    """MLflow."""

    uri: str | None = Field(
        None, description="tracking server; by default MLFLOW_TRACKING_URI, else sqlite in ./mlflow.db"
    )
    experiment: str = Field("clozeworks", min_length=1, description="experiment name")
    run_name: str | None = Field(None, description="name of the run; by default the name of output_dir")


class LoggingSettings(Settings):
    """What a person sees."""

    every_steps: PositiveInt = Field(10, description="steps between console lines")


class DistributedSettings(Settings):
    """The process groups."""

    timeout_seconds: PositiveInt = Field(1800, description="a collective that waits longer ends the run")


class RunConfig(Settings):
    """A training run."""

    output_dir: str = Field(
        min_length=1, description="local or shared folder for checkpoints, status and logs; run again to resume"
    )
    model: ModelSettings = ModelSettings()
    data: DataSettings
    training: TrainingSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    zero: ZeroSettings = ZeroSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    tracking: TrackingSettings = TrackingSettings()
    logging: LoggingSettings = LoggingSettings()
    distributed: DistributedSettings = DistributedSettings()
    deepspeed: dict[str, Any] | None = Field(
        None, description="DeepSpeed settings merged over those that follow from here"
    )

    @model_validator(mode="after")
    def _rules_between_settings(self) -> RunConfig:
        training = self.training
        if training.phases and (training.micro_batch_tokens or training.global_batch_tokens):
            raise ValueError(
                "training.phases is set together with training.micro_batch_tokens or training.global_batch_tokens; "
                "a phase has batch sizes of its own, remove the others"
            )
        if not training.phases:
            for name in ("max_steps", "micro_batch_tokens", "global_batch_tokens"):
                if getattr(training, name) is None:
                    raise ValueError(f"training.{name} is required where training.phases is not given")
        total = sum(phase.steps for phase in self.phases)
        if training.max_steps is not None and training.max_steps > total:
            raise ValueError(
                f"training.max_steps={training.max_steps} is more than the {total} steps of training.phases; "
                "lengthen a phase or lower it"
            )
        for number, phase in enumerate(self.phases):
            _check_phase(phase, number if training.phases else None, self.model.max_position_embeddings)
        warmup_steps, decay_steps = self.schedule.num_warmup_steps(self.max_steps), self.schedule.decay_steps
        for name, steps in (("warmup_steps", warmup_steps), ("decay_steps", decay_steps)):
            if steps > self.max_steps:
                raise ValueError(f"schedule.{name}={steps} is longer than the run's {self.max_steps} steps; lower it")
        if warmup_steps + decay_steps > self.max_steps:
            raise ValueError(
                f"schedule.warmup_steps={warmup_steps} and schedule.decay_steps={decay_steps} are together longer than "
                f"the run's {self.max_steps} steps; lower one"
            )
        if self.data.sentence_pairs != "none" and self.model.type_vocab_size < 2:
            raise ValueError(
                f"data.sentence_pairs={self.data.sentence_pairs} needs two segments and "
                f"model.type_vocab_size={self.model.type_vocab_size}; set it to 2"
            )
        if training.precision == "bf16" and self.zero.stage == 0:
            raise ValueError(
                "zero.stage=0 with training.precision=bf16 has no fp32 master weights in DeepSpeed; "
                "set zero.stage to 1 or higher, or training.precision to fp32"
            )
        if self.zero.offload_optimizer and self.zero.stage == 0:
            raise ValueError("zero.offload_optimizer needs zero.stage 1 or higher; raise the stage or turn it off")
        return self

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The run as phases; a run without `training.phases` is one phase."""
        training = self.training
        if training.phases:
            return training.phases
        return (
            Phase(
                steps=training.max_steps or 1,
                sequence_length=self.data.sequence_length,
                micro_batch_tokens=training.micro_batch_tokens or 1,
                global_batch_tokens=training.global_batch_tokens or 1,
            ),
        )

    @property
    def longest_sequence(self) -> int:
        """Places of the longest rows that the run trains on; what lies beyond, the model knows no positions for."""
        taken = zip(self.phases, self.steps_by_phase, strict=True)
        return max(phase.sequence_length for phase, steps in taken if steps)

    @property
    def steps_by_phase(self) -> tuple[int, ...]:
        """Optimizer steps that the run takes in each phase: fewer than the phases have where `max_steps` ends it."""
        left, steps = self.max_steps, []
        for phase in self.phases:
            steps.append(min(phase.steps, left))
            left -= steps[-1]
        return tuple(steps)

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.training.max_steps or sum(phase.steps for phase in self.phases)


def without_secrets(config: RunConfig) -> RunConfig:
    """The configuration as it may be kept and shown: user, password and query taken out of every URL in it."""
    return RunConfig.model_validate(_redacted(config.model_dump(mode="json")))


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return storage.redact(value) if isinstance(value, str) else value


def _check_phase(phase: Phase, number: int | None, max_position_embeddings: int) -> None:
    """`number` is the phase's in `training.phases`; None where the run is one phase without that list."""
    where = "training." if number is None else f"training.phases.{number}."
    length = "data.sequence_length" if number is None else f"{where}sequence_length"
    if phase.sequence_length > max_position_embeddings:
        raise ValueError(
            f"{length}={phase.sequence_length} is longer than "
            f"model.max_position_embeddings={max_position_embeddings}; lower the one or raise the other"
        )
    if phase.sequence_length < 8:
        raise ValueError(f"{length}={phase.sequence_length} is shorter than 8 places; raise it")
    for name in ("micro_batch_tokens", "global_batch_tokens"):
        tokens = getattr(phase, name)
        if tokens % phase.sequence_length:
            nearest = max(1, round(tokens / phase.sequence_length)) * phase.sequence_length
            raise ValueError(
                f"{where}{name}={tokens} is not a multiple of the sequence length {phase.sequence_length}; "
                f"the nearest is {nearest}"
            )
    if phase.micro_batch_tokens > phase.global_batch_tokens:
        raise ValueError(
            f"{where}micro_batch_tokens={phase.micro_batch_tokens} is more than "
            f"{where}global_batch_tokens={phase.global_batch_tokens}; lower the one or raise the other"
        )
