"""Numbers of a command line: what is out of bounds is refused where it is read."""

from __future__ import annotations

import argparse
from collections.abc import Callable

LARGEST_INTEGER = 2**63 - 1  # of 64 bits


def at_least(minimum: int) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number from `minimum` on, and one of 64 bits."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give one of {minimum} or more")
        if value > LARGEST_INTEGER:
            raise argparse.ArgumentTypeError(f"{text} is beyond {LARGEST_INTEGER}; give a smaller one")
        return value

    return read
