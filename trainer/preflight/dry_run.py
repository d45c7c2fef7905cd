"""The plan of a run as text: sizes, stages, batches, operations, memory and shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.base.settings import to_yaml
from data_prep.base.table import aligned
from data_prep.base.terminal import counted
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.storage import storage
from trainer.checkpoint.compatibility import check_branch
from trainer.checkpoint.format import CheckpointFolder, list_steps, step_folder, steps_in
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.run_config import RunConfig, without_secrets
from trainer.config.stages import Stage
from trainer.config.training_settings import BranchSettings
from trainer.data.shard_set import WINDOW_SHARDS, check_is_data_set
from trainer.metrics.throughput import flops_per_position
from trainer.model.sizes import activation_bytes
from trainer.preflight.data_checks import describe_data
from trainer.preflight.machine_checks import check_initial_weights, check_memory, check_teacher
from trainer.preflight.plan import (
    GIB,
    TENSORS_ONLY,
    ZERO_STAGES,
    PlannedRun,
    batch_sizes,
    micro_batch_without_padding,
    setting_of_micro_batch,
)


def explain(run: PlannedRun, expects_shards: bool = False) -> str:
    """Return the explanation of a run; it needs neither a GPU nor shards.

    Args:
        expects_shards: whether missing shards are worth a warning, as if they were named on the command line.

    Raises:
        UserError: existing shards do not fit the configuration; `init_from` or `teacher` is missing or does not fit it.
    """
    config, ranks = run.config, counted(run.world_size, "rank")
    uncounted = ["the number of steps is unknown, as the epochs cannot be counted"]
    only = f"; {TENSORS_ONLY}" if run.gpu is None else ""  # the line about the GPU says it
    parts = [
        ("Parameters", parameter_lines(run)),
        ("Stages", stage_lines(run) if run.uncounted is None else uncounted),
        ("Batches", batch_lines(run)),
        *([("Operations", flops_lines(config))] if run.uncounted is None else []),
        (f"Memory per rank, GiB (estimate, {ranks}, {config.training.precision}{only})", memory_lines(run)),
        ("Activations of a micro-batch by part, GiB (activations and logits above)", activation_lines(run)),
        ("Shards", list(shard_lines(run, expects_shards))),
    ]
    if config.branch is not None:
        parts.append(("Branch", [branch_line(config, config.branch)]))
    if config.init_from is not None:
        parts.append(("Initial weights", [finding.text for finding in check_initial_weights(run)]))
    if config.teacher is not None:
        parts.append(("Teacher", [finding.text for finding in check_teacher(run)]))
    parts.append(("Configuration", to_yaml(without_secrets(run.as_given or config)).rstrip().splitlines()))
    return "\n\n".join(f"{title}\n{'-' * len(title)}\n" + "\n".join(lines) for title, lines in parts)


def branch_line(config: RunConfig, branch: BranchSettings) -> str:
    """Report whether the checkpoint of --branch-from exists.

    Raises:
        UsageError: it exists and the run may not branch from it.
    """
    if not Path(branch.run).is_dir():
        return f"warning: {storage.redact(branch.run)} does not exist; give the output_dir of a run [missing-path]"
    steps, _ = list_steps(branch.run)
    if branch.step in steps:
        saved = CheckpointFolder(step_folder(branch.run, branch.step)).read_state()
        check_branch(saved, config, saved.data)  # the tokenizer is compared at the start
        return f"starts from step {branch.step:,} of {storage.redact(branch.run)}, which has that checkpoint"
    others = ", ".join(map(str, sorted(steps))) or "none"
    return f"warning: {storage.redact(branch.run)} has no checkpoint of step {branch.step}; existing steps: {others}"


def resume_line(config: RunConfig, step: int) -> str:
    """Report whether the checkpoint of --resume-from exists, in the output directory or in the store.

    This is a note, not an error: a run past that step may have removed it and still resumes.
    """
    steps = {*list_steps(config.output_dir)[0]}
    if config.checkpoint.upload_to is not None:
        try:
            steps |= {*steps_in(config.checkpoint.upload_to)[0]}
        except UserError as error:
            return f"--resume-from {step}: cannot read the store: {error}"
    if step in steps:
        return f"--resume-from {step}: the checkpoint exists"
    others = ", ".join(map(str, sorted(steps))) or "none"
    return (
        f"--resume-from {step}: {config.output_dir} has no complete checkpoint of that step; existing steps: {others}"
    )


def parameter_lines(run: PlannedRun) -> list[str]:
    width = max(map(len, run.parameters))
    counts = (f"{part:<{width}}  {count:>13,}" for part, count in run.parameters.items())
    return [f"{'module':<{width}}  {'parameters':>13}", *counts]


def stage_lines(run: PlannedRun) -> list[str]:
    """Return the table of stages, with hours and cost if a speed was measured."""
    header = ("stage", "name", "steps", "tokens", "length", "masking", "learning rate", "hours")
    lines = aligned([header, *(_stage_row(stage, run.seconds(stage)) for stage in run.config.stages)])
    if (time := run.describe_time()) is None:
        return [*lines, "hours need a measured throughput: --tokens-per-second N of all ranks, or --benchmark FILE"]
    return [*lines, f"whole run: {time}"]


def _stage_row(stage: Stage, seconds: float | None) -> tuple[str, ...]:
    first, last = stage.first_step, stage.first_step + max(stage.taken_steps, 1) - 1
    masks = dict.fromkeys(f"{stage.masking_rate(step):.3g}" for step in (first, last))
    rates = _drawn_rates(stage) if stage.data.law.is_drawn else " to ".join(masks)
    unit = "" if stage.data.mask_unit == "token" else f", {stage.data.mask_unit}s"
    unit = unit if stage.data.masking is None else f", {stage.data.masking}"
    masking = "none (causal)" if stage.is_causal else rates + unit
    schedule = stage.schedule
    warm = stage.rate_clock.first_step + schedule.warmup.steps  # completed steps; the rate only falls from here
    parts = [f"{stage.learning_rate(min(max(first, warm - 1), last)):.3g} at most"]
    if stage.taken_steps:
        parts.append(f"{stage.learning_rate(last):.2g} at the end")
    if stage.first_step < warm:
        parts.append(f"{schedule.warmup.steps:,} warmup steps")
    if schedule.name != "warmup_stable_decay" or schedule.decay_duration.steps:
        parts.append(schedule.shape if schedule.name != "warmup_stable_decay" else f"{schedule.shape} decay")
    hours = "-" if seconds is None else f"{seconds / 3600:,.1f}"
    steps = f"{stage.taken_steps:,}" + (f" of {stage.steps:,}" if stage.taken_steps < stage.steps else "")
    length = f"{stage.sequence_length:,}"
    return (str(stage.number), stage.name or "-", steps, f"{stage.tokens:,}", length, masking, ", ".join(parts), hours)


def _drawn_rates(stage: Stage) -> str:
    """Return the law of a stage's masking rates, the room for predictions, and their mean number in a step."""
    data, weighted = stage.data, ", weighted as a bound" if stage.data.loss_weight == "elbo" else ""
    predictions = data.law.mean * stage.global_batch_tokens
    room = f"room for {stage.room_for_labels:.1%} of the tokens"
    return f"{data.law.describe()}{weighted} ({room}, about {predictions:,.0f} predictions per step)"


def batch_lines(run: PlannedRun) -> list[str]:
    """Return the batch arithmetic of every stage, and the batch sizes of its ramp-up."""
    lines = []
    for stage in run.config.stages:
        name = f"{stage.label}: " if len(run.config.stages) > 1 else ""
        arithmetic = batch_arithmetic(stage, run.world_size)
        lines.append(f"{name}{arithmetic}")
        if arithmetic.micro_batch_tokens < stage.micro_batch_tokens:
            lines.append(
                f"  micro_batch_tokens={stage.micro_batch_tokens:,} is an upper bound; "
                f"{arithmetic.micro_batch_tokens:,} are used, so that the global batch divides over the ranks"
            )
        lines += warmup_lines(stage, run.world_size)
    return lines


def warmup_lines(stage: Stage, world_size: int) -> list[str]:
    """Return the batch sizes of a ramp-up in order: the first step of each in its stage, and its arithmetic."""
    warmup = stage.batch_warmup
    if warmup is None:
        return []
    lines = [
        f"  batch-size ramp-up over {warmup.duration.steps:,} steps; the learning rate follows the step, not the batch"
    ]
    sizes = batch_sizes(stage, world_size)
    for step, size in sizes:
        tokens, padding = size.global_rows * stage.sequence_length, size.padding_share
        line = f"  from step {step + 1:,}: {tokens:,} tokens, {size.accumulation_steps} accumulation"
        lines.append(f"{line}, {padding:.1%} padding" if padding else line)
    if any(size.padding_share for _, size in sizes):
        micro_batch = micro_batch_without_padding(stage, world_size)
        lines.append(
            "  no micro-batch removes this padding: the ranks do not divide every batch size into whole rows"
            if micro_batch is None
            else f"  {setting_of_micro_batch(stage, micro_batch)} removes this padding, and may be slower"
        )
    return lines


def flops_lines(config: RunConfig) -> list[str]:
    """Return the operations per token, and of the whole run."""
    lines, total = [], 0.0
    for stage in config.stages:
        flops = flops_per_position(config, stage)
        total += flops * stage.tokens
        lines.append(f"length {stage.sequence_length}: {flops / 1e9:.3f} GFLOP per token, forward and backward")
    return [*lines, f"whole run: {total:.3g} FLOP"]


def memory_lines(run: PlannedRun) -> list[str]:
    """Return the memory of a rank by part for ZeRO 0 to 3, at the stage that needs most, and whether it fits --gpu."""
    tables = [run.memory_in_stage(run.heaviest_stage(zero_stage), zero_stage) for zero_stage in ZERO_STAGES]
    parts = list(tables[0])
    lines = ["ZeRO  " + "  ".join(f"{part:>14}" for part in parts) + f"  {'total':>8}"]
    for zero_stage, table in zip(ZERO_STAGES, tables, strict=True):
        values = "  ".join(f"{table[part] / GIB:>14.2f}" for part in parts)
        mark = "<- this run" if zero_stage == run.config.zero.stage else ""
        lines.append(f"{zero_stage:>4}  {values}  {sum(table.values()) / GIB:>8.2f}  {mark}".rstrip())
    return lines if run.gpu is None else [*lines, *(finding.text for finding in check_memory(run))]


def activation_lines(run: PlannedRun) -> list[str]:
    """Return what each part of the model keeps from forward to backward, and the logits, at the heaviest stage."""
    stage, training = run.heaviest_stage(), run.config.training
    parts = activation_bytes(
        run.config.model,
        batch_arithmetic(stage, run.world_size).micro_batch_tokens,
        4 if training.precision == "fp32" else 2,
        training.activation_checkpointing,
    )
    parts["logits"] = run.memory_in_stage(stage)["logits"]
    total = sum(parts.values())
    return [f"{part:<14}{size / GIB:>8.2f}  {size / total:>6.1%}" for part, size in parts.items() if size] + [
        f"{'total':<14}{total / GIB:>8.2f}"
    ]


def shard_lines(run: PlannedRun, expects_shards: bool = False) -> Iterator[str]:
    """Describe the shards: contents, sufficiency, downloads and cache of each node."""
    if run.uncounted is not None:
        yield f"warning: {run.uncounted} [{run.uncounted.code}]"
        return
    manifests: list[Manifest | None] = []
    for url in run.config.data_sets:
        try:
            check_is_data_set(url)
            manifests.append(read_manifest(url))
        except UserError as error:
            manifests.append(None)
            is_expected = error.code == "missing-path" and not expects_shards
            yield f"{'skipped' if is_expected else 'warning'}: {error} [{error.code}]"
    for finding in describe_data(run, manifests):
        yield finding.text if finding.level == "ok" else f"warning: {finding.text}"
    if known := [manifest for manifest in manifests if manifest is not None]:
        yield from reading_lines(known, run.config.data.cache_bytes)


def reading_lines(manifests: Sequence[Manifest], cache_bytes: int) -> Iterator[str]:
    """Describe downloads and cache of a node for remote shards; the same on any number of nodes.

    A rank takes a slice of every global batch, and a batch has rows of a window of shards (`trainer/data/order.py`):
    so each node reads every shard in every epoch, and keeps the window that is read and the next.
    """
    train, held_out = (
        sum(shard.bytes for manifest in manifests for shard in manifest.split(split).shards)
        for split in ("train", "valid")
    )
    least = held_out + sum(map(windows_bytes, manifests))
    yield (
        f"Each node reads all train shards ({train / GIB:.2f} GiB) once per epoch, or in proportion to the weights of "
        "a mixture. Only remote shards are downloaded and use data.cache_bytes."
    )
    share = "every epoch downloads them again" if cache_bytes < train + held_out else "they are downloaded once"
    yield (
        f"data.cache_bytes per node: {least / GIB:.2f} GiB for two windows of {WINDOW_SHARDS} shards and the valid "
        f"shards, {(train + held_out) / GIB:.2f} GiB to download all once; with {cache_bytes / GIB:.2f} GiB {share}"
    )
    if cache_bytes < least:
        yield f"data.cache_bytes={cache_bytes} is less than remote shards need. Fix: set data.cache_bytes={least}"


def windows_bytes(manifest: Manifest) -> int:
    """Return the largest number of bytes that the train shards of two windows have together."""
    return sum(sorted(shard.bytes for shard in manifest.train.shards)[-2 * WINDOW_SHARDS :])
