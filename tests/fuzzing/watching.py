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
import time
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from data_prep.base.errors import UserError
from data_prep.base.terminal import paragraph

CPU_SECONDS = 10.0
WAITING_SECONDS = 60.0  # of the clock: generous, since a busy machine is slow, and that is no failure
MEMORY_BYTES = 1 << 30
_LONGEST_MESSAGE = 4_000

_RUNS = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "pickle.find_class", "socket.connect")
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    **dict.fromkeys(("os.remove", "os.rmdir"), ((0, 1),)),
    **dict.fromkeys(("os.mkdir", "os.chmod"), ((0, 2),)),
    "os.truncate": ((0, None),),
    **dict.fromkeys(("os.rename", "os.link"), ((0, 2), (1, 3))),  # `os.replace` is a renaming too
    "os.symlink": ((1, 2),),
}
"""Of what changes files, where each path stands among the arguments, and the open folder that it is meant from."""
_REPOSITORY = Path(__file__).resolve().parents[2]
_OF_THE_MACHINE = ("/proc", "/sys", "/dev", "/usr", "/lib", "/etc/localtime", "/etc/mime.types")

Result = TypeVar("Result")


class _Watch:
    folders: tuple[str, ...] | None = None  # None: nobody is watched
    readable: tuple[str, ...] = ()
    trespasses: ClassVar[list[str]] = []
    found: ClassVar[dict[Any, list[bool]]] = {}  # of each reader of a test, whether its calls gave something


@contextlib.contextmanager
def something_is_read(most_refusals: int = 20) -> Iterator[None]:
    """Fail if the block calls a reader more often than that, and it never gives anything but None or what is empty.

    Else a test of damaged files would pass with a reader that refuses everything, or finds nothing in it.
    """
    _Watch.found = {}
    yield
    for read, found in _Watch.found.items():
        assert len(found) <= most_refusals or any(found), f"{read} finds nothing in any of {len(found)} examples"


def read_or_refuse(read: Callable[[], Result], *folders: Path) -> Result | None:
    """What `read` gives, or None where it raises a `UserError`; any other error, and any trespass, is a failure."""
    results = _Watch.found.setdefault(getattr(read, "__code__", read), [])
    try:
        with _watched(folders):
            result = read()
        results.append(result is not None and (not isinstance(result, Sized) or len(result) > 0))
        return result
    except UserError as error:
        results.append(False)
        message = paragraph(error)  # as it is printed
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
        with _bounded_memory(), _bounded_cpu(), _bounded_waiting(), _without_bytecode():
            yield
    finally:
        _Watch.folders = None
        # Of a refusal too; what the reader caught of ours, as a library's `except Exception` does, is heard here again.
        assert not _Watch.trespasses, f"trespassed: {_Watch.trespasses}"


@contextlib.contextmanager
def _without_bytecode() -> Iterator[None]:
    """Keep the first import of a library, which happens where a reader needs it, from writing its bytecode."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _bounded_cpu() -> contextlib.AbstractContextManager[None]:
    return _bounded(signal.ITIMER_PROF, signal.SIGPROF, time.process_time, CPU_SECONDS, "of CPU")


def _bounded_waiting() -> contextlib.AbstractContextManager[None]:
    """For what waits and takes no CPU, such as the opening of a pipe; not for a library that takes no signals."""
    return _bounded(signal.ITIMER_REAL, signal.SIGALRM, time.monotonic, WAITING_SECONDS, "of waiting")


@contextlib.contextmanager
def _bounded(timer: int, number: int, clock: Callable[[], float], seconds: float, of_what: str) -> Iterator[None]:
    """Raise after so many seconds; whoever else has set this timer, as pytest-timeout has, gets it back going on."""

    def stop(*_: Any) -> None:
        _Watch.trespasses.append(f"took more than {seconds} seconds {of_what}")
        raise AssertionError(_Watch.trespasses[-1])

    started_at = clock()
    handler = signal.signal(number, stop)
    seconds_left, _ = signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0.0)
        signal.signal(number, handler)
        if seconds_left:
            signal.setitimer(timer, max(seconds_left - (clock() - started_at), 0.001))


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
    elif event in _CHANGES:
        paths = [_path(arguments, *places) for places in _CHANGES[event] if not isinstance(arguments[places[0]], int)]
        if event == "os.symlink":  # and what it leads to, as it is meant from there
            paths.append(os.path.join(os.path.dirname(paths[0]), os.fsdecode(arguments[0])))
        for path in paths:
            _judge(event, path, folders)


def _path(arguments: tuple[Any, ...], place: int, folder_place: int | None) -> str:
    """The path at a place of the arguments, under the folder whose descriptor stands at another, if any."""
    descriptor = -1 if folder_place is None else arguments[folder_place]
    folder = "" if descriptor < 0 else os.readlink(f"/proc/self/fd/{descriptor}")
    return os.path.join(folder, os.fsdecode(arguments[place]))


def _judge(event: str, path: Any, folders: tuple[str, ...]) -> None:
    place = os.path.realpath(os.fsdecode(path))
    inside = any(place == folder or place.startswith(folder + os.sep) for folder in folders)
    if not inside and not place.endswith(".pyc") and place != "/dev/null":
        _Watch.trespasses.append(f"{event} {place}")


def temporary_folder() -> Path:
    """Where temporary files go, which readers may use."""
    return Path(tempfile.gettempdir())
