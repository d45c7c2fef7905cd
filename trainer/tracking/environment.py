"""What a run runs on and from which source: versions, machine, git revision; nothing of the environment variables."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil
import torch

from data_prep.base.installed import installed_version

LIBRARIES = ("clozeworks", "torch", "deepspeed", "mlflow", "transformers", "tokenizers", "sentencepiece", "numpy")


def describe_environment() -> dict[str, str]:
    """Machine, interpreter and library versions."""
    versions = {name: version for name in LIBRARIES if (version := installed_version(name)) is not None}
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    machine = {"cpus": str(os.cpu_count()), "memory_gib": f"{memory_gib:.1f}"}
    if torch.cuda.is_available():
        machine |= {"gpu": torch.cuda.get_device_name(), "gpus": str(torch.cuda.device_count())}
        machine |= {"cuda": str(torch.version.cuda)}
    return {"python": platform.python_version(), "platform": platform.platform(), **machine, **versions}


def installed_packages() -> str:
    """All installed distributions as `pip freeze` lists them, `name==version` a line."""
    found = {each.name.lower(): f"{each.name}=={each.version}" for each in metadata.distributions() if each.name}
    return "\n".join(line for _, line in sorted(found.items())) + "\n"


def git_revision(folder: Path = Path(__file__).parent) -> str | None:
    """The commit that `folder` is at, with "-dirty" where files differ from it; None outside a repository."""
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
