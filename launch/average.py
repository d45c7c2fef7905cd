"""Average the weights of a run's last checkpoints, and export the mean.

    clozeworks average RUN --last 4 --output DIR

Averaging replaces or follows the decay of the learning rate: the mean of checkpoints of the stable phase often scores
better than each of them. --weights one_minus_sqrt weighs the checkpoints as a 1-sqrt decay over them would weigh their
updates; uniform is the plain mean. Any ZeRO stage and number of ranks may have written the checkpoints. The export
passes the same parity gate as `clozeworks export`, and its provenance names the averaged steps. The optimizer's state
is not averaged: the result is a model to use, evaluate or fine-tune, not a checkpoint to resume.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from data_prep.base.arguments import at_least, local_output
from data_prep.base.errors import run_command
from launch.options import command_parser

WEIGHTS = ("uniform", "one_minus_sqrt")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = command_parser("average.py", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="output directory of a run with at least N checkpoints")
    parser.add_argument("--last", type=at_least(2), required=True, metavar="N", help="number of newest checkpoints")
    parser.add_argument(
        "--weights", choices=WEIGHTS, default="uniform", help="coefficients of the mean (default %(default)s)"
    )
    parser.add_argument(
        "--output", required=True, type=local_output("--output"), metavar="DIR", help="new directory for the export"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the coefficients and write nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    from trainer.checkpoint.average import average_coefficients, stage_warning  # imports torch; --help need not wait
    from trainer.checkpoint.format import CheckpointFolder
    from trainer.hf_export.export import export_average, last_checkpoints

    folders = last_checkpoints(options.run, options.last)
    for folder, coefficient in zip(folders, average_coefficients(len(folders), options.weights), strict=True):
        print(f"{folder.name}  {coefficient:.4f}")
    if warning := stage_warning([CheckpointFolder(folder).read_state() for folder in folders]):
        print(warning, file=sys.stderr)
    if options.dry_run:
        print(f"dry run: the export would be written to {options.output}")
        return
    report = export_average(options.run, options.last, options.weights, options.output)
    print(f"checked: {report.parity}")
    print(f"exported the mean of {len(folders)} checkpoints, {report.num_parameters:,} parameters, to {report.output}")


if __name__ == "__main__":
    run_command(main)
