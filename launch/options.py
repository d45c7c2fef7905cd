"""Options, input texts and checks of output paths that several commands share."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from data_prep.base.arguments import CommandParser, HelpFormatter, at_least
from data_prep.base.errors import UsageError

MODEL_HELP = (
    "models:/NAME@ALIAS, models:/NAME/VERSION, runs:/RUN_ID/PATH, a run's output_dir, a checkpoint, an export or "
    "another Hugging Face folder, or a name on the Hugging Face Hub"
)


def command_parser(name: str, description: str | None) -> CommandParser:
    """Return the parser of a command, whose help is the module's docstring, wrapped to the terminal.

    Usage and errors name the command as it was called: `clozeworks NAME` or `NAME.py`. A wrong command line is one line
    of error with the code `usage`, and ends with status 2.
    """
    called = sys.argv[0]
    prog = called if called.startswith(("clozeworks ", "python -m launch ")) else name
    return CommandParser(prog=prog, description=description, formatter_class=HelpFormatter)


def add_config(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """Add the configuration of a training run: --config and overrides."""
    group = parser.add_argument_group("configuration")
    group.add_argument("--config", required=required, metavar="FILE", help="YAML file, or the name of a preset")
    group.add_argument("overrides", nargs="*", metavar="section.field=value", help="overrides of the file's settings")


def add_plan(parser: argparse._ActionsContainer) -> None:
    """Add what a plan of a run needs beside its configuration: --gpu, and a measured speed."""
    parser.add_argument(
        "--gpu", metavar="NAME", help="GPU of every rank, if it is not in this host: h100-80, h200-141 or a100-80"
    )
    parser.add_argument(
        "--tokens-per-second", type=float, metavar="N", help="measured throughput of all ranks, for hours and cost"
    )
    parser.add_argument(
        "--benchmark",
        type=Path,
        metavar="FILE",
        help="result of clozeworks benchmark --output for this model, for hours and cost (assumes that each rank "
        "computes as fast as there)",
    )


def add_model(parser: argparse._ActionsContainer, or_run: bool = True) -> None:
    """Add --model, which every command that uses a model understands in the same way."""
    parser.add_argument("--model", required=True, metavar="MODEL", help=MODEL_HELP)


def add_tracking_uri(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--tracking-uri",
        metavar="URI",
        help="MLflow server (default: MLFLOW_TRACKING_URI, or else sqlite:///mlflow.db in this folder)",
    )


def add_no_quoting(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--no-quoting", action="store_true", help="read quotation marks in tsv and csv as plain characters"
    )


def add_batch_size(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--batch-size", type=at_least(1), default=32, metavar="N", help="texts per batch (default 32)")


def add_dry_run(parser: argparse._ActionsContainer, what: str) -> None:
    """Add --dry-run; `what` completes "check everything, and write ..."."""
    parser.add_argument("--dry-run", action="store_true", help=what)


def lines_of_stdin() -> list[str]:
    """Return the lines of standard input, without a byte order mark.

    Raises:
        UsageError: it is not UTF-8.
    """
    data = sys.stdin.buffer.read()
    try:
        return lines_of(data)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"line {line:,} of standard input is not UTF-8 ({error.reason})",
            fix="convert the text to UTF-8, for example with iconv",
            code="input-not-utf8",
        ) from None


def lines_of(data: bytes) -> list[str]:
    """Return the lines of UTF-8 text, without a byte order mark and the empty line after the last line end.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    lines = data.decode("utf-8-sig").split("\n")  # other line separators can be part of a text
    return lines[:-1] if not lines[-1] else lines


def check_utf8(texts: Sequence[str]) -> None:
    """Check the encoding of texts of the command line; Python represents undecodable bytes as lone surrogates.

    Raises:
        UsageError: a text is not UTF-8.
    """
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise UsageError(
            "the text on the command line is not UTF-8",
            fix="set a UTF-8 locale, or give the text on standard input",
            code="input-not-utf8",
        )


def check_new_file(path: Path) -> None:
    """Check before any work that the file of --output can be written.

    Raises:
        UsageError: its folder does not exist or is not writable, or the path is a folder.
    """
    if not path.parent.is_dir():
        raise UsageError(
            f"--output {path}: the folder {path.parent} does not exist",
            fix="make the folder first, or give another file",
            code="missing-output-folder",
        )
    if path.is_dir():
        raise UsageError(f"--output {path} is a folder", fix="give the name of a file", code="output-is-a-folder")
    _check_writable(path.parent, path)


def check_new_folder(path: Path) -> None:
    """Check before any work that the folder of --output is new or empty and can be made.

    Raises:
        UsageError: it is not, or cannot.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"--output {path} is a file", fix="give a new folder", code="output-is-a-file")
    if path.exists() and any(path.iterdir()):
        raise UsageError(
            f"--output {path} is not empty", fix="give a new folder, or remove this one first", code="output-not-empty"
        )
    parent = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not parent.is_dir():
        raise UsageError(
            f"--output {path} cannot be made because {parent} is a file",
            fix="give another folder",
            code="output-is-a-file",
        )
    _check_writable(parent, path)


def _check_writable(folder: Path, path: Path) -> None:
    """Check by writing a nameless temporary file, which disappears at once."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"--output {path} cannot be written: {folder} is not writable ({error.strerror})",
            fix="give a path in another folder",
            code="output-not-writable",
        ) from None


def unknown_stage(stage: int, num_stages: int) -> UsageError:
    return UsageError(
        f"--stage {stage} does not exist: the run has stages 0 to {num_stages - 1}",
        fix="give one of them",
        code="unknown-stage",
    )
