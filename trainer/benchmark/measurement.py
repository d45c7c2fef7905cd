"""Time whole training steps with loader, engine and optimizer, as a run takes them: without a wait between steps."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from data_prep.base.errors import UsageError
from data_prep.base.garbage import exempt_what_is_loaded
from data_prep.base.urls import redact
from trainer.benchmark.plain_engine import PlainEngine
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.duration import Duration
from trainer.config.run_config import RunConfig
from trainer.data.loader import GlobalBatch, Loader, Position
from trainer.data.shard_set import ShardSet
from trainer.distributed.memory import peak_memory_bytes
from trainer.distributed.process_group import Ranks, gather_objects
from trainer.engine.engine import Engine, build_engine
from trainer.loop.step import Counting, take_step
from trainer.metrics.throughput import Interval, RankWork, WorkClock, flops_per_position, peak_flops
from trainer.objectives.objective import StageObjectives
from trainer.objectives.pretraining import Output, PretrainingModel

RESOLUTION = 1 / 8
"""Relative distance from the largest micro-batch at which the search ends."""


@dataclass(frozen=True)
class SpeedMeasurement:
    """One batch shape over `num_steps` timed steps; tokens are those of all ranks, padding not counted."""

    micro_batch_tokens: int
    global_batch_tokens: int
    accumulation_steps: int
    num_steps: int
    tokens_per_second: float
    step_milliseconds: dict[str, float]
    """p10, median and p90."""
    filled_share: float
    """Share of tokens among the computed positions, padding rows included."""
    mfu: float | None
    """As in `trainer.metrics.throughput.Interval`; None if no peak is known."""
    data_wait_share: float
    """Share of the slowest rank's time; on CUDA an upper bound, because the host waits while the device works."""
    peak_memory_bytes: dict[str, int]
    """Memory of the rank that needs most: allocated and reserved in the timed steps on CUDA, else the resident set."""


class StepClock:
    """Reads the time between steps; on CUDA by events, so that no step waits for the step before."""

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if self._uses_events:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds between each two marks; waits until the device has reached the last mark."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if not self._uses_events:
            return [last - first for first, last in pairs]
        self._marks[-1].synchronize()
        return [first.elapsed_time(last) / 1000.0 for first, last in pairs]


class Training:
    """A model in an engine, with a loader, as at the beginning of a run; it writes nothing to disk."""

    def __init__(self, config: RunConfig, shard_sets: list[ShardSet], ranks: Ranks, use_deepspeed: bool) -> None:
        """`config` has exactly one stage."""
        self.config, self.ranks = config, ranks
        (self.stage,) = config.stages
        self.loader = Loader(
            shard_sets,
            self.stage,
            Position(0, 0, 0),
            config.training.seed,
            (ranks.rank, ranks.world_size),
            pin_memory=ranks.device.type == "cuda",
        )
        self.batches = iter(self.loader)
        self.num_steps = 0
        self.upcoming: tuple[GlobalBatch, Counting] | None = None
        self.engine = _build(config, ranks, use_deepspeed)
        assert isinstance(self.engine.module, PretrainingModel)
        weights = {each.name: each.weight for each in self.stage.objectives}
        self.objectives = StageObjectives(self.engine.module.objectives, weights)
        batch = next(self.batches).micro_batches[0].to(ranks.device)

        def compute_loss() -> torch.Tensor:
            output: Output = self.engine.forward(batch, objectives=self.objectives.weights)
            return functools.reduce(torch.add, (sums["loss"] for sums in output.values()))

        self.engine.warmup_step(compute_loss)

    def step(self, clock: WorkClock) -> int:
        """Take one step as the training loop does; return the number of tokens over all ranks."""
        rate = self.stage.learning_rate(self.num_steps)
        batch, counting = self.upcoming or self._fetch(clock)
        counts, self.upcoming = counting.counts, self._fetch(clock)
        result = take_step(
            self.engine,
            batch,
            counts,
            self.objectives,
            self.num_steps,
            rate,
            self.config.training.seed,
            self.ranks,
            clock,
            lambda text: None,
        )
        self.num_steps += 1
        return result.counts.tokens

    def _fetch(self, clock: WorkClock) -> tuple[GlobalBatch, Counting]:
        batch = clock.fetch(self.batches)
        return batch, Counting(batch, self.objectives, self.ranks)

    def measure(self, num_steps: int, num_warmup_steps: int) -> SpeedMeasurement:
        """Take untimed steps, then time steps without a wait between them."""
        device, work, clock = self.ranks.device, WorkClock(self.ranks.device), StepClock(self.ranks.device)
        for _ in range(num_warmup_steps):
            self.step(work)
        work.read()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        clock.mark()
        tokens = 0
        for _ in range(num_steps):
            tokens += self.step(work)
            clock.mark()
        seconds = clock.seconds()
        own = RankWork(*work.read(), peak_memory_bytes(device))
        rows = num_steps * self.stage.global_batch_tokens // self.stage.sequence_length
        interval = Interval(num_steps, sum(seconds), tokens, rows, tuple(gather_objects(own, self.ranks)))
        return self._describe(interval, seconds)

    def _describe(self, interval: Interval, seconds: list[float]) -> SpeedMeasurement:
        peak = peak_flops(self.config, self.ranks.device)
        metrics = interval.metrics(self.stage, flops_per_position(self.config, self.stage), peak)
        low, median, high = np.percentile(seconds, [10, 50, 90]) * 1000.0
        cut = batch_arithmetic(self.stage, self.ranks.world_size)
        return SpeedMeasurement(
            micro_batch_tokens=cut.micro_batch_tokens,
            global_batch_tokens=self.stage.global_batch_tokens,
            accumulation_steps=self.loader.accumulation_steps,
            num_steps=interval.num_steps,
            tokens_per_second=interval.tokens_per_second,
            step_milliseconds={"p10": float(low), "median": float(median), "p90": float(high)},
            filled_share=interval.tokens / (interval.num_steps * cut.computed_rows * cut.sequence_length),
            mfu=metrics.get("train/mfu"),
            data_wait_share=metrics["train/data_wait_share"],
            peak_memory_bytes=_most(gather_objects(memory_bytes(self.ranks.device), self.ranks)),
        )

    def close(self) -> None:
        """Free the memory for the next measurement of this process."""
        self.engine.destroy()
        del self.engine, self.batches
        free_memory()


def free_memory() -> None:
    """Free unreferenced memory, also on the device, and graphs that torch.compile made for other shapes."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def memory_bytes(device: torch.device) -> dict[str, int]:
    """Return the peak memory: allocated and reserved by torch on CUDA, else resident in the process."""
    if device.type != "cuda":
        return {"resident": peak_memory_bytes(device)}
    return {"allocated": torch.cuda.max_memory_allocated(device), "reserved": peak_memory_bytes(device)}


def with_micro_batch(config: RunConfig, stage_number: int, micro_batch_tokens: int, world_size: int) -> RunConfig:
    """Return the configuration of one stage with this micro-batch; the global batch grows to whole micro-batches."""
    stage = config.stages[stage_number]
    at_once = micro_batch_tokens * world_size
    training = config.training.model_copy(
        update={
            "stages": (),
            "batch_warmup": None,
            "duration": Duration(config.max_steps),
            "gradient_clipping": stage.gradient_clipping,
            "micro_batch_tokens": micro_batch_tokens,
            "global_batch_tokens": -(-stage.global_batch_tokens // at_once) * at_once,
        }
    )
    data = stage.data.model_copy(update={"shards": config.data.shards, "sampling_alpha": config.data.sampling_alpha})
    optimizer = config.optimizer.model_copy(update={"learning_rate": stage.peak_learning_rate})
    changes = {"training": training, "data": data, "model": stage.model, "optimizer": optimizer, "branch": None}
    return config.model_copy(update=changes)


def _build(config: RunConfig, ranks: Ranks, use_deepspeed: bool) -> Engine | PlainEngine:
    training = config.training
    if config.teacher is not None:
        raise UsageError(
            f"the benchmark loads no teacher, and teacher={redact(config.teacher)}",
            fix="give teacher=null and objectives without distillation and hidden_states, to measure the model alone",
            code="benchmark-with-teacher",
        )
    exempt_what_is_loaded()
    model = PretrainingModel(config.model, config.all_objectives, training.activation_checkpointing)
    model.initialize(training.seed)
    if training.compile is True:
        model.compile_blocks()
    if use_deepspeed:
        return build_engine(model, config, ranks)
    dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
    return PlainEngine(model, config.optimizer, ranks.device, dtype, training.gradient_clipping)


def _most(of_ranks: list[dict[str, int]]) -> dict[str, int]:
    return {name: max(memory[name] for memory in of_ranks) for name in of_ranks[0]}


def largest_that_fits(fits: Callable[[int], bool], first: int, limit: int) -> int:
    """Return the largest number of rows up to `limit` that `fits`, within `RESOLUTION`; 0 if none fits.

    Doubles from `first` (or halves, if that is too large) until one number fits and one does not, then bisects. `fits`
    is called at most once for each number.
    """
    good, bad = 0, limit + 1
    number = min(first, limit)
    while good < limit and bad - good > max(1, int(good * RESOLUTION)):
        if fits(number):
            good = number
        else:
            bad = number
        if good == 0:
            number = bad // 2
        elif bad > limit:
            number = min(2 * good, limit)
        else:
            number = (good + bad) // 2
    return good
