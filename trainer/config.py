"""What a training run is: one YAML file, its schema, and the rules between its settings.

The schema is the source of truth for DeepSpeed too (`trainer/deepspeed_config.py` derives its dict from here).
Nothing is repaired in silence: a contradiction is an error that names setting, value, rule and remedy.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from data_prep import storage
from data_prep.settings import Settings
from trainer.model.families import OPTIONS, violations

Probability = Annotated[float, Field(ge=0.0, le=1.0)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class ModelSettings(Settings):
    """The encoder, in the words of the published configurations of BERT and ModernBERT."""

    family: Literal["bert", "modernbert", "custom"] = Field(
        "bert",
        description="architecture whose published options count where none are set: bert (the defaults shown here), "
        "modernbert, or custom (bert's, and any may be changed; only what transformers computes can be exported)",
    )
    vocab_size: PositiveInt = Field(30522, description="pieces of the tokenizer; at least the shards' vocabulary")
    pad_vocab_size_to_multiple_of: PositiveInt = Field(64, description="rows of the embedding are rounded up to this")
    hidden_size: PositiveInt = Field(768, description="width of the residual stream")
    num_hidden_layers: PositiveInt = Field(12, description="transformer blocks")
    num_attention_heads: PositiveInt = Field(12, description="heads; divides hidden_size")
    intermediate_size: PositiveInt = Field(3072, description="width of the feed-forward layer")
    max_position_embeddings: PositiveInt = Field(
        512, description="longest sequence the model knows positions for, places"
    )
    type_vocab_size: NonNegativeInt = Field(2, description="segments (A and B); 0: no embedding for them")
    position_embedding: Literal["learned", "sinusoidal", "rotary"] = Field(
        "learned", description="positions: added to the embeddings (learned, sinusoidal), or rotating queries and keys"
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="kind of every norm")
    norm_position: Literal["post", "pre"] = Field(
        "post", description="norms after each residual sum, or before each sublayer and after the last block"
    )
    embedding_norm: bool = Field(True, description="norm after the embeddings")
    hidden_act: Literal["gelu", "geglu", "relu"] = Field(
        "gelu", description="activation of the feed-forward layer; the MLM head's is gelu with geglu"
    )
    bias: bool = Field(True, description="biases in linear layers and LayerNorms; the MLM decoder always has one")
    local_attention: PositiveInt | None = Field(
        None, description="window of the local layers, places: half of it to each side, the place itself besides"
    )
    global_attn_every_n_layers: PositiveInt = Field(
        1, description="every n-th layer, from the first, attends to the whole sequence; the others are local"
    )
    global_rope_theta: PositiveFloat = Field(10_000.0, description="base of the rotary frequencies of global layers")
    local_rope_theta: PositiveFloat = Field(10_000.0, description="base of the rotary frequencies of local layers")
    hidden_dropout_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.1, description="dropout after embeddings and sublayers"
    )
    attention_probs_dropout_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0, description="attention dropout; over 0 takes the reference attention, which is slower"
    )
    layer_norm_eps: PositiveFloat = Field(1e-12, description="epsilon of every norm")
    initializer_range: PositiveFloat = Field(
        0.02, description="standard deviation of the truncated normal initialisation"
    )
    initialisation: Literal["normal", "depth_scaled"] = Field(
        "normal",
        description="normal: every matrix alike; depth_scaled: those that write into the residual stream by "
        "1 / sqrt(2 num_hidden_layers)",
    )
    output_bias: Literal["zeros", "frequencies"] = Field(
        "zeros",
        description="beginning of the MLM decoder's bias: zeros as published, or the log of each piece's frequency in "
        "the shards, which saves the first few hundred steps",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_options_of_family(cls, values: Any) -> Any:
        family = values.get("family") if isinstance(values, dict) else None
        return {**OPTIONS[family], **values} if isinstance(family, str) and family in OPTIONS else values

    @model_validator(mode="after")
    def _options_are_of_the_family(self) -> ModelSettings:
        if found := violations(self.family, dict(self)):
            raise ValueError(
                f"model.family={self.family} does not have {'; '.join(found)}; leave the setting out, or set "
                "model.family=custom, which has any options and may be beyond what transformers can load"
            )
        return self

    @model_validator(mode="after")
    def _sizes_agree(self) -> ModelSettings:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}; choose heads that divide it"
            )
        if self.position_embedding == "rotary" and self.head_size % 2:
            raise ValueError(
                f"model.position_embedding=rotary turns pairs, and model.hidden_size={self.hidden_size} over "
                f"model.num_attention_heads={self.num_attention_heads} gives heads of odd size {self.head_size}; "
                "change one of them"
            )
        if self.position_embedding == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(
                f"model.position_embedding=sinusoidal needs pairs of sine and cosine, and "
                f"model.hidden_size={self.hidden_size} is odd; choose an even one"
            )
        return self

    @model_validator(mode="after")
    def _local_layers_have_a_window(self) -> ModelSettings:
        window, period = self.local_attention, self.global_attn_every_n_layers
        if window is not None and window % 2:
            raise ValueError(
                f"model.local_attention={window} is odd, and half of it lies on each side of a place; set {window + 1}"
            )
        if window is None and period > 1:
            raise ValueError(
                f"model.global_attn_every_n_layers={period} makes layers local, and model.local_attention is not set; "
                "set its window, such as 128, or global_attn_every_n_layers=1"
            )
        if window is not None and period == 1:
            raise ValueError(
                f"model.local_attention={window} is never used with model.global_attn_every_n_layers=1, where every "
                "layer is global; set local_attention=null, or the other to 2 or more"
            )
        return self

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_kinds(self) -> tuple[Literal["global", "local"], ...]:
        """What each layer attends to: the whole sequence, or a window around each place."""
        period = self.global_attn_every_n_layers
        return tuple("local" if number % period else "global" for number in range(self.num_hidden_layers))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding matrix: `vocab_size` rounded up to `pad_vocab_size_to_multiple_of`."""
        multiple = self.pad_vocab_size_to_multiple_of
        return -(-self.vocab_size // multiple) * multiple


class WeightedShards(Settings):
    """One component of a mixture of data sets."""

    url: str = Field(description="folder or URL of a shard set (it holds manifest.json)")
    weight: PositiveFloat | None = Field(
        None,
        description="share of the samples, relative to the other components; by default its tokens to the power of "
        "data.sampling_alpha",
    )


class DataSettings(Settings):
    """Which shards are read, and what a sample is."""

    shards: str | tuple[WeightedShards, ...] = Field(
        description="folder or URL of the shards, or a list of {url, weight}"
    )
    sampling_alpha: Probability = Field(
        1.0, description="tempers a mixture without weights: 1 draws by tokens, 0 from all components alike"
    )
    tokenizer: str | None = Field(None, description="tokenizer folder; by default the copy that the shards carry")
    sequence_length: PositiveInt = Field(
        512, description="places in a row, special tokens included; a run with training.phases takes theirs"
    )
    sentence_pairs: Literal["none", "next_sentence", "sentence_order"] = Field(
        "none",
        description="a second task over packed sentence pairs: next_sentence (BERT: does B follow A, or is it from "
        "another document?) or sentence_order (ALBERT: do A and B stand in their order?)",
    )
    short_seq_probability: Probability = Field(
        0.1, description="share of sentence pairs with a shortened target length"
    )
    mlm_probability: Annotated[float, Field(gt=0.0, le=0.8)] = Field(
        0.15, description="share of the tokens that are predicted"
    )
    final_mlm_probability: Annotated[float, Field(gt=0.0, le=0.8)] | None = Field(
        None, description="that share at the last step, reached linearly from mlm_probability; by default it stays"
    )
    mask_unit: Literal["token", "word", "span"] = Field(
        "token", description="what is masked together: single tokens, whole words, or spans of words"
    )
    mean_span_words: Annotated[float, Field(ge=1.0)] = Field(
        3.0, description="mean length of a span, in words; lengths are geometric and at most 10"
    )
    mask_share: Probability = Field(0.8, description="share of the predicted tokens replaced by [MASK]")
    random_share: Probability = Field(0.1, description="share of the predicted tokens replaced by a random token")
    num_workers: NonNegativeInt = Field(
        1, description="processes a rank that build batches; 0 builds them in the rank itself"
    )
    cache_dir: str | None = Field(
        None, description="folder for copies of remote shards; by default the user's cache folder"
    )
    cache_bytes: PositiveInt = Field(
        100_000_000_000,
        description="size that the copies of remote shards may reach, in bytes, for all ranks of a node",
    )
    on_corrupt_shard: Literal["error", "skip"] = Field(
        "error",
        description="error stops at a shard that is damaged or missing; skip names it, counts its rows and goes on",
    )

    @model_validator(mode="after")
    def _weights(self) -> DataSettings:
        given = [component.weight is not None for component in self.components]
        if any(given) and not all(given):
            number = given.index(False)
            raise ValueError(
                f"data.shards[{number}] has no weight and others have; give every component one, or none (then they "
                "are drawn by tokens and data.sampling_alpha)"
            )
        if all(given) and self.sampling_alpha != 1.0:
            raise ValueError(
                f"data.sampling_alpha={self.sampling_alpha} tempers shares by tokens, and data.shards gives weights; "
                "leave out the one or the other"
            )
        return self

    @model_validator(mode="after")
    def _shares(self) -> DataSettings:
        if self.mask_share + self.random_share > 1.0 + 1e-9:
            raise ValueError(
                f"data.mask_share={self.mask_share} and data.random_share={self.random_share} sum to more than 1; "
                "lower one of them (the rest of the predicted tokens is kept as it is)"
            )
        return self

    @property
    def has_sentence_pairs(self) -> bool:
        """Whether the model judges sentence pairs, and so has a pooler and a head for them."""
        return self.sentence_pairs != "none"

    @property
    def max_mlm_probability(self) -> float:
        """The largest share of the tokens that any step predicts."""
        return max(self.mlm_probability, self.evaluated_mlm_probability)

    @property
    def evaluated_mlm_probability(self) -> float:
        """The share at the end of training, which evaluation uses throughout, so that its losses compare."""
        return self.mlm_probability if self.final_mlm_probability is None else self.final_mlm_probability

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
    """When the state is saved and how much of it is kept; the last step is always saved, the newest always kept."""

    every_steps: PositiveInt = Field(1000, description="steps between checkpoints")
    every_minutes: PositiveFloat | None = Field(
        None, description="save as well when so many minutes have passed since the last checkpoint"
    )
    keep_last: PositiveInt = Field(2, description="newest complete checkpoints that are kept")
    keep_every_steps: PositiveInt | None = Field(
        None, description="keep for good the checkpoints of steps that this divides"
    )
    keep_best: NonNegativeInt = Field(
        0, description="keep so many of the best by best_metric, among those saved at a step that was evaluated"
    )
    best_metric: Literal["valid/mlm_loss", "valid/mlm_accuracy", "valid/nsp_accuracy"] = Field(
        "valid/mlm_loss", description="metric of the evaluation that keep_best goes by"
    )
    on_failed_save: Literal["continue", "stop"] = Field(
        "continue", description="continue trains on with the last good one and a warning; stop ends the run"
    )
    upload_to: str | None = Field(
        None,
        description="URL of a folder of this run's own, such as s3://bucket/runs/NAME: checkpoints are copied there in "
        "the background, and fetched from there where the disk has none",
    )
    upload_wait_seconds: NonNegativeInt = Field(
        600, description="how long the end of a run waits for the copy of its last checkpoint, in seconds"
    )


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
    peak_flops_per_device: PositiveFloat | None = Field(
        None,
        description="operations a second that MFU divides by; by default the data sheet's for a known GPU in bf16 or "
        "fp16, and no MFU elsewhere",
    )
    gpu_hour_price: Annotated[float, Field(ge=0.0)] | None = Field(
        None, description="price of one device for an hour, in any currency; status.py and doctor.py reckon with it"
    )


class HealthSettings(Settings):
    """What is watched while a run goes on, and what ends it."""

    max_nonfinite_steps: NonNegativeInt = Field(
        20,
        description="steps in a row whose loss or gradient is not finite; each changes nothing and is counted, one "
        "more ends the run",
    )
    spike_threshold: PositiveFloat | None = Field(
        8.0, description="a loss so many standard deviations above the running median is a spike; null looks for none"
    )
    spike_window_steps: Annotated[int, Field(ge=10)] = Field(200, description="steps of the running median")
    plateau_steps: PositiveInt = Field(
        5000,
        description="steps after which the MLM loss should have left the unigram entropy, and sentence pairs chance",
    )
    plateau_margin_nats: Annotated[float, Field(ge=0.0)] = Field(
        0.2, description="how far below the unigram entropy counts as having left it, in nats"
    )
    chance_margin: Probability = Field(0.02, description="how far above a half pair accuracy is no longer chance")
    suspicious_pair_accuracy: Probability = Field(
        0.99, description="pair accuracy within the first plateau_steps / 10 steps that hints at a leak in the data"
    )
    slow_rank_ratio: Annotated[float, Field(gt=1.0)] = Field(
        1.5, description="a rank that takes so many times the median rank's time is named"
    )
    heartbeat_timeout_seconds: PositiveInt = Field(
        60, description="a rank that has not been heard of for so long is named and ends the run on all ranks"
    )
    step_timeout_seconds: PositiveInt = Field(
        1800,
        description="the run ends where no rank gets on with its work for so long, such as in a step, an evaluation or "
        "a save; must exceed the longest of them",
    )


class DistributedSettings(Settings):
    """The process groups."""

    timeout_seconds: PositiveInt = Field(1800, description="a collective that waits longer ends the run")


class RunConfig(Settings):
    """A training run."""

    output_dir: str = Field(
        min_length=1, description="local or shared folder for checkpoints, status and logs; run again to resume"
    )
    init_from: str | None = Field(
        None,
        min_length=1,
        description="weights to begin with: a Hugging Face folder of the model's family, or models:/NAME@ALIAS; a "
        "resumed run takes its checkpoint's",
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
    health: HealthSettings = HealthSettings()
    distributed: DistributedSettings = DistributedSettings()
    storage_options: dict[str, dict[str, Any]] = Field(
        {}, description="options of remote stores by URL prefix, such as {'s3://shards': {profile: research}}"
    )
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
        if self.data.has_sentence_pairs and self.model.type_vocab_size < 2:
            remedy = (
                "ModernBERT has neither segments nor a head for pairs, so set data.sentence_pairs=none, or "
                "model.family=custom"
                if self.model.family == "modernbert"
                else "set it to 2"
            )
            raise ValueError(
                f"data.sentence_pairs={self.data.sentence_pairs} needs two segments and "
                f"model.type_vocab_size={self.model.type_vocab_size}; {remedy}"
            )
        if self.init_from is not None and self.model.output_bias == "frequencies":
            raise ValueError(
                "model.output_bias=frequencies begins the MLM decoder's bias anew, and init_from brings a trained one; "
                "set model.output_bias=zeros"
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
    values = _redacted(config.model_dump(mode="json"))
    return RunConfig.model_validate(values | {"storage_options": storage.redacted_options(config.storage_options)})


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
