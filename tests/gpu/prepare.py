"""Pack what a GPU machine without network lacks: wheels and shards, into `.gpu_kit`.

    python3 -m pip list --format=freeze > there.txt          (on the GPU machine)
    python tests/gpu/prepare.py --shards DIR --there @there.txt

Run it in the project's environment; it needs a network and no GPU. --there lists what the GPU machine has, with
versions where they are known: a package is packed if none or an unfit one is there. The versions packed are those of
constraints.txt.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import wheels
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += [f"manylinux{year}_x86_64" for year in (2014, 2010, 1)]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )
    parser.add_argument("--shards", type=Path, required=True, metavar="DIR", help="a shard set to train on")
    parser.add_argument("--python", default="3.12", metavar="X.Y", help="of the GPU machine (default 3.12)")
    parser.add_argument("--there", nargs="+", required=True, metavar="NAME[==VERSION]", help="or @FILE, one a line")
    parser.add_argument("--without", nargs="*", default=list(wheels.WITHOUT), metavar="NAME", help="default: mlflow")
    parser.add_argument("--limit-mib", type=int, default=60, metavar="N", help="kit and tree together (default 60)")
    parser.add_argument("--output", type=Path, default=wheels.REPOSITORY / ".gpu_kit", metavar="DIR")
    return parser.parse_args(arguments)


def judge(there: Iterable[str]) -> Callable[[Requirement], bool]:
    """Whether a machine with the packages `there` meets a requirement; one without a version meets any."""
    versions = {canonicalize_name(line.split("==")[0]): line.strip().partition("==")[2] for line in there}

    def is_met(requirement: Requirement) -> bool:
        version = versions.get(canonicalize_name(requirement.name))
        return version is not None and (not version or requirement.specifier.contains(version, prereleases=True))

    return is_met


def pins(names: Iterable[str], constraints: Path = wheels.REPOSITORY / "constraints.txt") -> list[str]:
    """`NAME==VERSION` of each package, as constraints.txt has it, else as it is installed here."""
    pinned = {
        canonicalize_name(match[1]): match[2]
        for match in re.finditer(r"^([\w.-]+)==(\S+)", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    }
    return [f"{name}=={pinned.get(canonicalize_name(name)) or importlib.metadata.version(name)}" for name in names]


def download(pin: str, python: str, folder: Path) -> None:
    """Fetch the wheel of a package for Linux; build it where only sources are published.

    Raises:
        SystemExit: it cannot be had, or a built wheel is of this machine alone.
    """
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", *platforms, "-d", str(folder), pin]
    if subprocess.run(command, capture_output=True).returncode == 0:
        return
    before = set(folder.iterdir())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), pin]
    done = subprocess.run(build, env=os.environ | {"DS_BUILD_OPS": "0"}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"error: {pin} cannot be had for Python {python}: {done.stderr.strip()[-500:]}")
    for path in set(folder.iterdir()) - before:
        if not path.name.endswith("-none-any.whl"):
            raise SystemExit(f"error: {path.name} was built for this machine. Fix: name it in --there or --without")


def tree_bytes() -> int:
    """Size of the files that git tracks or would add."""
    command = ["git", "-C", str(wheels.REPOSITORY), "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    paths = [wheels.REPOSITORY / name for name in names if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> None:
    arguments = parse_arguments()
    kit: Path = arguments.output
    if not (arguments.shards / "manifest.json").is_file():
        raise SystemExit(f"error: {arguments.shards} holds no manifest.json. Fix: set --shards to a finished shard set")
    if arguments.shards.resolve().is_relative_to(kit.resolve()):
        raise SystemExit(
            f"error: --shards {arguments.shards} lies in {kit}, which is rebuilt. Fix: set another --output"
        )
    if kit.exists() and not (kit.is_dir() and ((kit / "wheels").is_dir() or not any(kit.iterdir()))):
        raise SystemExit(f"error: {kit} exists and is not a kit. Fix: set --output to a new directory")
    shutil.rmtree(kit, ignore_errors=True)
    (kit / "wheels").mkdir(parents=True)
    (kit / ".gitignore").write_text("*\n")  # the folder is ignored wherever it lies
    roots = wheels.requirements(without=arguments.without)
    missing = wheels.unmet(roots, judge(arguments.there), wheels.needs_of_installed, arguments.python)
    for pin in pins(missing):
        print(pin, flush=True)
        download(pin, arguments.python, kit / "wheels")
    with tarfile.open(kit / "shards.tar.xz", "w:xz", preset=3) as archive:
        archive.add(arguments.shards, arcname="shards")
    size, tree = sum(path.stat().st_size for path in kit.rglob("*") if path.is_file()), tree_bytes()
    print(f"{kit}: {size / 2**20:.1f} MiB, with the tree {(size + tree) / 2**20:.1f} of {arguments.limit_mib} MiB")
    if size + tree > arguments.limit_mib << 20:
        raise SystemExit("error: too large. Fix: give smaller --shards, or name more packages in --there")


if __name__ == "__main__":
    main()
