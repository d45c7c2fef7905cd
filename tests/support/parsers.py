"""The parsers of all commands, as the commands make them: what an option is called, and what a command line means."""

from __future__ import annotations

import argparse
import importlib
import sys
from functools import cache
from unittest import mock

from launch.command_table import COMMANDS, DATA_PREP


class _Made(Exception):
    """Carries the parser of a command that is about to parse."""


@cache
def parser_of(command: str) -> argparse.ArgumentParser | None:
    """The parser of `clozeworks COMMAND`; None for `ranks`, which hands all its arguments to torchrun."""

    def stop(parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        raise _Made(parser)

    module = COMMANDS[command].module
    words = ["clozeworks", command] if module == DATA_PREP else [f"clozeworks {command}"]
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
        mock.patch.object(argparse.ArgumentParser, "parse_known_intermixed_args", stop),
        mock.patch("data_prep.__main__.needs_workers", return_value=False),
    ):
        try:
            main = importlib.import_module(module).main
            main("clozeworks") if module == DATA_PREP else main()
        except _Made as made:
            parser = made.args[0]
            assert isinstance(parser, argparse.ArgumentParser)
            return parser
        except SystemExit:
            return None
    raise AssertionError(f"{command} parses nothing")
