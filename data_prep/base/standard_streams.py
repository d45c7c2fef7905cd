"""Standard output and error that work with any target: closed, a full disk, plain ASCII."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputLost(OSError):
    """Standard output cannot be written for a reason other than a closed pipe."""


def prepare_standard_streams() -> None:
    """Make prints succeed with closed streams and limited encodings; standard error never fails.

    If standard output cannot be written, `OutputLost` is raised. Replaced streams, such as those of a test, stay as
    they are.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:  # closed; in this order the null device takes the descriptor that is free
            setattr(sys, name, open(os.devnull, "w" if descriptor else "r", encoding="utf-8"))
        elif descriptor and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, guarded(stream, raises=name == "stdout"))


def lead_to_nowhere(*descriptors: int) -> None:
    """Send buffered output to the null device, so that the flush at exit does not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)


def guarded(stream: TextIO, raises: bool) -> TextIO:
    """Return a stream on the same descriptor whose write errors raise `OutputLost` (`raises`) or are dropped.

    What was printed to the given one is written first: Python's exit need not do so any more.
    """
    assert isinstance(stream, io.TextIOWrapper)
    raw = _Guarded(stream.fileno(), raises)
    try:
        stream.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if raises:
            raise OutputLost(error.errno, error.strerror) from None
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as Python does with -u
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Guarded(io.FileIO):
    def __init__(self, descriptor: int, raises: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._raises = raises

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # the reader closed the pipe
            raise
        except OSError as error:
            if self._raises:
                raise OutputLost(error.errno, error.strerror) from None
            return memoryview(data).nbytes
