"""The configuration of a training run: its schema, and the rules between its settings.

The schema is the source of truth for DeepSpeed too (`trainer/engine/deepspeed_config.py` derives its dict from it).
Nothing is changed silently: a contradiction is an error with setting, value, rule and fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import Field, model_validator

from data_prep.base.settings import PathText, SettingError, Settings
from data_prep.storage import storage
from trainer.config.data_settings import DataSettings
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import (
    MASKED_LM,
    SENTENCE_PAIRS,
    Objectives,
    check_objectives,
    objectives_of,
    sentence_pairs_of,
    union,
)
from trainer.config.promotion import parse_conditions
from trainer.config.registry_settings import RegistrySettings, check_kept
from trainer.config.run_settings import (
    BEST_METRICS,
    CheckpointSettings,
    EvaluationSettings,
    HealthSettings,
    LoggingSettings,
    TrackingSettings,
)
from trainer.config.schedule import tokens_of_stage
from trainer.config.stages import Stage, data_sets_of, resolve_stages
from trainer.config.synonyms import explain_synonym, length_names
from trainer.config.training_settings import (
    BatchWarmup,
    BranchSettings,
    DistributedSettings,
    OptimizerSettings,
    ScheduleSettings,
    TrainingSettings,
    ZeroSettings,
)


class RunConfig(Settings):
    """A training run."""

    output_dir: PathText = Field(
        min_length=1, description="output directory (local or shared) for checkpoints, status and logs; rerun to resume"
    )
    init_from: PathText | None = Field(
        None,
        min_length=1,
        description="initial weights: a Hugging Face directory of the model's family, a Hub name, or "
        "models:/NAME@ALIAS; a resumed run uses its checkpoint",
    )
    model: ModelSettings = ModelSettings()
    objectives: Objectives | None = Field(
        None,
        description="list of {name, weight, task, settings}: what the model is trained to predict, masked_lm, "
        "sentence_pairs or module:Class of your own; by default masked_lm, and what data.sentence_pairs names",
    )
    data: DataSettings
    training: TrainingSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    branch: BranchSettings | None = None
    zero: ZeroSettings = ZeroSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    tracking: TrackingSettings = TrackingSettings()
    registry: RegistrySettings = RegistrySettings()
    logging: LoggingSettings = LoggingSettings()
    health: HealthSettings = HealthSettings()
    distributed: DistributedSettings = DistributedSettings()
    storage_options: dict[str, dict[str, Any]] = Field(
        {}, description="options of remote storage by URL prefix, such as {'s3://shards': {profile: research}}"
    )
    deepspeed: dict[str, Any] | None = Field(
        None, description="DeepSpeed settings, merged over those that follow from this configuration"
    )

    @classmethod
    def explain_unknown(cls, name: str, value: object, values: Mapping[str, Any]) -> str | None:
        """Answer names of Hugging Face and Megatron (`synonyms.py`)."""
        return explain_synonym(name, value, _sequence_length(values, name))

    @model_validator(mode="after")
    def _check_between_settings(self) -> RunConfig:
        _check_stages(self)
        _check_schedules(self)
        _check_task(self)
        _check_evaluation(self)
        _check_kept(self)
        _check_zero(self)
        return self

    @model_validator(mode="before")
    @classmethod
    def _fill_sentence_pairs(cls, values: Any) -> Any:
        """Set `data.sentence_pairs`, where it is not set, as `objectives` have it."""
        if not isinstance(values, Mapping) or not isinstance(data := values.get("data"), Mapping):
            return values
        items = values.get("objectives") or ()
        pairs = [each for each in items if isinstance(each, Mapping) and each.get("name") == SENTENCE_PAIRS]
        if not pairs or "sentence_pairs" in data:
            return values
        return {**values, "data": {**data, "sentence_pairs": pairs[0].get("task") or "next_sentence"}}

    @property
    def run_objectives(self) -> Objectives:
        """What every stage trains that does not say otherwise."""
        return self.objectives or objectives_of(self.data.sentence_pairs)

    @cached_property
    def all_objectives(self) -> Objectives:
        """What the model has heads for: the objectives of all stages, in a branch too."""
        return union(
            [stage.objectives or self.run_objectives for stage in self.training.stages] or [self.run_objectives]
        )

    @property
    def has_pair_head(self) -> bool:
        """Whether the model judges sentence pairs."""
        return sentence_pairs_of(self.all_objectives) != "none"

    @property
    def has_own_objectives(self) -> bool:
        """Whether a class of the user's is among the objectives."""
        return any(each.is_own for each in self.all_objectives)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of the run, resolved; one without `training.stages`, and that of `branch` alone in a branch."""
        return resolve_stages(self)

    @cached_property
    def data_sets(self) -> tuple[str, ...]:
        """URLs of all data sets that the stages read, each once."""
        return data_sets_of(self.stages)

    def stage_of(self, step: int) -> Stage:
        """Return the stage of a step, counted from 1; the first stage for step 0."""
        return next((stage for stage in self.stages if step <= stage.last_step), self.stages[-1])

    @property
    def longest_sequence(self) -> int:
        """Longest sequence length of the run in tokens; the model is not trained on positions beyond."""
        return max(stage.sequence_length for stage in self.stages if stage.taken_steps)

    @property
    def steps_by_stage(self) -> tuple[int, ...]:
        """Optimizer steps of the run in each stage; `max_steps` may end the run before the stages do."""
        return tuple(stage.taken_steps for stage in self.stages)

    def tokens_after(self, step: int = 0) -> int:
        """Return the tokens of the run after `step` completed steps."""
        return sum(
            tokens_of_stage(stage, min(max(step - stage.first_step, 0), stage.taken_steps), stage.taken_steps)
            for stage in self.stages
        )

    @property
    def first_step(self) -> int:
        """Completed steps where the run begins; not 0 in a branch."""
        return self.stages[0].first_step

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run, with those before a branch."""
        return self.training.max_steps or self.stages[-1].last_step


def _sequence_length(values: Mapping[str, Any], name: str) -> int | None:
    """Return the sequence length that holds for the setting `name` in a configuration that is not validated.

    It may be set under a name of another project. None if it is unclear, as with two lengths.
    """
    training = values.get("training")
    stages = training.get("stages") if isinstance(training, Mapping) else None
    if stages:
        parts = name.split(".")
        number = int(parts[2]) if parts[:2] == ["training", "stages"] and parts[2].isdecimal() else None
        if number is None or not isinstance(stages, list) or not isinstance(stages[number], Mapping):
            return None
        if own := _lengths(stages[number]):
            return own.pop() if len(own) == 1 else None
    sections = (values, *(values[each] for each in ("data", "training", "model") if each in values))
    lengths = set().union(*(_lengths(each) for each in sections if isinstance(each, Mapping)))
    length = lengths.pop() if lengths else DataSettings.model_fields["sequence_length"].default
    return length if type(length) is int and not lengths else None


def _lengths(section: Mapping[str, Any]) -> set[Any]:
    """Return the sequence lengths that a section sets, under any name."""
    return {value for name, value in section.items() if str(name) in length_names() and isinstance(value, int | str)}


def without_secrets(config: RunConfig) -> RunConfig:
    """Return the configuration for files and logs: URLs without user, password and query, other secrets hidden."""
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
    """Check names, batch sizes and lengths."""
    training = config.training
    if config.branch is not None and config.branch.run.rstrip("/") == config.output_dir.rstrip("/"):
        raise SettingError(
            f"output_dir={storage.redact(config.output_dir)} is the run that the branch starts from",
            fix="set another output_dir for the branch",
            code="branch-into-its-own-run",
        )
    names = [stage.name for stage in training.stages if stage.name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingError(
            f"two of training.stages have the name {twice!r}", fix="rename one of them", code="duplicate-stage"
        )
    last = config.stages[-1].last_step
    if training.max_steps is not None and training.max_steps > last:
        raise SettingError(
            f"training.max_steps={training.max_steps} exceeds the {last} steps of training.stages",
            fix="lengthen a stage or lower training.max_steps",
            code="more-steps-than-stages",
        )
    if training.max_steps is not None and training.max_steps <= config.first_step:
        raise SettingError(
            f"training.max_steps={training.max_steps} ends before branch.step={config.first_step}",
            fix="raise or remove training.max_steps, which counts the steps before the branch",
            code="no-step-in-branch",
        )
    for stage in config.stages:
        _check_stage(stage, stage.prefix, config.model.max_position_embeddings)


def _check_schedules(config: RunConfig) -> None:
    """Check that warmup and decay fit into the run, and those of a stage into the stage."""
    for stage in config.stages:
        prefix, span = (f"{stage.prefix}schedule", "stage") if stage.has_own_schedule else ("schedule", "run")
        _check_schedule(stage.schedule, stage.rate_clock.steps, prefix, span)


def _check_schedule(schedule: ScheduleSettings, steps: int, section: str, span: str) -> None:
    for name, part in (("warmup_steps", schedule.warmup_steps or 0), ("decay_steps", schedule.decay_steps)):
        if part > steps:
            raise SettingError(
                f"{section}.{name}={part} exceeds the {steps} steps of the {span}",
                fix=f"lower {section}.{name}",
                code="schedule-longer-than-run",
            )
    if (schedule.warmup_steps or 0) + schedule.decay_steps > steps:
        raise SettingError(
            f"{section}.warmup_steps={schedule.warmup_steps} plus {section}.decay_steps={schedule.decay_steps} exceeds "
            f"the {steps} steps of the {span}",
            fix="lower one of them",
            code="schedule-longer-than-run",
        )


def _check_task(config: RunConfig) -> None:
    """Check objectives, sentence pairs and initial weights."""
    if config.objectives is not None:
        check_objectives(config.objectives, "objectives")
        if (trained := sentence_pairs_of(config.objectives)) != config.data.sentence_pairs:
            raise SettingError(
                f"data.sentence_pairs={config.data.sentence_pairs} contradicts objectives, in which it is {trained}",
                fix=f"set data.sentence_pairs={trained}, or remove one of the two settings",
                code="objectives-and-sentence-pairs",
            )
    names = [each.name for each in config.all_objectives]
    needs_masked_lm = {
        "model.output_bias=frequencies": config.model.output_bias == "frequencies",
        "evaluation.minimal_pairs": config.evaluation.minimal_pairs is not None,
        "evaluation.suite": config.evaluation.suite is not None,
        "registry.name": config.registry.name is not None,
    }
    for setting in needs_masked_lm if MASKED_LM not in names else ():
        if needs_masked_lm[setting]:
            raise SettingError(
                f"{setting} needs the head of masked_lm, which is no objective of the run",
                fix=f"{'set model.output_bias=zeros' if '=' in setting else f'remove {setting}'}, or add masked_lm to "
                "objectives",
                code="setting-needs-masked-lm",
            )
    if (pairs := sentence_pairs_of(config.all_objectives)) != "none" and config.model.type_vocab_size < 2:
        raise SettingError(
            f"data.sentence_pairs={pairs} needs two token types, and "
            f"model.type_vocab_size={config.model.type_vocab_size}",
            fix="set data.sentence_pairs=none (ModernBERT has neither token types nor a pair head), or "
            "model.family=custom"
            if config.model.family == "modernbert"
            else "set model.type_vocab_size=2",
            code="pairs-without-token-types",
        )
    if config.init_from is not None and config.model.output_bias == "frequencies":
        raise SettingError(
            f"model.output_bias=frequencies contradicts init_from={storage.redact(config.init_from)}, which provides a "
            "trained bias",
            fix="set model.output_bias=zeros",
            code="output-bias-with-init-from",
        )


def without_registry(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a checkpoint without `registry`, which no weight depends on."""
    return {name: value for name, value in values.items() if name != "registry"}


def _check_evaluation(config: RunConfig) -> None:
    """Check that the model has positions for the rows of an evaluation."""
    length, positions = config.evaluation.sequence_length, config.model.max_position_embeddings
    if length is not None and not 8 <= length <= positions:
        is_short = length < 8
        limit = "is less than 8 tokens" if is_short else f"exceeds model.max_position_embeddings={positions}"
        raise SettingError(
            f"evaluation.sequence_length={length} {limit}",
            fix=f"{'raise' if is_short else 'lower'} evaluation.sequence_length",
            code="sequence-too-short" if is_short else "sequence-too-long",
        )


def _check_kept(config: RunConfig) -> None:
    """Check which checkpoints are kept and registered."""
    best = config.checkpoint.best_metric
    is_own = config.has_own_objectives and best.endswith(("_loss", "_accuracy"))  # whose better direction is known
    if best.startswith("valid/") and best not in BEST_METRICS and not is_own:
        raise SettingError(
            f"checkpoint.best_metric={best} is no metric by which checkpoints are kept",
            fix=f"set one of {', '.join(BEST_METRICS)}, suite/NAME/TASK, or the loss or accuracy of an objective of "
            "your own",
            code="best-metric-not-measured",
        )
    if config.checkpoint.keep_best:
        _check_measured(config, "checkpoint.best_metric", config.checkpoint.best_metric)
    for condition in parse_conditions(config.registry.only_if) if config.registry.only_if else ():
        _check_measured(config, "registry.only_if", condition.metric)
    every = config.evaluation.suite_every_steps
    if every is not None and every % config.checkpoint.every_steps:
        raise SettingError(
            f"evaluation.suite_every_steps={every} is not a multiple of "
            f"checkpoint.every_steps={config.checkpoint.every_steps}",
            fix="set it to a multiple",
            code="suite-steps",
        )
    if config.registry.when == "kept":
        for stage in config.stages:
            check_kept(config.registry, config.checkpoint, stage.evaluation.every_steps, config.max_steps)


def _check_measured(config: RunConfig, setting: str, metric: str) -> None:
    """Check that the run measures the metric that a setting compares."""
    names = [each.name for each in config.all_objectives]
    if metric == "valid/pair_accuracy" and SENTENCE_PAIRS not in names:
        reason, fix = "with data.sentence_pairs=none", "set data.sentence_pairs=next_sentence"
    elif metric.startswith("valid/mlm") and MASKED_LM not in names:
        reason, fix = "without the objective masked_lm", "add masked_lm to objectives"
    elif metric.startswith("valid/minimal_pairs") and not config.evaluation.minimal_pairs:
        reason, fix = "without evaluation.minimal_pairs", "set evaluation.minimal_pairs to a directory"
    elif metric.startswith("suite/") and not config.evaluation.suite:
        reason, fix = "without evaluation.suite", "set evaluation.suite to that suite"
    else:
        return
    raise SettingError(
        f"{setting} compares {metric}, which is never measured {reason}",
        fix=f"{fix}, or compare another metric such as valid/mlm_loss",
        code="best-metric-not-measured" if setting == "checkpoint.best_metric" else "gate-not-measured",
    )


def _check_zero(config: RunConfig) -> None:
    """Check what the ZeRO stages support."""
    precision = config.training.precision
    if precision not in ("fp32", "auto") and config.zero.stage == 0:
        raise SettingError(
            f"zero.stage=0 with training.precision={precision} accumulates gradients in {precision} in DeepSpeed",
            fix="set zero.stage to 1 or higher (free on a single rank), or training.precision=fp32",
            code="zero-stage-0-in-half-precision",
        )
    if config.zero.offload_optimizer and config.zero.stage == 0:
        raise SettingError(
            "zero.offload_optimizer=true needs zero.stage 1 or higher, got zero.stage=0",
            fix="raise zero.stage, or set zero.offload_optimizer=false",
            code="offload-needs-zero",
        )


def _check_stage(stage: Stage, prefix: str | None, max_position_embeddings: int) -> None:
    """Check a stage; `prefix` leads to its settings in `training.stages`, None for a run without that list."""
    section = prefix or "training."
    length = f"{prefix}sequence_length" if prefix else "data.sequence_length"
    if stage.sequence_length > max_position_embeddings:
        raise SettingError(
            f"{length}={stage.sequence_length} exceeds model.max_position_embeddings={max_position_embeddings}",
            fix="lower the one or raise the other",
            code="sequence-too-long",
        )
    if stage.sequence_length < 8:
        raise SettingError(
            f"{length}={stage.sequence_length} is less than 8 tokens", fix=f"raise {length}", code="sequence-too-short"
        )
    sizes = {name: getattr(stage, name) for name in ("micro_batch_tokens", "global_batch_tokens")}
    if stage.batch_warmup is not None:
        sizes["batch_warmup.initial_tokens"] = stage.batch_warmup.initial_tokens
    for name, tokens in sizes.items():
        if tokens % stage.sequence_length:
            nearest = max(1, round(tokens / stage.sequence_length)) * stage.sequence_length
            raise SettingError(
                f"{section}{name}={tokens} is not a multiple of {length}={stage.sequence_length}",
                fix=f"set {section}{name}={nearest}",
                code="tokens-not-whole-rows",
            )
        if tokens < stage.micro_batch_tokens:
            raise SettingError(
                f"{section}micro_batch_tokens={stage.micro_batch_tokens} exceeds {section}{name}={tokens}",
                fix="lower the one or raise the other",
                code="micro-batch-exceeds-global-batch",
            )
    if stage.batch_warmup is not None:
        _check_batch_warmup(stage, stage.batch_warmup, section, "stage" if prefix else "run")


def _check_batch_warmup(stage: Stage, warmup: BatchWarmup, section: str, span: str) -> None:
    """Check the ramp-up of a stage."""
    if warmup.initial_tokens >= stage.global_batch_tokens:
        raise SettingError(
            f"{section}batch_warmup.initial_tokens={warmup.initial_tokens} is not less than "
            f"{section}global_batch_tokens={stage.global_batch_tokens}",
            fix=f"lower it, or remove {section}batch_warmup",
            code="batch-warmup-without-growth",
        )
    if warmup.num_steps > stage.steps:
        raise SettingError(
            f"{section}batch_warmup.steps={warmup.num_steps} exceeds the {stage.steps} steps of the {span}",
            fix=f"lower the length of {section}batch_warmup",
            code="batch-warmup-longer-than-stage",
        )
