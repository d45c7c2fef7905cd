"""Moments at which tests stop, kill or disturb a command, named by the files that it writes then.

`python -m tests.support.kill_points SIGNAL PATTERN NUMBER ...` is `python -m data_prep ...`, which sends itself the
signal before it writes a file with such a name, once NUMBER of them are written.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

import pytest

from data_prep.storage import storage


@contextmanager
def before_writing(of: str, act: Callable[[], object], num_writes: int = 0) -> Iterator[list[str]]:
    """Within the block `act` happens before a local file named like `of` is written, after so many of them.

    Yields the names of such files that were written.
    """
    local_write, written = storage.local_write, list[str]()

    def write(url: str | Path) -> AbstractContextManager[Path]:
        if fnmatch(Path(url).name, of):
            if len(written) == num_writes:
                act()
            written.append(Path(url).name)
        return local_write(url)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "local_write", write)
        yield written


def stopped_after(num_writes: int, of: str = "*") -> AbstractContextManager[list[str]]:
    """Within the block the process is stopped (KeyboardInterrupt) at its next such write after so many of them."""
    return before_writing(of, _stop, num_writes)


@contextmanager
def before_removing(of: str, act: Callable[[], object]) -> Iterator[None]:
    """Within the block `act` happens before a local file or folder named like `of` is removed."""
    remove = storage.remove

    def removing(url: str | Path) -> None:
        if fnmatch(Path(url).name, of):
            act()
        remove(url)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "remove", removing)
        yield


def stopped_before_removing(of: str, after: Callable[[], object] = lambda: None) -> AbstractContextManager[None]:
    """Within the block the process is stopped (KeyboardInterrupt) where it removes such a file or folder.

    Args:
        after: what it has done by then, such as removing a part of a folder.
    """

    def act() -> None:
        after()
        _stop()

    return before_removing(of, act)


@contextmanager
def disk_full_at(of: str) -> Iterator[None]:
    """Within the block the disk is full where a file named like `of` has been written."""
    flush = storage.flush

    def full(path: Path) -> None:
        if fnmatch(path.name, f".{of}.*.partial"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "flush", full)
        yield


def fill(disk: Path) -> None:
    """Leave no space on a disk: delete its file `filler` to make some."""
    with suppress(OSError), open(disk / "filler", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _stop() -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    from data_prep.__main__ import main

    number, pattern, count = signal.Signals[sys.argv.pop(1)], sys.argv.pop(1), int(sys.argv.pop(1))
    with before_writing(pattern, lambda: os.kill(os.getpid(), number), count):
        main()
