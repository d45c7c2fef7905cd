"""The source that a run executes: its digests, which ranks compare and checkpoints keep, and what changed since.

Modules are imported once, so that a file edited later does not run before the next start. So the digests of this
project are those of the first look of a process, and those of the user's modules are taken when they are imported.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from data_prep.base.imported_sources import imported_digest
from data_prep.storage import storage
from trainer.loop.reporter import Reporter
from trainer.loop.start import Start
from trainer.tracking.source_code import PACKAGES, source_text

NUMERICS = ("trainer/data/", "trainer/model/", "trainer/objectives/", "trainer/engine/", "trainer/loop/")
"""Where the project's files lie on which the numbers of a run depend."""

_MAX_NAMES = 20
_MODULE, _SCRIPT = "module ", "the script "


@functools.cache
def project_digests() -> Mapping[str, str]:
    """Return the sha256 of every installed source file of this project by its path, such as trainer/loop/step.py."""
    digests = {}
    for package, folder in _project_folders():
        for path in sorted(folder.rglob("*.py")):
            digests[f"{package}/{path.relative_to(folder).as_posix()}"] = storage.sha256_of(path)
    return digests


def source_digests() -> Iterator[tuple[str, str]]:
    """Yield name and sha256 of every installed source file of this project, and of the running script."""
    yield from project_digests().items()
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None:
        yield f"{_SCRIPT}{Path(script).name}", storage.sha256_of(Path(script))


def own_modules(task_modules: Sequence[str] = ()) -> dict[str, Path]:
    """Return the files of the user's own modules that this process imported, by name, and of modules that it did not.

    `task_modules` have the tasks of a suite, which a process of its own imports. What is installed, Python's own
    library and this project are none of them.
    """
    files = {name: path for name, module in list(sys.modules.items()) if (path := _file_of(name, module)) is not None}
    for module in task_modules:
        if module not in files and (path := _file_of_spec(module)) is not None:
            files[module] = path
    script = files.pop("__main__", None)
    named = {f"{_MODULE}{name}": path for name, path in sorted(files.items())}
    return named if script is None else {f"{_SCRIPT}{script.name}": script, **named}


def running_sources(task_modules: Sequence[str] = ()) -> dict[str, str]:
    """Return the sha256 of every source file that this run executes: the project's and the user's own, by name."""
    digests = dict(project_digests())
    for name, path in own_modules(task_modules).items():
        module = "__main__" if name.startswith(_SCRIPT) else name.removeprefix(_MODULE)
        digests[name] = imported_digest(sys.modules.get(module)) or storage.sha256_of(path)
    return digests


@dataclass(frozen=True)
class SourceChanges:
    """Names of files that differ from those of a checkpoint."""

    numerics: tuple[str, ...] = ()
    """Files on which the numbers of a run may depend: of the project's training code, and the user's own."""
    others: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.numerics or self.others)


def source_changes(before: Mapping[str, str], now: Mapping[str, str]) -> SourceChanges:
    """Compare the digests of a checkpoint with those of this process; nothing where an old checkpoint has none.

    A file of the project that is new or gone is a change. A module of the user's that one of them did not import is
    none: it may be imported later.
    """
    if not before:
        return SourceChanges()
    names = [
        name
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name) and (_is_of_project(name) or (name in before and name in now))
    ]
    numerics = tuple(name for name in names if name.startswith(NUMERICS) or not _is_of_project(name))
    return SourceChanges(numerics, tuple(name for name in names if name not in numerics))


def listed(names: tuple[str, ...]) -> str:
    """Return the names for a line of the log."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def log_sources(
    reporter: Reporter, sources: Mapping[str, str], start: Start, task_modules: Sequence[str], verbose: bool
) -> None:
    """Warn of source files that differ from the checkpoint's, and keep the source of each MLflow run as an artifact.

    Call it on rank 0. `sources` are the digests of what runs.
    A start with another source has an artifact of its own. `verbose` lists changed files on which no number depends.
    """
    before = start.checkpoint.saved.sources if start.checkpoint is not None else {}
    changes, artifact = source_changes(before, sources), f"source/step-{start.step:08d}.diff"
    if changes.numerics:
        reporter.warn(
            f"changed since the checkpoint: the source of {listed(changes.numerics)}; losses may differ from those of "
            f"the source before (see the run's artifact {artifact} for the differences from the commit, if git has one)"
        )
    if changes.others and verbose:
        reporter.info(f"changed since the checkpoint: other source files: {listed(changes.others)}")
    modules = own_modules(task_modules)
    if edited := [name for name, path in modules.items() if sources.get(name) not in (None, storage.sha256_of(path))]:
        reporter.warn(
            f"edited after they were imported, so what runs is not what is in the file: {listed(tuple(edited))}"
        )
    if changes or not before or start.branch is not None or start.is_from_other_run:
        changed = (*changes.numerics, *changes.others)
        reporter.tracker.log_artifact_text(artifact, source_text(modules, changed=changed))


def _is_of_project(name: str) -> bool:
    return name.startswith(tuple(f"{package}/" for package in PACKAGES))


def _project_folders() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield package, Path(folder)


def _file_of(name: str, module: ModuleType | None) -> Path | None:
    """The file of an imported module of the user's; None of another one."""
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if not isinstance(file, str) or (name != "__main__" and (spec is None or spec.origin != file)):
        return None  # made at run time, such as the code of torch.compile
    return _own(file)


def _file_of_spec(name: str) -> Path | None:
    """The file of a module that was not imported, searched for as tasks of a suite are: last in this directory."""
    path: list[str] | None = [*sys.path, os.getcwd()]
    spec = None
    for number in range(1, name.count(".") + 2):
        part = ".".join(name.split(".")[:number])
        spec = importlib.machinery.PathFinder.find_spec(part, path)
        path = None if spec is None or spec.submodule_search_locations is None else [*spec.submodule_search_locations]
        if spec is None:
            return None
    return _own(spec.origin) if spec is not None and isinstance(spec.origin, str) else None


def _own(file: str) -> Path | None:
    file = os.path.abspath(file)
    if not file.endswith(".py") or {"site-packages", "dist-packages"} & {*file.split(os.sep)}:
        return None
    if file.startswith(_folders_of_others()) or not os.path.isfile(file):
        return None
    return Path(file)


@functools.cache
def _folders_of_others() -> tuple[str, ...]:
    """Python's own library and this project; a process imports thousands of modules from them."""
    library = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return tuple(f"{folder}{os.sep}" for folder in (*library, *(folder for _, folder in _project_folders())))
