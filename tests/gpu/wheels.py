"""Which packages a machine lacks: the requirements of pyproject.toml, followed through those that are not met."""

from __future__ import annotations

import email
import importlib.metadata
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

REPOSITORY = Path(__file__).resolve().parents[2]
WITHOUT = ("mlflow",)
"""What a run can do without: 60 packages hang on it."""
FROM_TESTS = ("hypothesis", "pytest", "pytest-timeout")
"""Of the extra `test` what the tests marked `gpu` need."""


def requirements(
    pyproject: Path = REPOSITORY / "pyproject.toml", without: Iterable[str] = WITHOUT
) -> list[Requirement]:
    """What the project and its GPU tests need."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    product = [Requirement(line) for line in (*project["dependencies"], *extras["train"], *extras["registry"])]
    tests = [Requirement(line) for line in extras["test"]]
    return [
        *(each for each in product if canonicalize_name(each.name) not in set(without)),
        *(each for each in tests if canonicalize_name(each.name) in FROM_TESTS),
    ]


def unmet(
    roots: Iterable[Requirement],
    is_met: Callable[[Requirement], bool],
    needs_of: Callable[[str], Iterable[Requirement]],
    python: str,
) -> dict[str, Requirement]:
    """The requirements that are not met, by canonical name: `roots`, and what each package that they name needs.

    Markers are judged for Linux and the version `python` (as in "3.12"); what is met is followed no further.
    """
    found: dict[str, Requirement] = {}
    todo = list(roots)
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": "", "sys_platform": "linux"}
    while todo:
        requirement = todo.pop(0)
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate(environment)
        if applies and name not in found and not is_met(requirement):
            found[name] = requirement
            todo.extend(needs_of(name))
    return found


def needs_of_installed(name: str) -> list[Requirement]:
    """The requirements of a package of this environment; an error where it is not installed."""
    return [Requirement(line) for line in importlib.metadata.requires(name) or []]


def is_met_here(requirement: Requirement) -> bool:
    """Whether this environment holds a package that satisfies the requirement."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def wheels_to_install(folder: Path, roots: Iterable[Requirement]) -> tuple[list[Path], list[str]]:
    """The wheels of `folder` that this environment lacks, and the requirements that no wheel there meets."""
    wheels = {parse_wheel_filename(path.name)[0]: path for path in sorted(folder.glob("*.whl"))}

    def needs_of(name: str) -> list[Requirement]:
        return needs_of_wheel(wheels[name]) if name in wheels else []

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    missing = unmet(roots, is_met_here, needs_of, python)
    chosen = [path for name, path in wheels.items() if name in missing]
    return chosen, [str(requirement) for name, requirement in missing.items() if name not in wheels]


def needs_of_wheel(path: Path) -> list[Requirement]:
    """The requirements that a wheel's METADATA states."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    return [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
