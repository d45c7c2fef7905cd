"""Argument types of every command: bounds are checked, and no value of a repeated option is dropped."""

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
        refuse_url(f"{option} {redact(text)}", text, "it must be a local path")
        return Path(text)

    return read


def refuse_url(setting: str, value: str, rule: str) -> None:
    """Raise if `value` is a URL and not a local path; `rule` states what the setting must be.

    Raises:
        UsageError: it is a URL.
    """
    if "://" in value:
        raise UsageError(f"{setting} is a URL, and {rule}", fix="give a local path", code="local-path-required")


class Joined(argparse.Action):
    """An option with a comma-separated list: repeating it adds values."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, value if before is None else f"{before},{value}")


class Once(argparse.Action):
    """An option with a single value: repeating it is an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        before = getattr(namespace, self.dest)
        if before is not None:
            parser.error(f"{option} is given twice, {before} and {value}; run the command once for each")
        setattr(namespace, self.dest, value)
