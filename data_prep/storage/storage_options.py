"""Options of remote stores by URL prefix: which of them apply to a URL, and their display without secrets.

The options belong to the thread that configures them, and to threads without options of their own, so that two
preparations in one process keep theirs. Within `own_options` they end with the call, so that no later call takes its
logins. A process passes them (`options()`) to the processes that it starts.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from data_prep.base.environment import environment_now
from data_prep.base.errors import UsageError
from data_prep.base.known_secrets import HIDDEN, is_secret_option, remember_secrets, secret_options
from data_prep.base.urls import redact, redact_text

Result = TypeVar("Result")
Options = dict[str, dict[str, Any]]

_of_thread: contextvars.ContextVar[Options] = contextvars.ContextVar("storage_options")
_of_calls: list[Options] = [{}]
"""What threads without options of their own use is the last: that of the latest call within `own_options`, if any."""
_of_call: contextvars.ContextVar[Options] = contextvars.ContextVar("storage_options_of_call")
_LOGIN_VARIABLES = ("AWS_", "BOTO", "FSSPEC_", "GOOGLE_", "GCSFS_", "AZURE_", "HF_")
_logins: dict[str, dict[str, str]] = {}
"""By kind of filesystem, the variables with which those in fsspec's cache were made."""


def configure(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the options of remote stores for this thread, within `own_options` until it ends; the longest prefix wins.

    The values are what the store's fsspec package takes: `profile`, `endpoint_url`, `key`, `secret`,
    `client_kwargs`, ... for s3:// (s3fs); `token`, `project`, ... for gs:// (gcsfs).
    """
    for prefix, values in options.items():
        if "://" not in prefix:
            raise UsageError(
                f"the key {redact_text(prefix)!r} of storage_options is not a URL prefix",
                fix="write a prefix such as s3:// or s3://bucket/folder",
                code="invalid-storage-options",
            )
        if not isinstance(values, Mapping):
            raise UsageError(
                f"storage_options of {redact_text(prefix)} is not a mapping",
                fix="write options such as {profile: research}",
                code="invalid-storage-options",
            )
    copied = {prefix: dict(values) for prefix, values in options.items()}
    remember_secrets(secret for values in copied.values() for secret in secret_options(values))
    _of_thread.set(copied)
    of_call = _of_call.get(_of_calls[0])
    of_call.clear()
    of_call.update(copied)


@contextlib.contextmanager
def own_options(options_of_call: Mapping[str, Mapping[str, Any]] | None = None) -> Iterator[None]:
    """Within this context `configure` sets options of it alone; at its end those from before apply again.

    Args:
        options_of_call: those that it begins with; None for those that apply.
    """
    before: Options = options()
    tokens = _of_thread.set(before), _of_call.set(before)
    _of_calls.append(before)
    try:
        if options_of_call is not None:
            configure(options_of_call)
        yield
    finally:
        _of_calls[:] = [each for each in _of_calls if each is not before]  # another thread's may have begun later
        _of_thread.reset(tokens[0])
        _of_call.reset(tokens[1])


def options() -> Options:
    """The options that `configure` set, with secrets: for child processes, never for a file or a log."""
    return {prefix: dict(values) for prefix, values in _of_thread.get(_of_calls[-1]).items()}


def with_these_options(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return the function with the options of this thread, to be run once by another thread."""
    return functools.partial(contextvars.copy_context().run, function)


def options_for(url: str) -> dict[str, Any]:
    """The options of the longest prefix of the URL; empty if no prefix matches."""
    current = _of_thread.get(_of_calls[-1])
    fitting = [prefix for prefix in current if _lies_under(url, prefix)]
    return dict(current[max(fitting, key=len)]) if fitting else {}


def forget_other_logins(kind: Any) -> None:
    """Drop the filesystems of fsspec's cache, which goes by options alone, once the variables of logins changed."""
    now = {name: value for name, value in environment_now().items() if name.startswith(_LOGIN_VARIABLES)}
    if _logins.setdefault(kind.__name__, now) != now:
        kind.clear_instance_cache()
        _logins[kind.__name__] = now


def redacted_options(options: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The options for a manifest: secrets hidden, endpoint and profile kept."""
    return {redact(prefix): redacted_settings(values) for prefix, values in options.items()}


def redacted_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of another library, to store or print: values whose name is that of a secret are hidden."""
    return {name: _redacted(str(name), value) for name, value in values.items()}


def _lies_under(url: str, prefix: str) -> bool:
    # s3://corpus is not the bucket s3://corpus-two.
    return url == prefix or url.startswith(prefix if prefix.endswith("/") else prefix + "/")


def _redacted(name: str, value: Any) -> Any:
    if is_secret_option(name):
        return value if value is None or isinstance(value, bool) else HIDDEN
    if isinstance(value, Mapping):
        return redacted_settings(value)
    if isinstance(value, (list, tuple)):
        return [_redacted(name, item) for item in value]
    return redact_text(value) if isinstance(value, str) else value
