"""Arguments of every command: what is out of bounds is refused, and no value of a repeated option is dropped."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError
from data_prep.base.urls import redact

LARGEST_INTEGER = 2**63 - 1  # of 64 bits
LARGEST_PORT = 65_535  # of 16 bits


def at_least(minimum: int, maximum: int = LARGEST_INTEGER) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number from `minimum` to `maximum`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {minimum} or more")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"{text} is beyond {maximum}; give a smaller one")
        return value

    return read


def local_output(option: str) -> Callable[[str], Path]:
    """The `type` of an option that names a local file or folder to write: `Path` would make a URL a folder `s3:`."""

    def read(text: str) -> Path:
        refuse_url(f"{option} {redact(text)}", text, "what is written here goes to a local path; give one")
        return Path(text)

    return read


def refuse_url(setting: str, value: str, rule: str) -> None:
    """Refuse a URL where a local path is asked for; `rule` says of the setting what it has to be.

    Raises:
        UsageError: it is one.
    """
    if "://" in value:
        raise UsageError(f"{setting} is a URL, and {rule}")


class Joined(argparse.Action):
    """Of an option with a list in commas: given again, its values are added."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, value if before is None else f"{before},{value}")


class Once(argparse.Action):
    """Of an option with one value that must not be lost: given again, it is refused."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        if before is not None:
            parser.error(f"{option} is given twice, {before} and {value}; run the command once for each")
        setattr(namespace, self.dest, value)
