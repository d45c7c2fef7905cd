"""Digests of the files of imported modules, taken when a module is imported: what runs, whatever the file holds later.

Importing this module adds a finder in front of Python's own. It compiles a user's module from the bytes that it
digests: Python's cache of compiled modules goes by seconds and size, and would run the old code after a quick edit.
Modules of the standard library, of installed packages and of this project are left to Python.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import sys
import sysconfig
import types
from collections.abc import Sequence
from typing import Any

_OURS = {"data_prep", "trainer", "launch", "configs", "tests"}
_INSTALLED = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))

_digests: dict[str, tuple[Any, str, str]] = {}
"""By the module's name: its `__spec__`, which a reload replaces, its file (a process may run one script after another
as `__main__`), and the sha256 of that file when it was imported."""


def imported_digest(module: types.ModuleType | None) -> str | None:
    """Return the sha256 of a module's source file when it was imported; None where there is none.

    The present file counts for a module that was imported without this finder.
    """
    path = _source_file(module)
    if module is None or path is None:
        return None
    spec, file, digest = _digests.get(module.__name__, (None, "", ""))
    if file == path and spec is getattr(module, "__spec__", None):
        return digest
    try:
        return _digest_of(path)
    except OSError:
        return None


def check_unchanged(module: types.ModuleType | None) -> None:
    """Check, where work begins, that the file of a module is still the code that runs."""
    path = _source_file(module)
    if module is None or path is None:
        return
    try:
        now = _digest_of(path)
    except OSError:  # a file that is gone does not differ
        return
    if now != imported_digest(module):
        from data_prep.base.errors import UserError  # not at the top: `import data_prep` imports this module alone

        raise UserError(
            f"{path} changed after its module {module.__name__} was imported, so the code that runs is older",
            fix="restart the process and its workers, or reload the module (importlib.reload)",
            code="module-changed",
        )


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType | None:
        self.data = self.get_data(self.path)
        code: types.CodeType = self.source_to_code(self.data, self.path)
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        _digests[module.__name__] = module.__spec__, self.path, hashlib.sha256(self.data).hexdigest()


class _Finder:
    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in _OURS:
            return None
        spec = _python_finder.find_spec(fullname, path, target)
        loader = None if spec is None else spec.loader
        if spec is not None and type(loader) is importlib.machinery.SourceFileLoader and not _is_installed(loader.path):
            spec.loader = _Loader(loader.name, loader.path)
        return spec


def _source_file(module: types.ModuleType | None) -> str | None:
    path = getattr(module, "__file__", None)
    return path if isinstance(path, str) and path.endswith(".py") else None


def _is_installed(path: str) -> bool:
    return path.startswith(_INSTALLED) or "/site-packages/" in path or "/dist-packages/" in path


def _digest_of(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def _record_imported() -> None:
    """Take the digests of a user's modules that were imported before, the script that runs among them."""
    for name, module in list(sys.modules.items()):
        path = _source_file(module)
        if path is not None and name.partition(".")[0] not in _OURS and not _is_installed(path):
            try:
                _digests[name] = getattr(module, "__spec__", None), path, _digest_of(path)
            except OSError:
                continue


# Python's own, or what somebody put in its place, who may hide modules.
_python_finder: type[importlib.machinery.PathFinder] = next(
    (each for each in sys.meta_path if isinstance(each, type) and issubclass(each, importlib.machinery.PathFinder)),
    importlib.machinery.PathFinder,
)
if _Finder not in sys.meta_path:
    _record_imported()
    is_there = _python_finder in sys.meta_path
    sys.meta_path.insert(sys.meta_path.index(_python_finder) if is_there else len(sys.meta_path), _Finder)
