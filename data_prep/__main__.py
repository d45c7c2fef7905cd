"""The command line of data preparation: `python -m data_prep COMMAND ...`.

Little is imported here: every worker process imports this module once more.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from types import ModuleType

from data_prep.base.errors import run_command
from data_prep.executors.worker_server import needs_workers, start_worker_server

COMMANDS = ("tokenizer", "shards", "merge", "remove", "verify", "inspect", "stats")

_DOTTED_NAME = re.compile(r"[a-z_]+(\.[a-z_]+)+")


def main(prog: str = "python -m data_prep") -> None:
    """Parse the command line and run its command; `prog` is how help names the program.

    Raises:
        UserError: the command did not do all that it was asked for.
    """
    if needs_workers(sys.argv[1:]):
        start_worker_server()
    parser = argparse.ArgumentParser(
        prog=prog, description="Prepare a corpus: train a tokenizer, make shards, check and show them."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = _command_modules()
    of_commands = {
        name: subparsers.add_parser(name, help=module.HELP, description=module.__doc__)
        for name, module in modules.items()
    }
    for name, module in modules.items():
        module.add_arguments(of_commands[name])
    arguments, rest = parser.parse_known_args()
    overrides = _overrides(of_commands[arguments.command], arguments, rest)
    modules[arguments.command].run(arguments, overrides)


def _command_modules() -> dict[str, ModuleType]:
    """The module of the command that is asked for; of all where that is none, so that they are listed."""
    asked = sys.argv[1:2]
    names = asked if asked and asked[0] in COMMANDS else COMMANDS
    return {name: importlib.import_module(f"data_prep.commands.{name}") for name in names}


def _overrides(parser: argparse.ArgumentParser, arguments: argparse.Namespace, rest: list[str]) -> list[str]:
    """The `section.name=value` words, wherever on the command line they stand (also after the files of --input)."""
    from data_prep.config.preparation_config import PreparationConfig

    known = (*PreparationConfig.model_fields,)

    def is_override(word: str) -> bool:
        name, separator, _ = word.partition("=")
        # A dotted name is no folder of a partitioned corpus (lang=en/*.jsonl), so it is a setting, maybe misspelt.
        is_setting = name.partition(".")[0] in known or _DOTTED_NAME.fullmatch(name) is not None
        return bool(separator) and is_setting and not os.path.exists(word)

    if any(word.startswith("-") or "=" not in word for word in rest) or (rest and "input" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "input" not in arguments:
        return []
    overrides = [*rest, *filter(is_override, arguments.input)]
    arguments.input = [word for word in arguments.input if not is_override(word)]
    return overrides


if __name__ == "__main__":
    run_command(main)
