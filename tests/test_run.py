"""tests/run.sh, with stand-ins for the environment and Python: what it asks of pytest."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
ENVIRONMENT = """
prepare_environment() {
    echo "${CLOZEWORKS_CONSTRAINTS:-} ${CLOZEWORKS_VENV:-}" >"$root/environment"
    export CLOZEWORKS_VENV=$root/venv PATH=$root/venv/bin:$PATH
}
install_debian_packages() { true; }
count_gpus() { echo 0; }
_die() { echo "$*" >&2; exit 1; }
"""
PYTHON = """#!/bin/sh
echo "$COVERAGE_FILE"
shift 3
for word in "$@"; do echo "$word"; done
case $* in *"$FAILING"*)
    mkdir -p .pytest_cache/v/cache
    cd .pytest_cache/v/cache
    printf '{\n  "tests/test_a.py::test_a[b-\\\\u00e9]": true,\n  "tests/test_c.py": true\n}' >lastfailed
    exit 1 ;;
esac
"""
FAILURES = """
failed:
  tests/test_a.py::test_a[b-\\u00e9]
  tests/test_c.py
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository that holds run.sh and stand-ins for what it calls."""
    for folder in ("tests", "launch", "venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(REPOSITORY / "tests" / "run.sh", tmp_path / "tests")
    (tmp_path / "launch" / "environment.sh").write_text(ENVIRONMENT)
    (tmp_path / "venv" / "bin" / "python").write_text(PYTHON)
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    return tmp_path


def run(root: Path, *arguments: str, failing: str = "nothing") -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CLOZEWORKS_")}
    environment["FAILING"] = failing
    command = ["bash", "tests/run.sh", *arguments]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=60)


def asked(root: Path, *arguments: str) -> list[str]:
    """The words after `python -m pytest --durations=15`."""
    answer = run(root, *arguments)
    assert answer.returncode == 0, answer.stderr
    coverage_file, *words = answer.stdout.splitlines()
    assert coverage_file == str(root / "venv" / "coverage" / "data"), "nothing of it lies among the sources"
    return words


CORES = subprocess.run(["env", "-u", "OMP_NUM_THREADS", "nproc"], capture_output=True, text=True).stdout.strip()
FIRST = ["-m", "not slow and not (spawn or launcher)", "--numprocesses", CORES]
FIRST += ["--cov", "--cov-report=", "--cov-fail-under=0"]
SECOND = ["-m", "not slow and (spawn or launcher)", "--cov", "--cov-append", "--cov-report="]


def parts(root: Path, *arguments: str) -> list[list[str]]:
    """What is asked of the two parts of a whole run."""
    first, second = [], asked(root, *arguments)
    while second[0] != str(root / "venv" / "coverage" / "data"):
        first.append(second.pop(0))
    assert "coverage report" in second[-1]
    return [first, second[1:-1]]


def test_the_whole_run_is_two_parts_whose_lines_count_together_for_the_floor(root: Path) -> None:
    assert parts(root) == [FIRST, SECOND]


def test_a_failure_in_either_part_fails_the_run_and_keeps_no_test_from_running(root: Path) -> None:
    for failing in ("--numprocesses", "--cov-append"):
        answer = run(root, failing=failing)
        assert answer.returncode == 1
        assert "--numprocesses" in answer.stdout and "--cov-append" in answer.stdout
        assert answer.stdout.endswith(FAILURES)
    assert run(root, "tests/trainer", failing="tests/trainer").returncode == 1


def test_with_other_versions_it_is_the_whole_run_too(root: Path) -> None:
    (root / "older.txt").write_text("torch==2.11.0\n")
    assert parts(root, "--constraints", "older.txt") == [FIRST, SECOND]
    assert asked(root, "--constraints", "older.txt", "tests/trainer")[0] == "tests/trainer"


def test_other_versions_have_an_environment_of_their_own(root: Path) -> None:
    def environment(*arguments: str) -> list[str]:
        asked(root, *arguments)
        return (root / "environment").read_text().split(" ")

    assert environment() == ["", "\n"], "the pinned versions, in the folder that launch/environment.sh takes"
    folders = set()
    for version in ("2.11.0", "2.12.0"):
        (root / "other.txt").write_text(f"torch=={version}\n")
        constraints, folder = environment("--constraints", "other.txt")
        assert constraints == "other.txt"
        folders.add(folder.strip())
    assert len(folders) == 2 and all(Path(folder).parent == root for folder in folders)
    assert all(Path(folder).name.startswith(".venv-") for folder in folders), "which git ignores"


def test_a_missing_file_of_versions_is_told(root: Path) -> None:
    for arguments in (["--constraints", "none.txt"], ["--constraints"]):
        answer = run(root, *arguments)
        assert answer.returncode != 0 and "--constraints needs a file of versions" in answer.stderr


def test_help_is_its_own_and_installs_nothing(root: Path) -> None:
    for word in ("--help", "-h"):
        answer = run(root, word)
        assert answer.returncode == 0 and "--constraints FILE" in answer.stdout
    assert not (root / "environment").exists()


def test_of_a_part_no_floor_is_asked(root: Path) -> None:
    words = asked(root, "tests/trainer", "-k", "masking or loader")
    assert words == ["tests/trainer", "-k", "masking or loader", "--cov-fail-under=0"]
    assert asked(root, "--cov", "tests/trainer") == ["--cov", "tests/trainer", "--cov-fail-under=0"]


def test_every_test_runs_without_measuring_for_kills_lose_the_lines(root: Path) -> None:
    words = asked(root, "--all")
    assert words[:4] == ["-m", "", "-p", "tests.fault_table"] and "--cov" not in words
