"""Help texts that are wrapped to the terminal: paragraphs, list items, tables and example commands."""

from __future__ import annotations

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterable

_WIDEST = 100
_TABLE_ROW = re.compile(r"( +\S.*? {2,})(\S.*)")
_WORD = re.compile(r'"[^"]*"|\S+')


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
    if row := _TABLE_ROW.fullmatch(line):
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
