"""Watches a reader at work on a damaged file: it refuses in one paragraph or reads, in bounded time and memory.

Nothing is run, unpickled or looked up, and nothing is written, or read of what is the user's, outside given folders.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from data_prep.errors import UserError
from data_prep.terminal import paragraph

CPU_SECONDS = 10.0
MEMORY_BYTES = 1 << 30
_LONGEST_MESSAGE = 4_000

_RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class", "socket.connect")
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate")
_REPOSITORY = Path(__file__).resolve().parents[2]
_OF_THE_MACHINE = ("/proc", "/sys", "/dev", "/usr", "/lib", "/etc/localtime", "/etc/mime.types")

Result = TypeVar("Result")


class _Watch:
    folders: tuple[str, ...] | None = None  # None: nobody is watched
    readable: tuple[str, ...] = ()
    trespasses: ClassVar[list[str]] = []


def read_or_refuse(read: Callable[[], Result], *folders: Path) -> Result | None:
    """What `read` gives, or None where it raises a `UserError`; any other error, and any trespass, is a failure."""
    try:
        with _watched(folders):
            return read()
    except UserError as error:
        message = paragraph(error)  # as it is told
        assert message and not set(message) & set("\n\r\x1b\x00\u202e"), f"not one paragraph: {message[:300]!r}"
        assert len(message) <= _LONGEST_MESSAGE, f"a message of {len(message)} characters: {message[:300]!r}"
        return None


@contextlib.contextmanager
def _watched(folders: tuple[Path, ...]) -> Iterator[None]:
    _install()
    paths = {sys.prefix, sys.base_prefix, sysconfig.get_paths()["stdlib"], str(_REPOSITORY), *_OF_THE_MACHINE}
    _Watch.trespasses = []
    _Watch.readable = tuple(map(os.path.realpath, paths))
    _Watch.folders = tuple(os.path.realpath(folder) for folder in folders)
    try:
        with _bounded_memory(), _bounded_time():
            yield
    finally:
        _Watch.folders = None
    assert not _Watch.trespasses, f"trespassed: {_Watch.trespasses}"


@contextlib.contextmanager
def _bounded_time() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise AssertionError(f"took more than {CPU_SECONDS} seconds of CPU")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


@contextlib.contextmanager
def _bounded_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _install() -> None:
    """Hear of what this process opens and runs; such a hook cannot be taken off, so there is one for all tests."""
    if not getattr(sys, "_clozeworks_watch", False):
        sys._clozeworks_watch = True  # type: ignore[attr-defined]
        sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    folders = _Watch.folders
    if folders is None:
        return
    if event in _RUNS:
        _Watch.trespasses.append(f"{event} {arguments[:2]!r}")
    elif event == "open":
        path, mode, flags = arguments
        if isinstance(path, (str, bytes, os.PathLike)):
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) if mode is None else set(mode) & set("wax+")
            _judge(event, path, folders if writes else (*folders, *_Watch.readable))
    elif event in _CHANGES and isinstance(arguments[0], (str, bytes, os.PathLike)):
        _judge(event, arguments[0], folders)


def _judge(event: str, path: Any, folders: tuple[str, ...]) -> None:
    place = os.path.realpath(os.fsdecode(path))
    inside = any(place == folder or place.startswith(folder + os.sep) for folder in folders)
    if not inside and not place.endswith(".pyc") and place != "/dev/null":
        _Watch.trespasses.append(f"{event} {place}")


def temporary_folder() -> Path:
    """Where temporary files go, which readers may use."""
    return Path(tempfile.gettempdir())
