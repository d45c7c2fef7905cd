"""The log file of a process: its log lines with date and time, for those who come when its console is gone.

A thread writes the lines, so a slow, full or remote disk never delays the work. Lines that the disk did not take are
counted, and the file names their number as soon as it can be written again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

from data_prep.base.known_secrets import hide_secrets
from data_prep.base.logs import project_logger

_MAX_WAITING = 10_000
"""Lines that wait for the disk; older ones are dropped and counted."""
_WARNING = " warning: "
_START = " start: "
_TAIL_BYTES = 1 << 18
"""How much of a file's end is searched for warnings."""

_open_files: list[LogFile] = []


class LogFile(logging.Handler):
    """Writes the log lines of this process to a file, from `open` to `close`; those before `open` are kept for it."""

    def __init__(self, path: Path, who: str, from_first_warning: bool = False) -> None:
        """`who` stands in the first line of each start; `from_first_warning`: no file without a warning."""
        super().__init__()
        self._path, self._process = path, os.getpid()
        self._is_due = not from_first_warning
        self._lines: deque[str] = deque()
        self._lost = 0
        self._is_open = self._is_closed = False
        self._is_writing, self._has_thread = False, True
        self._changed = threading.Event()
        self._add(f"{_START}{who}")
        project_logger().addHandler(self)
        _open_files.append(self)

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        text = record.getMessage() + (f"\n{record.exc_text}" if record.exc_text else "")
        self.write(text, is_warning)

    def write(self, text: str, is_warning: bool = False) -> None:
        """Have the thread write a text soon."""
        if os.getpid() != self._process:  # a forked worker has no such thread
            return
        self._is_due |= is_warning
        self._add((_WARNING if is_warning else " ") + hide_secrets(text, keeps_queries=True))

    def open(self) -> None:
        """Write the lines so far and all later ones; where no thread can start, only `flush` and `close` write."""
        if not self._is_open:
            self._is_open = True
            try:
                threading.Thread(target=self._write_loop, name="log_file", daemon=True).start()
            except RuntimeError:  # too little memory, which the log is to tell
                self._has_thread = False
            self._changed.set()

    def flush(self, seconds: float = 2.0) -> None:
        """Wait for the disk, but no longer than these seconds."""
        deadline = time.monotonic() + seconds
        if self._is_open and self._is_due and os.getpid() == self._process:
            if not self._has_thread:
                self._write_waiting()
            while (self._lines or self._is_writing) and time.monotonic() < deadline:
                self._changed.set()
                time.sleep(0.005)

    def close(self) -> None:
        """Write what is left, and end."""
        if self in _open_files:
            _open_files.remove(self)
            project_logger().removeHandler(self)
            self.flush()
            self._is_closed = True
            self._changed.set()
        super().close()

    def _add(self, text: str) -> None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        if len(self._lines) >= _MAX_WAITING:
            self._lines.popleft()
            self._lost += 1
        self._lines.append(f"{moment}{text}\n")
        self._changed.set()

    def _write_loop(self) -> None:
        while not self._is_closed:
            self._changed.wait()
            self._changed.clear()
            if self._is_due:
                self._is_writing = True
                self._write_waiting()
                self._is_writing = False

    def _write_waiting(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if not lines:
            return
        if self._lost:
            lines.insert(0, f"({self._lost:,} lines before this one could not be written)\n")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "ab+") as file:
                if _is_torn(file):
                    file.write(b"\n")
                file.write("".join(lines).encode(errors="backslashreplace"))
            self._lost = 0
        except OSError:  # the console has these lines
            self._lost += len(lines) - (self._lost > 0)


def _is_torn(file: BinaryIO) -> bool:
    """Return whether a file ends within a line, which a full disk or a kill cut."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def write_last_words(text: str) -> None:
    """Write the error that ends this process to its log files, and wait for the disk for a moment."""
    for file in tuple(_open_files):
        file.write(text, is_warning=True)
        file.flush()


def flush_log_files() -> None:
    """Wait for the disk for a moment, before a process ends without `close`."""
    for file in tuple(_open_files):
        file.flush()


def warnings_of(path: Path) -> list[str]:
    """Return the warnings since the last start in a log file, each with its time; none without a readable file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode("utf-8", errors="replace").split("\n")
    except OSError:
        return []
    time_length = len("2026-11-28 05:02:07 UTC")
    found: list[str] = []
    for line in lines:
        rest = line[time_length:]
        if rest.startswith(_START):
            found.clear()
        elif rest.startswith(_WARNING):
            found.append(line[:time_length] + " " + rest[len(_WARNING) :])
    return found
