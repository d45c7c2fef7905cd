"""The pages point at what exists: tests and functions by `file.py::name`, files, commands, links, headings, images."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from launch.command_table import COMMANDS
from tests.test_layout import tracked_files

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("configs", "data_prep", "launch", "tests", "tests/benchmarks", "tests/gpu", "tests/system", "trainer")
PAGES = {
    path: path.read_text(encoding="utf-8")
    for folder in (".", *FOLDERS)
    for path in sorted((REPOSITORY / folder).glob("*.md"))
}
"""Every page: the README of each folder, and the walks and tables beside it."""
FRONT = PAGES[REPOSITORY / "README.md"]
EVERY_PAGE = pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))

CONCEPTS = [
    "byte-pair encoding",
    "embeddings and positions",
    "attention",
    "feed-forward",
    "masking",
    "next-sentence prediction",
    "the tied head",
    "fine-tuning",
]


def names_in(path: Path) -> set[str]:
    """Functions and classes that a Python file defines, those inside classes too."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)}


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_pages_are_those_of_the_folders() -> None:
    found = {path for path in tracked_files() if path.suffix == ".md" and "golden" not in path.parts}
    assert found == {path.relative_to(REPOSITORY) for path in PAGES}
    assert all(path.parent / "README.md" in PAGES for path in PAGES)


def test_the_pages_of_a_folder_lead_to_each_other() -> None:
    """A page beside a README is found from it, or from the front page."""
    lost = [
        path.relative_to(REPOSITORY).as_posix()
        for path in PAGES
        if path.name != "README.md"
        and f"]({path.name}" not in PAGES[path.parent / "README.md"]
        and f"]({path.relative_to(REPOSITORY).as_posix()}" not in FRONT
    ]
    assert lost == []


def test_the_front_page_is_short_and_has_the_commands_and_a_path_to_every_page() -> None:
    assert len(FRONT) <= 14_000
    assert 200 <= FRONT.count("\n") <= 280
    for command in ("bash launch/demo.sh", "bash tests/run.sh", "deepspeed --num_gpus 2 launch/pretrain.py"):
        assert command in FRONT
    linked = set(re.findall(r"\]\(([\w/]+README\.md)", FRONT))
    assert linked >= {f"{folder}/README.md" for folder in FOLDERS} - {"tests/gpu/README.md"}


def test_the_demos_output_is_at_most_fifteen_lines_and_there_is_one_picture_of_the_curves() -> None:
    output = FRONT.partition("<!-- demo output: begin -->\n```text\n")[2].partition("```")[0]
    assert 5 <= output.count("\n") <= 15
    picture = FRONT.partition("<!-- demo picture: begin -->\n")[2].partition("<!-- demo picture: end -->")[0]
    assert re.fullmatch(r"!\[.+\]\(.+\)\n", picture)


def test_the_installation_is_from_the_repository() -> None:
    words = " ".join(FRONT.split())
    assert "Install from the repository into an environment of its own, not from an index" in words


@EVERY_PAGE
def test_a_pointer_names_what_its_file_defines(path: Path) -> None:
    pointers = set(re.findall(r"`([\w./-]+\.py)::(\w+)`", PAGES[path]))
    assert {(file, name) for file, name in pointers if name not in names_in(REPOSITORY / file)} == set()


@EVERY_PAGE
def test_a_named_file_exists(path: Path) -> None:
    """Files and folders of the repository in backticks; a name with a placeholder or a glob is not one."""
    named = set(re.findall(r"`((?:trainer|data_prep|launch|configs|tests)/[\w./-]+)`", PAGES[path]))
    assert {name for name in named if not (REPOSITORY / name).exists()} == set()


def test_every_concept_points_to_its_code() -> None:
    section = PAGES[REPOSITORY / "trainer" / "README.md"].partition("\n## Concepts\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z][^|]+) \| (`.+`) \|$", section, re.MULTILINE)
    assert [idea for idea, _ in rows] == CONCEPTS
    assert [idea for idea, code in rows if not re.search(r"`[\w./-]+\.py::\w+`", code)] == []


@EVERY_PAGE
def test_commands_start_files_that_exist(path: Path) -> None:
    starter = r"(?:python|bash|deepspeed|torchrun)(?: --?[\w-]+(?:[ =]\d+)?)*"
    started = set(re.findall(starter + r" ((?:launch|tests)/[\w/.-]+)", PAGES[path]))
    assert {file for file in started if not (REPOSITORY / file).is_file()} == set()
    modules = set(re.findall(r"python -m ((?:data_prep|trainer|launch|tests)[\w.]*)", PAGES[path]))
    assert {
        name
        for name in modules
        if not any((REPOSITORY / (name.replace(".", "/") + end)).is_file() for end in (".py", "/__main__.py"))
    } == set()


def test_the_index_lists_every_command() -> None:
    index = PAGES[REPOSITORY / "launch" / "README.md"].partition("\n## All commands\n")[2].partition("\n## ")[0]
    folder = REPOSITORY / "launch"
    files = [
        file.relative_to(REPOSITORY).as_posix()
        for file in (*folder.rglob("*.py"), *folder.rglob("*.sh"))
        if file.suffix == ".sh" or "def main(" in file.read_text(encoding="utf-8")
    ]
    assert len(files) > 20
    libraries = {"launch/slurm/submission.sh", "launch/__main__.py"}
    assert {file for file in files if file not in index} <= libraries


def test_the_codes_of_the_commonest_errors_exist() -> None:
    section = FRONT.partition("\n## Troubleshooting\n")[2].partition("\n## ")[0]
    codes = re.findall(r"^\| `([a-z0-9-]+)` \|", section, re.MULTILINE)
    assert len(codes) == 8
    sources = "".join(
        file.read_text(encoding="utf-8")
        for package in ("data_prep", "trainer", "launch")
        for file in (REPOSITORY / package).rglob("*.py")
    )
    assert [code for code in codes if f'"{code}"' not in sources] == []


@EVERY_PAGE
def test_subcommands_exist(path: Path) -> None:
    in_code = re.findall(r"```(?:bash|console|text)\n.*?```|`[^`\n]+`", PAGES[path], re.DOTALL)
    named = {name for code in in_code for name in re.findall(r"(?:^|[`\n$] ?)clozeworks ([a-z][a-z-]*)", code)}
    assert named - COMMANDS.keys() == set()


@EVERY_PAGE
def test_links_lead_to_pages_headings_and_pictures(path: Path) -> None:
    page = re.sub(r"```.*?```", "", PAGES[path], flags=re.DOTALL)
    wrong = []
    for link in re.findall(r"\]\((?!https://)([^)]+)\)", page):
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (anchor and anchor not in anchors(PAGES[target])):
            wrong.append(link)
    assert wrong == []
