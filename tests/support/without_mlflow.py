"""Environments of other processes in which MLflow is not installed, nor what comes with it alone."""

from __future__ import annotations

import os
from pathlib import Path

BLOCKER = """
import sys
from importlib.machinery import PathFinder

NOT_INSTALLED = {"mlflow", "mlflow_skinny", "sqlalchemy", "alembic", "flask", "graphene", "docker", "skops"}


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in NOT_INSTALLED else super().find_spec(name, path, target)


sys.meta_path = [Finder if finder is PathFinder else finder for finder in sys.meta_path]
"""


def environment_without_mlflow(folder: Path) -> dict[str, str]:
    """The environment variables of this process, and a PYTHONPATH that hides MLflow; its files lie in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(BLOCKER)
    paths = [str(folder), str(Path(__file__).resolve().parents[2])]
    hidden = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW")}
    return hidden | {"PYTHONPATH": os.pathsep.join(paths), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
