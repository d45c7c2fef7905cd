"""Which versions of packages are installed."""

from __future__ import annotations

import importlib.metadata


def installed_version(distribution: str) -> str | None:
    """The version of an installed package; None where it is not installed, or runs from a folder of sources."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """The version of clozeworks that runs, "source" where it is not installed."""
    return installed_version("clozeworks") or "source"
