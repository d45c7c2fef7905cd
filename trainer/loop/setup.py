"""Set-up of a run: data, model, engine, checkpoint and tracking, in this order."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import torch

from data_prep.base.errors import UserError
from data_prep.base.garbage import exempt_what_is_loaded
from data_prep.base.logs import logger
from data_prep.base.urls import redact
from data_prep.dataset.manifest import TOKENIZER_FOLDER
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.checkpoint.compatibility import CHANGES_NUMERICS, CHANGES_SCORES
from trainer.checkpoint.data_version import describe_versions
from trainer.checkpoint.format import TrainState
from trainer.checkpoint.initial_weights import load_initial_weights
from trainer.checkpoint.late_scores import LateScores
from trainer.checkpoint.restore import load
from trainer.checkpoint.upload import Uploader
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.measurements import shape_of_words, untrained_positions
from trainer.config.objective_settings import MASKED_LM
from trainer.config.run_config import RunConfig
from trainer.config.training_settings import BranchSettings
from trainer.data.hidden_words import HiddenWords, hide_words
from trainer.data.sample_range import Branch
from trainer.data.shard_set import ShardSet, has_valid_split, tokenizer_of_run
from trainer.distributed.process_group import (
    Ranks,
    broadcast_object,
    device_name,
    gather_objects,
    is_cpu_requested,
)
from trainer.distributed.stop_signal import StopSignal
from trainer.distributed.watchdog import Watchdog
from trainer.engine.engine import Engine, build_engine
from trainer.loop.console import StepBar, device_line
from trainer.loop.evaluating import AVERAGE_PREFIX
from trainer.loop.extensions import Extensions
from trainer.loop.global_batches import count_first_epoch
from trainer.loop.recorder import Recorder
from trainer.loop.run import Progress, Run, data_identity, warn_of_disk
from trainer.loop.sources import log_sources, running_sources
from trainer.loop.start import (
    Start,
    begin_mlflow_run,
    check_start,
    find_start,
    first_state,
    is_unevaluated,
    open_branch_tracker,
    rate_jump,
    scores_of_start,
)
from trainer.loop.warmup import try_own_objectives, warmup_step
from trainer.metrics.custom_metrics import CustomMetrics
from trainer.metrics.health import Health, NonFiniteSteps
from trainer.metrics.unigram import training_counts, training_entropy_nats
from trainer.model.numerics import with_compilation_decided, with_precision_decided
from trainer.objectives.pretraining import PretrainingModel, num_parameters
from trainer.preflight.checks import warnings
from trainer.preflight.data_checks import EVALUATION_IS_OFF
from trainer.preflight.plan import PlannedRun
from trainer.tracking.run_description import all_lineages, describe_run
from trainer.tracking.status import RunStatus, read_status
from trainer.tracking.system_metrics import SystemMetrics
from trainer.tracking.tracker import MetricLog, NullTracker, Tracker
from trainer.validation.minimal_pairs import minimal_pairs_of

LOG = logger(__name__)

LARGE_ON_CPU = 100_000_000
"""Parameters above which a run on the CPU, for which nobody asked, is warned of."""


def set_up(
    config: RunConfig,
    extensions: Extensions,
    shard_sets: list[ShardSet],
    ranks: Ranks,
    stop_signal: StopSignal,
    watchdog: Watchdog,
    allow_change: bool,
    branch: Branch | None = None,
    verbose: bool = False,
) -> tuple[Run, TrainState, Progress]:
    """Find where the run starts, build its model and engine there, and open what it reports to."""
    config, of_compilation = with_compilation_decided(config, ranks)
    start = find_start(config, ranks, branch)
    config, of_precision = with_precision_decided(config, ranks, start.precision)
    log_device(config, extensions, ranks, of_compilation, of_precision)
    data = data_identity(shard_sets)
    changes = check_start(start, config, data, ranks, allow_change)
    exempt_what_is_loaded()
    model = build_model(config, shard_sets)
    lineage = start.data_lineage
    notes: list[str] = []
    if start.checkpoint is None and config.init_from is not None:
        find_folder = partial(extensions.pull_model, config.init_from, config.tracking.uri)
        notes, lineage = load_initial_weights(model, config.init_from, find_folder, ranks, data.tokenizer_fingerprint)
    if ranks.is_first:  # after the checks: a rejected run leaves the directory unchanged
        keep_tokenizer(config, shard_sets[0])
    scores = scores_of_start(start, ranks)
    engine = open_engine(model, start, scores, config, shard_sets, ranks, watchdog)
    state = first_state(start, config, data, seen_data(shard_sets, lineage, ranks), scores)
    progress = first_progress(start, scores, config, state)
    task_modules = extensions.modules_of_suite(config.evaluation) if ranks.is_first else []
    run = open_run(start, state, config, extensions, task_modules, shard_sets, engine, stop_signal, watchdog)
    for note in notes:
        run.log(note)
    log_run_summary(run, state, changes, config.branch if start.is_from_other_run else None)
    log_sources(run, start, task_modules, verbose)
    if warning := rate_jump(start, config, state):
        run.warn(warning)
    return run, state, progress


def log_device(config: RunConfig, extensions: Extensions, ranks: Ranks, *decisions: str | None) -> None:
    """Log what the run trains on as its first line, then warnings: of decisions, and those of `clozeworks doctor`."""
    hosts, devices = zip(*gather_objects((socket.gethostname(), device_name(ranks.device)), ranks), strict=True)
    if not ranks.is_first:
        return
    LOG.info(device_line(hosts, devices, config.training.precision, config.zero.stage))
    parameters = num_parameters(config.model, config.all_objectives)
    if ranks.device.type == "cpu" and not is_cpu_requested() and parameters > LARGE_ON_CPU:
        LOG.warning(
            f"no GPU was found, so {parameters:,} parameters train on the CPU, which is slow: check the driver and the "
            "CUDA build of torch (`clozeworks doctor`), or set DS_ACCELERATOR=cpu to train on the CPU on purpose"
        )
    for decision in decisions:
        if decision:
            LOG.warning(decision)
    for finding in warnings(PlannedRun(config, ranks.world_size, ranks.device, extensions)):
        LOG.warning(f"{finding.name}: {finding.text} (details: `clozeworks doctor`)")


def build_model(config: RunConfig, shard_sets: list[ShardSet]) -> PretrainingModel:
    """Return the model with the weights of a new run."""
    model = PretrainingModel(config.model, config.all_objectives, config.training.activation_checkpointing)
    model.initialize(config.training.seed)
    if config.model.output_bias == "frequencies":
        first = config.stages[0]
        model.set_output_bias(torch.from_numpy(training_counts(first.data, first.select(shard_sets))))
    return model


def open_engine(
    model: PretrainingModel,
    start: Start,
    scores: LateScores | None,
    config: RunConfig,
    shard_sets: list[ShardSet],
    ranks: Ranks,
    watchdog: Watchdog,
) -> Engine:
    """Return a prepared engine with the checkpoint's weights and optimizer state, if there is one."""
    if config.training.compile is True:
        model.compile_blocks()
    engine = build_engine(model, config, ranks)
    step = start.step - is_unevaluated(start, scores)  # graphs of an evaluation that is still to come
    warmup_step(engine, config, shard_sets, ranks, step, watchdog)
    try_own_objectives(engine, config, shard_sets, ranks)
    if start.checkpoint is not None:
        load(engine, start.checkpoint)
    return engine


def first_progress(start: Start, scores: LateScores | None, config: RunConfig, state: TrainState) -> Progress:
    """Return the progress at the start, with the metrics of the last start if that ended there.

    `scores` are those of the checkpoint (`scores_of_start`): if they are pending, evaluating it comes first.
    """
    own, status = start.own_checkpoint, read_status(Path(config.output_dir))
    is_pending = is_unevaluated(start, scores)
    measured = scores.metrics if scores is not None else {}
    return Progress(
        NonFiniteSteps(config.health.max_nonfinite_steps),
        saved_step=own.step if own is not None else None,
        evaluation_is_due=is_pending and not measured,
        average_is_due=is_pending,
        averaged_step=start.step if any(name.startswith(AVERAGE_PREFIX) for name in measured) else None,
        metrics=status.metrics if status is not None and status.step == state.step else {},
    )


def open_run(
    start: Start,
    state: TrainState,
    config: RunConfig,
    extensions: Extensions,
    task_modules: list[str],
    shard_sets: list[ShardSet],
    engine: Engine,
    stop_signal: StopSignal,
    watchdog: Watchdog,
) -> Run:
    """Open the parts that the run reports to, most of them on rank 0."""
    ranks, output_dir, stage = engine.ranks, Path(config.output_dir), config.stage_of(state.step + 1)
    assert isinstance(engine.module, PretrainingModel)
    objectives = engine.module.objectives
    return Run(
        config=config,
        ranks=ranks,
        shard_sets=shard_sets,
        pair_counts=count_first_epoch(config, shard_sets, state, ranks, watchdog, stop_signal),
        engine=engine,
        uploader=open_uploader(start, config, ranks),
        tracker=open_tracker(config, ranks, state, begin=start.branch is not None),
        recorder=Recorder(ranks, objectives, state.step),
        stop_signal=stop_signal,
        watchdog=watchdog,
        health=Health(config.health, training_entropy_nats(stage.data, stage.select(shard_sets)), objectives.values()),
        minimal_pairs=minimal_pairs_of(config, shard_sets[0]),
        hidden_words=hidden_words_of(config, shard_sets) if MASKED_LM in objectives else None,
        custom_metrics=CustomMetrics(config.logging.metrics) if config.logging.metrics else None,
        follower=extensions.open_follower(config, LOG.warning, LOG.info) if ranks.is_first else None,
        status=RunStatus(output_dir, partial(warn_of_disk, output_dir), watchdog.activity) if ranks.is_first else None,
        system=SystemMetrics(output_dir, ranks.device) if ranks.is_first else None,
        bar=StepBar(ranks.is_first, state.step, config.max_steps),
        num_parameters=num_parameters(config.model, config.all_objectives),
        sources=broadcast_object(running_sources(task_modules) if ranks.is_first else None, ranks),
    )


def hidden_words_of(config: RunConfig, shard_sets: list[ShardSet]) -> HiddenWords:
    """Return the words of the valid split that every evaluation hides."""
    tokenizer = Tokenizer.load(tokenizer_of_run(config.data.tokenizer, shard_sets[0]))
    length = shape_of_words(config.stages[0]).sequence_length
    return hide_words(shard_sets, tokenizer, length, config.data.on_corrupt_shard == "skip")


def open_uploader(start: Start, config: RunConfig, ranks: Ranks) -> Uploader | None:
    """Open the copying of checkpoints to `checkpoint.upload_to`, that of the resumed one first; a collective."""
    if config.checkpoint.upload_to is None:
        return None
    uploader = Uploader(config.checkpoint, ranks, LOG.warning)
    if start.own_checkpoint is not None and start.branch is None:
        uploader.submit_if_missing(start.own_checkpoint)
    return uploader


def open_tracker(config: RunConfig, ranks: Ranks, state: TrainState, begin: bool) -> MetricLog:
    """Open the run's MLflow journal on rank 0; `begin` starts a new one for a branch."""
    if not ranks.is_first:
        return NullTracker()
    if begin:
        return begin_mlflow_run(config.tracking, Path(config.output_dir), state, LOG.warning)
    if config.branch is not None:
        return open_branch_tracker(config, config.branch, LOG.warning)
    return Tracker.open(config.tracking, Path(config.output_dir), LOG.warning)


def log_run_summary(run: Run, state: TrainState, changes: list[str], new_branch: BranchSettings | None) -> None:
    """Log how the run starts, and send its description to MLflow; `new_branch` is the branch that begins here."""
    config = run.config
    stage = config.stage_of(state.step + 1)
    run.log(f"{run.num_parameters:,} parameters | {batch_arithmetic(stage, run.ranks.world_size)}")
    if (warmup := stage.batch_warmup) is not None:
        grows = f"{warmup.initial_tokens:,} to {stage.global_batch_tokens:,} tokens"
        run.log(f"batch-size ramp-up: {grows} over the first {warmup.num_steps:,} steps of the stage")
    start = f"starting training: {config.max_steps:,} steps, output_dir {config.output_dir}"
    if new_branch is not None:
        start = f"starting from step {new_branch.step:,} of {redact(new_branch.run)}: up to step {config.max_steps:,}, "
        start += f"output_dir {config.output_dir}"
    elif state.step:
        start = f"resuming after step {state.step:,} of {config.max_steps:,} in {config.output_dir}"
    run.log(start)
    if not has_valid_split(run.shard_sets):
        run.log(EVALUATION_IS_OFF)
    if (warning := untrained_positions(config)) is not None and not state.step:
        run.warn(warning)
    if config.model.attention_probs_dropout_prob and run.ranks.device.type == "cuda":
        run.log("model.attention_probs_dropout_prob is above 0: using the reference attention, which is slower")
    for line in describe_versions(run.shard_sets) if run.ranks.is_first else ():
        run.log(line)
    for change in changes:
        is_notable = change.startswith((*CHANGES_NUMERICS, *CHANGES_SCORES))
        (run.warn if is_notable else run.log)(f"changed since the checkpoint: {change}")
    if run.ranks.is_first:
        describe_run(run.tracker, config, run.shard_sets, state.data_lineage)


def seen_data(shard_sets: list[ShardSet], earlier: tuple[str, ...], ranks: Ranks) -> tuple[str, ...]:
    """Return the digests of the run's data, its earlier versions, and all data the weights saw before, from rank 0."""
    urls, digests = [each.url for each in shard_sets], data_identity(shard_sets).manifest_digests
    seen: tuple[str, ...] = broadcast_object(all_lineages(urls, digests, earlier) if ranks.is_first else None, ranks)
    return seen


def keep_tokenizer(config: RunConfig, shard_set: ShardSet) -> None:
    """Copy the tokenizer into the output directory unless it is there, so that the directory can be exported alone.

    Raises:
        UserError: the tokenizer is damaged, or the output directory cannot be written.
    """
    tokenizer = Tokenizer.load(tokenizer_of_run(config.data.tokenizer, shard_set))
    folder = Path(config.output_dir) / TOKENIZER_FOLDER
    if not is_tokenizer(folder, tokenizer.fingerprint):
        tokenizer.copy_files(str(folder))


def is_tokenizer(folder: Path, fingerprint: str) -> bool:
    """Return whether the directory has a complete tokenizer with that fingerprint."""
    try:
        return Tokenizer.load(folder).fingerprint == fingerprint
    except UserError:
        return False
