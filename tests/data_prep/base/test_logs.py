from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from data_prep.base.logs import logger


def test_notes_are_on_standard_output_and_warnings_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    logger("trainer.loop").info("step 1/3 is 50% done")
    logger("trainer.loop").warning("the disk is slow")
    assert capsys.readouterr() == ("step 1/3 is 50% done\n", "warning: the disk is slow\n")


def test_every_line_is_shown_once_whatever_libraries_add_to_the_root(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        logger("a").warning("once")
        logger("a.b").warning("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err == "warning: once\n" * 2


CONFIGURE = """
project = logging.getLogger("clozeworks")
project.setLevel(logging.WARNING)
project.handlers = [logging.StreamHandler(sys.stdout)]
project.handlers[0].setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
"""
USE = """
logger("a").warning("the disk is slow")
logger("a").info("a note")
"""
WORK = """
def warn(number):
    logger("unit").warning(f"unit {number} is odd")

assert len(list(run_units(warn, [1, 3], 2))) == 2
"""


def run(*parts: str) -> tuple[list[str], list[str]]:
    """The lines on standard output, and on standard error, of a new process."""
    imports = "import logging, sys; from data_prep.base.logs import logger\n"
    imports += "from data_prep.executors.executors import run_units\n"
    words = [sys.executable, "-c", imports + "".join(parts)]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.spawn
def test_handlers_and_level_of_the_caller_hold_whenever_they_are_set() -> None:
    own = ["WARNING clozeworks.a the disk is slow"]
    assert run(CONFIGURE, USE) == (own, [])
    assert run(USE, CONFIGURE, USE) == (["a note", *own], ["warning: the disk is slow"])


@pytest.mark.spawn
def test_worker_processes_show_their_warnings_on_standard_error() -> None:
    output, errors = run(CONFIGURE, WORK)
    assert not output and sorted(errors) == [f"warning: unit {number} is odd" for number in (1, 3)]
