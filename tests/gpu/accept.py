"""Accept the CUDA path on a machine with a GPU, in two calls of ten minutes, most valuable steps first.

    python3 tests/gpu/accept.py part1 --out DIR [--only NAME ...]    figures, resume, tests, comparisons (530 s)
    python3 tests/gpu/accept.py part2 --out DIR                      bert_large with pairs, export, fine-tuning
    python3 tests/gpu/accept.py cpu-check --out DIR --shards SHARDS  every step of both at toy sizes, without a GPU

Before, without a GPU: tests/gpu/prepare.py. Every step has a budget of its own, none stops the others, and what no
longer fits into the time, or needs files of a step that left none, is skipped and listed so. DIR/summary.json is
rewritten after each step, other files after each figure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wheels
from kit import NEEDS_GPU, Kit, Step, run_steps
from steps import LONG_STEPS, PART1, PART2

PART_SECONDS = {"part1": 530.0, "part2": 580.0, "cpu-check": 7200.0}


def install(kit_folder: Path, site: Path) -> None:
    """Put the kit's wheels that this machine lacks into a folder for PYTHONPATH, once."""
    if (site / ".done").exists() or not (kit_folder / "wheels").is_dir():
        return
    chosen, lacking = wheels.wheels_to_install(kit_folder / "wheels", wheels.requirements())
    print(f"installing {len(chosen)} wheels; not there: {', '.join(lacking) or 'nothing'}", flush=True)
    if chosen:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
        subprocess.run([*command, "--target", str(site), *map(str, chosen)], check=True)
    site.mkdir(parents=True, exist_ok=True)
    (site / ".done").touch()


def shards_of(arguments: argparse.Namespace) -> Path:
    """The shard set to train on; that of the kit is unpacked once.

    Raises:
        SystemExit: it does not exist.
    """
    shards: Path = (arguments.shards or arguments.work / "shards").absolute()
    packed: Path = arguments.kit / "shards.tar.xz"
    if arguments.shards is None and not shards.is_dir():
        if not packed.is_file():
            raise SystemExit(f"error: {packed} does not exist. Fix: run tests/gpu/prepare.py first, or set --shards")
        with tarfile.open(packed) as archive:
            archive.extractall(arguments.work, filter="data")
    if not (shards / "manifest.json").is_file():
        raise SystemExit(f"error: {shards} holds no manifest.json. Fix: set --shards to a finished shard set")
    return shards


def check_names(names: Sequence[str], steps: Sequence[Step]) -> None:
    """Refuse names with which no step begins.

    Raises:
        SystemExit: there is one.
    """
    for name in names:
        if not any(step.name.startswith(name) for step in steps):
            there = ", ".join(step.name for step in steps)
            raise SystemExit(f"error: --only {name!r} matches no step. Fix: choose from {there}")


def variables(work: Path, site: Path, toy: bool) -> dict[str, str]:
    """The environment of the steps. Without a GPU it hides MLflow too, as the GPU machine has none."""
    found, paths = dict(os.environ), [str(wheels.REPOSITORY), str(site)]
    if toy:
        sys.path.append(str(wheels.REPOSITORY))
        from tests.support.without_mlflow import environment_without_mlflow

        found = environment_without_mlflow(work / "blocked")
        paths.insert(0, found["PYTHONPATH"])
    elif importlib.util.find_spec("mlflow"):
        found["MLFLOW_TRACKING_URI"] = f"sqlite:///{work}/mlflow.db"
    return found | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join((str(site / "bin"), os.environ["PATH"])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
    }


def is_failure(row: dict[str, Any], toy: bool) -> bool:
    """Whether a step's row makes the exit status 1. Without a GPU nothing may be left out for want of time."""
    return row["status"] == "failed" or (toy and row["status"] == "skipped" and row["why"] != NEEDS_GPU)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PART_SECONDS)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for at most 8 files per part")
    parser.add_argument(
        "--kit", type=Path, default=wheels.REPOSITORY / ".gpu_kit", metavar="DIR", help="default .gpu_kit"
    )
    parser.add_argument("--shards", type=Path, metavar="DIR", help="default: those of the kit")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "clozeworks-gpu"), metavar="DIR")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="beginnings of names of steps")
    parser.add_argument("--seconds", type=float, metavar="S", help="default: 530 for part1, 580 for part2, else 7200")
    parser.add_argument(
        "--long-steps", type=int, default=LONG_STEPS, metavar="N", help=f"of part2's run (default {LONG_STEPS})"
    )
    arguments = parser.parse_args()
    ends_at = time.time() + (arguments.seconds or PART_SECONDS[arguments.part])
    work, toy = arguments.work.absolute(), arguments.part == "cpu-check"
    check_names(arguments.only, [*PART1, *PART2] if toy else {"part1": PART1, "part2": PART2}[arguments.part])
    work.mkdir(parents=True, exist_ok=True)
    shards, failed = shards_of(arguments), False
    install(arguments.kit, work / "site")
    for part, steps in (("part1", PART1), ("part2", PART2)):
        if toy or arguments.part == part:
            out = (arguments.out / part if toy else arguments.out).absolute()
            out.mkdir(parents=True, exist_ok=True)
            kit = Kit(part, out, work, shards, variables(work, work / "site", toy), ends_at, toy, arguments.long_steps)
            run_steps(kit, steps, arguments.only)
            failed |= any(is_failure(row, toy) for row in kit.rows)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
