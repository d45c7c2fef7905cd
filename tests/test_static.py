"""What is checked without running the code: ruff's rules and format, mypy's types, and that neither was made easy."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("configs", "data_prep", "trainer", "launch")
RUFF_FOLDERS = (*PACKAGES, "tests")
FAMILIES = {"B", "BLE", "C4", "E", "F", "I", "PERF", "PGH", "PT", "RUF", "SIM", "UP", "W"}
"""Of ruff's rules; more may be on."""
UNTYPED_LIBRARIES = {
    "cloudpickle", "datatrove", "deepspeed", "fsspec", "onnxruntime", "py3langid", "pyarrow", "rensa", "scipy",
    "sentencex", "sklearn",
}  # fmt: skip
# `type: ignore` names its code, and a second comment gives the reason.
IGNORE = re.compile(r"# type: ignore(?P<told>\[[a-z, -]+\]  # \S+ \S+)?")


def check(*command: str) -> None:
    answer = subprocess.run([sys.executable, "-m", *command], cwd=REPOSITORY, capture_output=True, text=True)
    assert answer.returncode == 0, f"{' '.join(command)}\n{answer.stdout}{answer.stderr}"


def settings(*path: str) -> Any:
    found: Any = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    for name in path:
        found = found[name]
    return found


def test_ruff_finds_nothing() -> None:
    check("ruff", "check", *RUFF_FOLDERS)


def test_the_code_is_formatted() -> None:
    check("ruff", "format", "--check", *RUFF_FOLDERS)


def test_the_types_hold() -> None:
    """40 CPU seconds without mypy's cache, few with it. Its own workers would only add to them."""
    check("mypy")


def test_a_mistake_is_found(tmp_path: Path) -> None:
    """The same settings refuse code that is wrong: so what passes has been looked at."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("import os\n\n\ndef size(text):\n    return len(text)\n\n\ntotal: str = size('a')\n")
    with pytest.raises(AssertionError, match="F401"):
        check("ruff", "check", "--no-cache", "--config", "pyproject.toml", str(wrong))
    with pytest.raises(AssertionError, match=r"no-untyped-def(?s:.*)no-untyped-call"):
        check("mypy", "--no-incremental", "--follow-imports", "skip", str(wrong))


def test_mypy_is_strict_everywhere() -> None:
    mypy = settings("mypy")
    assert mypy["strict"] is True and set(mypy["packages"]) == set(PACKAGES) and "exclude" not in mypy
    assert not {name for name, value in mypy.items() if value is False}
    for override in mypy["overrides"]:
        names = {module.split(".")[0] for module in override["module"]}
        assert not names & {*PACKAGES, "*"}
        if "ignore_missing_imports" in override:
            assert names == UNTYPED_LIBRARIES


def test_the_families_of_rules_stay_on() -> None:
    assert set(settings("ruff", "lint", "select")) >= FAMILIES
    exceptions = settings("ruff", "lint", "per-file-ignores")
    assert all(pattern.startswith("tests/") for pattern in exceptions)


def test_the_floor_of_coverage_stays() -> None:
    assert settings("coverage", "report", "fail_under") >= 90
    assert set(settings("coverage", "run", "source_dirs")) == {"data_prep", "trainer"}
    assert "omit" not in settings("coverage", "run") and "omit" not in settings("coverage", "report")


def test_every_ignored_type_names_its_code_and_reason() -> None:
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if found := IGNORE.search(line):
                    assert found["told"], f"{path.relative_to(REPOSITORY)}:{number}: {line.strip()}"
