"""Digests of functions: a change of what a function does changes the digest, wherever the change is."""

from __future__ import annotations

import importlib
import importlib.machinery
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from data_prep.base.source_digest import check_module_unchanged, function_digest, module_digest
from tests.support.error_codes import coded


@pytest.mark.parametrize(
    "source",
    [
        "def keep(d): return {0}",
        "LIMIT = {0}\ndef keep(d): return [LIMIT for word in d]",
        "def used(w): return {0}\ndef keep(d): return any(used(word) for word in d)",
        "LIMIT = {0}\ndef keep(d):\n    def inner(): return LIMIT\n    return inner()",
        "A = lambda d: {0}\nB = lambda d: 5\ndef keep(d): return B(d) or A(d)",
        "import functools\n@functools.lru_cache\ndef used(w): return {0}\ndef keep(d): return used(d)",
        "import functools\ndef wrapping(f):\n    @functools.wraps(f)\n    def inner(d): return {0}\n    return inner\n"
        "@wrapping\ndef keep(d): return None",
        "class Base:\n    def __call__(self, d): return {0}\nclass keep(Base): ...",
        "def used(): return {0}\nclass keep:\n    @staticmethod\n    def s(): return used()\n"
        "    def __call__(self, d): return self.s()",
        "def used(): return {0}\nclass keep:\n    @property\n    def p(self): return used()\n"
        "    def __call__(self, d): return self.p",
        "LIMIT = {0}\nclass keep:\n    limit = LIMIT\n    def __call__(self, d): return self.limit",
        "LIMIT = {0}\nfrom dataclasses import dataclass\n@dataclass\nclass keep:\n    limit: int = 1\n"
        "    def __call__(self, d): return self.limit + LIMIT",
    ],
)
def test_a_change_of_a_used_function_changes_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    digests = []
    for number in (1, 2, 1):
        (tmp_path / "own_keep.py").write_text(source.format(number) + "\n")
        sys.modules.pop("own_keep", None)
        importlib.invalidate_caches()
        importlib.import_module("linecache").checkcache()
        digests.append(function_digest(importlib.import_module("own_keep").keep))
    monkeypatch.delitem(sys.modules, "own_keep")
    assert None not in digests and digests[0] == digests[2] != digests[1]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `own_module`."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    path = tmp_path / "own_module.py"
    path.write_text("def keep(d): return 1\n")
    return path


@pytest.mark.fault(
    row=64, fault="a module of the user's is edited after its import", required="refused until it is reloaded"
)
def test_an_edited_module_is_refused_until_it_is_reloaded(own: Path) -> None:
    module = importlib.import_module("own_module")
    before = module_digest(module.keep)
    assert before is not None and before == module_digest(module)
    own.write_text("def keep(d): return 2\n")  # of the same size, within the same second
    assert module_digest(module) == before, "the code that runs"
    for check in (check_module_unchanged, function_digest):
        with pytest.raises(UserError, check=coded("module-changed")):
            check(module.keep)
    importlib.reload(module)
    check_module_unchanged(module)
    assert module.keep(None) == 2 and module_digest(module) != before
    own.write_text("def keep(d): return 1\n")
    sys.modules.pop("own_module")
    importlib.invalidate_caches()
    again = importlib.import_module("own_module")
    assert again.keep(None) == 1 and module_digest(again) == before


def test_a_module_of_a_package_is_followed_too(own: Path) -> None:
    (own.parent / "own_package").mkdir()
    (own.parent / "own_package/__init__.py").write_text("")
    inner = own.parent / "own_package/inner.py"
    inner.write_text("LIMIT = 1\n")
    module = importlib.import_module("own_package.inner")
    inner.write_text("LIMIT = 2\n")
    with pytest.raises(UserError, check=coded("module-changed")):
        check_module_unchanged(module)
    inner.unlink()
    check_module_unchanged(module)
    assert module_digest(module) is not None
    for name in ("own_package", "own_package.inner"):
        sys.modules.pop(name)


def test_a_module_that_was_imported_before_this_project_is_followed_too(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("def keep(d): return 1\n")
    (tmp_path / "script.py").write_text(
        "import early, pathlib\n"
        "from data_prep.base.source_digest import check_module_unchanged, module_digest\n"
        "before = module_digest(early)\n"
        "pathlib.Path(early.__file__).write_text('def keep(d): return 2\\n')\n"
        "assert module_digest(early) == before\n"
        "try: check_module_unchanged(early.keep)\n"
        "except Exception as error: print(error.code)\n"
    )
    environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.stdout == "module-changed\n", done.stderr


def test_installed_packages_and_the_standard_library_are_not_digested() -> None:
    for name in ("json", "numpy", "data_prep.base.errors"):
        assert type(importlib.import_module(name).__spec__.loader) is importlib.machinery.SourceFileLoader
