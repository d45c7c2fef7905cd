"""What README points at is there: functions and tests by `file.py::name`, files of commands, links to headings."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")

CONCEPTS = [
    "Byte-pair encoding",
    "Embeddings and positions",
    "Attention",
    "Feed-forward",
    "Masking",
    "Next-sentence prediction",
    "The tied head",
    "Fine-tuning",
]


def names_in(path: Path) -> set[str]:
    """Functions and classes that a Python file defines, those inside classes too."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)}


def test_a_pointer_names_what_its_file_defines() -> None:
    pointers = set(re.findall(r"`([\w./-]+\.py)::(\w+)`", README))
    assert len(pointers) > 15
    assert {(path, name) for path, name in pointers if name not in names_in(REPOSITORY / path)} == set()


def test_every_concept_has_its_code_its_test_a_command_and_its_output() -> None:
    section = README.partition("\n## Concepts\n")[2].partition("\n## ")[0].replace("\\\n", " ")
    parts = re.split(r"^\*\*(.+?)\.\*\* ", section, flags=re.MULTILINE)[1:]
    assert parts[::2] == CONCEPTS
    for name, text in zip(CONCEPTS, parts[1::2], strict=True):
        in_tests = {path.startswith("tests/") for path in re.findall(r"`([\w./-]+\.py)::\w+`", text)}
        assert in_tests == {False, True}, f"{name}: a pointer to its code or to its test is missing"
        assert re.search(r"^\$ .+\n(?!\$ |```).", text, re.MULTILINE), f"{name}: a command with its output is missing"


def test_commands_start_files_that_exist() -> None:
    started = set(
        re.findall(r"(?:python|bash|deepspeed|torchrun)(?: --?[\w-]+(?:[ =]\d+)?)* ((?:launch|tests)/[\w/.-]+)", README)
    )
    assert len(started) > 10
    assert {path for path in started if not (REPOSITORY / path).is_file()} == set()


def test_links_lead_to_headings() -> None:
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert {link for link in re.findall(r"\]\(#([^)]+)\)", README) if link not in anchors} == set()
