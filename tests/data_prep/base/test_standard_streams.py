"""Standard streams that are closed, full or plain ASCII: results that are lost are an error, messages are not."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.base.standard_streams import OutputLost, guarded

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, sys
from data_prep.base.errors import UserError, run_command

def command():
    print("progress", file=sys.stderr, flush=True)
    print("r\\u00e9sult" * int(sys.argv[1]))
    os.write(int(sys.argv[3]), b"worked")
    if sys.argv[2] == "fail": raise UserError("too bad")
    if sys.argv[2] == "exit": sys.exit(5)

run_command(command)
"""
LOST = (
    "error: standard output cannot be written (File too large). Fix: redirect it elsewhere and rerun the same command. "
    "[unwritable-output]\n"
)


def run(shell: str, *words: str, unbuffered: bool = False, **variables: str) -> tuple[int, str, str, bytes]:
    """Status, outputs and what was done by the program where the shell starts it so; files can hold nothing."""
    # Without coverage, which writes a file of its own.
    env = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    env |= {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    env["PYTHONUNBUFFERED"] = "1" if unbuffered else ""
    read, write = os.pipe()
    try:
        done = subprocess.run(
            ["sh", "-c", shell, "sh", sys.executable, "-c", PROGRAM, *words, str(write)],
            env=env,
            pass_fds=[write],
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        )
    finally:
        os.close(write)
    with os.fdopen(read, "rb") as pipe:
        return done.returncode, done.stdout, done.stderr, pipe.read()


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("length", ["1", "100000"])
@pytest.mark.parametrize("end", ["well", "exit"])
def test_results_that_cannot_be_written_are_an_error(tmp_path: Path, length: str, end: str, unbuffered: bool) -> None:
    shell = f'exec "$@" > {tmp_path / "full"}'
    status, _, errors, _ = run(shell, length, end, unbuffered=unbuffered)
    assert (status, errors) == (1, f"progress\n{LOST}")


def test_the_error_of_the_command_is_printed_too(tmp_path: Path) -> None:
    status, _, errors, _ = run(f'exec "$@" > {tmp_path / "full"}', "1", "fail")
    assert (status, errors) == (1, f"progress\nerror: too bad\n{LOST}")


@pytest.mark.parametrize(
    ("redirection", "output"),
    [("2> FULL", "r\u00e9sult\n"), ("2>&-", "r\u00e9sult\n"), (">&-", ""), ("<&- >&- 2>&-", "")],
)
def test_work_is_finished_although_the_streams_are_closed(tmp_path: Path, redirection: str, output: str) -> None:
    found = run('exec "$@" ' + redirection.replace("FULL", str(tmp_path / "full")), "1", "well")
    assert (found[0], found[1], found[3]) == (0, output, b"worked")


def test_characters_outside_the_encoding_of_a_stream_are_escaped() -> None:
    found = run('exec "$@"', "1", "well", PYTHONIOENCODING="ascii")
    assert found == (0, r"r\xe9sult" + "\n", "progress\n", b"worked")


def test_a_stream_that_reports_its_failure_raises_and_a_silent_one_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w", encoding="ascii") as stream, os.fdopen(read, "rb") as pipe:
        quiet, telling = guarded(stream, raises=False), guarded(stream, raises=True)
        quiet.write("\u00e9")
        quiet.flush()
        assert pipe.read(4) == rb"\xe9"
        os.dup2(os.open(os.devnull, os.O_RDONLY), write)  # which refuses what is written
        quiet.write("lost")
        quiet.flush()
        telling.write("lost")
        with pytest.raises(OutputLost, match="Bad file descriptor"):
            telling.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)


def test_output_printed_before_a_command_is_written_too() -> None:
    code = "print('before'); from data_prep.base.errors import run_command; run_command(lambda: print('after'))"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "before\nafter\n"
