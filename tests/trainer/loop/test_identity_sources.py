"""Which source files a run executes, and what changed since a checkpoint."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from trainer.api import EXTENSIONS
from trainer.config.run_settings import EvaluationSettings
from trainer.loop.identity import listed, own_modules, running_sources, source_changes, source_digests

REPOSITORY = Path(__file__).resolve().parents[3]
SUITE = """\
name: mine
data: .
tasks: {first: {function: "tasks_of_mine:score", metrics: [accuracy]}}
"""


def test_every_source_file_of_the_project_counts() -> None:
    digests = dict(source_digests())
    files = [
        path
        for package in ("configs", "data_prep", "trainer", "launch")
        for path in (REPOSITORY / package).rglob("*.py")
    ]
    assert {path.relative_to(REPOSITORY).as_posix() for path in files} <= digests.keys()
    assert len(digests) - len(files) in (0, 1), "beside them the script that runs"
    assert all(len(digest) == 64 for digest in digests.values())


def test_imported_modules_of_the_user_count_and_installed_ones_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels_of_mine.py").write_text("SCALE = 1\n")
    (tmp_path / "optimizer_of_mine.py").write_text("import kernels_of_mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("optimizer_of_mine")
    try:
        before = running_sources()
        assert {"module optimizer_of_mine", "module kernels_of_mine", "trainer/loop/step.py"} <= before.keys()
        assert not {"module torch", "module json", "module trainer.loop.step"} & before.keys()
        (tmp_path / "kernels_of_mine.py").write_text("SCALE = 2\n")
        assert not source_changes(before, running_sources()), "the code that was imported still runs"
        importlib.reload(sys.modules["kernels_of_mine"])
        changes = source_changes(before, running_sources())
        assert (changes.numerics, changes.others) == (("module kernels_of_mine",), ())
    finally:
        del sys.modules["optimizer_of_mine"], sys.modules["kernels_of_mine"]


def test_the_tasks_of_a_suite_count_though_another_process_imports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "suite.yaml").write_text(SUITE)
    (tmp_path / "tasks_of_mine.py").write_text("raise SystemExit('it is not imported')\n")
    found = own_modules(EXTENSIONS.modules_of_suite(EvaluationSettings(suite=str(tmp_path / "suite.yaml"))))
    assert found["module tasks_of_mine"] == tmp_path / "tasks_of_mine.py"
    assert "tasks_of_mine" not in sys.modules and str(tmp_path) not in sys.path


@pytest.mark.parametrize("folder", ["data", "model", "objectives", "engine", "loop"])
def test_changed_training_code_changes_numbers(folder: str) -> None:
    before = {f"trainer/{folder}/a.py": "1", f"trainer/{folder}/gone.py": "1", f"trainer/{folder}/same.py": "1"}
    now = {f"trainer/{folder}/a.py": "2", f"trainer/{folder}/new.py": "1", f"trainer/{folder}/same.py": "1"}
    changes = source_changes(before, now)
    assert changes.numerics == tuple(f"trainer/{folder}/{name}.py" for name in ("a", "gone", "new"))
    assert changes.others == ()


def test_other_files_of_the_project_are_listed_apart_and_modules_of_the_user_only_where_both_have_them() -> None:
    before = {"launch/options.py": "1", "module mine": "1", "module gone": "1", "the script run.py": "1"}
    now = {"launch/options.py": "2", "module mine": "2", "module new": "1", "the script run.py": "2"}
    changes = source_changes(before, now)
    assert changes.numerics == ("module mine", "the script run.py") and changes.others == ("launch/options.py",)


def test_a_checkpoint_of_an_earlier_release_has_no_changes() -> None:
    assert not source_changes({}, {"trainer/loop/step.py": "1"})


def test_a_long_list_is_cut() -> None:
    assert listed(("a", "b")) == "a, b"
    assert listed(tuple(map(str, range(25)))).endswith("18, 19 and 5 more")
