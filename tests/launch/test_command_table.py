"""The command `clozeworks`: its table is complete, its help imports nothing heavy, and it runs every command."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from data_prep.base.arguments import CommandParser, OnceFlag
from data_prep.base.errors import UsageError, run_command
from launch import __main__ as entry
from launch.command_table import COMMANDS, DATA_PREP, GROUPS
from tests.support.error_codes import coded

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "deepspeed", "mlflow", "transformers", "pandas", "sklearn", "scipy", "matplotlib"}
SHARED = {"__init__", "__main__", "command_table", "options", "benchmark_session", "export_onnx"}
TO_READ = {"minimal"}


def imported_by(*words: str) -> tuple[set[str], str]:
    """Run `clozeworks` in a process of its own; return the libraries that it imported, and its output."""
    code = (
        "import json, sys\nfrom launch.__main__ import main\nsys.argv = ['clozeworks', *json.loads(sys.argv[1])]\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(words)], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    output, _, modules = done.stdout.rstrip("\n").rpartition("\n")
    return set(json.loads(modules)) & (HEAVY | {"numpy", "pydantic", "yaml"}), output


def test_the_top_level_help_lists_every_command_and_imports_no_library() -> None:
    libraries, text = imported_by("--help")
    assert libraries == set()
    for group, commands in GROUPS.items():
        assert f"\n{group}:\n" in text
        for command in commands:
            assert f"\n  {command.name} " in text and command.summary in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.long
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_names_it_and_imports_nothing_heavy(command: str) -> None:
    libraries, text = imported_by(command, "--help")
    assert libraries & HEAVY == set()
    assert text.startswith(f"usage: clozeworks {command} ")
    assert "--dry-run" in text or command not in WRITING
    assert max(map(len, text.splitlines())) <= 80


WRITING = (
    "tokenizer shards merge remove pretrain finetune export register embed predict attention benchmark nodes "
    "sync-tracking stats average evaluate follow push".split()
)


def test_every_command_module_is_in_the_table() -> None:
    scripts = {path.stem for path in (REPOSITORY / "launch").glob("*.py")} - SHARED - TO_READ
    named = {command.module.removeprefix("launch.") for command in COMMANDS.values()}
    assert scripts | {DATA_PREP} == named
    from data_prep.__main__ import COMMANDS as preparing

    assert {command.name for command in COMMANDS.values() if command.module == DATA_PREP} == set(preparing)


def test_the_readme_of_the_folder_lists_every_command() -> None:
    """By its name, or by the script that is the same."""
    text = (REPOSITORY / "launch" / "README.md").read_text(encoding="utf-8")
    scripts = {command.name: command.module.replace(".", "/") + ".py" for command in COMMANDS.values()}
    listed = {name for name in COMMANDS if any(form in text for form in (f"{name}`", scripts[name]))}
    assert COMMANDS.keys() - listed == set()


def test_every_extra_of_the_table_exists() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert {command.extra for command in COMMANDS.values()} - {None} <= extras.keys()
    assert project["scripts"] == {"clozeworks": "launch.__main__:main"}


def test_a_command_runs_with_its_arguments_and_its_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["clozeworks", "status", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="2"):
        entry.main()
    assert "[missing-path]" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["clozeworks", "verify", str(tmp_path / "none")])
    with pytest.raises(SystemExit):
        entry.main()
    assert capsys.readouterr().err.startswith("error: ")


def test_underscores_name_a_command_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["clozeworks", "show_batch", "--help"])
    with pytest.raises(SystemExit, match="0"):
        entry.main()
    assert capsys.readouterr().out.startswith("usage: clozeworks show-batch ")


def test_an_unknown_command_is_answered_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.__main__.run_command", lambda command, *_, **__: command())
    monkeypatch.setattr(sys, "argv", ["clozeworks", "pretrian"])
    with pytest.raises(UsageError, match="closest name is 'pretrain'", check=coded("unknown-command")):
        entry.main()


def test_the_version_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["clozeworks", "--version"])
    entry.main()
    assert capsys.readouterr().out.startswith("clozeworks ")


def test_without_a_command_the_list_is_printed_as_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/lib/launch/__main__.py"])
    with pytest.raises(SystemExit, match="2"):
        entry.main()
    assert capsys.readouterr().err.startswith("usage: python -m launch COMMAND")


def test_a_missing_library_is_answered_with_the_extra_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["clozeworks", "doctor", "--config", "tiny_cpu"])
    with pytest.raises(SystemExit, match="2"):
        entry.main()
    error = capsys.readouterr().err
    assert error.startswith("error: the library torch is not installed") and error.count("\n") == 1
    assert "-m pip install" in error and f"{REPOSITORY}[train]" in error and "[missing-extra]" in error


def test_every_module_of_the_table_has_a_main() -> None:
    assert all(callable(importlib.import_module(command.module).main) for command in COMMANDS.values())
    assert callable(run_command)


class Parser(Exception):
    """Holds the parser of a command that would parse its command line now."""


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - {"ranks"}))  # its options are torchrun's
def test_no_option_of_a_command_drops_a_value_that_was_given_before(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_parser(parser: CommandParser, *_: object) -> None:
        raise Parser(parser)

    monkeypatch.setattr(CommandParser, "parse_known_args", raise_parser)
    monkeypatch.setattr(sys, "argv", ["clozeworks", command])
    with pytest.raises(Parser) as caught:
        entry.main()
    options = [action for action in caught.value.args[0]._actions if action.option_strings]
    flags = [action for action in options if action.nargs == 0 and not isinstance(action, OnceFlag)]
    valued = {type(action).__name__ for action in options if action not in flags}
    assert valued <= {"Once", "OnceFlag", "Joined", "_AppendAction", "_ExtendAction"}
    assert {type(action).__name__ for action in flags} <= {"_StoreTrueAction", "_HelpAction"}
    assert len({action.dest for action in options}) == len(options)
