"""`~` in paths of settings, options and Python calls, and names of environment variables, which stay as they are."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from data_prep.base.arguments import CommandParser, is_path
from data_prep.base.local_paths import expand_home, home_in
from launch.command_table import COMMANDS
from tests.support.parsers import parser_of
from tests.support.preparations import config_of
from trainer import load_config
from trainer.evaluation.suite_settings import load_suite


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HOME", "/users/someone")
    return "/users/someone"


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("~", "/users/someone"),
        ("~/runs", "/users/someone/runs"),
        ("file://~/runs", "file:///users/someone/runs"),
        ("sqlite:///~/m.db", "sqlite:////users/someone/m.db"),
        *((text, text) for text in ("./~/runs", "a/~", "~nobody-of-that-name/x", "s3://~/x", "$HOME/x", "", "~$doc")),
    ],
)
def test_a_leading_tilde_is_the_home_directory(typed: str, path: str) -> None:
    assert expand_home(typed) == path


RUN_PATHS = (
    *("output_dir", "init_from", "data.shards", "data.tokenizer", "data.cache_dir", "checkpoint.upload_to"),
    *("evaluation.minimal_pairs", "evaluation.suite", "tracking.uri"),
)


def test_every_path_of_a_run_begins_at_home(home: str) -> None:
    config = load_config("tiny_cpu", ["model.output_bias=zeros", *(f"{name}=~/x" for name in RUN_PATHS)])
    for name in RUN_PATHS:
        value = config.model_dump()
        for part in name.split("."):
            value = value[part]
        assert value == f"{home}/x", name
    mixture = load_config("tiny_cpu", {"data.shards": [{"url": "~/a"}, {"url": Path("~/b")}]})
    assert [each.url for each in mixture.data.components] == [f"{home}/a", f"{home}/b"]
    branch = load_config("tiny_cpu", ["branch={run: ~/r, step: 3, stage: s}", "training.stages=[{name: s, "
        "steps: 9, data: {shards: ~/d}}]", "training.max_steps=null"]).model_dump()  # fmt: skip
    assert branch["branch"]["run"] == f"{home}/r" and branch["training"]["stages"][0]["data"]["shards"] == f"{home}/d"


def test_paths_of_a_preparation_and_of_a_suite_begin_at_home(home: str, tmp_path: Path) -> None:
    config = config_of({"a": "~/*.txt"}, "keep_dropped=~/dropped")
    assert (config.sources[0].input, config.keep_dropped) == ((f"{home}/*.txt",), f"{home}/dropped")
    (tmp_path / "suite.yaml").write_text("name: s\ntasks: {t: {files: {train: ~/t.tsv}, metrics: [a]}}\n")
    suite = load_suite(tmp_path / "suite.yaml", ["data=~/glue"])
    assert suite.data == f"{home}/glue" and suite.files_of("t") == {"train": Path(f"{home}/t.tsv")}


NO_PATHS = {
    *("A,B,...", "A:B", "A:B[,C:D]", "ADDRESS", "ALIAS", "CLAIM:PATH", "CONDITION", "DIGEST", "I/N", "ID", "K", "M"),
    *(
        "MEAN",
        "N",
        "NAME",
        "NAME=VALUE",
        "N[,N]",
        "N,N,...",
        "OWNER/NAME",
        "PORT",
        "RATE",
        "S",
        "SECONDS",
        "SHARE",
        "STEP",
        "TASK",
        "TEXT",
        "TOKENS",
    ),
    *(
        "URL",
        "WORD",
        "X",
        "A B",
        "DIR[,DIR]",
        "section.field=value",
        "setting=value",
        "None",
        "[LABEL=]RUN_OR_MODEL[,...]",
    ),
}
"""What values other than paths are called in the help of options; those of a new kind are added here, or are paths."""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_value_of_a_command_is_known_as_a_path_or_as_something_else(command: str) -> None:
    parser = parser_of(command)
    for action in parser._actions if parser else ():
        if action.nargs != 0 and not action.choices:
            assert is_path(action) or str(action.metavar) in NO_PATHS, f"{action.option_strings or action.dest}"


def test_paths_of_a_command_line_begin_at_home(home: str) -> None:
    parser = CommandParser()
    parser.add_argument("--input", nargs="+", metavar="FILE")
    parser.add_argument("--output", type=Path, metavar="DIR")
    parser.add_argument("--note", metavar="TEXT")
    read = parser.parse_args(["--input", "~/a", "b", "--output=~/c", "--note", "~/d"])
    assert read == argparse.Namespace(input=[f"{home}/a", "b"], output=Path(f"{home}/c"), note="~/d")


def test_paths_of_a_python_call_begin_at_home(home: str) -> None:
    @home_in("paths", "to")
    def copy(paths: object, to: object = None, *, note: str = "") -> tuple[object, ...]:
        return paths, to, note

    assert copy(["~/a", Path("~/b")], to="~", note="~") == ([f"{home}/a", Path(f"{home}/b")], home, "~")
    assert copy(3) == (3, None, "")
    with pytest.raises(TypeError, match="copy"):
        copy()  # type: ignore[call-arg]


@pytest.mark.fault(
    row="68",
    fault="`~` and `$NAME` in a path",
    required="`~` is the home directory; `$NAME` stays, with a warning where the variable is set",
)
def test_row_68_a_variable_stays_literal_and_is_warned_of_where_it_is_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCRATCH_OF_TEST", "/scratch")
    config = load_config("tiny_cpu", ["output_dir=$SCRATCH_OF_TEST/x", "tracking.run_name=$NOT_SET_AT_ALL"])
    assert (config.output_dir, config.tracking.run_name) == ("$SCRATCH_OF_TEST/x", "$NOT_SET_AT_ALL")
    warned = capsys.readouterr().err
    assert warned.count("[literal-variable]") == 1 and "output_dir contains $SCRATCH_OF_TEST" in warned
    monkeypatch.setenv("RANK", "1")
    load_config("tiny_cpu", ["output_dir=$SCRATCH_OF_TEST/x"])
    assert capsys.readouterr().err == "", "rank 0 alone warns"


def test_a_variable_in_a_path_of_a_command_line_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCRATCH_OF_TEST", "/scratch")
    parser = CommandParser()
    parser.add_argument("--output", metavar="DIR")
    assert parser.parse_args(["--output", "$SCRATCH_OF_TEST/x"]).output == "$SCRATCH_OF_TEST/x"
    assert "--output contains $SCRATCH_OF_TEST" in capsys.readouterr().err
