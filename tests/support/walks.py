"""Walks: pages whose files are written and whose commands run in order, with the output that the page shows.

A block of a page that begins with a comment `# NAME`, such as `# corpus.yaml`, is the file NAME. A block of text with
lines `$ COMMAND` runs them; what follows a command is its output. `$ export NAME=VALUE` is for all commands after it.
`...` as a line stands for any lines, and at the end of a line for any characters. Numbers, digests and the results of
`clozeworks compare` compare by their shape, because machines and versions differ. Where `any_words` is set, words do
too: what a model says depends on its training, and only the layout stays.

A block of `console` is one of text that needs two hosts: it is only run with a host of `tests/support/two_nodes.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.two_nodes import TwoNodes

REPOSITORY = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# ([\w-]+\.\w+)\n")
_NUMBER = re.compile(r"\W*0\W*")
_ANY = "..."
_HOST = re.compile(rf"\b(?:node-a|{re.escape(socket.gethostname())})\b")
"""The name of a host on the pages, and that of this one."""
_MODEL = "MODEL:"
"""The beginning of a line whose words are those of a model."""
_SIGN = re.compile(r"(?<!\S)[+-](?=\d)")
_RESULT = re.compile(r"\b(?:better|worse|not clear)$")
ONE_HOST = ("text",)
TWO_HOSTS = ("text", "console")
"""The languages of the blocks whose commands are run."""


@dataclass(frozen=True)
class File:
    """A file that the walk needs."""

    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command line and the lines that the page shows after it."""

    line: str
    shown: tuple[str, ...]


def steps_of(page: str, languages: tuple[str, ...] = ONE_HOST) -> Iterator[File | Command]:
    """Yield what a page does, in order."""
    for language, block in _BLOCK.findall(page):
        if found := _FILE.match(block):
            yield File(found[1], block[found.end() :])
        elif language in languages and block.startswith("$ "):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                line, _, shown = re.sub(r"\\\n +", "", part).partition("\n")
                yield Command(line, tuple(shown.splitlines()))


def walk(
    page: str,
    folder: Path,
    variables: Mapping[str, str] | None = None,
    any_words: bool = False,
    nodes: TwoNodes | None = None,
) -> None:
    """Take every step of a page in a folder; raise AssertionError for the first that fails or prints something else.

    With `nodes` the first of the two hosts takes them, those that need both included.
    """
    programs = folder.parent / f"{folder.name}-programs"
    programs.mkdir()
    for name, start in (("clozeworks", f"{sys.executable} -P -m launch"), ("python", sys.executable)):
        path = f'PYTHONPATH="{REPOSITORY}:$PYTHONPATH"'  # that of the page comes after it
        (programs / name).write_text(f'#!/bin/sh\n{path} exec {start} "$@"\n', encoding="utf-8")
        (programs / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        **({"PDSH_SSH_ARGS_APPEND": nodes.ssh_options} if nodes else {}),
        **(variables or {}),
    }
    steps = list(steps_of(page, TWO_HOSTS if nodes else ONE_HOST))
    assert any(isinstance(step, Command) for step in steps), "the page has no command"
    for step in steps:
        if isinstance(step, File):
            (folder / step.name).write_text(step.text, encoding="utf-8")
            continue
        if step.line.startswith("export "):
            environment |= dict(word.split("=", 1) for word in shlex.split(step.line)[1:])
            continue
        words = ["bash", "-euo", "pipefail", "-c", step.line]
        done = subprocess.run(
            nodes.nodes[0].command(words, folder) if nodes else words,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"$ {step.line}\n{done.stdout}"
        missing = first_missing(step.shown, done.stdout.splitlines(), any_words)
        assert missing is None, f"$ {step.line}\nthe page shows: {missing}\nthe command printed:\n{done.stdout}"


def first_missing(shown: tuple[str, ...] | list[str], printed: list[str], any_words: bool = False) -> str | None:
    """Return the first line of a page that an output does not have at its place; None if it has all, and no others.

    Lines without `...` between them follow each other in the output too.
    """
    blocks: list[list[str]] = [[]]
    for line in shown:
        blocks.append([]) if line == _ANY else blocks[-1].append(line)
    position = 0
    for number, block in enumerate(blocks):
        starts = range(position, len(printed) + 1 if number else position + 1)
        if block is blocks[-1]:
            starts = starts[::-1]  # the last place of the same shape: nothing follows it
        counts = [_num_shown(block, printed[start:], any_words) for start in starts]
        if len(block) not in counts:
            return block[max(counts)]
        position = starts[counts.index(len(block))] + len(block)
    is_open = len(blocks) > 1 and not blocks[-1]
    return None if is_open or position == len(printed) else f"nothing after this, but came {printed[position]!r}"


def _num_shown(block: list[str], printed: list[str], any_words: bool) -> int:
    """Return how many lines of a block the output begins with."""
    pairs = zip(block, printed, strict=False)
    return next(
        (n for n, (line, one) in enumerate(pairs) if not _is_shown(line, one, any_words)),
        min(map(len, (block, printed))),
    )


def _is_shown(line: str, printed: str, any_words: bool) -> bool:
    if line.endswith(_ANY):
        return _shape(printed, any_words).startswith(_shape(line.removesuffix(_ANY), any_words))
    return _shape(printed, any_words) == _shape(line, any_words)


def _shape(line: str, any_words: bool) -> str:
    """A line without values of numbers, digests and host, lengths of lists of numbers, and widths of columns."""
    line = _HOST.sub("HOST", _SIGN.sub("", _RESULT.sub("RESULT", line)))
    line = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", "HEX", line)
    line = re.sub(r"0(?:, 0)+", "0", re.sub(r"\d+(?:[.,:]\d+)*", "0", line))
    line = re.sub(r" {2,}", " ", line).strip()
    if not any_words:
        return line
    if line.startswith(_MODEL):
        return _MODEL
    words = re.sub(r" \([^()]*\)$", "", line).split()  # a remark at the end depends on the word
    return " ".join("0" if _NUMBER.fullmatch(word) else "WORD" for word in words)
