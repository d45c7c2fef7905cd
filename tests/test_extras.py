"""Dependencies: what each part imports is what its extra of pyproject.toml brings, and no test does without them."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trainer
from data_prep.base.packages import CORE, EXTRA_OF, OF_FEW
from launch.command_table import COMMANDS as COMMAND_TABLE
from launch.command_table import Command
from tests.test_layout import PACKAGES, PRODUCT_FILES, REPOSITORY, imported_by, libraries_reached, module_name

COME_WITH = {"huggingface_hub": "tokenizers", "sqlalchemy": "mlflow"}
"""Libraries that are imported without being declared, and the dependency that brings each."""
OF_REGISTRY = ("export", "register", "FillMask", "Embedder")


def test_preparation_imports_the_core_dependencies_alone() -> None:
    """Also inside functions; the extras are those of one executor, of two filters and of the page of statistics."""
    reached = {
        library: importer
        for path in PRODUCT_FILES
        if path.relative_to(REPOSITORY).parts[0] == "data_prep"
        for library, importer in libraries_reached(module_name(path), everywhere=True).items()
    }
    assert len(reached) > 10
    assert {name: importer for name, importer in reached.items() if COME_WITH.get(name, name) not in CORE} == {
        "distributed": "data_prep.executors.dask_executor",
        "datatrove": "data_prep.filters.datatrove_adapter",
        "py3langid": "data_prep.filters.built_in_filters",
        "matplotlib": "data_prep.reports.plots",
    }


def test_the_core_dependencies_are_those_that_the_error_about_missing_libraries_knows() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^\w-]", line)[0] for line in project["dependencies"]}
    assert {{"pyyaml": "yaml"}.get(name, name) for name in names} <= CORE
    extras = project["optional-dependencies"]
    for library, extra in EXTRA_OF.items():
        name = {"sklearn": "scikit-learn", "sentence_transformers": "sentence-transformers"}.get(library, library)
        assert any(line.startswith(name) for line in extras[extra]), library


def test_every_library_of_the_product_is_a_declared_dependency() -> None:
    reached = {name.split(".")[0] for path in PRODUCT_FILES for name in imported_by(path)}
    reached -= sys.stdlib_module_names | {*PACKAGES, "_typeshed"}
    assert reached - CORE - EXTRA_OF.keys() - COME_WITH.keys() == set()


@pytest.mark.parametrize("command", COMMAND_TABLE.values(), ids=COMMAND_TABLE)
def test_a_command_starts_with_the_core_dependencies_alone(command: Command) -> None:
    """So its help is quick, and a missing extra is answered with the command that installs it."""
    assert libraries_reached(command.module, everywhere=False).keys() <= CORE


@cache
def brought_by(extra: str | None) -> frozenset[str]:
    """The distributions that an installation with this extra alone has, by what each of them requires here."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    todo = [*map(Requirement, (*project["dependencies"], *project["optional-dependencies"].get(extra, ())))]
    found: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        key = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if key in found:
            continue
        found.add(key)
        with suppress(importlib.metadata.PackageNotFoundError):  # of another platform
            required = map(Requirement, importlib.metadata.requires(requirement.name) or ())
            todo += [each for each in required if each.marker is None or holds(each.marker, key[1])]
    return frozenset(name for name, _ in found)


def holds(marker: Marker, extras: frozenset[str]) -> bool:
    return any(marker.evaluate({"extra": extra}) for extra in (*extras, ""))


def not_brought(libraries: Iterable[str], extra: str | None) -> set[str]:
    """The libraries that an installation with this extra alone lacks."""
    brought = brought_by(extra)
    return {each for each in libraries if not brought & {canonicalize_name(name) for name in distributions()[each]}}


@cache
def distributions() -> Mapping[str, list[str]]:
    """The distributions that bring each library."""
    return importlib.metadata.packages_distributions()


@pytest.mark.parametrize("command", COMMAND_TABLE.values(), ids=COMMAND_TABLE)
def test_a_command_finds_all_that_it_imports_with_its_extra_alone(command: Command) -> None:
    check_extra(command.module, command.extra)


def test_the_export_to_onnx_finds_all_that_it_imports_with_its_extra_alone() -> None:
    """DeepSpeed is as in the extra finetune, which it contains (`WITHOUT_DEEPSPEED` in test_layout.py)."""
    lacking = not_brought(libraries_reached("launch.export_onnx", everywhere=True), "onnx")
    assert lacking <= {"deepspeed"} | OF_FEW
    assert not_brought(["onnxruntime"], "finetune") == {"onnxruntime"}


def check_extra(module: str, extra: str | None) -> None:
    """Whenever it is imported; DeepSpeed is only where several ranks train (`WITHOUT_DEEPSPEED` in test_layout.py)."""
    allowed = {"deepspeed"} if extra in ("registry", "finetune") else set()
    assert not_brought(libraries_reached(module, everywhere=True), extra) <= allowed | (OF_FEW if extra else set())


@pytest.mark.parametrize("name", trainer.__all__)
def test_a_function_of_the_python_api_is_imported_with_its_extra_alone(name: str) -> None:
    extra = name if name in ("train", "finetune") else "registry" if name in OF_REGISTRY else "train"
    check_extra(trainer._SOURCES[name].partition(":")[0], extra)


def test_an_installation_lacks_what_only_other_extras_bring() -> None:
    assert not_brought(["torch", "numpy", "mlflow", "deepspeed"], None) == {"torch", "mlflow", "deepspeed"}
    assert not_brought(["torch", "deepspeed", "accelerate"], "registry") == {"deepspeed", "accelerate"}


def test_a_test_library_that_is_missing_is_no_reason_to_skip() -> None:
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    assert [path.name for path in files if "importor" + "skip" in path.read_text(encoding="utf-8")] == []
