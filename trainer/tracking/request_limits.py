"""How long MLflow's requests may take and how often they are tried again: settings of the whole process, shared.

MLflow reads them from the environment at each request. Several threads of a training make requests at once (its
curves, its registrations), so that none may set or take away what another goes by.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
SECONDS = "MLFLOW_HTTP_REQUEST_TIMEOUT"

_lock = threading.Lock()
_open: list[dict[str, int]] = []
"""The limits of every block that has begun and not ended."""
_users_own: set[str] = set()
"""Which were set by the user before the first of these blocks began."""


@contextmanager
def request_limits(max_retries: int, timeout_seconds: int) -> Iterator[None]:
    """Within the block MLflow's requests end after these; what the user set in the environment goes first.

    Where the blocks of several threads overlap, the most patient limits hold for all. MLflow's defaults are 7 retries
    of 120 seconds: a server that is down would hold a caller for minutes.
    """
    limits = {RETRIES: max_retries, SECONDS: timeout_seconds}
    with _lock:
        if not _open:
            _users_own.clear()
            _users_own.update(name for name in limits if name in os.environ)
        _open.append(limits)
        _apply()
    try:
        yield
    finally:
        with _lock:
            del _open[next(place for place, held in enumerate(_open) if held is limits)]
            _apply()


def _apply() -> None:
    for name in {RETRIES, SECONDS} - _users_own:
        if _open:
            os.environ[name] = str(max(limits[name] for limits in _open))
        else:
            os.environ.pop(name, None)
