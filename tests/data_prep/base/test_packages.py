"""The answer to a library that is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.base import packages as module
from data_prep.base.packages import install_command, installed_version, missing_extra
from tests.support.data_prep_command import as_command


def absent(name: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_the_command_names_the_extra_that_brings_the_library() -> None:
    for library, extra in (("sklearn", "finetune"), ("deepspeed", "train"), ("s3fs", "s3")):
        error = missing_extra(absent(library))
        assert error is not None and error.code == "missing-extra" and f"[{extra}]" in error.fix
    error = missing_extra(absent("torch"), "registry")
    assert error is not None and "[registry]" in error.fix and sys.executable in error.fix


def test_other_failed_imports_stay_bugs() -> None:
    assert missing_extra(absent("data_prep.no_such_module")) is None
    assert missing_extra(absent("torch.no_such_module")) is None, "torch is there, and of another version"
    assert missing_extra(ImportError("cannot import name", name="torch")) is None
    with pytest.raises(ModuleNotFoundError):
        as_command(lambda: __import__("no_such_library"))


def test_the_command_can_be_pasted_where_the_path_has_a_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "a b"
    (root / "data_prep" / "base").mkdir(parents=True)
    monkeypatch.setattr(module, "__file__", str(root / "data_prep" / "base" / "missing_extra.py"))
    assert install_command("train").endswith("'.[train]' in the root of the clozeworks repository")
    (root / "pyproject.toml").touch()
    assert install_command("train").endswith(f" -m pip install -e '{root}[train]'")
    (root / "constraints.txt").touch()
    assert install_command(None).endswith(f" -m pip install -c '{root}/constraints.txt' -e '{root}'")


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert installed_version("numpy") == np.__version__
    assert installed_version("clozeworks-of-another-world") is None
