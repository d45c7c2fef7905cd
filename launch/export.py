"""Export a checkpoint as a Hugging Face folder, and any model as ONNX.

    clozeworks export --checkpoint runs/bert --output exports/bert
    clozeworks export --model fitted/model --output exports/fitted --onnx --int8 --int8-data dev.tsv

The folder loads with AutoModel, AutoModelForMaskedLM, pipeline("fill-mask") and SentenceTransformer. The export is
refused if the logits of transformers differ from those of the trained model, or the token ids of AutoTokenizer from
those of preparation. --onnx adds model.onnx (float32) in the layout of optimum, checked against transformers; with
--model also to the folder of a fine-tuned or registered model. --int8 adds model_quantized.onnx if its predictions on
the texts of --int8-data are those of model.onnx. Exit status: 0 exported, 1 refused or failed, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from pathlib import Path

from data_prep.base.arguments import OnceFlag, local_output
from data_prep.base.errors import run_command
from launch.options import MODEL_HELP, add_dry_run, add_tracking_uri, check_new_folder, command_parser


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("export.py", __doc__)
    parser.usage = (
        "%(prog)s --checkpoint DIR --output DIR [OPTIONS]\n       %(prog)s --model MODEL --onnx --output DIR [OPTIONS]"
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="a checkpoint (OUTPUT_DIR/checkpoints/step-NNNNNNNN), or a run's output_dir for its newest one",
    )
    parser.add_argument(
        "--output", required=True, type=local_output("--output"), metavar="DIR", help="new folder for the export"
    )
    add_dry_run(parser, "export into a temporary folder and check, but write nothing to --output")
    subject.add_argument("--model", metavar="MODEL", help=f"with --onnx: {MODEL_HELP}")
    add_onnx(parser)
    read = parser.parse_args(arguments)
    if read.model is not None and read.onnx is None:
        parser.error("--model is only valid with --onnx; it is a Hugging Face folder already")
    if read.int8 and read.onnx is None:
        parser.error("--int8 is only valid with --onnx")
    if read.int8 and read.int8_data is None:
        parser.error("--int8 needs texts on which its predictions are checked; give them with --int8-data FILE")
    named = ("int8_data", "text_column", "pair_column", "label_column", "quoting", "min_agreement")
    if not read.int8 and (lone := [name for name in named if getattr(read, name) is not None]):
        parser.error(f"--{lone[0].replace('_', '-')} is only valid with --int8")
    return read


def add_onnx(parser: argparse.ArgumentParser) -> None:
    """Add the options of the ONNX export."""
    group = parser.add_argument_group("ONNX (extra onnx)")
    group.add_argument(
        "--onnx",
        nargs="?",
        const="model",
        choices=("model", "encoder"),
        help="also write model.onnx: the model with its head (default), or the encoder alone, for hidden states",
    )
    add_tracking_uri(group)
    group.add_argument("--int8", action="store_true", help="also write model_quantized.onnx, with matrices as int8")
    group.add_argument("--int8-data", type=Path, metavar="FILE", help="table of texts that --int8 is checked on")
    group.add_argument(
        "--text-column", metavar="NAME", help="its column of texts (default: as in the training data, or text)"
    )
    group.add_argument(
        "--pair-column", metavar="NAME", help="its column of second texts (default: as in the training data)"
    )
    group.add_argument("--label-column", metavar="NAME", help="its column of labels, for scores of both files")
    group.add_argument(
        "--quoting", action=OnceFlag, help="whether quotation marks in tsv and csv enclose cells, as in predict"
    )
    group.add_argument(
        "--min-agreement",
        type=share,
        metavar="SHARE",
        help="minimum share of equal predictions in float32 and int8 (default 0.99)",
    )


def share(text: str) -> float:
    """Read a number from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return value


def main() -> None:
    arguments = parse_arguments()
    if arguments.onnx is not None:
        # By name, as `launch/__main__.py` imports a command: its libraries are those of another extra.
        importlib.import_module("launch.export_onnx").export_onnx(arguments)
        return
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
