"""Options, input texts and checks of output paths that several commands share."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from data_prep.base.arguments import at_least
from data_prep.base.errors import UsageError


def command_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of a command, whose help shows the module's docstring as it stands."""
    return argparse.ArgumentParser(
        prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_model(parser: argparse.ArgumentParser, or_run: bool = False) -> None:
    """Add --model; with `or_run` the command takes a run's own checkpoint too."""
    folder = "a Hugging Face folder, or a run's output_dir" if or_run else "or a Hugging Face folder"
    what = f"models:/NAME@ALIAS, models:/NAME/VERSION, runs:/..., {folder}"
    parser.add_argument("--model", required=True, metavar="MODEL", help=what)


def add_tracking_uri(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--tracking-uri", metavar="URI", help="MLflow server (default MLFLOW_TRACKING_URI, else sqlite in ./mlflow.db)"
    )


def add_no_quoting(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--no-quoting", action="store_true", help="quotation marks of tsv and csv are plain characters")


def add_batch_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-size", type=at_least(1), default=32, metavar="N", help="texts at once (default 32)")


def lines_of_stdin() -> list[str]:
    """The lines of standard input, without a byte order mark.

    Raises:
        UsageError: it is not UTF-8.
    """
    data = sys.stdin.buffer.read()
    try:
        return lines_of(data)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"line {line:,} of standard input is not UTF-8 text ({error.reason}); convert it, for instance by iconv"
        ) from None


def lines_of(data: bytes) -> list[str]:
    """The lines of UTF-8 text, without a byte order mark and the empty line behind the last line's end.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    lines = data.decode("utf-8-sig").split("\n")  # other line separators may stand in a text
    return lines[:-1] if not lines[-1] else lines


def check_utf8(texts: Sequence[str]) -> None:
    """Refuse texts of the command line that were not UTF-8; Python has put half characters for such bytes."""
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        raise UsageError("the text on the command line is not UTF-8; set a UTF-8 locale, or give it on standard input")


def check_new_file(path: Path, option: str) -> None:
    """Refuse a file to write in a folder that is not there or takes no file, before any work is done for it."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it first, or give another file")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a folder; give the name of a file")
    _check_takes_files(path.parent, option, path)


def check_new_folder(path: Path, option: str) -> None:
    """Refuse a folder to make that is there with something in it, or that cannot be made.

    Raises:
        UsageError: naming the option.
    """
    if path.exists() and not path.is_dir():
        raise UsageError(f"{option} {path} is a file; give a new folder")
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"{option} {path} is not empty; give a new folder, or remove this one first")
    there = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if not there.is_dir():
        raise UsageError(f"{option} {path} cannot be made: {there} is a file; give another folder")
    _check_takes_files(there, option, path)


def _check_takes_files(folder: Path, option: str, path: Path) -> None:
    """Refuse a folder in which nothing can be written, by a file without a name that is gone at once."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"{option} {path} cannot be written: {folder} takes no file ({error.strerror}); give another place"
        ) from None
