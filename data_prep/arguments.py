"""Numbers of a command line: what is out of bounds is refused where it is read."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(minimum: int) -> Callable[[str], int]:
    """The `type` of an argument that is a whole number from `minimum` on."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give one of {minimum} or more")
        return value

    return read
