"""Pretrain an encoder: `deepspeed launch/pretrain.py --config FILE [section.field=value ...]`.

On one process: `clozeworks pretrain ...` or `python launch/pretrain.py ...` (the CPU or the first GPU). On all GPUs of
this host: `deepspeed launch/pretrain.py ...`. On several hosts: `clozeworks nodes --hostfile FILE -- ...`, or
`torchrun ... launch/pretrain.py ...` on each (`clozeworks ranks` is torchrun with the exit status of the rank that
failed first). The arguments are the same everywhere.

The same command again resumes from the newest complete checkpoint in `output_dir`. `--dry-run` explains the run without
GPU or shards. Exit status: 0 all steps done, 1 failed, 2 wrong usage or configuration (also if data.shards are missing
or raw text), 75 stopped by a signal (or the loss of its launcher) after saving, 76 a rank crashed, hung or failed to
join (rerun the same command after both).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from data_prep.base.arguments import Joined, wrapped_settings
from data_prep.base.errors import UsageError, run_command
from data_prep.base.local_paths import expand_home
from data_prep.base.logs import show_times
from data_prep.base.settings import describe, setting_names, to_yaml
from launch.options import add_plan, command_parser
from trainer.api import EXTENSIONS, Training, start
from trainer.config.run_config import RunConfig, check_output_dir, load_config, without_secrets
from trainer.config.stages import epochs_of
from trainer.data.sample_range import Branch, parse_ranges
from trainer.distributed import rank_environment as environment
from trainer.distributed.stop_signal import StopSignal
from trainer.engine.deepspeed_config import deepspeed_config, with_deepspeed_file
from trainer.loop.result import RunResult
from trainer.preflight.launch_checks import check_launch
from trainer.tracking.status import log_path

HOST_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")
"""Directories that every host has of its own."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        UsageError: an option is unknown, such as a setting written with dashes.
    """
    parser = command_parser("pretrain.py", __doc__)
    parser.allow_abbrev = False  # an abbreviation such as --deepspeed is an unknown option, which gets advice
    parser.epilog = "settings:\n" + wrapped_settings(describe(RunConfig))
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, or the name of a preset")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings that replace the file's")
    parser.add_argument("--dry-run", action="store_true", help="explain the run (sizes, batches, memory) and stop")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration as YAML and stop")
    parser.add_argument(
        "--check-volumes",
        metavar="DIR[,DIR]",
        help="before a job is submitted: check the settings, and that output_dir is inside one of these directories, "
        "which outlive the job, or checkpoint.upload_to is set; print log file and status command, and stop ('': any "
        "directory except /tmp and others that end with the host)",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run a few steps of every stage at their real sizes, in a directory beside output_dir that is removed "
        "afterwards, and print speed, memory and the hours of the whole run",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks for --dry-run (default: those of the launcher, else 1)",
    )
    add_plan(parser.add_argument_group("plan", "with --dry-run:"))
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        metavar="FILE",
        help="DeepSpeed JSON merged over the settings that follow from the YAML",
    )
    parser.add_argument("--allow-change", action="store_true", help="resume although an incompatible setting changed")
    add_branch(parser)
    parser.add_argument(
        "--verbose", action="store_true", help="on resume, list all source files that changed since the checkpoint"
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    words = sys.argv[1:] if arguments is None else arguments
    file = next((word for word in words if word.endswith((".yaml", ".yml")) and "=" not in word), None)
    if file is not None and not any(word.startswith("--config") for word in words):
        raise UsageError(
            f"{file} is given without --config", fix=f"write --config {file}", code="config-without-option"
        )
    parsed, unknown = parser.parse_known_intermixed_args(words)
    if (option := next((word for word in unknown if word.startswith("-")), None)) is not None:
        raise explain_unknown_option(option, words)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed


def add_branch(parser: argparse.ArgumentParser) -> None:
    """Add the options of a start from a checkpoint of this run or of another one."""
    parser.add_argument(
        "--resume-from",
        type=int,
        metavar="STEP",
        help="branch from this checkpoint, in a new MLflow run below the old one; removes later checkpoints",
    )
    parser.add_argument(
        "--skip-samples",
        action=Joined,
        metavar="A:B[,C:D]",
        help="with --resume-from: predict nothing in samples A to B - 1 of that checkpoint's epoch",
    )
    parser.add_argument(
        "--skip-epoch",
        type=int,
        metavar="N",
        help="epoch of --skip-samples as the log counts it, if it is a later one of the same stage",
    )
    parser.add_argument(
        "--branch-from",
        metavar="RUN:STEP",
        help="start from this checkpoint of another run (its output_dir) and train --stage; rerun it to resume",
    )
    parser.add_argument("--stage", metavar="NAME", help="with --branch-from: the stage of training.stages to train")


def explain_unknown_option(option: str, words: list[str]) -> UsageError:
    """Create the error for an option such as `--learning_rate 1e-4`: settings are written without dashes."""
    from trainer.config.synonyms import explain_synonym

    name, has_value, value = option.lstrip("-").partition("=")
    if not has_value:
        following = words[words.index(option) + 1 : words.index(option) + 2]
        value = following[0] if following and not following[0].startswith("--") and "=" not in following[0] else ""
    dotted = name.replace("-", "_")
    if dotted in set(setting_names(RunConfig)) and ("." in dotted or dotted in ("output_dir", "init_from")):
        fix = f"write {dotted}={value or 'VALUE'}: settings have no dashes"
    elif name == "gpus":  # of earlier releases
        fix = (
            "add --ranks N to --dry-run for the memory per rank on N GPUs; tests/benchmarks/predictions.py has traffic"
        )
    else:
        fix = explain_synonym(name, value) or "write settings as section.field=value without dashes; --help lists all"
    return UsageError(f"unknown option {option.partition('=')[0]}", fix=fix, code="unknown-option")


def main() -> None:
    arguments = parse_arguments()
    explains = check_has_dry_run(arguments)
    config = load_config(arguments.config, [*arguments.overrides, *branch_settings(arguments)])
    config, branch = with_deepspeed_file(config, arguments.deepspeed_config), branch_of(arguments)
    if explains:  # which starts no rank, and takes the number of ranks alone from the environment
        check_output_dir(config.output_dir, config.checkpoint.upload_to)
        if not epochs_of(config.training):
            deepspeed_config(config, world_size(arguments))
        if environment.rank() == 0:
            _explain(config, arguments)
        return

    planned = config
    if arguments.rehearse:
        from trainer.preflight.rehearsal import rehearsal_of

        config = rehearsal_of(planned, os.environ.get("MASTER_PORT", str(os.getpid())))

    def begin(train: Training) -> NoReturn:
        check_launch()
        show_times()
        stop_signal = StopSignal()  # before the imports below, which take seconds
        from trainer.distributed.exit import run_rank

        def remove() -> None:
            shutil.rmtree(config.output_dir, ignore_errors=True)

        def train_and_report() -> int:
            rehearses = arguments.rehearse and environment.rank() == 0
            try:
                forced_end = remove if arguments.rehearse else None
                result = train(stop_signal=stop_signal, verbose=arguments.verbose, on_forced_end=forced_end)
                if rehearses and result.status == "finished":
                    from trainer.checkpoint.data_version import with_epochs_counted
                    from trainer.preflight.rehearsal import report

                    whole = with_epochs_counted(planned)
                    print(report(whole, config, environment.world_size()).text(), flush=True)
                return result.exit_status
            finally:
                if rehearses:
                    remove()

        run_rank(train_and_report)

    finished = start(config, arguments.allow_change, branch, begin)
    if environment.rank() == 0:
        print(finished_text(finished, config), flush=True)


def finished_text(result: RunResult, config: RunConfig) -> str:
    """Describe a run with nothing left to do; its length in the configuration may have been lowered since."""
    training = config.training
    longer, length = "lengthen a stage of training.stages", "training.stages"
    if training.duration is not None:
        length = f"training.{training.duration.setting.partition('=')[0]}"
        longer = f"raise {length}"
    max_steps = result.step if epochs_of(training) else config.max_steps
    loss = result.metrics.get("valid/mlm_loss")
    valid = "" if loss is None else f" | valid mlm loss {loss:.3f}"
    limit = f"/{result.step}" if result.step <= max_steps else f", beyond the {max_steps:,} steps of {length}"
    return (
        f"the run in {result.output_dir} is finished: step {result.step}{limit}{valid} | checkpoint "
        f"{result.checkpoint}\nmetrics: {result.view_hint}\n"
        f"to train longer, {longer}; for a new run, set another output_dir"
    )


def check_has_dry_run(arguments: argparse.Namespace) -> bool:
    """Return whether the run is only to be explained, and check that options of --dry-run come with it.

    Raises:
        UsageError: one comes alone: a run has the ranks of its launcher.
    """
    explains = arguments.print_config or arguments.dry_run or arguments.check_volumes is not None
    others = ("dry_run", "print_config", "check_volumes", "resume_from", "branch_from", "allow_change")
    if arguments.rehearse and (given := next((each for each in others if getattr(arguments, each)), None)):
        raise UsageError(
            f"--rehearse and --{given.replace('_', '-')} exclude each other",
            fix="give one of them: a rehearsal is a new run of a few steps",
            code="contradicting-arguments",
        )
    if arguments.ranks is not None and not explains:
        raise UsageError(
            f"--ranks {arguments.ranks} needs --dry-run",
            fix="add --dry-run, or start that many ranks with the launcher",
            code="option-needs-dry-run",
        )
    for option in ("gpu", "tokens_per_second", "benchmark"):
        value = getattr(arguments, option)
        if value is not None and not arguments.dry_run:
            given = f"--{option.replace('_', '-')} {value:g}" if isinstance(value, float) else f"--{option} {value}"
            raise UsageError(f"{given} needs --dry-run", fix="add it", code="option-needs-dry-run")
    return explains


def check_volumes(config: RunConfig, volumes: list[Path]) -> None:
    """Check that the run's checkpoints outlive its job: in one of the volumes, or in a store.

    Without volumes, any directory counts that is not the host's own (`HOST_DIRECTORIES`).

    Raises:
        UsageError: they do not.
    """
    output_dir = Path(config.output_dir).absolute()
    if config.checkpoint.upload_to is not None:
        return
    if volumes and not any(output_dir.is_relative_to(volume.absolute()) for volume in volumes):
        problem = f"is outside every volume ({', '.join(map(str, volumes))})"
    elif not volumes and any(output_dir.is_relative_to(directory) for directory in HOST_DIRECTORIES):
        problem = "is a directory of one host"
    else:
        return
    raise UsageError(
        f"output_dir={config.output_dir} {problem}, so checkpoints are lost with the job",
        fix="choose a directory that outlives the job, or set checkpoint.upload_to to the URL of a store",
        code="output-dir-outside-volumes",
    )


def world_size(arguments: argparse.Namespace) -> int:
    """Return the number of ranks: --ranks, else that of the launcher, else 1."""
    ranks = arguments.ranks if arguments.ranks is not None else environment.world_size()
    if ranks < 1:
        raise UsageError(f"--ranks {ranks} is less than 1", fix="give 1 or more", code="invalid-number-of-ranks")
    return ranks


def branch_of(arguments: argparse.Namespace) -> Branch | None:
    """Return the branch of the command line, if any.

    Raises:
        UsageError: samples or their epoch are given without the checkpoint they refer to.
    """
    skip = tuple(parse_ranges(arguments.skip_samples, "--skip-samples")) if arguments.skip_samples else ()
    if arguments.resume_from is None and skip:
        raise UsageError(
            f"--skip-samples {arguments.skip_samples} needs the checkpoint whose epoch it counts in",
            fix="add --resume-from STEP",
            code="skip-samples-without-step",
        )
    if arguments.skip_epoch is not None and (arguments.skip_epoch < 0 or not skip):
        raise UsageError(
            f"--skip-epoch {arguments.skip_epoch} is not an epoch (from 0) of --skip-samples",
            fix="give an epoch of 0 or more together with --skip-samples",
            code="skip-epoch-without-samples",
        )
    return None if arguments.resume_from is None else Branch(arguments.resume_from, skip, arguments.skip_epoch)


def branch_settings(arguments: argparse.Namespace) -> list[str]:
    """Return --branch-from and --stage as overrides.

    Raises:
        UsageError: one of them is missing, or --branch-from is not RUN:STEP.
    """
    source, stage = arguments.branch_from, arguments.stage
    if source is None and stage is None:
        return []
    if source is None or stage is None:
        alone, other = ("--stage", "--branch-from RUN:STEP") if source is None else ("--branch-from", "--stage NAME")
        raise UsageError(f"{alone} needs {other}", fix=f"add {other}", code="branch-without-stage")
    run, _, step = source.rpartition(":")
    if not run or not step.isdecimal():
        raise UsageError(
            f"--branch-from {source} is not RUN:STEP",
            fix="write it as in --branch-from runs/stable:20000",
            code="invalid-branch",
        )
    return [f"branch={json.dumps({'run': run, 'step': int(step), 'stage': stage})}"]


def _explain(config: RunConfig, arguments: argparse.Namespace) -> None:
    if arguments.check_volumes is not None:
        check_volumes(config, [Path(expand_home(volume)) for volume in arguments.check_volumes.split(",") if volume])
        print(f"log file: {log_path(Path(config.output_dir))}")
        print(f"status: clozeworks status {shlex.quote(config.output_dir)}")
    if arguments.print_config:
        print(to_yaml(without_secrets(config)), end="")
    if arguments.dry_run:
        from data_prep.storage import storage
        from trainer.preflight.dry_run import explain, resume_line
        from trainer.preflight.plan import plan_run

        storage.configure(config.storage_options)
        run = plan_run(
            config,
            EXTENSIONS,
            world_size=world_size(arguments),
            gpu=arguments.gpu,
            tokens_per_second=arguments.tokens_per_second,
            benchmark=arguments.benchmark,
        )
        deepspeed_config(run.config, run.world_size)
        print(explain(run, expects_shards=any(word.startswith("data.shards") for word in arguments.overrides)))
        if arguments.resume_from is not None:
            print("", resume_line(config, arguments.resume_from), sep="\n")
        if run.uncounted is not None:
            raise run.uncounted


if __name__ == "__main__":
    run_command(main, speaks=environment.local_rank() == 0)  # of its host: hosts may have other files
