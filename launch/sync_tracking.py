"""Send the metrics of a run to MLflow from this host.

    clozeworks sync-tracking OUTPUT_DIR

This is for clusters whose compute nodes cannot reach the server: run the command on a login node that sees OUTPUT_DIR,
during the run or after it, any number of times. Each metric arrives once, in the MLflow run of the training run.
Exit status: 0 everything was sent, 1 not everything, 2 wrong usage.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_prep.base.errors import UsageError, run_command
from data_prep.base.logs import logger
from launch.options import add_tracking_uri, command_parser

LOG = logger(__name__)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("sync_tracking.py", __doc__)
    parser.add_argument(
        "output_dir", type=Path, metavar="OUTPUT_DIR", help="output directory of a pretraining or fine-tuning run"
    )
    add_tracking_uri(parser)
    parser.add_argument("--dry-run", action="store_true", help="list the folders that would be sent, and send nothing")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    if not arguments.output_dir.is_dir():
        state = "is not a directory" if arguments.output_dir.exists() else "does not exist"
        raise UsageError(
            f"{arguments.output_dir} {state}", fix="give the OUTPUT_DIR of a run", code="missing-output-dir"
        )
    from trainer.tracking.sync import sync, tracking_folders

    if arguments.dry_run:
        for folder in tracking_folders(arguments.output_dir):
            print(f"would send {folder}")
        return
    for synced in sync(arguments.output_dir, arguments.tracking_uri, LOG.warning):
        print(
            f"{synced.folder}: sent {synced.num_bytes:,} bytes of metrics and {synced.num_artifacts} artifacts; "
            f"the run is {synced.status}\n  {synced.view_hint}",
            flush=True,
        )


if __name__ == "__main__":
    run_command(main)
