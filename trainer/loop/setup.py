"""Set-up of a run: data, model, engine, checkpoint and tracking, in this order."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data_prep.base.errors import UserError
from data_prep.base.garbage import exempt_what_is_loaded
from data_prep.base.logs import logger
from data_prep.base.urls import redact
from data_prep.dataset.manifest import TOKENIZER_FOLDER
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.checkpoint import writer
from trainer.checkpoint.compatibility import CHANGES_NUMERICS, CHANGES_SCORES
from trainer.checkpoint.data_version import describe_versions
from trainer.checkpoint.format import DataIdentity, TrainState
from trainer.checkpoint.restore import load
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.measurements import shape_of_words, untrained_positions
from trainer.config.objective_settings import MASKED_LM, is_taught
from trainer.config.run_config import RunConfig
from trainer.data.hidden_words import HiddenWords, hide_words
from trainer.data.sample_range import Branch
from trainer.data.shard_set import ShardSet, has_valid_split, open_tokenizer
from trainer.distributed.process_group import Ranks, broadcast_object, device_name, gather_objects, is_cpu_requested
from trainer.distributed.stop_signal import StopSignal
from trainer.distributed.watchdog import Watchdog
from trainer.engine.engine import Engine, build_engine
from trainer.loop.checkpoints import Checkpoints, Progress
from trainer.loop.console import device_line
from trainer.loop.evaluating import AVERAGE_PREFIX
from trainer.loop.global_batches import count_first_epoch
from trainer.loop.identity import listed, own_modules, running_sources, source_changes
from trainer.loop.reporter import Reporter
from trainer.loop.run import Extensions, Run, RunData
from trainer.loop.start import Start, check_start, find_start, first_state, open_tracker, rate_jump
from trainer.loop.warmup import stages_after, try_own_objectives, warmup_step
from trainer.metrics.health import Health, NonFiniteSteps
from trainer.metrics.unigram import counts_of_first_stage, training_entropy_nats
from trainer.model.numerics import with_compilation_decided, with_precision_decided
from trainer.objectives.pretraining import PretrainingModel, num_parameters
from trainer.preflight.checks import warnings
from trainer.preflight.data_checks import EVALUATION_IS_OFF
from trainer.preflight.plan import PlannedRun
from trainer.tracking.run_description import all_lineages, describe_run, source_text
from trainer.tracking.status import RunStatus
from trainer.tracking.tracker import NullTracker

if TYPE_CHECKING:
    from trainer.checkpoint.upload import Uploader
    from trainer.objectives.distillation import Teacher

LOG = logger(__name__)

LARGE_ON_CPU = 100_000_000
"""A run on the CPU that the user did not request gets a warning if the model has more parameters."""


def set_up(
    config: RunConfig,
    extensions: Extensions,
    shard_sets: list[ShardSet],
    ranks: Ranks,
    status: RunStatus | None,
    stop_signal: StopSignal,
    watchdog: Watchdog,
    allow_change: bool,
    branch: Branch | None = None,
    verbose: bool = False,
) -> tuple[Run, TrainState, Progress]:
    """Find where the run starts, build its model and engine there, and open its reporter."""
    config, of_compilation = with_compilation_decided(config, ranks)
    start = find_start(config, ranks, branch)
    config, of_precision = with_precision_decided(config, ranks, start.precision)
    log_device(config, extensions, ranks, of_compilation, of_precision)
    data = data_identity(shard_sets)
    teacher = teacher_of(config, extensions, start, shard_sets, data, ranks)
    data = data.model_copy(update={"teacher": start.teacher if teacher is None else teacher.digest})
    changes = check_start(start, config, data, ranks, allow_change)
    exempt_what_is_loaded()
    model = build_model(config, shard_sets)
    if teacher is not None:
        teacher.attach_to(model.objectives.values())
    notes, lineage, adopted, teachers = load_init_from(model, start, config, extensions, shard_sets, data, ranks)
    if ranks.is_first:  # after the checks: a rejected run leaves the directory unchanged
        keep_tokenizer(config, shard_sets[0])
    engine = open_engine(model, start, config, shard_sets, ranks, watchdog)
    state = first_state(start, config, data, seen_data(shard_sets, lineage, ranks), teachers)
    state = state.model_copy(update={"adopted": adopted}) if adopted else state
    objectives, stage = model.objectives, config.stage_of(state.step + 1)
    minimal_pairs = None
    if config.evaluation.minimal_pairs is not None:
        from trainer.validation.minimal_pairs import minimal_pairs_of

        minimal_pairs = minimal_pairs_of(config, shard_sets[0])
    run_data = RunData(
        shard_sets,
        pair_counts=count_first_epoch(config, shard_sets, state, ranks, watchdog, stop_signal),
        minimal_pairs=minimal_pairs,
        hidden_words=hidden_words_of(config, shard_sets) if MASKED_LM in objectives else None,
    )
    uploader = open_uploader(start, config, ranks)
    entropy = training_entropy_nats(stage.data, stage.select(shard_sets))
    reporter = Reporter(
        config,
        engine,
        objectives,
        state.step,
        health=Health(config.health, entropy, objectives.values()),
        facts_of=run_data.facts_of,
        tracker=open_tracker(config, start.branch, state, LOG.warning) if ranks.is_first else NullTracker(),
        status=status,
        stop_signal=stop_signal,
        mark=watchdog.mark,
    )
    task_modules = extensions.modules_of_suite(config.evaluation) if ranks.is_first else []
    sources = broadcast_object(running_sources(task_modules) if ranks.is_first else None, ranks)
    open_follower = partial(extensions.open_follower, config, LOG.warning, LOG.info) if ranks.is_first else lambda: None
    checkpoints = Checkpoints(
        config,
        engine,
        data,
        reporter,
        watchdog.mark,
        description=writer.describe(config, ranks, sources),
        uploader=uploader,
        follower=open_follower(),
        open_follower=open_follower,
    )
    run = Run(config, run_data, engine, reporter, checkpoints, stop_signal, watchdog)
    if ranks.is_first:
        for note in notes:
            LOG.info(note)
        if teacher is not None:
            LOG.info(f"teacher: {redact(str(config.teacher))}, {teacher.describe()}")
        log_run_summary(run, state, changes, start)
        log_sources(reporter, sources, start, task_modules, verbose)
        if warning := rate_jump(start, config, state):
            LOG.warning(warning)
    return run, state, first_progress(start, config)


def load_init_from(
    model: PretrainingModel,
    start: Start,
    config: RunConfig,
    extensions: Extensions,
    shard_sets: list[ShardSet],
    data: DataIdentity,
    ranks: Ranks,
) -> tuple[list[str], tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Give a fresh run the weights of `init_from`; a checkpoint's come later.

    Returns notes for the log, the manifest digests of all data that the weights saw, what was adopted, and the sha256
    of all teachers that the weights learned from.
    """
    if start.checkpoint is not None or config.init_from is None:
        return [], start.data_lineage, (), start.teachers
    from trainer.checkpoint.initial_weights import load_initial_weights, wanted_of

    find_folder = partial(extensions.pull_model, config.init_from, config.tracking.uri)
    open_own = partial(open_tokenizer, config.data.tokenizer, shard_sets[0])
    count = partial(counts_of_first_stage, config, shard_sets)
    wanted = wanted_of(config, data.tokenizer_fingerprint, open_own, count)
    return load_initial_weights(model, config.init_from, find_folder, ranks, wanted)


def teacher_of(
    config: RunConfig,
    extensions: Extensions,
    start: Start,
    shard_sets: list[ShardSet],
    data: DataIdentity,
    ranks: Ranks,
) -> Teacher | None:
    """Return the teacher; None if there is none, or no stage that is left to train compares the model with it."""
    stages = stages_after(start.first_trial, config)
    if config.teacher is None or not any(is_taught(stage.objectives) for stage in stages):
        return None
    from trainer.checkpoint.teacher import load_teacher

    find_folder = partial(extensions.pull_model, config.teacher, config.tracking.uri)
    open_own = partial(open_tokenizer, config.data.tokenizer, shard_sets[0])
    return load_teacher(config, find_folder, data.tokenizer_fingerprint, ranks, open_own)


def log_device(config: RunConfig, extensions: Extensions, ranks: Ranks, *decisions: str | None) -> None:
    """Log the devices of the run as its first line, then warnings: of decisions, and those of `clozeworks doctor`."""
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
        model.set_output_bias(torch.from_numpy(counts_of_first_stage(config, shard_sets)))
    return model


def open_engine(
    model: PretrainingModel,
    start: Start,
    config: RunConfig,
    shard_sets: list[ShardSet],
    ranks: Ranks,
    watchdog: Watchdog,
) -> Engine:
    """Return a prepared engine with the checkpoint's weights and optimizer state, if there is one."""
    if config.training.compile is True:
        model.compile_blocks()
    engine = build_engine(model, config, ranks)
    warmup_step(engine, config, shard_sets, ranks, start.first_trial, watchdog)
    try_own_objectives(engine, config, shard_sets, ranks)
    if start.checkpoint is not None:
        load(engine, start.checkpoint)
    return engine


def first_progress(start: Start, config: RunConfig) -> Progress:
    """Return the progress at the start; a checkpoint whose scores are pending is evaluated first."""
    own, is_pending = start.own_checkpoint, start.is_unevaluated
    measured = start.scores.metrics if start.scores is not None else {}
    return Progress(
        NonFiniteSteps(config.health.max_nonfinite_steps),
        saved_step=own.step if own is not None else None,
        evaluation_is_due=is_pending and not measured,
        average_is_due=is_pending,
        averaged_step=start.step if any(name.startswith(AVERAGE_PREFIX) for name in measured) else None,
    )


def hidden_words_of(config: RunConfig, shard_sets: list[ShardSet]) -> HiddenWords:
    """Return the words of the valid split that every evaluation hides."""
    tokenizer = open_tokenizer(config.data.tokenizer, shard_sets[0])
    length = shape_of_words(config.stages[0]).sequence_length
    return hide_words(shard_sets, tokenizer, length, config.data.on_corrupt_shard == "skip")


def open_uploader(start: Start, config: RunConfig, ranks: Ranks) -> Uploader | None:
    """Open the copying of checkpoints to `checkpoint.upload_to`, that of the resumed one first; a collective."""
    if config.checkpoint.upload_to is None:
        return None
    from trainer.checkpoint.upload import Uploader

    uploader = Uploader(config.checkpoint, ranks, LOG.warning)
    if start.own_checkpoint is not None and start.branch is None:
        uploader.submit_if_missing(start.own_checkpoint)
    return uploader


def log_run_summary(run: Run, state: TrainState, changes: list[str], start: Start) -> None:
    """Log how the run starts, and send its description to MLflow, on rank 0."""
    config, stage, shard_sets = run.config, run.config.stage_of(state.step + 1), run.data.shard_sets
    LOG.info(f"{run.reporter.num_parameters:,} parameters | {batch_arithmetic(stage, run.ranks.world_size)}")
    if (warmup := stage.batch_warmup) is not None:
        grows = f"{warmup.initial_tokens:,} to {stage.global_batch_tokens:,} tokens"
        LOG.info(f"batch-size ramp-up: {grows} over the first {warmup.duration.steps:,} steps of the stage")
    how = f"starting training: {config.max_steps:,} steps, output_dir {config.output_dir}"
    if start.branch is not None and start.branch.run is not None:
        how = f"starting from step {state.step:,} of {redact(start.branch.run)}: up to step {config.max_steps:,}, "
        how += f"output_dir {config.output_dir}"
    elif state.step:
        how = f"resuming after step {state.step:,} of {config.max_steps:,} in {config.output_dir}"
    LOG.info(how)
    if not has_valid_split(shard_sets):
        LOG.info(EVALUATION_IS_OFF)
    if (warning := untrained_positions(config)) is not None and not state.step:
        LOG.warning(warning)
    if config.model.attention_probs_dropout_prob and run.ranks.device.type == "cuda":
        LOG.info("model.attention_probs_dropout_prob is above 0: using the reference attention, which is slower")
    for line in describe_versions(shard_sets):
        LOG.info(line)
    for change in changes:
        is_notable = change.startswith((*CHANGES_NUMERICS, *CHANGES_SCORES))
        (LOG.warning if is_notable else LOG.info)(f"changed since the checkpoint: {change}")
    describe_run(run.reporter.tracker, config, shard_sets, state.data_lineage, state.adopted, state.teachers)


def data_identity(shard_sets: list[ShardSet]) -> DataIdentity:
    """Return the identity of the run's data."""
    return DataIdentity(
        manifest_digests=tuple(shard_set.manifest.digest for shard_set in shard_sets),
        tokenizer_fingerprint=shard_sets[0].manifest.tokenizer.fingerprint,
    )


def log_sources(
    reporter: Reporter, sources: Mapping[str, str], start: Start, task_modules: Sequence[str], verbose: bool
) -> None:
    """Warn of source files that differ from the checkpoint's, and keep the source of each MLflow run as an artifact.

    Call it on rank 0. `sources` are the digests of the running source. Each start with another source logs its own
    artifact. `verbose` also lists changed files on which no number depends.
    """
    before = start.checkpoint.saved.sources if start.checkpoint is not None else {}
    changes, artifact = source_changes(before, sources), f"source/step-{start.step:08d}.diff"
    if changes.numerics:
        reporter.warn(
            f"changed since the checkpoint: the source of {listed(changes.numerics)}; losses may differ from those of "
            f"the source before (see the run's artifact {artifact} for the differences from the commit, if git has one)"
        )
    if changes.others and verbose:
        reporter.info(f"changed since the checkpoint: other source files: {listed(changes.others)}")
    modules = own_modules(task_modules)
    if edited := [name for name, path in modules.items() if sources.get(name) not in (None, storage.sha256_of(path))]:
        reporter.warn(
            f"edited after they were imported, so the code that runs is older than the file: {listed(tuple(edited))}"
        )
    if changes or not before or start.branch is not None:
        changed = (*changes.numerics, *changes.others)
        reporter.tracker.log_artifact_text(artifact, source_text(modules, changed=changed))


def seen_data(shard_sets: list[ShardSet], earlier: tuple[str, ...], ranks: Ranks) -> tuple[str, ...]:
    """Return the digests of the run's data, its earlier versions, and all data the weights saw before, from rank 0."""
    urls, digests = [each.url for each in shard_sets], data_identity(shard_sets).manifest_digests
    seen: tuple[str, ...] = broadcast_object(all_lineages(urls, digests, earlier) if ranks.is_first else None, ranks)
    return seen


def keep_tokenizer(config: RunConfig, shard_set: ShardSet) -> None:
    """Copy the tokenizer into the output directory unless it is there: the directory alone can then be exported.

    Raises:
        UserError: the tokenizer is damaged, or the output directory cannot be written.
    """
    tokenizer = open_tokenizer(config.data.tokenizer, shard_set)
    folder = Path(config.output_dir) / TOKENIZER_FOLDER
    if not is_tokenizer(folder, tokenizer.fingerprint):
        tokenizer.copy_files(str(folder))


def is_tokenizer(folder: Path, fingerprint: str) -> bool:
    """Return whether the directory has a complete tokenizer with that fingerprint."""
    try:
        return Tokenizer.load(folder).is_named(fingerprint)
    except UserError:
        return False
