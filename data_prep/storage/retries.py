"""Retries with exponential backoff and jitter, for busy stores and broken connections."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from data_prep.base.errors import UsageError, UserError
from data_prep.base.urls import redact
from data_prep.storage.store_errors import RESUME, answer, is_transient

RETRY_SECONDS = 120.0
RETRY_VARIABLE = "CLOZEWORKS_RETRY_SECONDS"

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 15.0

Result = TypeVar("Result")


def retry_seconds() -> float:
    """How long a request is retried, in seconds; the environment variable CLOZEWORKS_RETRY_SECONDS overrides it."""
    value = os.environ.get(RETRY_VARIABLE) or str(RETRY_SECONDS)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise UsageError(
            f"{RETRY_VARIABLE}={value} is not a number of seconds",
            fix="set it to 0 or more, or unset it",
            code="invalid-retry-seconds",
        )
    return seconds


def with_retries(url: str, what: str, operation: Callable[[], Result], seconds: float | None = None) -> Result:
    """Call `operation` until it succeeds, fails for good, or the store has been busy for `seconds`.

    A running attempt is not interrupted, so a store that hangs adds its own time limit. Each wait is logged to
    stderr. A permanent error is raised as it is.

    Raises:
        UserError: the store stayed busy or unreachable.
    """
    import tenacity  # here: work on local files starts sooner without it

    limit = retry_seconds() if seconds is None else seconds

    def log_wait(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait = state.next_action.sleep if state.next_action else 0.0
        text = f"{redact(url)} answers {answer(error) if error else 'nothing'}; retrying in {wait:.1f} s"
        print(text, file=sys.stderr, flush=True)

    backoff = tenacity.wait_exponential_jitter(_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, jitter=_FIRST_WAIT_SECONDS)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=tenacity.stop_after_delay(limit),
        wait=lambda state: min(backoff(state), max(limit - (state.seconds_since_start or 0.0), 0.0)),
        before_sleep=log_wait,
        reraise=True,
    )
    try:
        return retrying(operation)
    except Exception as error:
        if not is_transient(error):
            raise
        tried = retrying.statistics
        raise UserError(
            f"{redact(url)} cannot be {what}: the store answered {answer(error)} for "
            f"{tried['delay_since_first_attempt']:.0f} s, {tried['attempt_number']} times",
            fix=RESUME,
            code="store-unavailable",
        ) from None
