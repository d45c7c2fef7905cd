"""The errors of object stores: retries with exponential backoff and jitter, and the message for the user.

The stores' packages are extras, so their exceptions are recognized by their attributes (a response, a status) and
class names, not by their types.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

from data_prep.base.errors import UsageError, UserError
from data_prep.base.known_secrets import hide_secrets
from data_prep.base.urls import redact

RESUME = "fix the cause and rerun the same command; it resumes"
"""The remedy where the user has to look for the cause."""

RETRY_SECONDS = 120.0
RETRY_VARIABLE = "CLOZEWORKS_RETRY_SECONDS"
_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 15.0

_TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504, 509}
_TRANSIENT_CODES = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestLimitExceeded",
    "TooManyRequests",
    "RequestTimeout",
    "RequestTimeoutException",
    "InternalError",
    "ServiceUnavailable",
    "IncompleteBody",
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "OperationAborted",
    "ConditionalRequestConflict",
}
# Of botocore, aiohttp, urllib3, http.client and httpx.
_TRANSIENT_TYPES = {
    "HTTPClientError",
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "ProxyConnectionError",
    "ResponseParserError",
    "ClientConnectionError",
    "ClientPayloadError",
    "IncompleteRead",
    "TransportError",
}
_TRANSIENT_ERRNOS = {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN}
_PACKAGES = {
    *("aiobotocore", "aiohttp", "asyncio", "azure", "botocore", "fsspec", "gcsfs", "google", "httpx", "httpcore"),
    *("huggingface_hub", "s3fs", "urllib3"),
}
_OURS = __name__.partition(".")[0]
_UNTRUSTED = "CERTIFICATE_VERIFY_FAILED"

UNUSABLE = {"read": "unreadable-file", "written": "unwritable-file", "removed": "unremovable-file"}
"""The codes of errors of the system or the store, by what was tried."""


Result = TypeVar("Result")


class IncompleteTransfer(ConnectionError):
    """Fewer bytes were received than requested, or stored than sent."""


class ChangedWhileRead(OSError):
    """The object was replaced after it was opened."""


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


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: the store is busy, or the connection broke."""
    causes = list(_chain(error))
    if isinstance(error, UserError) or any(_UNTRUSTED in str(cause) for cause in causes):
        return False
    if (
        type(error).__name__ == "OfflineModeIsEnabled"
    ):  # HF_HUB_OFFLINE, which huggingface_hub calls a broken connection
        return False
    return any(_is_transient_itself(cause) for cause in causes)


def http_status(error: BaseException) -> int | None:
    """The HTTP status behind the error, where there is one."""
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status
        if isinstance(status := getattr(response, "status_code", None), int):  # httpx
            return status
        if _has_transient_type(cause):  # aiohttp's own errors have a code too
            return None
        for name in ("status", "code"):
            if isinstance(status := getattr(cause, name, None), int):
                return status
    return None


def store_code(error: BaseException) -> str:
    """The store's own name of the error, such as SlowDown; empty if it gave none."""
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            return "" if code.isdigit() else code  # the answer to a HEAD request has no body, only a status
    return ""


def answer(error: BaseException) -> str:
    """The store's answer in two or three words: "SlowDown", "HTTP status 500", "nothing in time"."""
    # Errors of the packages' own cleanup come later in the chain.
    cause = next((cause for cause in _chain(error) if _is_transient_itself(cause)), error)
    if code := store_code(cause):
        return code
    if status := http_status(cause):
        return f"HTTP status {status}"
    if isinstance(cause, IncompleteTransfer):
        return str(cause)
    if any(isinstance(cause, TimeoutError) or "Timeout" in type(cause).__name__ for cause in _chain(cause)):
        return "nothing in time"
    return "with a broken connection"


@contextlib.contextmanager
def explained(url: str, what: str) -> Iterator[None]:
    """Turn an error of the store into a `UserError`; `what` is read, written or removed."""
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not _is_refusal(error):
            raise
        reason, fix, code = _explanation(error)
        raise UserError(f"{redact(url)} cannot be {what}: {reason}", fix=fix, code=code or UNUSABLE[what]) from None


def _explanation(error: Exception) -> tuple[str, str, str]:
    """The reason, the fix and the code; an empty code where the reason is not a rule of ours."""
    status, code, name = http_status(error), store_code(error), type(error).__name__
    message = hide_secrets(getattr(error, "strerror", None) or str(error) or name)
    if isinstance(error, ChangedWhileRead):
        return "it changed while it was read", "rerun once nothing writes to it", "changed-while-read"
    if code == "NoSuchBucket":
        return "there is no such bucket", "check its name and the endpoint", "unknown-bucket"
    if isinstance(error, PermissionError) or status in (401, 403):
        reason = f"permission denied ({answer(error) if code or status else message})"
        return reason, "check the credentials (AWS_PROFILE, or storage_options for this URL)", "permission-denied"
    if isinstance(error, FileNotFoundError):
        return "there is no such file", "check its name", "missing-file"
    if "Credential" in name:
        return (
            message,
            "set AWS_PROFILE or AWS_ACCESS_KEY_ID, or storage_options for this URL",
            "missing-credentials",
        )
    if _is_unknown_option(error):
        return f"its storage_options are invalid: {message}", "check their names", "invalid-storage-options"
    if package := _package_that_raised(error):
        return f"{package} cannot use the store's answer ({name}: {message})", RESUME, ""
    return message, RESUME, ""


def _is_refusal(error: Exception) -> bool:
    """Whether the error comes from the store or its package, not from a bug of this project."""
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _PACKAGES:
        return True
    return _is_unknown_option(error) or bool(_package_that_raised(error))


def _is_unknown_option(error: Exception) -> bool:
    """Whether a package reports an option that it does not have."""
    return isinstance(error, TypeError) and "unexpected keyword argument" in str(error)


def _package_that_raised(error: Exception) -> str:
    """The store's package in which an error of another kind arose, as over a malformed answer; empty for none.

    Errors that such a package defines, and those of the system, state their reason themselves.
    """
    if isinstance(error, OSError) or type(error).__module__.partition(".")[0] in _PACKAGES:
        return ""
    roots = [
        frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    last = next((root for root in reversed(roots) if root in _PACKAGES or root == _OURS), "")
    return last if last in _PACKAGES else ""


def _is_transient_itself(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, TimeoutError)):
        return True
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status in _TRANSIENT_STATUSES or response.get("Error", {}).get("Code") in _TRANSIENT_CODES
    if getattr(response, "status_code", None) in _TRANSIENT_STATUSES:
        return True
    if any(getattr(error, name, None) in _TRANSIENT_STATUSES for name in ("status", "code")):
        return True
    if isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS:
        return True
    return _has_transient_type(error)


def _has_transient_type(error: BaseException) -> bool:
    return any(base.__name__ in _TRANSIENT_TYPES for base in type(error).__mro__)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and all that it was raised from: packages wrap, translate and hide the first cause."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop(0)
        if current is not None and not any(current is other for other in seen):
            seen.append(current)
            waiting += [current.__cause__, current.__context__]
            yield current
