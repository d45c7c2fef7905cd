"""What texts of the product advise exists: every command and option of any text, every setting that a `fix=` names.

The texts are read from the sources, so that a new one is tested as soon as it is written. Values that are filled in at
run time are placeholders here. `tests/support/advice.py` tries the fixes of every error that any test provokes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from pydantic import Field, model_validator

from data_prep.base.errors import UsageError
from data_prep.base.settings import SettingError, Settings
from data_prep.config.preparation_config import PreparationConfig
from launch.command_table import COMMANDS
from tests.support import advice
from tests.support.advice import OF_OTHER_PROGRAMS, OPTION, REPOSITORY
from tests.support.parsers import parser_of
from tests.support.settings import names_of, settings_of
from trainer import load_config
from trainer.config.run_config import RunConfig
from trainer.config.synonyms import synonyms

_HOLE = "\N{WHITE SQUARE}"  # what is filled in at run time
_COMMAND = re.compile(r"clozeworks ([a-z][a-z-]*)((?: (?!clozeworks )[^`;,)\n]*)?)")
_SETTING = re.compile(r"(?<![\w./{-])([a-z_]+(?:\.[a-z_]+)+)=")


def texts() -> Iterator[tuple[str, str, bool]]:
    """Position and text of every string that may be printed, and whether it is a `fix=` or an answer to another name.

    Of docstrings only those of modules are printed, as the help of commands.
    """
    for package in ("data_prep", "trainer", "launch"):
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            tree = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            fixes = [node.value for node in tree if isinstance(node, ast.keyword) and node.arg == "fix"]
            in_fixes = {id(part) for fix in fixes for part in ast.walk(fix)}
            skipped = {id(part) for node in tree if isinstance(node, ast.JoinedStr) for part in node.values}
            skipped |= {id(node.value) for node in tree[2:] if isinstance(node, ast.Expr)}
            for node in tree:
                if id(node) not in skipped and (text := _text(node)):
                    yield f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', 0)}", text, id(node) in in_fixes
    for entry in synonyms():
        yield f"synonyms.yaml: {entry.names[0]}", entry.advice, True


def _text(node: ast.AST) -> str:
    """The text of a string, with placeholders for values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else _HOLE for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value else ""


TEXTS = sorted(set(texts()))
FIXES = [(where, text) for where, text, is_fix in TEXTS if is_fix]


def test_the_sources_have_fixes() -> None:
    assert len(FIXES) > 500 and len(TEXTS) > 3000


def test_every_command_in_a_fix_exists() -> None:
    named = {name: where for where, text in FIXES for name, _ in _COMMAND.findall(text)}
    assert not {name: where for name, where in named.items() if name not in COMMANDS}


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"ranks"}))
def test_every_option_of_a_command_in_a_text_exists(command: str) -> None:
    parser = parser_of(command)
    assert parser is not None
    known = {option for action in parser._actions for option in action.option_strings}
    wrong = [
        (where, option)
        for where, text, _ in TEXTS
        for name, arguments in _COMMAND.findall(text)
        if name == command
        for option in OPTION.findall(arguments.partition(" -- ")[0])
        if option not in known
    ]
    assert not wrong, wrong


def test_every_command_that_a_text_quotes_is_parsed() -> None:
    found = {where: list(advice.refused_commands(text.replace(_HOLE, "1"))) for where, text, _ in TEXTS}
    assert not {where: problems for where, problems in found.items() if problems}


def test_every_option_in_a_text_is_one_of_some_command() -> None:
    parsers = [parser for command in COMMANDS if (parser := parser_of(command)) is not None]
    known = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    scripts = "".join(path.read_text() for path in (REPOSITORY / "launch").rglob("*.sh"))
    known |= set(OPTION.findall(scripts)) | OF_OTHER_PROGRAMS
    wrong = [
        (where, option)
        for where, text, _ in TEXTS
        for option in OPTION.findall(text)
        if option not in known and _HOLE not in text[text.index(option) : text.index(option) + len(option) + 1]
    ]
    assert not wrong, wrong


def test_every_setting_in_a_fix_exists() -> None:
    known = {name for schema in (RunConfig, PreparationConfig) for name in names_of(schema)}
    known |= {name.split(".", 1)[1] for name in known if name.startswith("training.stages.")}
    wrong = [
        (where, name)
        for where, text in FIXES
        for name in _SETTING.findall(text)
        if name not in known and not name.startswith(("deepspeed.", "storage_options."))
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(
    "override",
    [
        "data.masking=whole_word",
        "data.mask_unit=whole_word",
        "model.position_embeding=learned",
        "training.precision=bfloat16",
        "zero.stage=bf16",
        "optimizer.lr=1e-4",
        "training.whole_word_mask=true",
        "checkpoint.average_last=5",
    ],
)
def test_a_setting_that_an_error_advises_removes_the_error(override: str) -> None:
    """The fixture `right_advice` applies it, here and wherever else a test loads a wrong configuration."""
    with pytest.raises(UsageError):
        load_config("tiny_cpu", [override])


@pytest.mark.parametrize(
    ("fix", "is_right"),
    [
        ("run `clozeworks status run --json`", True),
        ("run 'clozeworks fill-mask --model runs/a \"a [MASK]\"'", True),
        ("run `clozeworks register --output x`", False),
        ("run `clozeworks pretrian`", False),
        ("run `clozeworks predict --model x --batch-size many`", False),
    ],
)
def test_a_command_that_an_error_advises_is_parsed(fix: str, is_right: bool) -> None:
    assert (not list(advice.refused_commands(fix))) == is_right


def test_an_option_that_another_command_has_is_noticed() -> None:
    assert list(advice.foreign_options("add --epochs 3", ["predict.py"])) == ["predict has no option --epochs"]
    assert not list(advice.foreign_options("add --epochs 3, see `clozeworks predict --help`", ["finetune.py"]))


def test_a_setting_that_does_not_help_is_noticed() -> None:
    class Picky(Settings):
        size: int = Field(1, description="size")

        @model_validator(mode="after")
        def _check(self) -> Picky:
            if self.size > 1:
                raise SettingError("size is too large", fix=f"set size={self.size - 1}", code="too-large")
            return self

    for size, is_right in ((2, True), (3, False)):
        with pytest.raises(UsageError, match=f"set size={size - 1}"):
            settings_of(Picky, f"size={size}")
        assert (not advice.wrong) == is_right
    advice.wrong.clear()
