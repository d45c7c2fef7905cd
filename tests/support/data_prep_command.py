"""The command line of data preparation, run in the test's own process: its status, what it prints and leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.base.errors import run_command


class Command:
    """Runs `python -m data_prep ...`; keeps status and both outputs. A user's mistake shows no traceback."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capfd = monkeypatch, capfd
        self.output = self.errors = ""

    def __call__(self, *arguments: object) -> int:
        self._monkeypatch.setattr(sys, "argv", ["data_prep", *map(str, arguments)])
        self._capfd.readouterr()
        try:
            run_command(main)
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        self.output, self.errors = self._capfd.readouterr()
        assert "Traceback" not in self.errors
        return status


def as_command(work: Callable[[], object]) -> None:
    """Run a function as the command line does: its errors become one line and a status."""
    run_command(work)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below the folder by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_nothing_half_made(output: Path) -> None:
    """No manifest, and nothing that was being written: finished work alone, if anything."""
    assert not (output / "manifest.json").exists() and not (output / "DATA_CARD.md").exists()
    assert not list(output.rglob("*.partial"))
