"""One command for everything: `clozeworks COMMAND ...`, or `python -m launch COMMAND ...` without an installation.

A subcommand is imported only when it is called, so that help takes no time and each role installs only what it uses.
"""

from __future__ import annotations

import difflib
import importlib
import shutil
import sys
import textwrap
from pathlib import Path

from data_prep.base.errors import UsageError, run_command
from launch.command_table import COMMANDS, GROUPS, REMOVED, Command
from trainer.distributed.rank_environment import local_rank

ENTRY_POINT = "clozeworks"
MODULE = "python -m launch"

USAGE = """\
usage: {prog} COMMAND [ARGUMENTS]
       {prog} COMMAND --help
       {prog} --help | --version
"""
PURPOSE = (
    "Pretrain BERT-style encoders: corpus -> tokenizer -> shards -> training run -> exported and registered model."
)

EPILOG = """\
Every command that writes has --dry-run. A command whose libraries are not installed prints the command that
installs them. Exit status: 0 done, 1 failed, 2 wrong usage or configuration; others are in the command's help.
"""


def main() -> None:
    """Run `clozeworks`; the entry point of pyproject.toml."""
    prog = MODULE if Path(sys.argv[0]).name == "__main__.py" else ENTRY_POINT
    words = sys.argv[1:]
    command = COMMANDS.get(words[0].replace("_", "-")) if words else None
    # The ranks of a host share its files: one of them reports an error.
    speaks = local_rank() == 0
    run_command(lambda: _run(prog, words, command), speaks, extra=command.extra if command else None)


def _run(prog: str, words: list[str], command: Command | None) -> None:
    if command is None:
        _answer(prog, words)
        return
    if command.module.startswith("data_prep."):  # which has subcommands of its own
        from data_prep.__main__ import main as prepare

        sys.argv = [prog, command.name, *words[1:]]
        prepare(prog)
        return
    sys.argv = [f"{prog} {command.name}", *words[1:]]
    importlib.import_module(command.module).main()


def _answer(prog: str, words: list[str]) -> None:
    """Answer a command line without a command.

    Raises:
        UsageError: there is no such command.
    """
    if not words:
        print(help_text(prog), end="", file=sys.stderr)
        sys.exit(2)
    if words in (["-h"], ["--help"], ["help"]):
        print(help_text(prog), end="")
    elif words == ["--version"]:
        from data_prep.base.packages import own_version

        print(f"clozeworks {own_version()}")
    else:
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        closest = f"; the closest name is {near[0]!r}" if near else ""
        fix = REMOVED.get(words[0].replace("_", "-"), f"choose from the list of '{prog} --help'{closest}")
        raise UsageError(f"unknown command {words[0]!r}", fix=fix, code="unknown-command")


def help_text(prog: str) -> str:
    """Return the list of commands in their groups."""
    width, columns = max(map(len, COMMANDS)) + 4, shutil.get_terminal_size().columns
    groups = (
        f"{group}:\n" + "".join(_row(f"  {each.name}".ljust(width), each.summary, columns) for each in commands)
        for group, commands in GROUPS.items()
    )
    usage = USAGE.format(prog=prog) + "\n" + _row("", PURPOSE, columns)
    return "\n".join([usage, *groups, _row("", EPILOG, columns)])


def _row(start: str, text: str, columns: int) -> str:
    return textwrap.fill(text, columns, initial_indent=start, subsequent_indent=" " * len(start)) + "\n"


if __name__ == "__main__":
    main()
