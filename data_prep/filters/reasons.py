"""How the reasons of filters are named where drops are counted."""

from __future__ import annotations

_PREFIX = "filter "
UNUSABLE = "cannot be judged"
"""The reason of a filter for documents that it cannot judge, under the policy `skip`."""


def filter_reason(name: str, reason: str) -> str:
    """The reason of a filter as the manifest counts it, such as "filter metadata: score >= 3"."""
    return f"{_PREFIX}{name}: {reason}"


def is_filter_reason(reason: str) -> bool:
    """Whether a reason of the manifest is that of a filter."""
    return reason.startswith(_PREFIX)
