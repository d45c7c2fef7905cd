"""A command of launch/, run in the test's own process."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest


def run(monkeypatch: pytest.MonkeyPatch, command: ModuleType, *arguments: str | Path) -> None:
    """Call its `main` with these arguments; what it raises comes through."""
    monkeypatch.setattr(sys, "argv", ["command.py", *map(str, arguments)])
    command.main()
