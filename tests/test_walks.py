"""The walks of the pages run as they stand, and show what their commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.walks import Command, File, first_missing, steps_of, walk

REPOSITORY = Path(__file__).resolve().parents[1]
MOST_LINES = 200
WALKS = ("data_prep/TUTORIAL.md",)
EVERY_WALK = pytest.mark.parametrize("name", WALKS)


def test_a_page_is_files_and_commands_with_what_they_print() -> None:
    page = "Text.\n```yaml\n# a.yaml\nx: 1\n```\n```bash\necho not run\n```\n"
    page += "```text\n$ echo a \\\n    b\na b\n$ true\n```\n"
    assert list(steps_of(page)) == [File("a.yaml", "x: 1\n"), Command("echo a b", ("a b",)), Command("true", ())]


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        (["a 1"], ["a 2,500"], None),
        (["a", "..."], ["a", "b"], None),
        (["...", "c"], ["a", "b", "c"], None),
        (["version 1 (..."], ["version 2 (91beb8492be1de82)"], None),
        (["x      1"], ["x 12"], None),
        (["x +0.1  worse"], ["x -0.2  not clear"], None),
        (["x 1 worse"], ["x 1 much"], "x 1 worse"),
        (["a"], ["b"], "a"),
        (["a", "c"], ["a", "b", "c"], "c"),
        (["...", "c", "a"], ["a", "c"], "a"),
        (["a"], ["a", "b"], "nothing after this, but came 'b'"),
        (["a"], [], "a"),
    ],
)
def test_the_output_of_a_page_is_compared_by_its_shape(
    shown: list[str], printed: list[str], missing: str | None
) -> None:
    assert first_missing(shown, printed) == missing


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ('  "exception"  0.570', '  "a"      0.020', True),
        ("layer 2, head 1", "layer 1, head 2", True),
        ("0.1 .", "0.2 word", True),
        ("a b", "a", False),
        ("a 1", "a b", False),
        ("1 2", "1", False),
        ("MODEL: a...", "MODEL: b c", True),
    ],
)
def test_the_words_of_a_model_are_compared_by_their_layout(shown: str, printed: str, same: bool) -> None:
    assert first_missing([shown], [printed], any_words=True) == (None if same else shown)


@pytest.mark.parametrize("name", [*WALKS, "launch/DOWNSTREAM.md"])
def test_a_walk_is_short(name: str) -> None:
    assert (REPOSITORY / name).read_text(encoding="utf-8").count("\n") <= MOST_LINES


def test_an_exported_variable_reaches_the_commands_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    walk("```text\n$ export A='1 2' B=3\n$ echo $A; echo b$B\n1 2\nb3\n```\n", folder)


def test_a_walk_fails_where_a_command_prints_something_else(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    folder.mkdir()
    page.write_text("```text\n$ echo 1 > one; cat one\n2\n$ echo three\nfour\n```\n")
    with pytest.raises(AssertionError, match="the page shows: four"):
        walk(page.read_text(), folder)
    assert (folder / "one").read_text() == "1\n"


@pytest.mark.slow
@EVERY_WALK
def test_a_walk_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "walk"
    folder.mkdir()
    walk((REPOSITORY / name).read_text(encoding="utf-8"), folder)
