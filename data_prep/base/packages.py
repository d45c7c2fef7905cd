"""Installed packages: their versions, and what to install when a library of an optional part (an extra) is missing."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import sys
from pathlib import Path
from shlex import quote

from data_prep.base.errors import UsageError, UserError

EXTRA_OF = {
    "accelerate": "finetune",
    "aiohttp": "http",
    "datatrove": "datatrove",
    "deepspeed": "train",
    "distributed": "dask",
    "gcsfs": "gcs",
    "matplotlib": "plots",
    "mlflow": "registry",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "pandas": "finetune",
    "py3langid": "language",
    "s3fs": "s3",
    "scipy": "finetune",
    "sentence_transformers": "embedding",
    "sklearn": "finetune",
    "torch": "train",
    "transformers": "train",
}
"""Libraries outside the core dependencies, and the extra that installs each."""

OF_FEW = frozenset({"sentence_transformers"})
"""Libraries that the extra of a command does not bring, for only some of its options need them."""

CORE = frozenset(
    "braceexpand cloudpickle fsspec numpy psutil pyarrow pydantic pydantic_core regex rensa "
    "safetensors sentencepiece sentencex tenacity tokenizers tqdm webdataset xxhash yaml zstandard".split()
)
"""Libraries of the core dependencies."""


def missing_extra(error: ImportError, extra: str | None = None) -> UserError | None:
    """Return the error for the user, or None if the import failed for another reason.

    Args:
        error: the failed import.
        extra: the extra that the running command needs (default: the one that brings the library).
    """
    library = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != library:
        return None
    if library not in EXTRA_OF and library not in CORE:
        return None
    return UsageError(
        f"the library {library} is not installed in {sys.prefix}",
        fix=install_command(EXTRA_OF.get(library) if library in OF_FEW or not extra else extra),
        code="missing-extra",
    )


def install_command(extra: str | None) -> str:
    """Return the command that adds an extra (None: the core dependencies) to the running environment."""
    extras = f"[{extra}]" if extra else ""
    root = Path(__file__).resolve().parents[2]
    pip = f"{quote(sys.executable)} -m pip install"
    if not (root / "pyproject.toml").is_file():
        return f"{pip} '.{extras}' in the root of the clozeworks repository"
    constraints = f" -c {quote(str(root / 'constraints.txt'))}" if (root / "constraints.txt").is_file() else ""
    return f"{pip}{constraints} -e {quote(f'{root}{extras}')}"


@functools.cache
def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package; None if it is not installed or runs from a source folder.

    A process reads each version once: what it has imported stays the same.
    """
    try:
        return name_and_version(importlib.metadata.distribution(distribution))[1]
    except importlib.metadata.PackageNotFoundError:
        return None


def name_and_version(distribution: importlib.metadata.Distribution) -> tuple[str | None, str | None]:
    """Return the name and version that a distribution states; None where it states none.

    Its own attributes parse all that it says of itself: half a second for 200 distributions.
    """
    texts = map(distribution.read_text, ("METADATA", "PKG-INFO", ""))  # the last is of a distribution that is one file
    head = itertools.takewhile(bool, next(filter(None, texts), "").splitlines())
    fields = {name: value for name, _, value in (line.partition(": ") for line in head)}
    return fields.get("Name"), fields.get("Version")


def own_version() -> str:
    """Return the running version of clozeworks, "source" if it is not installed."""
    return installed_version("clozeworks") or "source"
