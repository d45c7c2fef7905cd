from __future__ import annotations

import logging
import sys

from data_prep.base.logs import logger


def test_notes_are_on_standard_output_and_warnings_on_standard_error(capsys):
    logger("trainer.loop").info("step 1/3 is 50% done")
    logger("trainer.loop").warning("the disk is slow")
    assert capsys.readouterr() == ("step 1/3 is 50% done\n", "warning: the disk is slow\n")


def test_every_line_is_shown_once_whatever_libraries_add_to_the_root(capsys):
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)
    try:
        logger("a").warning("once")
        logger("a.b").warning("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err == "warning: once\n" * 2
