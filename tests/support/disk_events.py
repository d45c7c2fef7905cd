"""What a program asks of the disk, in order: which content is brought to the disk itself, and what is renamed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest


class Flushed(NamedTuple):
    """An fsync of a file with its content at that moment, or of a folder with its names."""

    path: Path
    content: bytes | frozenset[str]


class Renamed(NamedTuple):
    source: Path
    target: Path


def record_disk_events(monkeypatch: pytest.MonkeyPatch) -> list[Flushed | Renamed]:
    """A list that grows with every os.fsync and os.replace of this process."""
    events: list[Flushed | Renamed] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)
        events.append(Flushed(path, frozenset(os.listdir(path)) if path.is_dir() else path.read_bytes()))

    def recorded_replace(source: str | Path, target: str | Path) -> None:
        replace(source, target)
        events.append(Renamed(Path(source), Path(target)))

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return events


def assert_replaced_durably(events: list[Flushed | Renamed], path: Path, content: bytes) -> None:
    """The content was on the disk before `path` got its name, and the name afterwards."""
    written, renamed, named = events
    assert isinstance(renamed, Renamed) and renamed.target == path
    assert written == Flushed(renamed.source, content)
    assert isinstance(named, Flushed) and named.path == path.parent
    assert path.name in named.content and renamed.source.name not in named.content
