"""The command line of data preparation: `python -m data_prep COMMAND ...`.

The module imports little: help is quick, and the workers' server starts before the command's own imports.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from contextlib import suppress

from data_prep.base.arguments import CommandParser, HelpFormatter
from data_prep.base.errors import run_command
from data_prep.base.garbage import collect_rarely
from data_prep.executors.worker_server import needs_workers, start_worker_server

GROUPS = {
    "prepare": {
        "tokenizer": "train a tokenizer on text files",
        "shards": "make a data set of text files, or add text to one",
        "merge": "finish a data set that several jobs prepared with shards --shard-range",
    },
    "inspect": {
        "verify": "check every byte and count of a data set",
        "inspect": "show decoded documents of a data set, or how its tokenizer splits a text",
        "stats": "show counts, lengths and frequencies of a data set, or write them as a web page",
    },
    "maintain": {
        "remove": "remove a source or documents from a data set (takedown), as a new version",
    },
}
COMMANDS_PACKAGE = "data_prep.commands"
COMMANDS = {name: text for commands in GROUPS.values() for name, text in commands.items()}

_DOTTED_NAME = re.compile(r"[a-z_]+(\.[a-z_]+)+")
_FIRST_STEPS = """first steps:
  python -m data_prep tokenizer --input 'corpus/*.jsonl' --output tokenizer --vocab-size 32000
  python -m data_prep shards --input 'corpus/*.jsonl' --tokenizer tokenizer --output shards
  python -m data_prep verify shards

Each command has its own help: python -m data_prep COMMAND --help
From Python: from data_prep import train_tokenizer, prepare, verify, open_dataset"""


def main(prog: str = "python -m data_prep") -> None:
    """Parse the command line and run its command; `prog` is the program's name in the help.

    Raises:
        UserError: the command did not do everything that it was asked for.
    """
    collect_rarely()
    words = sys.argv[1:]
    with suppress(OSError):  # a deleted working folder is reported where a path needs it
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())  # for `module:function` of the user's, as with python -m
    name = words[0] if words else ""
    if needs_workers(words):
        start_worker_server(f"{COMMANDS_PACKAGE}.{name}")
    if name not in COMMANDS:
        _answer_without_command(words)
    module = importlib.import_module(f"{COMMANDS_PACKAGE}.{name}")
    parser = CommandParser(
        prog=f"{prog} {name}",
        description=(module.__doc__ or "").partition(": ")[2],
        formatter_class=HelpFormatter,
    )
    module.add_arguments(parser)
    positionals = [str(action.metavar or action.dest) for action in parser._actions if not action.option_strings]
    settings = [] if positionals else ["[section.name=value ...]"]
    parser.usage = " ".join([parser.prog, *positionals, "[options]", *settings])
    arguments, rest = parser.parse_known_args(words[1:])
    module.run(arguments, _overrides(parser, arguments, rest))


def _answer_without_command(words: list[str]) -> None:
    """Print the help, or refuse what is not a command; never returns."""
    lines = ["usage: python -m data_prep COMMAND ...", "", "Prepare text for pretraining: a tokenizer and shards.", ""]
    for group, commands in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<11}{text}" for name, text in commands.items()), ""]
    lines.append(_FIRST_STEPS)
    if words and words[0] in ("-h", "--help"):
        print("\n".join(lines))
        sys.exit(0)
    if not words:
        print("\n".join(lines), file=sys.stderr)
        sys.exit(2)
    near = difflib.get_close_matches(words[0], COMMANDS, 1)
    closest = f"; the closest name is {near[0]!r}" if near else ""
    CommandParser().refuse(
        f"unknown command {words[0]!r}", fix=f"give one of {', '.join(COMMANDS)}{closest}", code="unknown-command"
    )


def _overrides(parser: CommandParser, arguments: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return the `section.name=value` words, wherever on the command line they are (also after --input's files)."""
    from data_prep.config.preparation_config import PreparationConfig

    known = (*PreparationConfig.model_fields,)

    def is_override(word: str) -> bool:
        name, separator, _ = word.partition("=")
        # A dotted name is not a folder of a partitioned corpus (lang=en/*.jsonl), so it is a setting, maybe misspelt.
        is_setting = name.partition(".")[0] in known or _DOTTED_NAME.fullmatch(name) is not None
        return bool(separator) and is_setting and not os.path.exists(word)

    if any(word.startswith("-") or "=" not in word for word in rest) or (rest and "input" not in arguments):
        fix = f"see `{parser.prog} --help`"
        if near := _nearest_options(parser, rest):
            fix = f"write {', '.join(near)}, or {fix}"
        parser.refuse(f"unrecognized arguments: {' '.join(rest)}", fix=fix)
    if "input" not in arguments:
        return []
    overrides = [*rest, *filter(is_override, arguments.input)]
    arguments.input = [word for word in arguments.input if not is_override(word)]
    return overrides


def _nearest_options(parser: CommandParser, words: list[str]) -> list[str]:
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    return [match for word in words for match in difflib.get_close_matches(word.partition("=")[0], known, 1, 0.7)]


if __name__ == "__main__":
    run_command(main)
