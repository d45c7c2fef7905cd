"""Explanation of a run before it starts: sizes, batches, operations, memory and shards, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from data_prep.base.errors import UsageError, UserError
from data_prep.base.settings import to_yaml
from data_prep.base.table import aligned
from data_prep.base.terminal import counted
from data_prep.dataset.manifest import Manifest, read_manifest
from data_prep.storage import storage
from trainer.checkpoint.compatibility import check_branch
from trainer.checkpoint.format import CheckpointFolder, list_steps, step_folder, steps_in
from trainer.checkpoint.initial_weights import look_at_initial_weights
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.run_config import RunConfig, without_secrets
from trainer.config.schedule import global_batch_sizes, tokens_of_stage
from trainer.config.stages import Stage
from trainer.config.training_settings import BranchSettings, ZeroStage
from trainer.data.shard_set import WINDOW_SHARDS, check_is_data_set
from trainer.metrics.throughput import flops_per_position
from trainer.model.sizes import activation_bytes
from trainer.objectives.pretraining import PretrainingModel, parameter_counts
from trainer.preflight.data_checks import EVALUATION_IS_OFF, check_needs_no_evaluation, format_epochs
from trainer.preflight.memory_estimate import TENSORS_ONLY, heaviest_stage, memory_in_stage

GIB = 1 << 30
MANY_EPOCHS = 100
USUAL_PADDING = 128
"""A vocabulary that is rounded up to a multiple of this is no mistake."""
ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)


def explain(
    config: RunConfig,
    world_size: int,
    look_at_model: Callable[[str, str | None], Path | None],
    expects_shards: bool = False,
    tokens_per_second: float | None = None,
) -> str:
    """Return the explanation for `world_size` ranks; it needs neither a GPU nor shards.

    Args:
        look_at_model: finds what `init_from` names (`trainer/preflight/checks.py::Outside`).
        expects_shards: whether missing shards are worth a warning, as if they were named on the command line.
        tokens_per_second: throughput of all ranks, for the hours of each stage.

    Raises:
        UserError: existing shards do not fit the configuration; `init_from` is missing or does not fit it.
    """
    parts = [
        ("Configuration", to_yaml(without_secrets(config)).rstrip().splitlines()),
        ("Parameters", parameter_lines(config)),
        ("Stages", stage_lines(config, tokens_per_second)),
        ("Batches", batch_lines(config, world_size)),
        ("Operations", flops_lines(config)),
        (
            f"Memory per rank, GiB (estimate, {counted(world_size, 'rank')}, {config.training.precision}; "
            f"{TENSORS_ONLY})",
            memory_lines(config, world_size),
        ),
        (
            "Activations of a micro-batch by part, GiB (activations and logits above)",
            activation_lines(config, world_size),
        ),
        ("Shards", list(shard_lines(config, world_size, expects_shards))),
    ]
    if config.branch is not None:
        parts.append(("Branch", [branch_line(config, config.branch)]))
    if config.init_from is not None:
        parts.append(("Initial weights", initial_weights_lines(config, config.init_from, look_at_model)))
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


def parameter_lines(config: RunConfig) -> list[str]:
    """The parameters of each part of the model, counted on the model itself."""
    with torch.device("meta"):
        counts = parameter_counts(PretrainingModel(config.model, config.all_objectives))
    width = max(map(len, counts))
    return [f"{'module':<{width}}  {'parameters':>13}", *(f"{part:<{width}}  {n:>13,}" for part, n in counts.items())]


def stage_lines(config: RunConfig, tokens_per_second: float | None = None) -> list[str]:
    """The table of stages; the hours are those of the tokens at a throughput, if one is given."""
    header = ("stage", "name", "steps", "tokens", "length", "masking", "learning rate", "hours")
    rows = [_stage_row(stage, tokens_per_second) for stage in config.stages]
    lines = aligned([header, *rows])
    if tokens_per_second is None:
        return [*lines, "--tokens-per-second N adds the hours at that throughput of all ranks"]
    hours = config.tokens_after() / tokens_per_second / 3600
    return [*lines, f"whole run at {tokens_per_second:,.0f} tokens/s: {hours:,.1f} hours"]


def _stage_row(stage: Stage, tokens_per_second: float | None) -> tuple[str, ...]:
    first, last = stage.first_step, stage.first_step + max(stage.taken_steps, 1) - 1
    masks = dict.fromkeys(f"{stage.masking_rate(step):.3g}" for step in (first, last))
    unit = "" if stage.data.mask_unit == "token" else f", {stage.data.mask_unit}s"
    unit = unit if stage.data.masking is None else f", {stage.data.masking}"
    schedule = stage.schedule
    warm = stage.rate_clock.first_step + schedule.warmup.steps  # completed steps; the rate only falls from here
    parts = [f"{stage.learning_rate(min(max(first, warm - 1), last)):.3g} at most"]
    if stage.taken_steps:
        parts.append(f"{stage.learning_rate(last):.2g} at the end")
    if stage.first_step < warm:
        parts.append(f"{schedule.warmup.steps:,} warmup steps")
    if schedule.name != "warmup_stable_decay" or schedule.decay_duration.steps:
        parts.append(schedule.shape if schedule.name != "warmup_stable_decay" else f"{schedule.shape} decay")
    tokens = stage.tokens
    hours = "-" if tokens_per_second is None else f"{tokens / tokens_per_second / 3600:,.1f}"
    steps = f"{stage.taken_steps:,}" + (f" of {stage.steps:,}" if stage.taken_steps < stage.steps else "")
    length, masking = f"{stage.sequence_length:,}", " to ".join(masks) + unit
    return (str(stage.number), stage.name or "-", steps, f"{tokens:,}", length, masking, ", ".join(parts), hours)


def batch_lines(config: RunConfig, world_size: int) -> list[str]:
    """The batch arithmetic of every stage."""
    lines = []
    for stage, steps in zip(config.stages, config.steps_by_stage, strict=True):
        name = f"{stage.label}: " if len(config.stages) > 1 else ""
        arithmetic = batch_arithmetic(stage, world_size)
        lines.append(f"{name}{arithmetic}; {steps:,} steps = {tokens_of_stage(stage, 0, steps):,} tokens")
        if arithmetic.micro_batch_tokens < stage.micro_batch_tokens:
            lines.append(
                f"  micro_batch_tokens={stage.micro_batch_tokens:,} is an upper bound; "
                f"{arithmetic.micro_batch_tokens:,} are used, so that the global batch divides over the ranks"
            )
        lines += warmup_lines(stage, world_size)
    return lines


def warmup_lines(stage: Stage, world_size: int) -> list[str]:
    """The batch sizes of a ramp-up in order: the first step of each in its stage, and its arithmetic."""
    warmup = stage.batch_warmup
    if warmup is None:
        return []
    lines = [
        f"  batch-size ramp-up over {warmup.duration.steps:,} steps; the learning rate follows the step, not the batch"
    ]
    for step, tokens in global_batch_sizes(stage):
        arithmetic = batch_arithmetic(stage, world_size, tokens)
        line = f"  from step {step + 1:,}: {tokens:,} tokens, {arithmetic.accumulation_steps} accumulation"
        padding = arithmetic.padding_share
        lines.append(f"{line}, {padding:.1%} padding" if padding else line)
    return lines


def flops_lines(config: RunConfig) -> list[str]:
    """Operations per token, and of the whole run."""
    lines, total = [], 0.0
    for stage, steps in zip(config.stages, config.steps_by_stage, strict=True):
        flops = flops_per_position(config, stage)
        total += flops * tokens_of_stage(stage, 0, steps)
        lines.append(f"length {stage.sequence_length}: {flops / 1e9:.3f} GFLOP per token, forward and backward")
    return [*lines, f"whole run: {total:.3g} FLOP"]


def memory_lines(config: RunConfig, world_size: int) -> list[str]:
    """Estimated memory of a rank by part, for ZeRO 0 to 3, at the stage that needs most."""
    tables = [
        memory_in_stage(config, heaviest_stage(config, zero_stage, world_size), zero_stage, world_size)
        for zero_stage in ZERO_STAGES
    ]
    marks = ["<- this run" if zero_stage == config.zero.stage else "" for zero_stage in range(4)]
    parts = list(tables[0])
    lines = ["ZeRO  " + "  ".join(f"{part:>14}" for part in parts) + f"  {'total':>8}"]
    for zero_stage, (table, mark) in enumerate(zip(tables, marks, strict=True)):
        values = "  ".join(f"{table[part] / GIB:>14.2f}" for part in parts)
        lines.append(f"{zero_stage:>4}  {values}  {sum(table.values()) / GIB:>8.2f}  {mark}".rstrip())
    return lines


def activation_lines(config: RunConfig, world_size: int) -> list[str]:
    """What each part of the model keeps from forward to backward, at the stage that needs most, and the logits."""
    stage = heaviest_stage(config, config.zero.stage, world_size)
    number_bytes = 4 if config.training.precision == "fp32" else 2
    parts = activation_bytes(
        config.model,
        batch_arithmetic(stage, world_size).micro_batch_tokens,
        number_bytes,
        config.training.activation_checkpointing,
    )
    parts["logits"] = memory_in_stage(config, stage, config.zero.stage, world_size)["logits"]
    total = sum(parts.values())
    return [f"{part:<14}{size / GIB:>8.2f}  {size / total:>6.1%}" for part, size in parts.items() if size] + [
        f"{'total':<14}{total / GIB:>8.2f}"
    ]


def shard_lines(config: RunConfig, world_size: int, expects_shards: bool = False) -> Iterator[str]:
    """Describe the shards: contents, sufficiency, downloads and cache of each node."""
    all_manifests: list[Manifest | None] = []
    for url in config.data_sets:
        try:
            check_is_data_set(url)
            all_manifests.append(read_manifest(url))
        except UserError as error:
            all_manifests.append(None)
            is_expected = error.code == "missing-path" and not expects_shards
            yield f"{'skipped' if is_expected else 'warning'}: {error} [{error.code}]"
    tokens_read = tokens_by_data_set(config, [0 if each is None else each.train.tokens for each in all_manifests])
    for url, manifest, tokens in zip(config.data_sets, all_manifests, tokens_read, strict=True):
        if manifest is not None:
            yield from _describe_shards(storage.redact(url), manifest, config, world_size, round(tokens))
    if None not in all_manifests and not any(each.valid.documents for each in all_manifests if each is not None):
        check_needs_no_evaluation(config)
        yield EVALUATION_IS_OFF
    if manifests := [each for each in all_manifests if each is not None]:
        yield from reading_lines(manifests, config.data.cache_bytes)


def tokens_by_data_set(config: RunConfig, train_tokens: Sequence[int]) -> list[float]:
    """Return the tokens that the run reads of each of its data sets, given the train tokens of each."""
    tokens_read = [0.0] * len(train_tokens)
    for stage in config.stages:
        weights = [
            component.weight if component.weight is not None else train_tokens[number] ** stage.data.sampling_alpha
            for number, component in zip(stage.data_sets, stage.data.components, strict=True)
        ]
        for number, weight in zip(stage.data_sets, weights, strict=True):
            tokens_read[number] += stage.tokens * weight / (sum(weights) or 1)
    return tokens_read


def reading_lines(manifests: Sequence[Manifest], cache_bytes: int) -> Iterator[str]:
    """Describe downloads and cache of a node for remote shards; the same on any number of nodes.

    A rank takes a slice of every global batch, and a batch holds rows of a window of shards (`trainer/data/order.py`):
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
    """The most bytes that the train shards of two windows have together."""
    return sum(sorted(shard.bytes for shard in manifest.train.shards)[-2 * WINDOW_SHARDS :])


def initial_weights_lines(
    config: RunConfig, source: str, look_at_model: Callable[[str, str | None], Path | None]
) -> list[str]:
    """The weights that the run starts from, checked against the model; a run with checkpoints resumes from those."""
    complete, _ = list_steps(config.output_dir)
    if complete:
        return [f"skipped: {config.output_dir} has checkpoints, and the run resumes from the newest"]
    try:
        fingerprint = read_manifest(config.data_sets[0]).tokenizer.fingerprint
    except UserError:  # reported under "Shards"; without them there is nothing to compare the tokenizer with
        fingerprint = None
    find_folder = partial(look_at_model, source, config.tracking.uri)
    return look_at_initial_weights(config.model, source, find_folder, fingerprint)


def _describe_shards(
    url: str, manifest: Manifest, config: RunConfig, world_size: int, tokens_read: int
) -> Iterator[str]:
    if manifest.tokenizer.vocab_size > config.model.vocab_size:
        raise UsageError(
            f"the shards at {url} have ids up to {manifest.tokenizer.vocab_size - 1:,}, and "
            f"model.vocab_size is {config.model.vocab_size:,}",
            fix=f"set model.vocab_size={manifest.tokenizer.vocab_size}",
            code="vocabulary-too-small",
        )
    train = manifest.train
    yield (
        f"{url}: {counted(len(train.shards), 'train shard')} for {counted(world_size, 'rank')} (any number of "
        f"ranks reads any number of shards), {train.tokens:,} train tokens, {manifest.valid.tokens:,} valid tokens"
    )
    epochs = tokens_read / max(train.tokens, 1)
    yield f"the run reads {tokens_read:,} tokens, about {format_epochs(epochs)} of these tokens"
    if epochs > MANY_EPOCHS:
        yield f"warning: the run repeats these tokens for {format_epochs(epochs)}; lower training.max_steps or add data"
    yield from _warn_of_unused_ids(manifest.tokenizer.vocab_size, config)


def _warn_of_unused_ids(vocab_size: int, config: RunConfig) -> Iterator[str]:
    """Warn of embeddings without a token, beyond those that a vocabulary is rounded up by."""
    multiple = max(config.model.pad_vocab_size_to_multiple_of, USUAL_PADDING)
    if config.model.vocab_size > -(-vocab_size // multiple) * multiple:
        yield (
            f"warning: model.vocab_size={config.model.vocab_size:,} exceeds the {vocab_size:,} tokens of the shards' "
            f"tokenizer; the other embeddings are never trained. Fix: set model.vocab_size={vocab_size}"
        )
