"""The walks of the pages run as they stand, and show what their commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.two_nodes import missing, two_nodes
from tests.support.walks import TWO_HOSTS, Command, File, first_missing, steps_of, walk

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_LINES = 200
WALKS = ("data_prep/TUTORIAL.md", "launch/OPERATIONS.md", "launch/TUTORIAL.md")
ON_TWO_HOSTS = "launch/TUTORIAL.md"
EVERY_WALK = pytest.mark.parametrize("name", WALKS)


def test_a_page_is_files_and_commands_with_what_they_print() -> None:
    page = "Text.\n```yaml\n# a.yaml\nx: 1\n```\n```bash\necho not run\n```\n"
    page += "```text\n$ echo a \\\n    b\na b\n$ true\n```\n"
    assert list(steps_of(page)) == [File("a.yaml", "x: 1\n"), Command("echo a b", ("a b",)), Command("true", ())]


def test_commands_that_need_two_hosts_are_only_taken_there() -> None:
    page = "```console\n$ ssh b true\n```\n```text\n# hosts.txt\na slots=1\n```\n```text\n$ true\n```\n"
    hostfile = File("hosts.txt", "a slots=1\n")
    assert list(steps_of(page)) == [hostfile, Command("true", ())]
    assert list(steps_of(page, TWO_HOSTS)) == [Command("ssh b true", ()), hostfile, Command("true", ())]


@pytest.mark.parametrize(
    ("shown", "printed", "absent"),
    [
        (["a 1"], ["a 2,500"], None),
        (["a", "..."], ["a", "b"], None),
        (["...", "c"], ["a", "b", "c"], None),
        (["version 1 (..."], ["version 2 (91beb8492be1de82)"], None),
        (["x      1"], ["x 12"], None),
        (["a"], ["b"], "a"),
        (["a", "c"], ["a", "b", "c"], "c"),
        (["...", "c", "a"], ["a", "c"], "a"),
        (["a"], ["a", "b"], "nothing after this, but came 'b'"),
        (["a"], [], "a"),
    ],
)
def test_the_output_of_a_page_is_compared_by_its_shape(
    shown: list[str], printed: list[str], absent: str | None
) -> None:
    assert first_missing(shown, printed) == absent


@EVERY_WALK
def test_a_walk_is_short(name: str) -> None:
    assert (REPOSITORY / name).read_text(encoding="utf-8").count("\n") <= MOST_LINES


def test_a_walk_fails_where_a_command_prints_something_else(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    folder.mkdir()
    page.write_text("```text\n$ echo 1 > one; cat one\n2\n$ echo three\nfour\n```\n")
    with pytest.raises(AssertionError, match="the page shows: four"):
        walk(page, folder)
    assert (folder / "one").read_text() == "1\n"


@pytest.mark.slow
@EVERY_WALK
def test_a_walk_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "walk"
    folder.mkdir()
    walk(REPOSITORY / name, folder)


@pytest.mark.slow
@pytest.mark.launcher
@pytest.mark.spawn
def test_a_walk_of_two_hosts_runs_as_it_stands(tmp_path: Path) -> None:
    if (lacking := missing()) is not None:
        pytest.skip(lacking)
    keys, folder = tmp_path / "keys", tmp_path / "walk"
    keys.mkdir()
    folder.mkdir()
    with two_nodes(keys) as nodes:
        walk(REPOSITORY / ON_TWO_HOSTS, folder, nodes=nodes)
