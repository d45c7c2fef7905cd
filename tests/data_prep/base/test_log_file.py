from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.base.known_secrets import remember_secrets
from data_prep.base.log_file import LogFile, warnings_of, write_last_words
from data_prep.base.logs import logger

MOMENT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "rank-0.log"


@pytest.fixture
def log_file(path: Path) -> Iterator[LogFile]:
    file = LogFile(path, "rank 0")
    yield file
    file.close()


def test_lines_before_the_opening_are_kept_and_every_line_has_date_and_time(log_file: LogFile, path: Path) -> None:
    logger("a").info("setting up")
    assert not path.exists(), "a refused run leaves no file"
    log_file.open()
    logger("a").warning("the disk is slow")
    write_last_words("error: it failed")
    lines = path.read_text().splitlines()
    assert [re.sub(MOMENT, "T", line) for line in lines] == [
        "T start: rank 0",
        "T setting up",
        "T warning: the disk is slow",
        "T warning: error: it failed",
    ]


def test_the_file_of_another_rank_begins_with_its_first_warning(path: Path) -> None:
    file = LogFile(path, "rank 1", from_first_warning=True)
    file.open()
    logger("a").info("a note")
    file.flush()
    assert not path.exists()
    logger("a").warning("a warning")
    file.close()
    assert [line.split(" UTC ")[1] for line in path.read_text().splitlines()] == [
        "start: rank 1",
        "a note",
        "warning: a warning",
    ]
    logger("a").warning("after the end")
    assert "after the end" not in path.read_text()


def test_secrets_are_hidden(log_file: LogFile, path: Path) -> None:
    remember_secrets(["hunter2hunter2"])
    log_file.open()
    logger("a").warning("the key is %s", "hunter2hunter2")
    write_last_words("it was hunter2hunter2")
    assert "hunter2" not in path.read_text() and "the key is" in path.read_text()


def test_lines_that_the_disk_refuses_are_counted_once_it_takes_lines_again(log_file: LogFile, path: Path) -> None:
    path.parent.write_text("a file where the folder is to be")
    log_file.open()
    logger("a").warning("lost")
    log_file.flush()
    path.parent.unlink()
    logger("a").info("kept")
    log_file.flush()
    first, second = path.read_text().splitlines()
    assert first == "(2 lines before this one could not be written)" and second.endswith("UTC kept")


def test_a_line_after_one_that_was_cut_is_whole(log_file: LogFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"2026-11-28 05:02:07 UTC step 1")
    log_file.open()
    logger("a").info("step 2")
    log_file.close()
    first, start, second, rest = path.read_text().split("\n")
    assert first.endswith("step 1") and " start: " in start and second.endswith("UTC step 2") and not rest


def test_a_disk_that_hangs_delays_no_caller(log_file: LogFile, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(log_file, "_write_waiting", answers.wait)
    log_file.open()
    began = time.monotonic()
    for number in range(10_050):
        log_file.write(f"line {number}")
    log_file.flush(0.1)
    assert time.monotonic() - began < 5 and len(log_file._lines) == 10_000
    answers.set()


def test_an_error_is_written_where_no_thread_can_start(
    log_file: LogFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after too little memory."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        log_file.open()
    write_last_words("error: out of memory")
    assert path.read_text().endswith("error: out of memory\n")


def test_warnings_are_those_since_the_last_start(path: Path) -> None:
    assert warnings_of(path) == []
    for text in ("first", "second"):
        file = LogFile(path, "rank 0")
        file.open()
        file.write(text, is_warning=True)
        file.write("a note: warning: none")
        file.close()
    (warning,) = warnings_of(path)
    assert re.fullmatch(f"{MOMENT} second", warning)


@pytest.mark.spawn
def test_the_console_shows_the_time_of_notes_where_it_was_asked_to() -> None:
    code = "from data_prep.base.logs import logger, show_times\nlogger('a').info('one')\nshow_times()\n"
    code += "logger('a').info('two')\nlogger('a').warning('three')"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert re.fullmatch(r"one\n\d\d:\d\d:\d\d two\n", done.stdout) and done.stderr == "warning: three\n"
