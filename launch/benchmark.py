"""Measure training steps: `benchmark.py --config FILE [--sweep] [--output FILE] [section.field=value ...]`.

Tokens a second (padding not counted), milliseconds a step, MFU, peak memory and the share of time spent waiting
for data, of whole steps as a run takes them; --sweep tries micro-batches up to the largest that fits, and --profile
says where the time goes. Alone, or under the deepspeed launcher or torchrun on as many ranks as these start. It writes
no checkpoint and tracks nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from data_prep.base.arguments import at_least, local_output
from data_prep.base.errors import UsageError, UserError, run_command
from data_prep.base.settings import load_settings
from data_prep.storage import storage
from trainer.benchmark import benchmark_report
from trainer.benchmark.largest_batch import largest_that_fits
from trainer.benchmark.measurement import Measurement, Training, free_memory, with_micro_batch
from trainer.benchmark.profiling import profile_steps, top_operations, write_profile
from trainer.benchmark.synthetic import DocumentLengths, write_synthetic_shards
from trainer.config.run_config import RunConfig
from trainer.config.training_settings import Stage
from trainer.data.shard_set import ShardSet, check_tokenizer, open_shard_set
from trainer.distributed.exit import run_rank
from trainer.distributed.memory import is_out_of_memory
from trainer.distributed.process_group import Ranks, all_agree, initialize_distributed, shut_down
from trainer.loop.data_version import open_data
from trainer.metrics.throughput import WorkClock
from trainer.model.numerics import with_compilation_decided, with_precision_decided

PROFILED_STEPS = 3
SWEEP_LIMIT_TOKENS = 1 << 20
"""Where a sweep on CUDA ends if memory has not ended it; elsewhere the system ends a process that takes too much."""
SYNTHETIC = "synthetic"
"""What the JSON names as `data.shards` where there are none."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmark.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, or the name of a preset")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings that replace the file's")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps (default 20)")
    parser.add_argument("--warmup-steps", type=int, default=5, metavar="N", help="steps before them (default 5)")
    parser.add_argument(
        "--stage", type=at_least(0), default=0, metavar="N", help="stage of training, counted from 0 (default)"
    )
    parser.add_argument(
        "--sweep", action="store_true", help="a table over micro-batches, up to the largest that fits into memory"
    )
    parser.add_argument(
        "--sweep-limit",
        type=int,
        metavar="TOKENS",
        help="largest micro-batch to try, in places (default: 1,048,576 on CUDA, 4 times the configured one elsewhere, "
        "where a process that takes too much memory is killed)",
    )
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--shards", metavar="DIR", help="measure on these shards")
    data.add_argument("--synthetic", action="store_true", help="measure on synthetic documents (the default)")
    parser.add_argument(
        "--document-tokens", type=float, default=600.0, metavar="MEAN", help="of synthetic documents (default 600)"
    )
    parser.add_argument(
        "--document-sigma",
        type=float,
        default=1.0,
        metavar="S",
        help="standard deviation of the logarithm of their lengths (default 1; 0: all of one length)",
    )
    parser.add_argument(
        "--peak-tflops", type=float, metavar="X", help="sets logging.peak_flops_per_device, which MFU divides by"
    )
    parser.add_argument("--no-engine", action="store_true", help="plain PyTorch in place of DeepSpeed, on one rank")
    parser.add_argument(
        "--profile",
        type=local_output("--profile"),
        metavar="FILE",
        help="profile a few more steps, print the longest operations, and write a Chrome trace (.json, .json.gz) or a "
        "table",
    )
    parser.add_argument(
        "--output",
        type=local_output("--output"),
        metavar="FILE",
        help="write figures, machine, versions and configuration as JSON",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(arguments)


def read_config(arguments: argparse.Namespace) -> RunConfig:
    """The configuration with what the command line says of it.

    Raises:
        UsageError: an argument is out of range, or does not go with another.
    """
    overrides = list(arguments.overrides)
    # A mixture of the file has no part in synthetic documents.
    overrides.append(f"data.shards={arguments.shards or SYNTHETIC}")
    if arguments.peak_tflops is not None:
        overrides.append(f"logging.peak_flops_per_device={arguments.peak_tflops * 1e12}")
    config = load_settings(RunConfig, arguments.config, overrides)
    if not 0 <= arguments.stage < len(config.stages):
        raise UsageError(f"--stage {arguments.stage} is not there: the run has stages 0 to {len(config.stages) - 1}")
    if arguments.steps < 1 or arguments.warmup_steps < 0:
        raise UsageError(
            f"--steps {arguments.steps} and --warmup-steps {arguments.warmup_steps}: time at least one step, after 0 "
            "or more"
        )
    if arguments.document_tokens < 1 or arguments.document_sigma < 0:
        raise UsageError(
            f"--document-tokens {arguments.document_tokens:g} --document-sigma {arguments.document_sigma:g} is no "
            "distribution of lengths; give a mean of 1 or more, and 0 or more"
        )
    if arguments.sweep and arguments.profile:
        raise UsageError("--profile is of one micro-batch, and --sweep measures many; give one of them")
    for name, path in (("--output", arguments.output), ("--profile", arguments.profile)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{name} {path} cannot be written: there is no such folder; make it")
    length = config.stages[arguments.stage].sequence_length
    if arguments.sweep_limit is not None and arguments.sweep_limit < length:
        raise UsageError(f"--sweep-limit {arguments.sweep_limit} holds no row of {length} places; raise it")
    if arguments.shards is None and config.data.mask_unit != "token":
        raise UsageError(
            f"data.mask_unit={config.data.mask_unit} needs a tokenizer, which synthetic documents do not have; give "
            "--shards DIR, or set data.mask_unit=token"
        )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.no_engine and world_size > 1:
        raise UsageError(f"--no-engine measures one rank, and the launcher started {world_size}; start one")
    if arguments.no_engine and config.training.precision == "fp16":
        raise UsageError("--no-engine scales no loss, so it has no training.precision=fp16; set bf16 or fp32")
    return config


def benchmark(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Measure, print and write; all ranks together."""
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
        session = Session(config, arguments, ranks, shard_sets)
        points, largest = session.sweep() if arguments.sweep else ([session.measure()], None)
    if ranks.is_first:
        summary = benchmark_report.report(config, arguments.stage, ranks, engine, data, points)
        write_json(arguments.output, summary | {"largest_micro_batch_tokens": largest})
    shut_down(ranks)


class Session:
    """Measurements of one configuration on the same data."""

    def __init__(
        self, config: RunConfig, arguments: argparse.Namespace, ranks: Ranks, shard_sets: list[ShardSet]
    ) -> None:
        self.config, self.arguments, self.ranks, self.shard_sets = config, arguments, ranks, shard_sets
        self.stage = config.stages[arguments.stage]

    def measure(self) -> Measurement:
        """The configured micro-batch, and its profile if asked for."""
        training = self._start(self.stage.micro_batch_tokens)
        point = training.measure(self.arguments.steps, self.arguments.warmup_steps)
        say(self.ranks, *benchmark_report.table_lines([point]))
        if self.arguments.profile:
            self._profile(training)
        training.close()
        return point

    def sweep(self) -> tuple[list[Measurement], int]:
        """All micro-batches that were tried and fit, and the largest of them, in places.

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
                f"not even a micro-batch of one row of {length} places fits on {self.ranks.device}; set "
                "training.activation_checkpointing=true, raise zero.stage, or take a smaller model"
            )
        largest = max(points)
        best = max(points.values(), key=lambda point: point.tokens_per_second)
        ended = " (none larger was tried: --sweep-limit)" if largest == limit else ""
        say(
            self.ranks,
            f"largest micro-batch that fits: {largest * length:,} places{ended}; fastest: {best.micro_batch_tokens:,}",
        )
        return [points[rows] for rows in sorted(points)], largest * length

    def _try(self, micro_batch_tokens: int) -> Measurement | None:
        """None where memory runs out on any rank. A rank that waits for one out of memory ends at the time-out."""
        point, training = None, None
        try:
            training = self._start(micro_batch_tokens)
            point = training.measure(self.arguments.steps, self.arguments.warmup_steps)
            training.close()
        except (MemoryError, RuntimeError, UserError) as error:
            if not is_out_of_memory(error):
                raise
        training = None  # only now, out of the handler, does nothing hold the tensors of a failed try
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
                f"where {PROFILED_STEPS} steps spent their time:",
                *benchmark_report.operation_lines(operations),
            )
            write_profile(profiler, str(self.arguments.profile), self.ranks.device)


def open_documents(
    config: RunConfig, arguments: argparse.Namespace, ranks: Ranks, folder: Path
) -> tuple[list[ShardSet], str]:
    """The shards to read, and what they are in words; every rank writes the same synthetic ones for itself."""
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
    """The largest micro-batch that a sweep tries, in places."""
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


def main() -> None:
    arguments = parse_arguments()
    config = read_config(arguments)
    run_rank(lambda: benchmark(config, arguments))


if __name__ == "__main__":
    run_command(main, speaks=os.environ.get("RANK", "0") == "0")
