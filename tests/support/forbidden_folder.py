"""A folder that may not be entered, for tests that may run as the user whom nothing is forbidden."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest


def forbid(monkeypatch: pytest.MonkeyPatch, folder: str | Path) -> None:
    """Refuse to say anything of what lies in the folder, as the system does where its mode has no x."""
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, (str, Path)) and str(path).startswith(f"{folder}{os.sep}"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)
