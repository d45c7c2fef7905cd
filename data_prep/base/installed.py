"""Versions of installed packages."""

from __future__ import annotations

import importlib.metadata


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed package; None if it is not installed or runs from a source folder."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """Return the running version of clozeworks, "source" if it is not installed."""
    return installed_version("clozeworks") or "source"
