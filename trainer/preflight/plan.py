"""The plan of a run: what it computes, reads, needs in memory and how long it takes, before any of it happens.

`clozeworks doctor`, `pretrain --dry-run` and every start describe and check the same plan.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

import torch

from data_prep.base.errors import UsageError, UserError
from data_prep.base.terminal import counted, long_duration
from data_prep.dataset.manifest import read_manifest
from trainer.checkpoint.data_version import open_data, with_epochs_counted
from trainer.config.batch_arithmetic import BatchArithmetic, batch_arithmetic
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import MASKED_LM_ALONE, is_taught
from trainer.config.run_config import RunConfig
from trainer.config.run_settings import EvaluationSettings
from trainer.config.schedule import global_batch_sizes
from trainer.config.stages import Stage, epochs_of, with_steps
from trainer.config.training_settings import ZeroStage
from trainer.data.shard_set import ShardSet, open_tokenizer
from trainer.distributed.process_group import device_type
from trainer.metrics.throughput import flops_per_position
from trainer.model.numerics import with_own_precision
from trainer.model.sizes import DTYPES, flops_per_token, memory_per_rank, num_predictions, teacher_bytes
from trainer.objectives.pretraining import PretrainingModel, num_parameters, parameter_counts
from trainer.tracking.status import read_status

GIB = 1 << 30
TENSORS_ONLY = "tensors only; add about 0.9 GiB for the process"
ZERO_STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
NOTABLE_MEMORY = 0.9
"""Share of a device's memory: the estimate has neither buffers of NCCL nor gaps of the allocator."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, which need not be in this machine."""

    label: int
    """Memory in the name of the product, in GB (of 2^30 bytes)."""
    memory_bytes: int
    """Memory that PyTorch reports."""
    device: str
    """A part of the device's name that no other kind has."""


GPUS = {
    "h100-80": Gpu(80, 79 * GIB, "H100"),
    "h200-141": Gpu(141, 139 * GIB, "H200"),
    "a100-80": Gpu(80, 79 * GIB, "A100"),
}


def gpu_named(name: str | None) -> Gpu | None:
    """Return the GPU of --gpu.

    Raises:
        UsageError: there is none of that name in `GPUS`.
    """
    if name is not None and name.lower() not in GPUS:
        raise UsageError(f"--gpu {name} is unknown", fix=f"give one of {', '.join(GPUS)}", code="unknown-gpu")
    return None if name is None else GPUS[name.lower()]


@dataclass(frozen=True)
class Speed:
    """A measured speed: the tokens per second of all ranks, or the operations per second of each."""

    source: str
    tokens_per_second: float | None = None
    flops_per_device: float | None = None


class Outside(Protocol):
    """Checks by packages that training does not import; `trainer/api.py` provides them."""

    def look_at_model(self, source: str, tracking_uri: str | None) -> Path | None:
        """Return the checked folder of a model, perhaps without its weights; None: it exists and is not downloaded.

        Raises:
            UserError: there is no such model, or the registry does not answer.
        """

    def check_suite(self, settings: EvaluationSettings, evaluates: bool) -> None:
        """Check the suite, if there is one; its files and functions only where this machine evaluates.

        Raises:
            UserError: one is missing or wrong.
        """


@dataclass(frozen=True)
class PlannedRun:
    """A run before it starts; estimates need a configuration whose `training.precision` is decided."""

    config: RunConfig
    world_size: int
    device: torch.device
    """Device of this machine."""
    outside: Outside
    allow_change: bool = False
    """Whether the run resumes although a setting changed that makes it another run."""
    is_first: bool = True
    """Whether this process is rank 0."""
    gpu: Gpu | None = None
    """The device of every rank, if it is not that of this machine."""
    speed: Speed | None = None
    uncounted: UserError | None = None
    """Why the epochs of the run could not be counted; its stages then have one step each, and no rule was checked."""
    as_given: RunConfig | None = None
    """The configuration with its epochs, if they could not be counted."""

    @property
    def device_type(self) -> str:
        """The type of the device that trains."""
        return self.device.type if self.gpu is None else "cuda"

    @cached_property
    def shard_sets(self) -> list[ShardSet]:
        """The data of all stages, opened once.

        Raises:
            UserError: a data set is missing or damaged.
        """
        return open_data(self.config, self.allow_change)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """The parameters of each part of the model and their `total`, counted on a model without memory for them."""
        with torch.device("meta"):
            return parameter_counts(PretrainingModel(self.config.model, self.config.all_objectives))

    @cached_property
    def teacher(self) -> ModelSettings | None:
        """The architecture of the teacher; None without one, or where it exists and is not downloaded.

        Raises:
            UserError: it is missing, does not fit the run, or has another tokenizer than the shards, if these are read.
        """
        if self.config.teacher is None:
            return None
        from trainer.checkpoint.teacher import look_at_teacher

        try:
            fingerprint = read_manifest(self.config.data_sets[0]).tokenizer.fingerprint
        except UserError:  # the check of the data reports it
            fingerprint = None
        find_folder = partial(self.outside.look_at_model, self.config.teacher, self.config.tracking.uri)
        return look_at_teacher(
            self.config,
            find_folder,
            fingerprint,
            lambda: open_tokenizer(self.config.data.tokenizer, self.shard_sets[0]),
        )

    @cached_property
    def _known_teacher(self) -> ModelSettings | None:
        try:
            return self.teacher
        except UserError:  # the check of the teacher reports it
            return None

    @cached_property
    def teacher_parameters(self) -> int:
        """The parameters of the teacher; 0 where it is not known."""
        return 0 if self._known_teacher is None else num_parameters(self._known_teacher, MASKED_LM_ALONE)

    def teacher_share(self, stage: Stage) -> float:
        """Return the operations of the teacher in a stage, relative to those of the model, forward and backward."""
        if self._known_teacher is None or not is_taught(stage.objectives):
            return 0.0
        whole = flops_per_token(self._known_teacher, stage.sequence_length, stage.predicted_share)
        return whole / 3 / flops_per_position(self.config, stage)

    def memory_in_stage(
        self,
        stage: Stage,
        zero_stage: ZeroStage | None = None,
        micro_batch_tokens: int | None = None,
        activation_checkpointing: bool | None = None,
    ) -> dict[str, int]:
        """Return the bytes of one rank by part; what is not given is as the run has it."""
        training, zero = self.config.training, self.config.zero
        assert training.precision != "auto", "the precision of its numbers is not decided"
        is_checkpointed = training.activation_checkpointing
        tokens = micro_batch_tokens or batch_arithmetic(stage, self.world_size).micro_batch_tokens
        parts = memory_per_rank(
            self.config.model,
            num_parameters=self.parameters["total"],
            zero_stage=zero.stage if zero_stage is None else zero_stage,
            world_size=self.world_size,
            micro_batch_tokens=tokens,
            sequence_length=stage.sequence_length,
            device_type="cpu" if self.device_type == "cpu" else "cuda",
            precision=training.precision,
            mlm_probability=stage.predicted_share,
            activation_checkpointing=is_checkpointed if activation_checkpointing is None else activation_checkpointing,
        )
        if self._known_teacher is not None:
            predictions = num_predictions(tokens, stage.sequence_length, stage.predicted_share)
            sizes = self.config.model, self._known_teacher, self.teacher_parameters, tokens, predictions
            taught = is_taught(stage.objectives)
            parts["teacher"] = teacher_bytes(*sizes, DTYPES[training.precision]) if taught else 0
        return parts

    def heaviest_stage(self, zero_stage: ZeroStage | None = None) -> Stage:
        """Return the stage that needs the most memory per rank; the first of several that need as much."""
        return max(self.config.stages, key=lambda stage: sum(self.memory_in_stage(stage, zero_stage).values()))

    def on_device(self, parts: dict[str, int]) -> dict[str, int]:
        """Return the parts of a rank's memory that its device has; the optimizer may be offloaded from a GPU."""
        is_offloaded = self.config.zero.offload_optimizer and self.device_type == "cuda"
        offloaded = ("optimizer", "master_weights", "gradient_copy") if is_offloaded else ()
        return {name: size for name, size in parts.items() if name not in offloaded}

    def settings_that_fit(self, limit: float) -> str | None:
        """Return settings with which the device of a rank needs at most `limit` bytes; None if nothing tried does.

        In this order: a smaller micro-batch, a higher ZeRO stage, activation checkpointing.
        """
        own_stage, is_checkpointed = self.config.zero.stage, self.config.training.activation_checkpointing
        variants = [(zero_stage, each) for each in (is_checkpointed, True) for zero_stage in ZERO_STAGES[own_stage:]]
        for zero_stage, checkpointing in dict.fromkeys(variants):
            settings = [] if zero_stage == own_stage else [f"zero.stage={zero_stage}"]
            settings += [] if checkpointing == is_checkpointed else ["training.activation_checkpointing=true"]
            micro_batches = [
                self._micro_batch_that_fits(stage, zero_stage, checkpointing, limit) for stage in self.config.stages
            ]
            if all(micro_batches):
                for stage, tokens in zip(self.config.stages, micro_batches, strict=True):
                    if tokens < batch_arithmetic(stage, self.world_size).micro_batch_tokens:
                        settings.append(setting_of_micro_batch(stage, tokens))
                return " ".join(settings)
        return None

    def _micro_batch_that_fits(self, stage: Stage, zero_stage: ZeroStage, checkpointing: bool, limit: float) -> int:
        """Return the tokens of the largest micro-batch up to the stage's; 0 if not even one row fits."""

        def is_too_large(rows: int) -> bool:
            parts = self.memory_in_stage(stage, zero_stage, rows * stage.sequence_length, checkpointing)
            return sum(self.on_device(parts).values()) > limit

        most = batch_arithmetic(stage, self.world_size).micro_batch_rows
        return bisect.bisect_left(range(1, most + 1), True, key=is_too_large) * stage.sequence_length

    def seconds(self, stage: Stage) -> float | None:
        """Return how long a stage takes; None if no speed was measured."""
        if self.speed is None:
            return None
        if self.speed.tokens_per_second is not None:
            return stage.tokens / self.speed.tokens_per_second
        assert self.speed.flops_per_device is not None, "a speed is one of the two"
        return flops_per_position(self.config, stage) * stage.tokens / (self.speed.flops_per_device * self.world_size)

    def describe_time(self) -> str | None:
        """Return duration, device-hours and cost of the whole run in words; None if no speed was measured."""
        seconds = [self.seconds(stage) for stage in self.config.stages]
        if self.speed is None:
            return None
        total = sum(each for each in seconds if each is not None)
        hours, price = total * self.world_size / 3600, self.config.logging.gpu_hour_price
        cost = f", {hours * price:,.2f} at {price:g} per device-hour" if price is not None else ""
        return f"{long_duration(total)}, {hours:,.1f} device-hours{cost}, {self.speed.source}"


def plan_run(
    config: RunConfig,
    outside: Outside,
    *,
    world_size: int | None = None,
    gpu: str | None = None,
    tokens_per_second: float | None = None,
    benchmark: Path | None = None,
) -> PlannedRun:
    """Return the plan of a run that need not start on this machine; without a number of ranks, one for each GPU here.

    Epochs are counted; `PlannedRun.uncounted` is the reason if the data do not allow it.

    Raises:
        UserError: there is no such GPU or benchmark, or the throughput is none.
    """
    device, of_ranks = torch.device(device_type(), 0), gpu_named(gpu)
    config = with_own_precision(config, "cuda" if of_ranks is not None else device.type)
    uncounted, as_given = None, None
    try:
        config = with_epochs_counted(config)
    except UserError as error:
        uncounted, as_given = error, config
        config = with_steps(config, dict.fromkeys(epochs_of(config.training), 1))
    num_here = torch.cuda.device_count() if device.type == "cuda" else 1
    speed = measured_speed(config, tokens_per_second, benchmark, of_ranks)
    ranks = world_size or num_here
    return PlannedRun(config, ranks, device, outside, gpu=of_ranks, speed=speed, uncounted=uncounted, as_given=as_given)


def batch_sizes(stage: Stage, world_size: int) -> list[tuple[int, BatchArithmetic]]:
    """Return the sizes of the stage's global batches in order, each with its first step in the stage."""
    return [(step, batch_arithmetic(stage, world_size, tokens)) for step, tokens in global_batch_sizes(stage)]


def setting_of_micro_batch(stage: Stage, tokens: int) -> str:
    """Return the setting that gives a stage micro-batches of so many tokens."""
    return f"{stage.prefix or 'training.'}micro_batch_tokens={tokens}"


def micro_batch_without_padding(stage: Stage, world_size: int) -> int | None:
    """Return the tokens of the largest micro-batch, up to the stage's, that leaves no padding row in any batch.

    None if there is none: some batch of the stage is not a multiple of the ranks.
    """
    rows = math.gcd(*(size.global_rows for _, size in batch_sizes(stage, world_size)))
    if rows % world_size:
        return None
    largest = stage.micro_batch_tokens // stage.sequence_length
    per_rank = rows // world_size
    return stage.sequence_length * next(size for size in range(min(largest, per_rank), 0, -1) if per_rank % size == 0)


def measured_speed(
    config: RunConfig, tokens_per_second: float | None, benchmark: Path | None, gpu: Gpu | None
) -> Speed | None:
    """Return the speed that was given, else that of a benchmark's file, else that of the run so far.

    Raises:
        UserError: the file is not of `clozeworks benchmark --output`, or measured another model, precision or GPU.
    """
    if tokens_per_second is not None:
        if not 0 < tokens_per_second < math.inf:
            raise UsageError(
                f"--tokens-per-second {tokens_per_second:g} is not a throughput",
                fix="give a positive number",
                code="invalid-throughput",
            )
        return Speed(f"at {tokens_per_second:,.0f} tokens/s", tokens_per_second=tokens_per_second)
    if benchmark is not None:
        return _speed_of_benchmark(config, benchmark, gpu)
    status = read_status(Path(config.output_dir))
    if status is None or not status.flops_per_device or not status.world_size:
        return None
    source = f"from the speed of this run on {counted(status.world_size, 'rank')}"
    return Speed(source, flops_per_device=status.flops_per_device)


def _speed_of_benchmark(config: RunConfig, path: Path, gpu: Gpu | None) -> Speed:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
        ranks, device = int(report["machine"]["ranks"]), str(report["machine"]["device"])
        fastest = max(float(each["tokens_per_second"]) for each in report["measurements"])
        flops = fastest * float(report["flops_per_position"]) / ranks
        model, precision = report["config"]["model"], report["config"]["training"]["precision"]
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(
            f"--benchmark {path} is not a result of `clozeworks benchmark --output FILE` ({type(error).__name__})",
            fix="measure it with that command, or give --tokens-per-second",
            code="unreadable-benchmark",
        ) from None
    training = config.training.precision
    is_other = model != config.model.model_dump(mode="json") or (training != "auto" and precision != training)
    if is_other or (gpu is not None and re.search(rf"\b{gpu.device}\b", device) is None):
        raise UsageError(
            f"--benchmark {path} measured "
            + (f"another model, or in {precision}" if is_other else f"{device}, and --gpu names another GPU"),
            fix="measure this configuration on that GPU with `clozeworks benchmark --output FILE`",
            code="benchmark-of-another-run",
        )
    return Speed(f"from {fastest:,.0f} tokens/s in {path} ({counted(ranks, 'rank')}, {device})", flops_per_device=flops)
