"""Measuring whole training steps for `clozeworks benchmark`: one micro-batch, or a sweep over micro-batches."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.benchmark import benchmark_report
from trainer.benchmark.benchmark_report import profile_steps, top_operations, write_profile
from trainer.benchmark.measurement import SpeedMeasurement, Training, free_memory, largest_that_fits, with_micro_batch
from trainer.benchmark.synthetic import DocumentLengths, write_synthetic_shards
from trainer.checkpoint.data_version import open_data
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.shard_set import ShardSet, check_tokenizer, open_shard_set
from trainer.distributed.memory import is_out_of_memory
from trainer.distributed.process_group import Ranks, all_agree, initialize_distributed, shut_down
from trainer.metrics.throughput import WorkClock
from trainer.model.numerics import with_compilation_decided, with_precision_decided

PROFILED_STEPS = 3
SWEEP_LIMIT_TOKENS = 1 << 20
"""Largest micro-batch of a sweep on CUDA unless memory ends it; elsewhere the system kills a process out of memory."""


def benchmark(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Measure, print and write the result; called on all ranks together."""
    storage.configure(config.storage_options)
    ranks = initialize_distributed(config.distributed, config.training.deterministic)
    config, _ = with_precision_decided(config, ranks)
    config, warning = with_compilation_decided(config, ranks)
    if warning:
        say(ranks, f"warning: {warning}")
    with tempfile.TemporaryDirectory(prefix="clozeworks-benchmark-") as folder:
        shard_sets, data = open_documents(config, arguments, ranks, Path(folder))
        engine = "plain PyTorch" if arguments.no_engine else f"DeepSpeed ZeRO {config.zero.stage}"
        say(ranks, *benchmark_report.heading_lines(config, arguments.stage, ranks, engine, data))
        if arguments.dry_run:
            say(ranks, "dry run: nothing was measured and nothing was written")
            shut_down(ranks)
            return 0
        session = BenchmarkSession(config, arguments, ranks, shard_sets)
        points, largest = session.sweep() if arguments.sweep else ([session.measure()], None)
    if ranks.is_first:
        summary = benchmark_report.report(config, arguments.stage, ranks, engine, data, points)
        write_json(arguments.output, summary | {"largest_micro_batch_tokens": largest})
    shut_down(ranks)


class BenchmarkSession:
    """Measurements of one configuration on the same data."""

    def __init__(
        self, config: RunConfig, arguments: argparse.Namespace, ranks: Ranks, shard_sets: list[ShardSet]
    ) -> None:
        self.config, self.arguments, self.ranks, self.shard_sets = config, arguments, ranks, shard_sets
        self.stage = config.stages[arguments.stage]

    def measure(self) -> SpeedMeasurement:
        """Measure the configured micro-batch, and profile it if the command line asks for it."""
        training = self._start(self.stage.micro_batch_tokens)
        point = training.measure(self.arguments.steps, self.arguments.warmup_steps)
        say(self.ranks, *benchmark_report.table_lines([point]))
        if self.arguments.profile:
            self._profile(training)
        training.close()
        return point

    def sweep(self) -> tuple[list[SpeedMeasurement], int]:
        """Measure micro-batches of growing size.

        Returns:
            The measurements of those that fit into memory, and the size of the largest in tokens.

        Raises:
            UserError: not even one row fits.
        """
        length, points = self.stage.sequence_length, {}

        def fits(rows: int) -> bool:
            point = self._try(rows * length)
            if point is not None:
                points[rows] = point
            say(
                self.ranks, benchmark_report.table_lines([point])[1] if point else f"{rows * length:>11,}  does not fit"
            )
            return point is not None

        say(self.ranks, benchmark_report.table_lines([])[0])
        first = max(1, self.stage.micro_batch_tokens // length // 4)
        limit = sweep_limit(self.config, self.arguments, self.ranks) // length
        rows = largest_that_fits(fits, first, limit)
        if not rows:
            raise UserError(
                f"a micro-batch of one row of {length} tokens does not fit into the memory of {self.ranks.device}",
                fix="set training.activation_checkpointing=true, raise zero.stage, or choose a smaller model",
                code="out-of-memory",
            )
        largest = max(points)
        best = max(points.values(), key=lambda point: point.tokens_per_second)
        ended = " (limited by --sweep-limit)" if largest == limit else ""
        say(
            self.ranks,
            f"largest micro-batch that fits: {largest * length:,} tokens{ended}; fastest: {best.micro_batch_tokens:,}",
        )
        return [points[rows] for rows in sorted(points)], largest * length

    def _try(self, micro_batch_tokens: int) -> SpeedMeasurement | None:
        """Measure one micro-batch; None if memory runs out on any rank.

        A rank that waits for a rank out of memory ends at the timeout.
        """
        point, training = None, None
        try:
            training = self._start(micro_batch_tokens)
            point = training.measure(self.arguments.steps, self.arguments.warmup_steps)
            training.close()
        except (MemoryError, RuntimeError, UserError) as error:
            if not is_out_of_memory(error):
                raise
        training = None  # outside the handler, where no traceback keeps the tensors of a failed attempt alive
        free_memory()
        return point if all_agree(point is not None, self.ranks) else None

    def _start(self, micro_batch_tokens: int) -> Training:
        config = with_micro_batch(self.config, self.arguments.stage, micro_batch_tokens, self.ranks.world_size)
        return Training(config, self.shard_sets, self.ranks, use_deepspeed=not self.arguments.no_engine)

    def _profile(self, training: Training) -> None:
        clock = WorkClock(self.ranks.device)

        def take_steps() -> None:
            for _ in range(PROFILED_STEPS):
                training.step(clock)

        profiler = profile_steps(take_steps, self.ranks.device)
        if self.ranks.is_first:
            operations = top_operations(profiler, self.ranks.device)
            say(
                self.ranks,
                f"operations of {PROFILED_STEPS} steps by time:",
                *benchmark_report.operation_lines(operations),
            )
            write_profile(profiler, str(self.arguments.profile), self.ranks.device)


def open_documents(
    config: RunConfig, arguments: argparse.Namespace, ranks: Ranks, folder: Path
) -> tuple[list[ShardSet], str]:
    """Open the shards, and describe them; every rank writes its own copy of the same synthetic shards."""
    if arguments.shards is not None:
        shard_sets = open_data(config)
        check_tokenizer(shard_sets, config.data.tokenizer, config.model.vocab_size)
        train = shard_sets[0].manifest.train
        mean = train.tokens / max(train.documents, 1)
        return shard_sets, f"documents of {storage.redact(arguments.shards)}, mean {mean:,.0f} tokens"
    stage = config.stages[arguments.stage]
    largest = sweep_limit(config, arguments, ranks) if arguments.sweep else stage.micro_batch_tokens
    lengths = DocumentLengths(arguments.document_tokens, arguments.document_sigma)
    num_tokens = 2 * max(stage.global_batch_tokens, largest * ranks.world_size)
    write_synthetic_shards(folder, config.model.vocab_size, num_tokens, lengths)
    return [open_shard_set(str(folder))], str(lengths)


def sweep_limit(config: RunConfig, arguments: argparse.Namespace, ranks: Ranks) -> int:
    """Return the largest micro-batch that a sweep tries, in tokens."""
    given: int | None = arguments.sweep_limit
    if given is not None:
        return given
    if ranks.device.type == "cuda":
        return SWEEP_LIMIT_TOKENS
    stage: Stage = config.stages[arguments.stage]
    return 4 * stage.micro_batch_tokens


def say(ranks: Ranks, *lines: str) -> None:
    """Print on rank 0."""
    if ranks.is_first:
        print(*lines, sep="\n", flush=True)


def write_json(path: Path | None, values: dict[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
