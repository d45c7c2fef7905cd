"""Trying again where a store is busy or a connection breaks, with exponential waits and jitter."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from data_prep.base.errors import UsageError, UserError
from data_prep.base.urls import redact
from data_prep.storage.store_errors import GO_ON, answer, is_transient

RETRY_SECONDS = 120.0
RETRY_VARIABLE = "CLOZEWORKS_RETRY_SECONDS"

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 15.0

Result = TypeVar("Result")


def retry_seconds() -> float:
    """For how long a request is tried again; CLOZEWORKS_RETRY_SECONDS in the environment overrides it.

    Raises:
        UsageError: what the environment says is no number, or below 0.
    """
    said = os.environ.get(RETRY_VARIABLE) or str(RETRY_SECONDS)
    try:
        seconds = float(said)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise UsageError(f"{RETRY_VARIABLE}={said} is no number of seconds; give one of 0 or more, or unset it")
    return seconds


def with_retries(url: str, what: str, operation: Callable[[], Result], seconds: float | None = None) -> Result:
    """Call `operation` until it succeeds, fails for good, or the store has been busy for `seconds`.

    An attempt that has begun is not cut short, so a store that hangs takes its own time limit on top. Each wait is
    reported on stderr. A permanent failure is raised unchanged.

    Raises:
        UserError: the store was busy or out of reach all the time.
    """
    import tenacity  # here, for work on local files needs none of it and starts sooner

    limit = retry_seconds() if seconds is None else seconds

    def tell(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait = state.next_action.sleep if state.next_action else 0.0
        text = f"{redact(url)} answers {answer(error) if error else 'nothing'}; trying again in {wait:.1f} s"
        print(text, file=sys.stderr, flush=True)

    backoff = tenacity.wait_exponential_jitter(_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS, jitter=_FIRST_WAIT_SECONDS)
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception(is_transient),
        stop=tenacity.stop_after_delay(limit),
        wait=lambda state: min(backoff(state), max(limit - (state.seconds_since_start or 0.0), 0.0)),
        before_sleep=tell,
        reraise=True,
    )
    try:
        return retrying(operation)
    except Exception as error:
        if not is_transient(error):
            raise
        tried = retrying.statistics
        raise UserError(
            f"{redact(url)} cannot be {what}: the store has answered {answer(error)} for "
            f"{tried['delay_since_first_attempt']:.0f} s, {tried['attempt_number']} times; {GO_ON}"
        ) from None
