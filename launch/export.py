"""Export a checkpoint as a Hugging Face folder: `launch/export.py --checkpoint DIR --output DIR`.

The folder loads with AutoModel, AutoModelForMaskedLM, pipeline("fill-mask") and SentenceTransformer. It is
written only if transformers gives the logits of the trained model and AutoTokenizer the ids of preparation.
Exit status: 0 exported, 2 wrong usage, 1 refused or failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from data_prep.base.arguments import local_output
from data_prep.base.errors import run_command
from launch.options import command_parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("export.py", __doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="DIR",
        help="a checkpoint (OUTPUT_DIR/checkpoints/step-...), or a run's OUTPUT_DIR for its newest one",
    )
    parser.add_argument(
        "--output", required=True, type=local_output("--output"), metavar="DIR", help="new folder for the export"
    )
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    from trainer.hf_export.export import export_checkpoint  # takes seconds to import, which --help need not wait for

    report = export_checkpoint(arguments.checkpoint, arguments.output)
    print(f"checked: {report.parity}")
    print(f"exported {report.checkpoint}, {report.num_parameters:,} parameters, to {report.output}")


if __name__ == "__main__":
    run_command(main)
