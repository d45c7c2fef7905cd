"""Pretrain an encoder: `deepspeed launch/pretrain.py --config FILE [section.field=value ...]`.

The same command again resumes from the newest complete checkpoint in `output_dir`. `--dry-run` explains the run
without GPU or shards. Exit status: 0 all steps done, 2 wrong usage or configuration, 1 failed on the way, 75 stopped
by a signal (or the loss of its launcher) after saving, 76 a rank was lost, hung or not reached (start the same command
again in both cases).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from data_prep.base.arguments import Joined, refuse_url
from data_prep.base.errors import UsageError, run_command
from data_prep.base.settings import describe, load_settings, to_yaml
from data_prep.base.urls import redact
from launch.options import command_parser
from trainer.config.run_config import RunConfig, without_secrets
from trainer.data.sample_range import Branch, parse_ranges
from trainer.distributed.stacks import log_environment
from trainer.engine.deepspeed_config import deepspeed_config
from trainer.engine.deepspeed_file import with_deepspeed_file
from trainer.preflight.launch_checks import check_launch


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("pretrain.py", __doc__)
    parser.epilog = "settings:\n" + "\n".join(describe(RunConfig))
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file, or the name of a preset")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value", help="settings that replace the file's")
    parser.add_argument("--dry-run", action="store_true", help="explain the run (sizes, batches, memory) and stop")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration as YAML and stop")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="ranks that --dry-run assumes (default: those of the launcher, else 1)",
    )
    parser.add_argument(
        "--gpus",
        action=Joined,
        metavar="N[,N]",
        help="with --dry-run: memory and traffic of a step at these numbers of GPUs as well",
    )
    parser.add_argument(
        "--deepspeed_config",
        "--deepspeed-config",
        metavar="FILE",
        help="DeepSpeed JSON merged over what the YAML gives",
    )
    parser.add_argument(
        "--allow-change", action="store_true", help="resume although a setting changed that makes it another run"
    )
    parser.add_argument(
        "--resume-from",
        type=int,
        metavar="STEP",
        help="go back to the checkpoint of this step, in a new MLflow run under the old one; later checkpoints go",
    )
    parser.add_argument(
        "--skip-samples",
        action=Joined,
        metavar="A:B[,C:D]",
        help="with --resume-from: predict nothing in the samples A to B - 1 of that checkpoint's epoch",
    )
    parser.add_argument(
        "--skip-epoch",
        type=int,
        metavar="N",
        help="epoch of --skip-samples, where the log names a later one of the same stage",
    )
    parser.add_argument("--local_rank", "--local-rank", type=int, default=None, help=argparse.SUPPRESS)
    return parser.parse_intermixed_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    check_has_dry_run(arguments)
    config = load_settings(RunConfig, arguments.config, arguments.overrides)
    check_is_path(config.output_dir)
    config = with_deepspeed_file(config, arguments.deepspeed_config)
    branch = branch_of(arguments)
    explains = arguments.print_config or arguments.dry_run
    if explains or world_size(arguments) == 1:  # several ranks compare what they run first, and refuse it together
        deepspeed_config(config, world_size(arguments))
    if explains:
        if is_first_rank():
            _explain(config, arguments)
        return
    check_output_dir(config.output_dir)
    check_launch()
    os.environ.update(log_environment(os.environ))  # before torch is imported
    from trainer.distributed.stop_signal import StopSignal

    stop_signal = StopSignal()  # before the imports below, which take seconds
    from trainer.distributed.exit import run_rank
    from trainer.loop.train import train

    run_rank(lambda: train(config, arguments.allow_change, branch, stop_signal))


def check_has_dry_run(arguments: argparse.Namespace) -> None:
    """Refuse what only explains a run where the run would start: its ranks are the launcher's.

    Raises:
        UsageError: there is such an option alone.
    """
    if arguments.ranks is not None and not arguments.dry_run and not arguments.print_config:
        raise UsageError(f"--ranks {arguments.ranks} is for --dry-run; give both, or start that many by the launcher")
    if arguments.gpus is not None and not arguments.dry_run:
        raise UsageError(f"--gpus {arguments.gpus} is for --dry-run; give both")


def check_is_path(output_dir: str) -> None:
    """Refuse a URL: a local folder of that name would be made, and lost with the node.

    Not the schema's, for checkpoints of earlier releases may hold one.

    Raises:
        UsageError: it is one.
    """
    remedy = "set a path, and checkpoint.upload_to to the URL for copies of the checkpoints there"
    refuse_url(f"output_dir={redact(output_dir)}", output_dir, f"a run works in a local or shared folder; {remedy}")


def check_output_dir(output_dir: str) -> None:
    """Refuse a folder that cannot be made, since a file or a link to nothing lies at its place or above it.

    Raises:
        UsageError: one does.
    """
    path = Path(output_dir)
    link = next((place for place in (path, *path.parents) if place.is_symlink() and not place.exists()), None)
    if link is not None:
        where = f"output_dir={output_dir} leads over {link}, a link to {os.readlink(link)}, which is not there"
        raise UsageError(f"{where}; make that folder, or name another")
    file = next((place for place in (path, *path.parents) if place.is_file()), None)
    if file is not None:
        where = "" if file == path else f" lies in {file}, which"
        raise UsageError(f"output_dir={output_dir}{where} is a file; name a folder")


def world_size(arguments: argparse.Namespace) -> int:
    """The ranks to assume: those of --ranks, else the launcher's, else one."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if not launched.isdigit():
        raise UsageError(f"WORLD_SIZE={launched} in the environment is no number; start the ranks with a launcher")
    ranks = arguments.ranks if arguments.ranks is not None else int(launched)
    if ranks < 1:
        raise UsageError(f"--ranks {ranks} is not a number of ranks; give 1 or more")
    return ranks


def gpu_numbers(text: str) -> list[int]:
    """The numbers of --gpus."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"--gpus {text} is not a list of numbers such as 8,64,512; fix it")
    return [int(word) for word in words]


def branch_of(arguments: argparse.Namespace) -> Branch | None:
    """The branch that the command line asks for, if any.

    Raises:
        UsageError: samples or their epoch are named without what they count in.
    """
    skip = tuple(parse_ranges(arguments.skip_samples, "--skip-samples")) if arguments.skip_samples else ()
    if arguments.resume_from is None and skip:
        raise UsageError("--skip-samples counts in the epoch of a checkpoint; name its step with --resume-from STEP")
    if arguments.skip_epoch is not None and (arguments.skip_epoch < 0 or not skip):
        raise UsageError(f"--skip-epoch {arguments.skip_epoch} is the epoch (from 0) of --skip-samples; give both")
    return None if arguments.resume_from is None else Branch(arguments.resume_from, skip, arguments.skip_epoch)


def is_first_of_host() -> bool:
    """Whether this process is the first rank of its host, whose files others may not have (or has no launcher)."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def is_first_rank() -> bool:
    """Whether this process is rank 0 of its launcher (or has none)."""
    return os.environ.get("RANK", "0") == "0"


def _explain(config: RunConfig, arguments: argparse.Namespace) -> None:
    others = gpu_numbers(arguments.gpus) if arguments.gpus else []
    if arguments.print_config:
        print(to_yaml(without_secrets(config)), end="")
    if arguments.dry_run:
        from trainer.distributed.process_group import device_type
        from trainer.model.numerics import with_own_precision
        from trainer.preflight.dry_run import explain, resume_line

        config = with_own_precision(config, device_type())
        print(explain(config, world_size(arguments)))
        if arguments.resume_from is not None:
            print("", resume_line(config, arguments.resume_from), sep="\n")
        if others:
            from trainer.preflight.scale import scale_lines

            print("", "Other numbers of GPUs (on paper)", *scale_lines(config, others), sep="\n")


if __name__ == "__main__":
    run_command(main, speaks=is_first_of_host())
