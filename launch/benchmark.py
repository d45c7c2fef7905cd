"""Measure training throughput.

    clozeworks benchmark --config FILE [--sweep] [--output FILE] [section.field=value ...]
    deepspeed launch/benchmark.py --config FILE ...

The command times whole training steps and reports tokens/s (without padding), milliseconds per step, MFU, peak memory
and the share of time spent on data loading. --sweep tries micro-batches up to the largest that fits into memory.
--profile lists the slowest operations. The command runs on one rank, or under the deepspeed launcher or torchrun on
all their ranks. It writes no checkpoint and logs nothing to MLflow.
"""

from __future__ import annotations

import argparse

from data_prep.base.arguments import at_least, local_output
from data_prep.base.errors import UsageError, run_command
from data_prep.base.load_settings import load_settings
from launch.options import add_config, add_dry_run, command_parser, unknown_stage
from trainer.config.run_config import RunConfig
from trainer.config.stages import epochs_of, with_steps
from trainer.distributed import rank_environment as environment

SYNTHETIC = "synthetic"
"""`data.shards` in the JSON output when the documents are synthetic."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("benchmark.py", __doc__)
    add_config(parser)
    steps = parser.add_argument_group("steps")
    steps.add_argument("--steps", type=int, default=20, metavar="N", help="timed steps (default 20)")
    steps.add_argument("--warmup-steps", type=int, default=5, metavar="N", help="untimed steps before (default 5)")
    steps.add_argument(
        "--stage", type=at_least(0), default=0, metavar="N", help="stage of the recipe, counted from 0 (default 0)"
    )
    steps.add_argument(
        "--sweep", action="store_true", help="measure micro-batches of growing size, up to the largest that fits"
    )
    steps.add_argument(
        "--sweep-limit",
        type=int,
        metavar="TOKENS",
        help="largest micro-batch of --sweep, in tokens (default: 1,048,576 on CUDA; elsewhere 4 times the configured "
        "one, because the system kills a process that takes too much memory)",
    )
    steps.add_argument("--no-engine", action="store_true", help="plain PyTorch instead of DeepSpeed, on one rank")
    data_group = parser.add_argument_group("data")
    data = data_group.add_mutually_exclusive_group()
    data.add_argument("--shards", metavar="DIR", help="measure on these shards")
    data.add_argument("--synthetic", action="store_true", help="measure on synthetic documents (default)")
    data_group.add_argument(
        "--document-tokens",
        type=float,
        default=600.0,
        metavar="MEAN",
        help="mean length of synthetic documents (default 600)",
    )
    data_group.add_argument(
        "--document-sigma",
        type=float,
        default=1.0,
        metavar="S",
        help="standard deviation of the logarithm of their lengths (default 1; 0 for equal lengths)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--peak-tflops", type=float, metavar="X", help="peak of one device, for MFU (logging.peak_flops_per_device)"
    )
    output.add_argument(
        "--profile",
        type=local_output("--profile"),
        metavar="FILE",
        help="profile a few more steps, print the slowest operations, and write a Chrome trace (.json, .json.gz) or a "
        "table",
    )
    output.add_argument(
        "--output",
        type=local_output("--output"),
        metavar="FILE",
        help="write results, machine, versions and configuration as JSON",
    )
    add_dry_run(output, "check the configuration and the data, but measure and write nothing")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(arguments)


def read_config(arguments: argparse.Namespace) -> RunConfig:
    """Return the configuration with the settings of the command line.

    Raises:
        UsageError: an argument is out of range or contradicts another.
    """
    environment.check_rank_environment()
    overrides = list(arguments.overrides)
    # Synthetic documents replace a mixture of the file.
    overrides.append(f"data.shards={arguments.shards or SYNTHETIC}")
    if arguments.peak_tflops is not None:
        overrides.append(f"logging.peak_flops_per_device={arguments.peak_tflops * 1e12}")
    config = load_settings(RunConfig, arguments.config, overrides)
    config = with_steps(config, dict.fromkeys(epochs_of(config.training), 1000))  # synthetic documents have no epochs
    if not 0 <= arguments.stage < len(config.stages):
        raise unknown_stage(arguments.stage, len(config.stages))
    if arguments.steps < 1 or arguments.warmup_steps < 0:
        raise UsageError(
            f"--steps {arguments.steps} --warmup-steps {arguments.warmup_steps} leave nothing to measure",
            fix="give at least 1 step and 0 or more warmup steps",
            code="argument-out-of-range",
        )
    if arguments.document_tokens < 1 or arguments.document_sigma < 0:
        raise UsageError(
            f"--document-tokens {arguments.document_tokens:g} --document-sigma {arguments.document_sigma:g} do not "
            "define a distribution of lengths",
            fix="give a mean of at least 1 and a deviation of at least 0",
            code="argument-out-of-range",
        )
    if arguments.sweep and arguments.profile:
        raise UsageError(
            "--profile measures one micro-batch and --sweep several",
            fix="give one of them",
            code="contradicting-options",
        )
    for name, path in (("--output", arguments.output), ("--profile", arguments.profile)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(
                f"{name} {path} cannot be written: its folder does not exist",
                fix="make the folder first, or give another file",
                code="missing-output-folder",
            )
    length = config.stages[arguments.stage].sequence_length
    if arguments.sweep_limit is not None and arguments.sweep_limit < length:
        raise UsageError(
            f"--sweep-limit {arguments.sweep_limit} is less than one row of {length} tokens",
            fix=f"give at least {length}",
            code="argument-out-of-range",
        )
    data = config.stages[arguments.stage].data
    for name, plain in (("mask_unit", "token"), ("masking", None)) if arguments.shards is None else ():
        if (value := getattr(data, name)) != plain:
            raise UsageError(
                f"data.{name}={value} needs a tokenizer, which synthetic documents do not have",
                fix=f"give --shards DIR, or set data.{name}={plain or 'null'}",
                code="masking-without-tokenizer",
            )
    world_size = environment.world_size()
    if arguments.no_engine and world_size > 1:
        raise UsageError(
            f"--no-engine measures one rank, but the launcher started {world_size}",
            fix="start one rank",
            code="no-engine-unsupported",
        )
    if arguments.no_engine and config.training.precision == "fp16":
        raise UsageError(
            "--no-engine does not support training.precision=fp16 because it scales no loss",
            fix="set training.precision to bf16 or fp32",
            code="no-engine-unsupported",
        )
    return config


def main() -> None:
    arguments = parse_arguments()
    config = read_config(arguments)
    from launch.benchmark_session import benchmark
    from trainer.distributed.exit import run_rank

    run_rank(lambda: benchmark(config, arguments))


if __name__ == "__main__":
    run_command(main, speaks=environment.rank() == 0)
