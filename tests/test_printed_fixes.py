"""What errors advise exists: every command, option and setting that a `fix=` of the sources names.

The fixes are read from the sources, so that a new one is tested as soon as it is written. Values that are filled in at
run time are placeholders here; the tests of the modules run the fixes that depend on them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from data_prep.base.settings import setting_names
from data_prep.config.preparation_config import PreparationConfig
from launch.command_table import COMMANDS
from tests.support.parsers import parser_of
from tests.trainer.config import test_run_config
from trainer.config.load import load_config
from trainer.config.run_config import RunConfig
from trainer.config.synonyms import synonyms

REPOSITORY = Path(__file__).resolve().parents[1]
_HOLE = "\N{WHITE SQUARE}"  # what is filled in at run time
_COMMAND = re.compile(r"clozeworks ([a-z][a-z-]*)((?: (?!clozeworks )[^`;,)]*)?)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z_-]+")
_SETTING = re.compile(r"(?<![\w./{-])([a-z_]+(?:\.[a-z_]+)+)=")
_OF_OTHER_PROGRAMS = {
    *("--interface", "--memory-limit", "--nthreads", "--nworkers", "--upgrade", "--hostfile", "--num_gpus"),
    *("--help", "--constraints", "--no-deps", "--local", "--unset", "--global"),
}
"""Options of the Dask, DeepSpeed, pip and git commands, and of every parser."""


def fixes() -> Iterator[tuple[str, str]]:
    """Position and text of every `fix=` in the sources, and of the answers to names of other projects."""
    for package in ("data_prep", "trainer", "launch"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.keyword) and node.arg == "fix":
                    for text in _texts(node.value):
                        yield f"{path.relative_to(REPOSITORY)}:{node.value.lineno}", text
    for entry in synonyms():
        yield f"synonyms.yaml: {entry.names[0]}", entry.advice


def _texts(node: ast.expr) -> Iterator[str]:
    """Texts that an expression may be: both branches of a condition, with placeholders for values."""
    if isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else _HOLE for part in node.values)


FIXES = sorted(set(fixes()))


def test_the_sources_have_fixes() -> None:
    assert len(FIXES) > 500


@pytest.mark.parametrize("command", sorted({name for _, text in FIXES for name, _ in _COMMAND.findall(text)}))
def test_every_option_of_a_command_in_a_fix_exists(command: str) -> None:
    assert command in COMMANDS, [where for where, text in FIXES if f"clozeworks {command}" in text]
    parser = parser_of(command)
    known = {option for action in parser._actions for option in action.option_strings} if parser else set()
    wrong = [
        (where, option)
        for where, text in FIXES
        for name, arguments in _COMMAND.findall(text)
        if name == command
        for option in _OPTION.findall(arguments.partition(" -- ")[0])
        if option not in known
    ]
    assert not wrong, wrong


def test_every_option_in_a_fix_is_one_of_some_command() -> None:
    parsers = [parser for command in COMMANDS if (parser := parser_of(command)) is not None]
    known = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    scripts = "".join(path.read_text() for path in (REPOSITORY / "launch").rglob("*.sh"))
    known |= set(_OPTION.findall(scripts)) | _OF_OTHER_PROGRAMS
    wrong = [
        (where, option)
        for where, text in FIXES
        for option in _OPTION.findall(text)
        if option not in known and _HOLE not in text[text.index(option) : text.index(option) + len(option) + 1]
    ]
    assert not wrong, wrong


def test_every_setting_in_a_fix_exists() -> None:
    known = {name for schema in (RunConfig, PreparationConfig) for name in setting_names(schema)}
    known |= {name.split(".", 1)[1] for name in known if name.startswith("training.stages.")}
    wrong = [
        (where, name)
        for where, text in FIXES
        for name in _SETTING.findall(text)
        if name not in known and not name.startswith(("deepspeed.", "storage_options."))
    ]
    assert not wrong, wrong


_COMPLETE = re.compile(r"\b(?:set|write|or) ([a-z_]+(?:\.[a-z_0-9]+)*=(?:\[[^]]*\]|\"[^\"]*\"|[\w./-]*\w))(?=$|[ ,;)])")
"""A setting with its whole value, which can be appended to the command line as it is."""


def situations() -> list[tuple[str, ...]]:
    """Overrides that `tests/trainer/config/test_run_config.py` and others find refused."""
    table = next(
        mark
        for mark in test_run_config.test_a_contradiction_states_setting_value_fix_and_code.pytestmark
        if mark.name == "parametrize"
    ).args[1]
    return [tuple(overrides) for overrides, *_ in table] + [
        ("data.masking=whole_word",),
        ("data.mask_unit=whole_word",),
        ("model.position_embeding=learned",),
        ("training.precision=bfloat16",),
        ("zero.stage=bf16",),
        ("optimizer.lr=1e-4",),
        ("training.whole_word_mask=true",),
        ("checkpoint.average_last=5",),
    ]


def test_a_setting_that_an_error_advises_removes_the_error() -> None:
    wrong, num_tried = [], 0
    for overrides in situations():
        with pytest.raises(UsageError) as caught:
            load_config("tiny_cpu", overrides)
        for setting in _COMPLETE.findall(caught.value.fix):
            num_tried += 1
            name = setting.partition("=")[0]
            kept = [word for word in overrides if word.partition("=")[0] != name]
            if unknown := re.search(r"unknown setting ([\w.]+)", caught.value.problem):
                kept = [word for word in kept if not word.startswith(unknown[1])]
            try:
                load_config("tiny_cpu", [*kept, setting])
            except UsageError as error:
                if error.problem == caught.value.problem or error.code == "invalid-setting":
                    wrong.append((overrides, setting, str(error)))
    assert not wrong, wrong
    assert num_tried > 20
