"""Arguments of every command: numbers out of bounds are refused, and no value of a repeated option is dropped."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

LARGEST_INTEGER = 2**63 - 1  # of 64 bits


def at_least(minimum: int) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number from `minimum` on, and one of 64 bits."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {minimum} or more")
        if value > LARGEST_INTEGER:
            raise argparse.ArgumentTypeError(f"{text} is beyond {LARGEST_INTEGER}; give a smaller one")
        return value

    return read


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
