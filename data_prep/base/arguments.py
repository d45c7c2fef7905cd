"""Arguments and help texts of every command: bounds are checked, and no value of a repeated option is dropped."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from data_prep.base.errors import UsageError
from data_prep.base.known_secrets import hide_secrets
from data_prep.base.local_paths import expand_home, warn_of_variables
from data_prep.base.urls import redact

LARGEST_INTEGER = 2**63 - 1  # of 64 bits
LARGEST_PORT = 65_535  # of 16 bits


def at_least(minimum: int, maximum: int = LARGEST_INTEGER) -> Callable[[str], int]:
    """Return the argparse `type` of a whole number from `minimum` to `maximum`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number of {minimum} or more, got {text!r}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"must be at most {maximum}, got {text}")
        return value

    return read


def local_output(option: str) -> Callable[[str], Path]:
    """Return the argparse `type` of a local path to write; plain `Path` would turn a URL into a folder `s3:`."""

    def read(text: str) -> Path:
        if "://" in text:
            raise UsageError(
                f"{option} {redact(text)} is a URL, and it must be a local path",
                fix="give a local path",
                code="local-path-required",
            )
        return Path(text)

    return read


class Joined(argparse.Action):
    """An option with a comma-separated list: repeating it adds values."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, value if before is None else f"{before},{value}")


class Once(argparse.Action):
    """An option with a single value: repeating it is an error. `CommandParser` takes it where no action is named."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        assert isinstance(parser, CommandParser), "it knows what was given before"
        if option is not None:  # not a positional argument
            parser.refuse_repetition(self.dest, option, value)
        setattr(namespace, self.dest, value)


class OnceFlag(argparse.BooleanOptionalAction):
    """A pair of options `--NAME` and `--no-NAME`, of which one can be given, once."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        assert isinstance(parser, CommandParser), "it knows what was given before"
        parser.refuse_repetition(self.dest, str(option), option)
        super().__call__(parser, namespace, value, option)


_WIDEST = 100
_SHOWN_CHARACTERS = 200
_TABLE_ROW = re.compile(r"( +\S.*? {2,})(\S.*)")
_CONTINUED_ROW = re.compile(r"( {16,})(\S.*)")
_WORD = re.compile(r'(?:--[\w-]+ (?![-\[]))?(?:"[^"]*"|\[[^]]*\]|\S+)')
"""A word of a command; an option goes with its value, and brackets stay together."""


_PATH_METAVARS = re.compile(r"FILE(\.\w+)?|DIR|FOLDER|PATH|OUTPUT_DIR|MODEL|DATASET|RUN|RUN:STEP|URI")
"""Names of values that are a local path, or may be one."""


def is_path(action: argparse.Action) -> bool:
    """Whether the metavar of an option or argument says that its values are local paths, or may be."""
    return isinstance(action.metavar, str) and _PATH_METAVARS.fullmatch(action.metavar) is not None


class CommandParser(argparse.ArgumentParser):
    """argparse's parser, whose errors are one line in the form of all errors of the project.

    An option with a single value is refused when it is given again: argparse would drop the first value. Options that
    collect values name their action (`Joined`, append, extend).

    `~` is expanded in the values of options and arguments whose metavar names a path.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for action in (None, "store"):
            self.register("action", action, Once)
        self._given: dict[str, Any] = {}
        self.fixes_of_repetition: dict[str, str] = {}
        """What to do instead of giving an option again, by destination, where it is not to repeat the command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line; options of an earlier one do not count as given."""
        self._given.clear()
        return super().parse_known_args(args, namespace)

    def refuse_repetition(self, dest: str, option: str, value: Any) -> None:
        """End the process with status 2 if an option of this destination was given before."""
        if dest in self._given:
            first, again = (redact(str(each))[:_SHOWN_CHARACTERS] for each in (self._given[dest], value))
            self.refuse(
                f"{option} is given twice, {first} and {again}",
                fix=self.fixes_of_repetition.get(dest, "give it once, or run the command once for each"),
                code="option-given-twice",
            )
        self._given[dest] = value

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        if is_path(action):
            arg_string = expand_home(arg_string)
            warn_of_variables("/".join(action.option_strings) or str(action.metavar), arg_string)
        return super()._get_value(action, arg_string)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.refuse(message.rstrip(". "), fix=f"see `{self.prog} --help`")

    def refuse(self, problem: str, *, fix: str, code: str = "usage") -> NoReturn:
        """End the process with status 2 and an error of the project's form."""
        self.exit(2, hide_secrets(f"error: {problem}. Fix: {fix}. [{code}]\n", keeps_queries=True))


class HelpFormatter(argparse.HelpFormatter):
    """argparse's formatter for descriptions of several paragraphs.

    Lines that begin with a space (examples, tables) keep their line ends and are broken only where they are too long.
    Lines that begin with a hyphen are list items. All others are joined and wrapped.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        paragraph: list[str] = []
        for line in [*textwrap.dedent(text).strip("\n").splitlines(), ""]:
            if line.startswith((" ", "- ")) or not line.strip():
                lines += _wrapped(" ".join(paragraph), width - len(indent))
                paragraph = []
            if line.startswith("- "):
                lines += _wrapped(line, width - len(indent), hanging="  ")
            elif line.startswith(" ") or not line.strip():
                lines += _broken(line, width - len(indent))
            else:
                paragraph.append(line)
        return "\n".join(indent + line if line else "" for line in lines[:-1])


def wrapped_settings(lines: Iterable[str]) -> str:
    """Return the lines of settings, each wrapped to the terminal with a hanging indent."""
    width = min(_WIDEST, shutil.get_terminal_size().columns) - 2
    return "\n".join(
        part
        for line in lines
        for part in textwrap.wrap(line.strip(), width, initial_indent="  ", subsequent_indent="      ")
    )


def _wrapped(text: str, width: int, hanging: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)


def _broken(line: str, width: int) -> list[str]:
    """Break a long row of a table in its last column, and a long command at a space, as a shell continues it."""
    if len(line) <= width:
        return [line]
    if row := _TABLE_ROW.fullmatch(line) or _CONTINUED_ROW.fullmatch(line):
        hanging = " " * len(row[1])
        return textwrap.wrap(row[2], width, initial_indent=row[1], subsequent_indent=hanging)
    start = line[: len(line) - len(line.lstrip())]
    lines = [start]
    for word in _WORD.findall(line):
        if lines[-1].strip() and len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"{start}    {word}")
        else:
            lines[-1] += f" {word}" if lines[-1].strip() else word
    return lines
