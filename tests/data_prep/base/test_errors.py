"""How commands end: their errors in a paragraph, and quietly where the reader of their output has seen enough."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep import Document
from data_prep.base.errors import READER_GONE_STATUS, UsageError, UserError, failure, run_command

REPOSITORY = Path(__file__).resolve().parents[3]


def raising(error: BaseException):
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (UserError("the disk is full"), 1, "error: the disk is full\n"),
        (UsageError("no such setting"), 2, "error: no such setting\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (SystemExit(3), 3, ""),
    ],
)
def test_an_error_ends_with_its_paragraph_and_its_status(error, status, told, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(raising(error))
    assert (ended.value.code, capsys.readouterr().err) == (status, told)


def test_a_silent_process_reports_only_its_status(capsys):
    with pytest.raises(SystemExit) as ended:
        run_command(raising(UserError("told by another")), speaks=False)
    assert ended.value.code == 1 and capsys.readouterr().err == ""


def test_success_returns_and_a_mistake_of_ours_keeps_its_traceback():
    run_command(lambda: None)
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)


def test_a_failure_names_the_last_line_that_is_in_a_file():
    with pytest.raises(AttributeError) as caught:
        Document("a").text = "b"  # fails in code that `dataclasses` generated
    assert failure(caught.value).startswith(f"failed at {__file__}:") and "FrozenInstanceError" in failure(caught.value)


def test_a_name_that_the_system_refuses_is_reported_and_other_system_errors_are_bugs(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    for name, told in (("a" * 256, "File name too long"), ("loop", "Too many levels of symbolic links")):
        with pytest.raises(SystemExit) as ended:
            run_command(lambda name=name: open(tmp_path / name))
        assert ended.value.code == 2
        assert (
            capsys.readouterr().err
            == f"error: {tmp_path / name}: {told}. Fix: choose another name. [unusable-file-name]\n"
        )
    with pytest.raises(FileNotFoundError):
        run_command(lambda: open(tmp_path / "nothing"))


def test_a_deleted_working_folder_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    with pytest.raises(SystemExit) as ended:
        run_command(lambda: print(os.path.abspath("a")))
    assert ended.value.code == 2 and capsys.readouterr().err.endswith("[missing-working-folder]\n")


def test_another_broken_pipe_is_not_taken_for_a_closed_output():
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError):
        run_command(lambda: os.write(write, b"to a server"))
    os.close(write)


def ended_by_its_reader(words: list[str]) -> tuple[int, str]:
    """Status and standard error of a command whose reader takes nothing and is gone before it begins."""
    read, write = os.pipe()
    os.close(read)
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
    env.pop("PYTHONUNBUFFERED", None)  # the reader is found gone at the end, not at the first word
    try:
        done = subprocess.run(words, cwd=REPOSITORY, env=env, stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    return done.returncode, done.stderr


PROGRAM = """
import sys
from data_prep.base.errors import UserError, run_command

def command():
    print("word" * int(sys.argv[1]))
    if sys.argv[2] == "fail": raise UserError("too bad")
    if sys.argv[2] == "exit": sys.exit(5)

run_command(command)
"""


@pytest.mark.parametrize("length", [1, 1_000_000], ids=["in the buffer", "over the buffer"])
@pytest.mark.parametrize("end", ["well", "exit"])
def test_a_closed_output_ends_a_command_quietly(length, end):
    ended = ended_by_its_reader([sys.executable, "-c", PROGRAM, str(length), end])
    assert ended == (READER_GONE_STATUS, "")


def test_an_error_is_printed_although_the_reader_of_the_output_has_ended():
    assert ended_by_its_reader([sys.executable, "-c", PROGRAM, "1", "fail"]) == (1, "error: too bad\n")


@pytest.mark.parametrize(
    "words",
    [
        ["launch/status.py", "--help"],
        ["launch/pretrain.py", "--config", "tiny_cpu", "--print-config"],
        ["-m", "data_prep", "shards", "--help"],
    ],
    ids=["status", "pretrain", "data_prep"],
)
def test_every_command_ends_quietly_at_a_closed_output(words):
    assert ended_by_its_reader([sys.executable, *words]) == (READER_GONE_STATUS, "")
