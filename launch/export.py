"""Export a checkpoint as a Hugging Face folder.

    clozeworks export --checkpoint runs/bert --output exports/bert

The folder loads with AutoModel, AutoModelForMaskedLM, pipeline("fill-mask") and SentenceTransformer. The export is
refused if the logits of transformers differ from those of the trained model, or the token ids of AutoTokenizer from
those of preparation. Exit status: 0 exported, 1 refused or failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from data_prep.base.arguments import local_output
from data_prep.base.errors import run_command
from launch.options import add_dry_run, check_new_folder, command_parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("export.py", __doc__)
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="DIR",
        help="a checkpoint (OUTPUT_DIR/checkpoints/step-NNNNNNNN), or a run's output_dir for its newest one",
    )
    parser.add_argument(
        "--output", required=True, type=local_output("--output"), metavar="DIR", help="new folder for the export"
    )
    add_dry_run(parser, "export into a temporary folder and check, but write nothing to --output")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    from trainer.hf_export.export import export_checkpoint

    if arguments.dry_run:
        check_new_folder(arguments.output)
        with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
            report = export_checkpoint(arguments.checkpoint, Path(temporary) / arguments.output.name)
        print(f"checked: {report.parity}")
        print(f"dry run: {report.checkpoint} can be exported to {arguments.output}; nothing was written")
        return
    report = export_checkpoint(arguments.checkpoint, arguments.output)
    print(f"checked: {report.parity}")
    print(f"exported {report.checkpoint}, {report.num_parameters:,} parameters, to {report.output}")


if __name__ == "__main__":
    run_command(main)
