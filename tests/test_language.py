"""Code, tests and pages are free of the words of a former dialect."""

from __future__ import annotations

import re
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
