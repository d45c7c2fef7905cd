"""What a rank runs: settings, data and source.

All ranks compare these facts before the first step (`trainer/distributed/agreement.py`). Weights of `init_from` are not
among them: rank 0 reads them and broadcasts them.

Checkpoints keep the digests of the source, so that a start can report what changed since. A file that is edited after
its import does not run before the next start. So a process computes the digests of this project once, at first use, and
those of the user's modules when they are imported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from data_prep.base.errors import UserError
from data_prep.base.imported_sources import imported_digest
from data_prep.base.packages import installed_version
from data_prep.base.settings import flatten
from data_prep.storage import storage
from trainer.config.custom_code import code_of
from trainer.config.run_config import RunConfig, without_secrets
from trainer.data.sample_range import Branch
from trainer.data.shard_set import ShardSet
from trainer.distributed.agreement import Fact, Facts
from trainer.tracking.run_description import PACKAGES

PER_HOST = {
    "data.shards.url": "the manifests are compared instead",
    "training.stages.data.shards.url": "the manifests are compared instead",
    "data.tokenizer": "its fingerprint is compared with the shards' instead",
    "evaluation.minimal_pairs": "their content is compared instead",
    "data.num_workers": "batches do not depend on it, and hosts may have other numbers of cores",
    "data.cache_dir": "hosts may have other disks",
    "data.cache_bytes": "hosts may have other disks",
    "storage_options": "hosts may reach a store by other endpoints and logins; what is read is compared instead",
    "logging.peak_flops_per_device": "hosts may have other devices; rank 0's counts",
    "logging.gpu_hour_price": "hosts may have other prices; rank 0's counts",
}
"""Settings and sections that may differ between hosts, and why; names have no list indices."""

LIBRARIES = ("torch", "deepspeed", "numpy")
"""Libraries that must have one version on all ranks."""

NUMERICS = ("trainer/data/", "trainer/model/", "trainer/objectives/", "trainer/engine/", "trainer/loop/")
"""Folders of the project's files on which the numbers of a run depend."""

_MAX_DISPLAY = 80
_MAX_NAMES = 20
_MODULE, _SCRIPT = "module ", "the script "


def facts_of(
    config: RunConfig, allow_change: bool, branch: Branch | None, opened: Sequence[ShardSet] | UserError
) -> Facts:
    """Collect the facts of this rank; `opened` is the run's data, or why this rank cannot read it."""
    equal, per_host = _facts_of_settings(config)
    equal |= {name: _fact(value) for name, value in _flags(allow_change, branch).items()}
    if not isinstance(opened, UserError):
        equal |= _facts_of_data(opened)
        if (pairs := config.evaluation.minimal_pairs) is not None:
            from trainer.data.minimal_pairs import digest_of_pairs, read_minimal_pairs

            equal["evaluation.minimal_pairs (content)"] = _fact(digest_of_pairs(read_minimal_pairs(pairs))[:12])
    equal |= {f"version of {name}": _fact(installed_version(name)) for name in LIBRARIES}
    if not isinstance(opened, UserError):
        equal |= {f"version of {kind.key(name)}": _fact(kind.version(name)) for kind, name in code_of(config)}
    equal |= {f"sha256 of {name}": Fact(digest, digest[:12]) for name, digest in source_digests()}
    per_host["version of python"] = _fact(sys.version.split()[0])
    return Facts(equal, per_host, opened if isinstance(opened, UserError) else None)


def may_differ(name: str) -> bool:
    """Return whether a setting (dotted name, with list indices) may differ between hosts."""
    plain = re.sub(r"\.\d+(?=\.|$)", "", name)
    return any(plain == each or plain.startswith(f"{each}.") for each in PER_HOST)


def _facts_of_settings(config: RunConfig) -> tuple[dict[str, Fact], dict[str, Fact]]:
    """Return the resolved settings that must be equal, and those that may differ; without secrets."""
    public = without_secrets(config)
    values = public.model_dump(mode="json")
    # A single component may be written as a URL or as a list.
    values["data"]["shards"] = _as_list(values["data"]["shards"])
    for stage in values["training"]["stages"]:
        if stage["data"] is not None:
            stage["data"]["shards"] = _as_list(stage["data"]["shards"])
    facts = {name: _fact(value) for name, value in flatten(values, with_items=True)}
    per_host = {name: fact for name, fact in facts.items() if may_differ(name)}
    return {name: fact for name, fact in facts.items() if name not in per_host}, per_host


def _as_list(shards: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"url": shards, "weight": None}] if isinstance(shards, str) else shards


def _flags(allow_change: bool, branch: Branch | None) -> dict[str, Any]:
    """Return the options of the command line that change a run."""
    return {
        "--allow-change": allow_change,
        "--resume-from": branch and branch.step,
        "--skip-samples": [f"{first}:{stop}" for first, stop in branch.skip] if branch else [],
        "--skip-epoch": branch and branch.epoch,
    }


def _facts_of_data(shard_sets: Sequence[ShardSet]) -> dict[str, Fact]:
    """Return the digests of all data, and of the tokenizer that all components share."""
    facts = {
        f"the manifest of data.shards.{number}": Fact(
            each.manifest.digest, f"{each.manifest.digest[:12]} ({storage.redact(each.url)})"
        )
        for number, each in enumerate(shard_sets)
    }
    return facts | {"the tokenizer's fingerprint": _fact(shard_sets[0].manifest.tokenizer.fingerprint)}


def _fact(value: Any) -> Fact:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    display = storage.hide_secrets(text)
    if len(display) > _MAX_DISPLAY:
        display = f"{display[:_MAX_DISPLAY]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]})"
    return Fact(text, display)


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

    `task_modules` are the modules with the tasks of a suite, which another process imports. Installed packages,
    Python's own library and this project are left out.
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

    A file of the project that is new or gone is a change. A user's module that only one of the two processes imported
    is none: it may be imported later.
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


def _is_of_project(name: str) -> bool:
    return name.startswith(tuple(f"{package}/" for package in PACKAGES))


def _project_folders() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield package, Path(folder)


def _file_of(name: str, module: ModuleType | None) -> Path | None:
    """Return the file of an imported module of the user's; None for any other module."""
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if not isinstance(file, str) or (name != "__main__" and (spec is None or spec.origin != file)):
        return None  # made at run time, such as the code of torch.compile
    return _own(file)


def _file_of_spec(name: str) -> Path | None:
    """Return the file of a module that was not imported; as for tasks of a suite, this directory is searched last."""
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
    """Return the folders of Python's own library and this project; a process imports thousands of modules from them."""
    library = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    return tuple(f"{folder}{os.sep}" for folder in (*library, *(folder for _, folder in _project_folders())))
