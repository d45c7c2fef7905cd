"""Help texts that are wrapped to the terminal: paragraphs and list items are filled, indented lines stay as written."""

from __future__ import annotations

import argparse
import textwrap


class HelpFormatter(argparse.HelpFormatter):
    """argparse's formatter for descriptions of several paragraphs.

    Lines that begin with a space (examples, tables) keep their line ends, lines that begin with a hyphen are list
    items, and all others are joined and wrapped.
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
                lines.append(line)
            else:
                paragraph.append(line)
        return "\n".join(indent + line if line else "" for line in lines[:-1])


def _wrapped(text: str, width: int, hanging: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
