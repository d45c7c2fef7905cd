"""tests/run.sh, with stand-ins for the environment and Python: what it passes on to pytest."""

from __future__ import annotations

import os
import shutil
import subprocess
from itertools import pairwise
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
case $* in "-m mypy" | *fork_server.py*) exit 0 ;; esac
! env | grep -qE '^(PYTHON|PYTEST)' || exit 3
echo "$COVERAGE_FILE"
shift 3
for word in "$@"; do echo "$word"; done
case $* in *"$FAILING"*) exit 1 ;; esac
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that holds run.sh and stand-ins for what it calls."""
    monkeypatch.delenv("CI", raising=False)
    for name in ("DONTWRITEBYTECODE", "PATH", "OPTIMIZE", "HOME", "SAFEPATH", "INSPECT", "WARNINGS", "_CPU_COUNT"):
        monkeypatch.setenv(f"PYTHON{name}", "1")  # which run.sh removes
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        monkeypatch.setenv(name, "1")
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


def passed_on(root: Path, *arguments: str) -> list[str]:
    """The words after `python -m pytest --durations=15`."""
    answer = run(root, *arguments)
    assert answer.returncode == 0, answer.stderr
    coverage_file, *words = answer.stdout.splitlines()
    assert coverage_file == str(root / "venv" / "coverage" / "data"), "nothing of it lies among the sources"
    taken = [after for word, after in pairwise(words) if word == "--cov" and not after.startswith("-")]
    assert not taken, "pytest takes a path after --cov for what is measured, and runs all tests"
    return words


CORES = subprocess.run(["env", "-u", "OMP_NUM_THREADS", "nproc"], capture_output=True, text=True).stdout.strip()
WORKERS = str(int(CORES) + 2)
PROJECT = [
    *("tests/test_*.py", "tests/benchmarks", "tests/gpu", "tests/workarounds"),
    *("tests/fuzzing/test_watching.py", "tests/system/test_demo.py"),
]
WORKERS_OPTIONS = ["--numprocesses", WORKERS, "--dist", "loadfile", "--no-loadscope-reorder"]
OF_PRODUCT = [f"--ignore={path}" for path in PROJECT]
DEFAULT = ["-m", "not slow and not long", *WORKERS_OPTIONS, *OF_PRODUCT]
WITH_LONG = ["-m", "not slow", *WORKERS_OPTIONS, *OF_PRODUCT]
SECOND_LANE = ["-m", "not slow", *WORKERS_OPTIONS, *PROJECT]


def test_the_default_run_is_the_quick_tests_of_the_product_and_names_what_it_leaves_out(root: Path) -> None:
    *words, first, last = passed_on(root)
    assert words == DEFAULT and first.endswith("bash tests/run.sh --long")
    assert last.endswith("bash tests/run.sh --project")
    assert all(list(REPOSITORY.glob(path)) for path in PROJECT)
    *words, last = passed_on(root, "--long")
    assert words == WITH_LONG and last.endswith("bash tests/run.sh --project")


def test_the_second_lane_is_what_the_first_leaves_out(root: Path) -> None:
    assert passed_on(root, "--project") == SECOND_LANE


def test_lines_are_counted_of_the_long_tests_too(root: Path) -> None:
    *words, last, _ = passed_on(root, "--cov")
    assert words == [*WITH_LONG[: -len(OF_PRODUCT)], "--cov", *OF_PRODUCT] and "coverage report" in last


def test_continuous_integration_runs_both_lanes_with_the_long_tests(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    assert passed_on(root) == ["-m", "not slow", *WORKERS_OPTIONS]
    assert passed_on(root, "--project") == SECOND_LANE
    assert run(root, failing="--numprocesses").returncode == 1
    assert passed_on(root, "tests/trainer") == ["--cov-fail-under=0", "tests/trainer"]


def test_a_failure_fails_the_run(root: Path) -> None:
    assert run(root, failing="--numprocesses").returncode == 1
    assert run(root, "tests/trainer", failing="tests/trainer").returncode == 1


def test_with_other_versions_it_is_the_whole_run_too(root: Path) -> None:
    (root / "older.txt").write_text("torch==2.11.0\n")
    assert passed_on(root, "--constraints", "older.txt")[:-2] == DEFAULT
    assert passed_on(root, "--long", "--constraints", "older.txt")[:-1] == WITH_LONG
    assert passed_on(root, "--constraints", "older.txt", "tests/trainer")[1:] == ["tests/trainer"]


def test_other_versions_have_an_environment_of_their_own(root: Path) -> None:
    def environment(*arguments: str) -> list[str]:
        passed_on(root, *arguments)
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


def test_a_missing_file_of_versions_is_reported(root: Path) -> None:
    for arguments in (["--constraints", "none.txt"], ["--constraints"]):
        answer = run(root, *arguments)
        assert answer.returncode != 0 and "[missing-constraints]" in answer.stderr


def test_help_is_its_own_and_installs_nothing(root: Path) -> None:
    for word in ("--help", "-h"):
        answer = run(root, word)
        assert answer.returncode == 0 and "--constraints FILE" in answer.stdout
    assert not (root / "environment").exists()


def test_of_a_part_no_floor_is_passed_on(root: Path) -> None:
    words = passed_on(root, "tests/trainer", "-k", "masking or loader")
    assert words == ["--cov-fail-under=0", "tests/trainer", "-k", "masking or loader"]
    assert passed_on(root, "--cov", "tests/trainer") == ["--cov", "--cov-fail-under=0", "tests/trainer"]


def test_every_test_runs_without_measuring_for_kills_lose_the_lines(root: Path) -> None:
    words = passed_on(root, "--all")
    assert words[1:5] == ["-m", "", "-p", "tests.fault_table"] and "--cov" not in words
