"""What a training run is: one YAML file, its schema, and the rules between its settings.

The schema is the source of truth for DeepSpeed too (`trainer/engine/deepspeed_config.py` derives its dict from here).
Nothing is repaired in silence: a contradiction is an error that names setting, value, rule and remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from data_prep.base.settings import Settings
from data_prep.storage import storage
from trainer.config.data_settings import DataSettings
from trainer.config.model_settings import ModelSettings
from trainer.config.registry_settings import RegistrySettings, check_kept
from trainer.config.run_settings import (
    CheckpointSettings,
    EvaluationSettings,
    HealthSettings,
    LoggingSettings,
    TrackingSettings,
)
from trainer.config.training_settings import (
    BatchWarmup,
    DistributedSettings,
    OptimizerSettings,
    ScheduleSettings,
    Stage,
    TrainingSettings,
    ZeroSettings,
)


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
    registry: RegistrySettings = RegistrySettings()
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
        _check_stages(self)
        _check_schedule(self)
        _check_task(self)
        _check_kept(self)
        _check_zero(self)
        return self

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The run as stages; a run without `training.stages` is one stage."""
        training = self.training
        if training.stages:
            return training.stages
        return (
            Stage(
                steps=training.max_steps or 1,
                sequence_length=self.data.sequence_length,
                micro_batch_tokens=training.micro_batch_tokens or 1,
                global_batch_tokens=training.global_batch_tokens or 1,
                batch_warmup=training.batch_warmup,
            ),
        )

    @property
    def longest_sequence(self) -> int:
        """Places of the longest rows that the run trains on; what lies beyond, the model knows no positions for."""
        taken = zip(self.stages, self.steps_by_stage, strict=True)
        return max(stage.sequence_length for stage, steps in taken if steps)

    @property
    def steps_by_stage(self) -> tuple[int, ...]:
        """Optimizer steps that the run takes in each stage: fewer than the stages have where `max_steps` ends it."""
        left, steps = self.max_steps, []
        for stage in self.stages:
            steps.append(min(stage.steps, left))
            left -= steps[-1]
        return tuple(steps)

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.training.max_steps or sum(stage.steps for stage in self.stages)


def without_secrets(config: RunConfig) -> RunConfig:
    """The configuration as it may be kept and shown: URLs without user, password and query, other secrets hidden."""
    values = _redacted(config.model_dump(mode="json"))
    values["storage_options"] = storage.redacted_options(config.storage_options)
    if config.deepspeed is not None:
        values["deepspeed"] = storage.redacted_settings(config.deepspeed)
    return RunConfig.model_validate(values)


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return storage.redact(value) if isinstance(value, str) else value


def _check_stages(config: RunConfig) -> None:
    """Batch sizes and lengths, and that they are said once."""
    training = config.training
    if training.stages:
        for name in ("micro_batch_tokens", "global_batch_tokens", "batch_warmup"):
            if getattr(training, name) is not None:
                raise ValueError(
                    f"training.stages is set together with training.{name}; a stage has batch sizes of its own, "
                    "give it to the stage"
                )
    else:
        for name in ("max_steps", "micro_batch_tokens", "global_batch_tokens"):
            if getattr(training, name) is None:
                raise ValueError(f"training.{name} is required where training.stages is not given")
    total = sum(stage.steps for stage in config.stages)
    if training.max_steps is not None and training.max_steps > total:
        raise ValueError(
            f"training.max_steps={training.max_steps} is more than the {total} steps of training.stages; "
            "lengthen a stage or lower it"
        )
    for number, stage in enumerate(config.stages):
        _check_stage(stage, number if training.stages else None, config.model.max_position_embeddings)


def _check_schedule(config: RunConfig) -> None:
    """Warm-up and decay fit into the run."""
    warmup_steps, decay_steps = config.schedule.num_warmup_steps(config.max_steps), config.schedule.decay_steps
    for name, steps in (("warmup_steps", warmup_steps), ("decay_steps", decay_steps)):
        if steps > config.max_steps:
            raise ValueError(f"schedule.{name}={steps} is longer than the run's {config.max_steps} steps; lower it")
    if warmup_steps + decay_steps > config.max_steps:
        raise ValueError(
            f"schedule.warmup_steps={warmup_steps} and schedule.decay_steps={decay_steps} are together longer than "
            f"the run's {config.max_steps} steps; lower one"
        )


def _check_task(config: RunConfig) -> None:
    """Sentence pairs, and what the weights begin with."""
    if config.data.has_sentence_pairs and config.model.type_vocab_size < 2:
        remedy = (
            "ModernBERT has neither segments nor a head for pairs, so set data.sentence_pairs=none, or "
            "model.family=custom"
            if config.model.family == "modernbert"
            else "set it to 2"
        )
        raise ValueError(
            f"data.sentence_pairs={config.data.sentence_pairs} needs two segments and "
            f"model.type_vocab_size={config.model.type_vocab_size}; {remedy}"
        )
    if config.init_from is not None and config.model.output_bias == "frequencies":
        raise ValueError(
            "model.output_bias=frequencies initializes the MLM decoder's bias, and init_from brings a trained one; "
            "set model.output_bias=zeros"
        )


def without_registry(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a checkpoint but `registry`, which no weight depends on and a later release may refuse."""
    return {name: value for name, value in values.items() if name != "registry"}


def _check_kept(config: RunConfig) -> None:
    """What is kept of the checkpoints, and where."""
    best = config.checkpoint.best_metric
    if config.checkpoint.keep_best and best == "valid/pair_accuracy" and not config.data.has_sentence_pairs:
        raise ValueError(
            f"checkpoint.best_metric={best} is never measured with data.sentence_pairs=none; set it to valid/mlm_loss"
        )
    if config.checkpoint.keep_best and best == "valid/minimal_pairs_accuracy" and not config.evaluation.minimal_pairs:
        raise ValueError(
            f"checkpoint.best_metric={best} is never measured without evaluation.minimal_pairs. Fix: set it to a "
            "folder of minimal pairs, or checkpoint.best_metric to valid/mlm_loss"
        )
    if config.registry.when == "kept":
        check_kept(config.registry, config.checkpoint, config.evaluation.every_steps, config.max_steps)


def _check_zero(config: RunConfig) -> None:
    """What DeepSpeed's stages can do."""
    precision = config.training.precision
    if precision not in ("fp32", "auto") and config.zero.stage == 0:
        raise ValueError(
            f"zero.stage=0 with training.precision={precision} accumulates gradients in {precision} in DeepSpeed; "
            "set zero.stage to 1 or higher (on a single rank it costs nothing), or training.precision to fp32"
        )
    if config.zero.offload_optimizer and config.zero.stage == 0:
        raise ValueError("zero.offload_optimizer needs zero.stage 1 or higher; raise the stage or turn it off")


def _check_stage(stage: Stage, number: int | None, max_position_embeddings: int) -> None:
    """`number` is the stage's in `training.stages`; None where the run is one stage without that list."""
    where = "training." if number is None else f"training.stages.{number}."
    length = "data.sequence_length" if number is None else f"{where}sequence_length"
    if stage.sequence_length > max_position_embeddings:
        raise ValueError(
            f"{length}={stage.sequence_length} is longer than "
            f"model.max_position_embeddings={max_position_embeddings}; lower the one or raise the other"
        )
    if stage.sequence_length < 8:
        raise ValueError(f"{length}={stage.sequence_length} is shorter than 8 places; raise it")
    sizes = {name: getattr(stage, name) for name in ("micro_batch_tokens", "global_batch_tokens")}
    if stage.batch_warmup is not None:
        sizes["batch_warmup.initial_tokens"] = stage.batch_warmup.initial_tokens
    for name, tokens in sizes.items():
        if tokens % stage.sequence_length:
            nearest = max(1, round(tokens / stage.sequence_length)) * stage.sequence_length
            raise ValueError(
                f"{where}{name}={tokens} is not a multiple of the sequence length {stage.sequence_length}; "
                f"the nearest is {nearest}"
            )
        if tokens < stage.micro_batch_tokens:
            raise ValueError(
                f"{where}micro_batch_tokens={stage.micro_batch_tokens} is more than {where}{name}={tokens}; "
                "lower the one or raise the other"
            )
    if stage.batch_warmup is not None:
        _check_batch_warmup(stage, stage.batch_warmup, where)


def _check_batch_warmup(stage: Stage, warmup: BatchWarmup, where: str) -> None:
    if warmup.initial_tokens >= stage.global_batch_tokens:
        raise ValueError(
            f"{where}batch_warmup.initial_tokens={warmup.initial_tokens} is not less than "
            f"{where}global_batch_tokens={stage.global_batch_tokens}, to which it grows; lower it, or leave out "
            f"{where}batch_warmup"
        )
    if warmup.steps > stage.steps:
        raise ValueError(
            f"{where}batch_warmup.steps={warmup.steps} is longer than the {stage.steps} steps that it belongs to; "
            "lower it"
        )
