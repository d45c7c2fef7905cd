"""The rules between the settings of a run: a contradiction is an error with setting, value, rule and fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from data_prep.base.settings import SettingError
from data_prep.storage import storage
from trainer.config.duration import Duration
from trainer.config.families.registry import FAMILIES
from trainer.config.objective_settings import (
    CAUSAL,
    MASKED_LM,
    OF_TEACHER,
    OF_TOKENS,
    SENTENCE_PAIRS,
    check_objectives,
    sentence_pairs_of,
)
from trainer.config.registry_settings import check_kept
from trainer.config.run_settings import BEST_METRICS
from trainer.config.stages import Stage, epochs_of
from trainer.config.training_settings import BatchWarmup, ScheduleSettings

if TYPE_CHECKING:
    from trainer.config.run_config import RunConfig


def check_run(config: RunConfig) -> None:
    """Check all rules between the settings of a run.

    Raises:
        SettingError: two settings contradict each other.
    """
    _check_stages(config)
    _check_schedules(config)
    _check_task(config)
    _check_evaluation(config)
    _check_kept(config)
    _check_zero(config)


def _check_stages(config: RunConfig) -> None:
    """Check names, batch sizes and lengths."""
    training = config.training
    if config.branch is not None and config.branch.run.rstrip("/") == config.output_dir.rstrip("/"):
        raise SettingError(
            f"output_dir={storage.redact(config.output_dir)} is the run that the branch starts from",
            fix="set another output_dir for the branch",
            code="branch-into-its-own-run",
        )
    if training.stages and training.duration is not None and training.duration.unit == "epochs":
        raise SettingError(
            f"training.{training.duration.setting} cannot be the length of a run with stages, whose data may differ",
            fix="set the duration of each stage in epochs",
            code="epochs-of-all-stages",
        )
    names = [stage.name for stage in training.stages if stage.name]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SettingError(
            f"two of training.stages have the name {twice!r}", fix="rename one of them", code="duplicate-stage"
        )
    if epochs_of(training):  # checked again with their steps, once the data are opened
        return
    last = config.stages[-1].last_step
    if training.duration is not None and config.max_steps > last:
        removed = f"training.{training.duration.setting.partition('=')[0]}=null"
        raise SettingError(
            f"training.{training.duration.setting} exceeds the {last} steps of training.stages",
            fix=f"lengthen a stage, or shorten that setting, or remove it with {removed}",
            code="more-steps-than-stages",
        )
    if training.duration is not None and config.max_steps <= config.first_step:
        raise SettingError(
            f"training.{training.duration.setting} ends before branch.step={config.first_step}",
            fix="raise or remove it; it counts the steps before the branch",
            code="no-step-in-branch",
        )
    for stage in config.stages:
        _check_stage(stage, stage.prefix, config.model.max_position_embeddings)


def _check_schedules(config: RunConfig) -> None:
    """Check that warmup and decay fit into the run, and those of a stage into the stage."""
    for stage in () if epochs_of(config.training) else config.stages:
        prefix, span = (f"{stage.prefix}schedule", "stage") if stage.has_own_schedule else ("schedule", "run")
        _check_schedule(stage.schedule, stage.rate_clock.steps, prefix, span)


def _check_schedule(schedule: ScheduleSettings, steps: int, section: str, span: str) -> None:
    parts = [part for part in (schedule.warmup, schedule.decay_duration) if part.steps]
    if sum(part.steps for part in parts) > steps:
        settings = " plus ".join(f"{section}.{part.setting}{_steps_of(part)}" for part in parts)
        raise SettingError(
            f"{settings} exceeds the {steps} steps of the {span}",
            fix="lower one of them" if len(parts) > 1 else f"lower {settings.partition('=')[0]}",
            code="schedule-longer-than-run",
        )


def _steps_of(duration: Duration) -> str:
    """Return the steps of a resolved duration that was not written in steps."""
    is_written = duration.setting.endswith((f"={duration.steps}", f"={duration.steps} steps"))
    return "" if is_written else f" ({duration.steps} steps)"


def _check_task(config: RunConfig) -> None:
    """Check objectives, sentence pairs and initial weights."""
    if config.objectives is not None:
        check_objectives(config.objectives, "objectives")
        if (trained := sentence_pairs_of(config.objectives)) != config.data.sentence_pairs:
            task = config.data.sentence_pairs
            is_missing = trained == "none"
            other = f"add {{name: sentence_pairs, task: {task}}} to objectives" if is_missing else "change objectives"
            raise SettingError(
                f"data.sentence_pairs={task} contradicts objectives, in which it is {trained}",
                fix=f"set data.sentence_pairs={trained}, or {other}",
                code="objectives-and-sentence-pairs",
            )
    names = [each.name for each in config.all_objectives]
    needs_masked_lm = {
        "model.output_bias=frequencies": config.model.output_bias == "frequencies" and not {*names} & {*OF_TOKENS},
        "evaluation.minimal_pairs": config.evaluation.minimal_pairs is not None,
        "evaluation.suite": config.evaluation.suite is not None,
        "evaluation.masking_rates": config.evaluation.masking_rates is True,
        "registry.name": config.registry.name is not None,
    }
    for setting in needs_masked_lm if MASKED_LM not in names else ():
        if needs_masked_lm[setting]:
            raise SettingError(
                f"{setting} needs the head of masked_lm, but the run does not have this objective",
                fix=f"{'set model.output_bias=zeros' if '=' in setting else f'remove {setting}'}, or add masked_lm to "
                "objectives",
                code="setting-needs-masked-lm",
            )
    if (pairs := sentence_pairs_of(config.all_objectives)) != "none" and config.model.type_vocab_size < 2:
        rule = FAMILIES[config.model.family].rules.get("type_vocab_size")
        raise SettingError(
            f"data.sentence_pairs={pairs} needs two token types, and "
            f"model.type_vocab_size={config.model.type_vocab_size}",
            fix="set model.type_vocab_size=2"
            if rule is None or 2 in rule.allowed
            else f"set data.sentence_pairs=none ({rule.reason}), or model.family=custom",
            code="pairs-without-token-types",
        )
    if config.init_from is not None and config.model.output_bias == "frequencies":
        raise SettingError(
            f"model.output_bias=frequencies contradicts init_from={storage.redact(config.init_from)}, which provides a "
            "trained bias",
            fix="set model.output_bias=zeros",
            code="output-bias-with-init-from",
        )
    _check_adopted(config)
    _check_teacher(config)


def _check_adopted(config: RunConfig) -> None:
    """Check that there are weights to adopt, and that the model has what is adopted."""
    named = f"adopt=[{', '.join(config.adopt)}]"
    if twice := next((item for item in config.adopt if config.adopt.count(item) > 1), None):
        raise SettingError(f"{named} names {twice} twice", fix="name each once", code="adopted-twice")
    if config.adopt and config.init_from is None:
        raise SettingError(
            f"{named} has no effect without init_from, whose weights it adopts",
            fix="set init_from, or remove adopt",
            code="setting-without-effect",
        )
    if "rope" in config.adopt and config.model.position_embedding != "rotary":
        raise SettingError(
            f"{named}: rope has no effect with model.position_embedding={config.model.position_embedding}",
            fix="remove rope from adopt",
            code="setting-without-effect",
        )


def _check_teacher(config: RunConfig) -> None:
    """Check that a teacher teaches in some stage, and that objectives that need one have it."""
    taught = next((each.name for each in config.all_objectives if each.name in OF_TEACHER), None)
    if config.teacher is not None and taught is None:
        raise SettingError(
            f"teacher={storage.redact(config.teacher)} has no effect: no objective compares the model with it",
            fix="add {name: distillation} to objectives of the run or of a stage, or remove teacher",
            code="setting-without-effect",
        )
    if config.teacher is None and taught is not None:
        raise SettingError(
            f"the objective {taught} needs a teacher, which is not set",
            fix=f"set teacher to a trained model of the same tokenizer, or remove {taught} from objectives",
            code="no-teacher",
        )


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
            f"checkpoint.best_metric={best} is not a metric for checkpoint.keep_best",
            fix=f"set one of {', '.join(BEST_METRICS)}, suite/NAME/TASK, or the loss or accuracy of an objective of "
            "your own",
            code="best-metric-not-measured",
        )
    if config.checkpoint.keep_best:
        _check_measured(config, "checkpoint.best_metric", config.checkpoint.best_metric)
    if config.registry.only_if:
        from trainer.config.promotion import parse_conditions

        for condition in parse_conditions(config.registry.only_if):
            _check_measured(config, "registry.only_if", condition.metric)
    every = config.evaluation.suite_every_steps
    if every is not None and every % config.checkpoint.every_steps:
        raise SettingError(
            f"evaluation.suite_every_steps={every} is not a multiple of "
            f"checkpoint.every_steps={config.checkpoint.every_steps}",
            fix="set it to a multiple",
            code="suite-steps",
        )
    if config.registry.when == "kept" and not epochs_of(config.training):
        for stage in config.stages:
            check_kept(config.registry, config.checkpoint, stage.evaluation.every_steps, config.max_steps)


def _check_measured(config: RunConfig, setting: str, metric: str) -> None:
    """Check that the run measures the metric that a setting compares."""
    names = [each.name for each in config.all_objectives]
    if metric == "valid/pair_accuracy" and SENTENCE_PAIRS not in names:
        reason, fix = "with data.sentence_pairs=none", "set data.sentence_pairs=next_sentence"
    elif metric.startswith("valid/mlm") and MASKED_LM not in names:
        reason, fix = "without the objective masked_lm", "add masked_lm to objectives"
    elif metric.startswith("valid/causal") and CAUSAL not in names:
        reason, fix = "without the objective causal", "train it in a stage"
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
    names = [each.name for each in stage.objectives]
    if stage.data.loss_weight != "none" and not {*names} & {*OF_TOKENS}:
        where = prefix or "data."
        raise SettingError(
            f"{where}loss_weight={stage.data.loss_weight} has no effect: masked_lm is not among the objectives",
            fix=f"set {where}loss_weight=none, or add masked_lm to them",
            code="setting-without-effect",
        )
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
    if warmup.duration.steps > stage.steps:
        raise SettingError(
            f"{section}batch_warmup.{warmup.duration.setting}{_steps_of(warmup.duration)} exceeds the {stage.steps} "
            f"steps of the {span}",
            fix=f"lower the length of {section}batch_warmup",
            code="batch-warmup-longer-than-stage",
        )
