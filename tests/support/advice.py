"""The advice of errors and log lines, tried while the tests run: commands are parsed, settings applied to the case.

`record()` watches every `UserError` of the product, every refused configuration and every logged line. `wrong` lists
what failed; the fixture `right_advice` (tests/conftest.py) fails the test in whose situation it was printed.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from data_prep.base import load_settings, overrides
from data_prep.base.errors import UsageError, UserError
from data_prep.base.typed_values import typed_value
from launch.command_table import COMMANDS
from tests.support.parsers import parser_of

REPOSITORY = Path(__file__).resolve().parents[2]
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9]")
COMPLETE = re.compile(r"\b(?:set|write|or) ([a-z_]+(?:\.[a-z_0-9]+)*=(?:\[[^]]*\]|\"[^\"]*\"|[\w./-]*\w))(?=$|[ ,;)])")
"""A setting with its whole value, which can be appended to the command line as it is."""
_QUOTED = re.compile(r"`clozeworks ([a-z][a-z-]*)([^`]*)`|'clozeworks ([a-z][a-z-]*)([^']*)'")
_PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{2,}\b")
OF_OTHER_PROGRAMS = {
    *("--interface", "--memory-limit", "--nthreads", "--nworkers", "--upgrade", "--hostfile", "--num_gpus"),
    *("--help", "--constraints", "--no-deps", "--local", "--unset", "--global", "--remote-name", "--deepspeed_config"),
    *("--backend-store-uri", "--experiment-id", "--run-id", "--local-dir", "--env-manager", "--port"),
}
"""Options of the Dask, DeepSpeed, pip, git, curl, MLflow and Hugging Face commands, and of every parser."""

wrong: list[str] = []
"""What was printed and does not work."""
_printed: list[tuple[str, list[str]]] = []
"""Fixes that were made since the last check, with the command line, and logged lines that name a command."""


def record() -> None:
    """Watch the errors of this process from now on."""
    make_error, validate = UserError.__init__, load_settings.validate_settings
    make_record = logging.getLogRecordFactory()

    def made(self: UserError, problem: str, *, fix: str = "", code: str = "") -> None:
        make_error(self, problem, fix=fix, code=code)
        if fix and _is_of_product(sys._getframe(1).f_code.co_filename):
            _printed.append((self.fix, list(sys.argv)))

    def validated(schema: Any, values: dict[str, Any], source: str, typed: Mapping[str, str] | None = None) -> Any:
        try:
            return validate(schema, values, source, typed)
        except UsageError as error:
            tried = {each: _still_wrong(validate, schema, values, error, each) for each in COMPLETE.findall(error.fix)}
            wrong.extend(f"{error}. With {each}: {problem}" for each, problem in tried.items() if problem)
            raise

    def logged(*arguments: Any, **options: Any) -> logging.LogRecord:
        line = make_record(*arguments, **options)
        if line.name.startswith("clozeworks.") and "clozeworks " in str(line.msg):
            _printed.append((str(line.msg), []))
        return line

    logging.setLogRecordFactory(logged)
    UserError.__init__ = made  # type: ignore[method-assign]
    load_settings.validate_settings = validated


def check_printed() -> None:
    """Try the commands and options of the fixes that were made since the last call."""
    while _printed:
        fix, words = _printed.pop()
        wrong.extend(f"Fix: {fix}. {problem}" for problem in (*refused_commands(fix), *foreign_options(fix, words)))


def refused_commands(text: str) -> Iterator[str]:
    """Yield what the parsers of the commands that a text quotes say against them."""
    for found in _QUOTED.finditer(text):
        name, arguments = (found[1], found[2]) if found[1] else (found[3], found[4])
        parser = parser_of(name) if name in COMMANDS else None
        if name not in COMMANDS:
            yield f"there is no command {name}"
        elif parser is not None and arguments and not _PLACEHOLDER.search(arguments):
            output = io.StringIO()
            for parse in (parser.parse_args, parser.parse_intermixed_args):
                with contextlib.redirect_stderr(output), contextlib.suppress(SystemExit, TypeError, UserError):
                    parse(shlex.split(arguments))
                    break
            else:
                yield output.getvalue()


def foreign_options(fix: str, words: list[str]) -> Iterator[str]:
    """Yield the options that a fix names without a command, and that the command does not have which printed it."""
    name = Path(words[0]).name.removesuffix(".py").replace("_", "-") if words else ""
    name = words[1] if name == "clozeworks" and len(words) > 1 else name
    parser = parser_of(name) if name in COMMANDS else None
    if parser is None:
        return
    named = [found[1] or found[3] for found in _QUOTED.finditer(fix)]
    parsers = [parser, *(other for each in named if each in COMMANDS and (other := parser_of(each)) is not None)]
    known = {option for each in parsers for action in each._actions for option in action.option_strings}
    known |= OF_OTHER_PROGRAMS
    for option in OPTION.findall(re.sub(r"`[^`]*`|'[^']*'", "", fix)):  # which may be of other commands
        if option not in known:
            yield f"{name} has no option {option}"


def _still_wrong(validate: Any, schema: Any, values: dict[str, Any], error: UsageError, setting: str) -> str:
    """Return what is wrong after an advised setting was appended to the command line; nothing if the error is gone."""
    changed = copy.deepcopy(values)
    if unknown := re.search(r"unknown setting ([\w.]+)", error.problem):
        *sections, last = unknown[1].split(".")
        section: Any = changed
        for each in sections:
            section = section[int(each)] if isinstance(section, list) else section.get(each, {})
        section.pop(last, None)
    try:
        name, _, text = setting.partition("=")
        overrides._set(schema, changed, name, lambda wanted: overrides._read_typed(wanted, name, text), setting)
        validate(schema, typed_value(schema, changed, source="the fix"), "the fix", {})
    except UsageError as again:
        if again.problem.partition(": ")[2] == error.problem.partition(": ")[2] or again.code == "invalid-setting":
            return again.problem
    return ""


def _is_of_product(file: str) -> bool:
    return any(file.startswith(f"{REPOSITORY / package}/") for package in ("data_prep", "trainer", "launch"))
