"""Standard output and error of a command, made fit for any place that they lead to: none, a full disk, plain ASCII."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputLost(OSError):
    """Standard output cannot be written, and its reader has not just gone."""


def prepare_standard_streams() -> None:
    """Let nothing that is printed fail for want of a stream or of a letter, nor standard error at all.

    Where standard output cannot be written `OutputLost` is raised. Streams that are not the process's own, such
    as those of a test, stay as they are.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        stream: TextIO | None = getattr(sys, name)
        if stream is None:  # closed; in this order the null device takes the descriptor that is free
            setattr(sys, name, open(os.devnull, "w" if descriptor else "r", encoding="utf-8"))
        elif descriptor and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, guarded(stream, tells=name == "stdout"))


def lead_to_nowhere(*descriptors: int) -> None:
    """Have what is still in the buffers go to the null device, and not into a complaint at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor)


def guarded(stream: TextIO, tells: bool) -> TextIO:
    """A stream onto the same descriptor; where it cannot be written that is an error, or what it was given is lost."""
    assert isinstance(stream, io.TextIOWrapper)
    raw = _Guarded(stream.fileno(), tells)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),  # as Python does with -u
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Guarded(io.FileIO):
    def __init__(self, descriptor: int, tells: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._tells = tells

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # its reader has seen enough
            raise
        except OSError as error:
            if self._tells:
                raise OutputLost(error.errno, error.strerror) from None
            return memoryview(data).nbytes
