"""Code, tests and pages are free of the words of a former dialect, and what people read of sentences turned around."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
DIALECT = ("reckon(?:s|ed|ing)?", "anew", "mend(?:s|ed|ing)?", "lest", "borne", "trainings", "is told", "are told")
WORDS = re.compile(r"\b(?:" + "|".join((*DIALECT, "dead places?")) + r")\b", re.IGNORECASE)
ENDINGS = {".py", ".sh", ".yaml", ".md", ".toml", ""}
FILES = sorted(
    path
    for folder in ("configs", "data_prep", "launch", "trainer")
    for path in (REPOSITORY / folder).rglob("*")
    if path.is_file() and path.suffix in ENDINGS and "__pycache__" not in path.parts
)
TESTS = sorted(
    path
    for ending in ("*.md", "*.py")
    for path in (REPOSITORY / "tests").rglob(ending)
    if "golden" not in path.parts and path != Path(__file__).resolve()
)
_VERB = "(?:is|are|was|were|does|do|did|has|have|had)"
_THE = "(?:the|an?|its|each|every)"
_MORE = "(?:more|less|worse|(?:long|lat|larg|small|high|low|bett|earli|great|new|old|slow|fast|furth|short|wid)er)"
TURNED = {
    "'there and back' (sent and returned)": r"\bthere and back\b",
    "'is no X' (is not a X)": rf"(?<![Tt]here )\b(?:is|are|was|were) no (?!{_MORE}\b)\w",
    "', as does X' (X does so too)": rf", as {_VERB}\b",
    "'Of a X the Y' (the Y of a X)": rf"(?:^|[.:;|] )Of {_THE} (?:[\w-]+ ){{1,4}}{_THE} ",
    "'of each the X' (the X of each)": r"\bof each (?:the|an?|its)\b",
    "'of the X of the Y of the Z'": rf"\bof {_THE} [\w/-]+ of {_THE} [\w/-]+ of\b",
    "'so many percent' (this percentage)": r"\bso many (?:percent|tokens|rows|steps)\b",
    "'goes on' (resumes, continues)": r"\b(?:go|goes|went) on\b",
    "'whoever' (anyone who)": r"\bwhoever\b",
}
"""Sentences that cannot be read aloud, with what to write: subject first, then the verb, then one fact."""


def turned(text: str) -> list[str]:
    """The names of the patterns of `TURNED` in a text."""
    words = " ".join(text.split())
    return [f"{name}: {found.group()}" for name, each in TURNED.items() if (found := re.search(each, words))]


def read_by_people(path: Path) -> Iterator[str]:
    """The sentences of a page, the comments of a configuration or script, the texts of a module without docstrings."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from re.split(r"\n\n|\n(?=\s*(?:[-*]|\d+\.) )|\|", re.sub(r"```.*?```", "\n\n", source, flags=re.DOTALL))
    elif path.suffix == ".py":
        tree = ast.parse(source)
        unread = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in unread:
                yield node.value
    else:
        yield from re.split(r"\n[^#]*", "\n".join(re.findall(r"^# .*|\s# .*", source, re.MULTILINE)))


@pytest.mark.parametrize("text", ["Reckoned with.", "they\nare told so", "a dead place", "two trainings", "mends it"])
def test_a_word_of_the_dialect_is_found(text: str) -> None:
    assert WORDS.search(" ".join(text.split()))


@pytest.mark.parametrize("text", ["commend", "TrainingSample", "recommended", "molest", "the training is", "airborne"])
def test_other_words_are_left_alone(text: str) -> None:
    assert not WORDS.search(text)


def test_no_file_has_a_word_of_the_dialect() -> None:
    found = []
    for path in [*FILES, *TESTS, REPOSITORY / "README.md", REPOSITORY / "pyproject.toml"]:
        words = " ".join(line.strip().removeprefix("# ") for line in path.read_text(encoding="utf-8").splitlines())
        found += [f"{path.relative_to(REPOSITORY)}: {match.group()}" for match in WORDS.finditer(words)]
    assert len(FILES) > 150
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "all are sent, there and back",
        "a value that\nis no number",
        "They exit, as does the launcher.",
        "It waits. Of a mixture the parts are measured.",
        "of each the first words",
        "the mean of the rows of the tokens of a text",
        "so many percent of the tokens",
        "the run goes on",
        "for whoever reads it",
    ],
)
def test_a_sentence_that_is_turned_around_is_found(text: str) -> None:
    assert turned(text)


@pytest.mark.parametrize(
    "text",
    [
        "there is no run",
        "it is no longer read",
        "is no larger than 3",
        "Of these, 80% become [MASK]",
        "Of the predicted tokens, the model hides 80%",
        "the rows of the tokens",
        "as is",
        "they wait, and so do the others",
    ],
)
def test_other_sentences_are_left_alone(text: str) -> None:
    assert turned(text) == []


def test_nothing_that_people_read_is_turned_around() -> None:
    pages = [path for path in TESTS if path.suffix == ".md"]
    found = [
        f"{path.relative_to(REPOSITORY)}: {each}"
        for path in [*FILES, *pages, REPOSITORY / "README.md"]
        for text in read_by_people(path)
        for each in turned(text)
    ]
    assert found == []
