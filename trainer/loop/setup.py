"""Set-up of a run: data, model, engine, checkpoint and tracking, in this order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from data_prep.base.errors import UserError
from data_prep.base.urls import redact
from data_prep.dataset.manifest import TOKENIZER_FOLDER
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.checkpoint.compatibility import CHANGES_NUMERICS, check_branch, check_compatible
from trainer.checkpoint.format import Checkpoint, TrainState
from trainer.checkpoint.restore import find_latest, load, open_verified
from trainer.checkpoint.upload import Uploader
from trainer.checkpoint.writer import warn_on_stderr
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.data_settings import DataSettings
from trainer.config.run_config import RunConfig, without_registry
from trainer.config.schedule import rate_jump_warning
from trainer.config.stages import Stage
from trainer.config.training_settings import BranchSettings
from trainer.data.batch import Batch
from trainer.data.evaluation_batches import evaluation_batches
from trainer.data.sample_range import Branch
from trainer.data.shard_set import ShardSet, tokenizer_of_run
from trainer.distributed.process_group import Ranks, broadcast_object, patient_collectives
from trainer.distributed.stop_signal import StopSignal
from trainer.distributed.watchdog import Watchdog
from trainer.engine.engine import Engine, build_engine
from trainer.evaluation.pairs_in_training import MinimalPairs, open_minimal_pairs
from trainer.evaluation.suites_in_training import SuitesInTraining
from trainer.loop.branch import begin_mlflow_run, begun_in, branched, is_on, open_branch_tracker
from trainer.loop.console import StepBar, print_line
from trainer.loop.data_version import describe_versions
from trainer.loop.recorder import Recorder
from trainer.loop.run import Progress, Run, data_identity, warn_of_disk
from trainer.metrics.health import Health, NonFiniteSteps
from trainer.metrics.status import RunStatus, read_status
from trainer.metrics.unigram import training_counts, training_entropy_nats
from trainer.model.numerics import describe_numerics, with_compilation_decided, with_precision_decided
from trainer.model.pretraining import PretrainingModel, PretrainingOutput
from trainer.registry.registrar import Registrar
from trainer.registry.starting_weights import load_initial_weights
from trainer.tracking.run_description import all_lineages, describe_run
from trainer.tracking.system_metrics import SystemMetrics
from trainer.tracking.tracker import MetricLog, NullTracker, Tracker

COMPILATION_SECONDS = 3600
"""How long all compilation of a set-up may take on a rank while the others wait; a cold cache takes minutes."""


def set_up(
    config: RunConfig,
    shard_sets: list[ShardSet],
    ranks: Ranks,
    stop_signal: StopSignal,
    watchdog: Watchdog,
    allow_change: bool,
    branch: Branch | None = None,
) -> tuple[Run, TrainState, Progress]:
    """Build model and engine, and load the newest checkpoint if there is one."""
    config, warning = with_compilation_decided(config, ranks)
    if warning and ranks.is_first:
        warn_on_stderr(warning)
    output_dir, data = Path(config.output_dir), data_identity(shard_sets)
    latest, branch = find_start(config, ranks, branch)
    begins_branch = latest is None and config.branch is not None
    if config.branch is not None and latest is None:
        latest = open_verified(config.branch.run, config.branch.step, ranks)
    saved_precision = latest.saved.config["training"]["precision"] if latest else None
    config, warning = with_precision_decided(config, ranks, saved_precision)
    if warning and ranks.is_first:
        warn_on_stderr(warning)
    numerics = describe_numerics(config, ranks.device)
    changes: list[str] = []
    if latest and not begins_branch:
        changes = check_compatible(latest.saved, config, data, ranks.world_size, numerics, allow_change)
    elif latest:
        check_branch(latest.saved, config, data)
    next_sentence = config.data.has_sentence_pairs
    model = PretrainingModel(config.model, next_sentence, config.training.activation_checkpointing)
    model.initialize(config.training.seed)
    if config.model.output_bias == "frequencies":
        first = config.stages[0]
        model.set_output_bias(torch.from_numpy(training_counts(first.data, first.select(shard_sets))))
    notes: list[str] = []
    earlier = latest.saved.data_lineage if latest else ()
    if config.init_from is not None and latest is None:  # a checkpoint has precedence
        notes, earlier = load_initial_weights(
            model, config.init_from, ranks, config.tracking.uri, data.tokenizer_fingerprint
        )
    if ranks.is_first:  # after the checks: a rejected run leaves the directory unchanged
        keep_tokenizer(config, shard_sets[0])
    if config.training.compile is True:
        model.compile_blocks()
    engine = build_engine(model, config, ranks)
    warmup_step(engine, config, shard_sets, ranks, latest.step if latest else 0, watchdog)
    if latest:
        load(engine, latest)
    state = latest.saved.state if latest else TrainState()
    state = state.model_copy(update={"data_lineage": seen_data(shard_sets, earlier, ranks)})
    if branch is not None:
        state = branched(state, branch)
    if latest and begins_branch:
        state = begun_in(config, state, latest.saved, data)
    saved_step = latest.step if latest and not begins_branch else None
    progress = Progress(NonFiniteSteps(config.health.max_nonfinite_steps), saved_step=saved_step)
    status = read_status(output_dir)
    if status and status.get("step") == state.step:
        progress = replace(progress, metrics=status.get("metrics", {}))
    stage = config.stage_of(state.step + 1)
    uploader = Uploader(config.checkpoint, ranks, warn_on_stderr) if config.checkpoint.upload_to is not None else None
    if uploader is not None and latest is not None and branch is None and not begins_branch:
        uploader.submit_if_missing(latest)
    run = Run(
        config=config,
        ranks=ranks,
        shard_sets=shard_sets,
        engine=engine,
        tracker=open_tracker(config, ranks, state, begin=branch is not None),
        recorder=Recorder(ranks, state.step),
        stop_signal=stop_signal,
        watchdog=watchdog,
        health=Health(config.health, training_entropy_nats(stage.data, stage.select(shard_sets))),
        minimal_pairs=minimal_pairs_of(config, shard_sets[0]),
        uploader=uploader,
        suites=SuitesInTraining(config, warn_on_stderr, print_line)
        if ranks.is_first and config.evaluation.suite
        else None,
        registrar=Registrar(config, warn_on_stderr, print_line) if ranks.is_first and config.registry.name else None,
        status=RunStatus(output_dir, partial(warn_of_disk, output_dir)) if ranks.is_first else None,
        system=SystemMetrics(output_dir, ranks.device) if ranks.is_first else None,
        bar=StepBar(ranks.is_first, state.step, config.max_steps),
    )
    for note in notes:
        run.log(note)
    log_run_summary(run, state, changes, config.branch if begins_branch else None)
    if latest and not begins_branch and (warning := rate_jump(latest, config, state)):
        run.warn(warning)
    return run, state, progress


def minimal_pairs_of(config: RunConfig, shard_set: ShardSet) -> MinimalPairs | None:
    """The minimal pairs of `evaluation.minimal_pairs`, encoded; None where it is not set.

    Raises:
        UserError: they cannot be read, or a sentence is longer than the shortest row of the run.
    """
    if config.evaluation.minimal_pairs is None:
        return None
    tokenizer = Tokenizer.load(tokenizer_of_run(config.data.tokenizer, shard_set))
    shortest = min(stage.sequence_length for stage in config.stages)
    return open_minimal_pairs(config.evaluation.minimal_pairs, tokenizer, shortest)


def find_start(config: RunConfig, ranks: Ranks, branch: Branch | None) -> tuple[Checkpoint | None, Branch | None]:
    """Return the checkpoint to resume from, and the branch to take there, unless it was taken before.

    Raises:
        UserError: there is no checkpoint of the branch's step, or none that is whole.
    """
    remote, stage = config.checkpoint.upload_to, config.zero.stage
    latest = find_latest(config.output_dir, ranks, remote=remote, stage=stage)
    if branch is None or (latest is not None and is_on(latest.saved.state, branch)):
        return latest, None
    return find_latest(config.output_dir, ranks, remote=remote, stage=stage, step=branch.step), branch


def open_tracker(config: RunConfig, ranks: Ranks, state: TrainState, begin: bool) -> MetricLog:
    """Open the run's MLflow journal on rank 0; `begin` starts a new one for a branch."""
    if not ranks.is_first:
        return NullTracker()
    if begin:
        return begin_mlflow_run(config.tracking, Path(config.output_dir), state, warn_on_stderr)
    if config.branch is not None:
        return open_branch_tracker(config, config.branch, warn_on_stderr)
    return Tracker.open(config.tracking, Path(config.output_dir), warn_on_stderr)


def warmup_step(
    engine: Engine, config: RunConfig, shard_sets: list[ShardSet], ranks: Ranks, step: int, watchdog: Watchdog
) -> None:
    """Take one step at the largest micro-batch that changes nothing, so that out-of-memory errors come first.

    With compilation all graphs of the steps after `step` are compiled here, those of evaluation too: the timeouts of
    steps need no allowance for a compiler.
    """
    ahead, is_compiled = stages_after(step, config), config.training.compile is True
    shapes = one_of_each_shape([_as_cut(stage, ranks.world_size) for stage in ahead])
    batches = [
        _first_batch(stage, stage.data, config, shard_sets, ranks) for stage in (shapes if is_compiled else shapes[:1])
    ]
    losses = [_loss_of(engine, batch) for batch in batches]
    if not is_compiled:
        engine.prepare(*losses)
        return
    with patient_collectives(COMPILATION_SECONDS, config.distributed, ranks):
        watchdog.mark("compiling for training", COMPILATION_SECONDS)
        engine.prepare(*losses)
        watchdog.mark("compiling for evaluation", COMPILATION_SECONDS)
        engine.eval()
        with torch.no_grad():
            for stage in one_of_each_shape(ahead):
                engine.forward(_first_batch(stage, stage.evaluation_data, config, shard_sets, ranks), scored=True)
        engine.train()
    watchdog.mark("setting up")


def stages_after(step: int, config: RunConfig) -> list[Stage]:
    """Return the remaining stages after `step` steps; at the end of the run, the last one."""
    taken = [stage for stage in config.stages if stage.taken_steps]
    return [stage for stage in taken if stage.first_step + stage.taken_steps > step] or taken[-1:]


def one_of_each_shape(stages: Sequence[Stage]) -> list[Stage]:
    """Return one stage per shape of micro-batch, the largest first."""
    by_shape = {
        (stage.micro_batch_tokens, stage.sequence_length, stage.data.max_mlm_probability): stage for stage in stages
    }
    return [by_shape[shape] for shape in sorted(by_shape, reverse=True)]


def enter_stage(engine: Engine, stage: Stage) -> None:
    """Set what differs between stages and is no argument of a step: RoPE bases, gradient clipping, weight decay."""
    assert isinstance(engine.module, PretrainingModel)
    engine.module.set_rope_bases(stage.model)
    engine.set_gradient_clipping(stage.gradient_clipping)
    engine.set_weight_decay(stage.weight_decay)


def _as_cut(stage: Stage, world_size: int) -> Stage:
    """Return the stage with the micro-batch size of training on that many ranks; evaluation uses the full size."""
    return replace(stage, micro_batch_tokens=batch_arithmetic(stage, world_size).micro_batch_tokens)


def _first_batch(
    stage: Stage, data: DataSettings, config: RunConfig, shard_sets: list[ShardSet], ranks: Ranks
) -> Batch:
    """Return a micro-batch of valid data in the stage's shape, masked as `data` sets it, on the rank's device."""
    batches = evaluation_batches(
        shard_sets, data, stage, config.training.seed, ranks.rank, ranks.world_size, stage.micro_batch_tokens
    )
    return next(batches).batch.to(ranks.device)


def _loss_of(engine: Engine, batch: Batch) -> Callable[[], torch.Tensor]:
    def loss() -> torch.Tensor:
        output: PretrainingOutput = engine.forward(batch)
        return output.mlm_loss_sum + output.nsp_loss_sum

    return loss


def log_run_summary(run: Run, state: TrainState, changes: list[str], begun: BranchSettings | None) -> None:
    """Log how the run starts, and send its description to MLflow; `begun` is the branch that begins here."""
    config = run.config
    stage = config.stage_of(state.step + 1)
    run.log(f"{run.num_parameters:,} parameters | {batch_arithmetic(stage, run.ranks.world_size)}")
    if (warmup := stage.batch_warmup) is not None:
        grows = f"{warmup.initial_tokens:,} to {stage.global_batch_tokens:,} tokens"
        run.log(f"batch-size ramp-up: {grows} over the first {warmup.num_steps:,} steps of the stage")
    start = f"starting training: {config.max_steps:,} steps, output_dir {config.output_dir}"
    if begun is not None:
        start = f"starting from step {begun.step:,} of {redact(begun.run)}: up to step {config.max_steps:,}, "
        start += f"output_dir {config.output_dir}"
    elif state.step:
        start = f"resuming after step {state.step:,} of {config.max_steps:,} in {config.output_dir}"
    run.log(start)
    if config.model.attention_probs_dropout_prob and run.ranks.device.type == "cuda":
        run.log("model.attention_probs_dropout_prob is above 0: using the reference attention, which is slower")
    for line in describe_versions(run.shard_sets) if run.ranks.is_first else ():
        run.log(line)
    for change in changes:
        (run.warn if change.startswith(CHANGES_NUMERICS) else run.log)(f"changed since the checkpoint: {change}")
    if run.ranks.is_first:
        describe_run(run.tracker, config, run.shard_sets, state.data_lineage)


def rate_jump(latest: Checkpoint, config: RunConfig, state: TrainState) -> str | None:
    """Warn if `training.max_steps` changed since the checkpoint so that the learning rate jumps; else None."""
    before = RunConfig.model_validate(without_registry(latest.saved.config)).max_steps
    if before == config.max_steps or not 0 < state.step < config.max_steps:
        return None
    stage = config.stage_of(state.step + 1)
    if stage.has_own_schedule:
        return None
    return rate_jump_warning(state.step, before, config.max_steps, stage.peak_learning_rate, stage.schedule)


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
