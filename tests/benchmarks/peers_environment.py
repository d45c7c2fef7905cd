"""The virtual environment of the peers: what this Python has, and the peers' packages beside it.

Their own requirements exclude each other (mosaicml-streaming pins numpy and transformers below this project's) and
name a torch with CUDA, so every package is installed alone (`--no-deps`), in a version that was tried.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

PEERS = {
    "datasets": "5.2.0",
    "datatrove": "0.10.1",
    "gigatoken": "0.10.0",
    "mosaicml-streaming": "0.13.0",
    "torchdata": "0.11.0",
}
_REQUIRED = {
    "awkward": "2.14.0",
    "awkward-cpp": "57",
    "brotli": "1.2.1",
    "catalogue": "2.0.10",
    "cramjam": "2.14.0",
    "dill": "0.4.1",
    "humanize": "4.17.0",
    "loguru": "0.7.3",
    "multiprocess": "0.70.19",
    "orjson": "3.13.0",
    "python-snappy": "0.7.3",
    "zstd": "1.5.7.2",
}


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option --environment."""
    cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
    parser.add_argument(
        "--environment",
        type=Path,
        default=Path(cache) / "clozeworks-peers",
        metavar="DIR",
        help="where the peers are installed, made where it is missing (default: clozeworks-peers in ~/.cache)",
    )


def make_environment(folder: Path) -> str:
    """The environment's Python; the environment is made where it is missing or has other versions."""
    packages = [f"{name}=={version}" for name, version in (PEERS | _REQUIRED).items()]
    marker, python = folder / "packages.txt", str(folder / "bin" / "python")
    if not marker.exists() or marker.read_text().split() != packages:
        print(f"installing {', '.join(packages)} into {folder}", file=sys.stderr, flush=True)
        _checked([sys.executable, "-m", "venv", "--clear", str(folder)])
        site_packages = _checked([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
        (Path(site_packages) / "host.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        _checked([python, "-m", "pip", "install", "--quiet", "--no-deps", *packages])
        marker.write_text("\n".join(packages) + "\n")
    return python


def _checked(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)[:300]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout
