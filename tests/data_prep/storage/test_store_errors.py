"""Errors of stores: which are worth another attempt, the attempts, and the message for the user about the others."""

from __future__ import annotations

import time

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError, SSLError
from s3fs.errors import translate_boto_error

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import store_errors
from data_prep.storage.store_errors import answer, explained, http_status, is_transient, with_retries
from tests.support.error_codes import coded


def refusal(code: str, status: int) -> Exception:
    """What s3fs raises when the store refuses."""
    response = {"Error": {"Code": code, "Message": "said"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(response, "GetObject"))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (refusal("SlowDown", 503), "SlowDown"),
        (refusal("500", 500), "HTTP status 500"),
        (refusal("RequestTimeout", 400), "RequestTimeout"),
        (ClientPayloadError("half"), "with a broken connection"),
        (EndpointConnectionError(endpoint_url="https://x"), "with a broken connection"),
        (ReadTimeoutError(endpoint_url="https://x"), "nothing in time"),
        (ConnectionResetError(), "with a broken connection"),
    ],
)
def test_a_busy_store_and_a_broken_connection_are_worth_another_attempt(error: Exception, told: str) -> None:
    assert is_transient(error) and answer(error) == told


@pytest.mark.parametrize(
    "error",
    [
        refusal("AccessDenied", 403),
        refusal("NoSuchKey", 404),
        refusal("NotImplemented", 501),
        refusal("InvalidRequest", 400),
        FileNotFoundError("a"),
        NoCredentialsError(),
        UserError("told already"),
        SSLError(endpoint_url="https://x", error="CERTIFICATE_VERIFY_FAILED"),
        ValueError("ours"),
    ],
    ids=str,
)
def test_lasting_refusals_are_not_retried(error: Exception) -> None:
    assert not is_transient(error)


def test_the_cause_behind_a_translated_error_counts() -> None:
    try:
        try:
            raise refusal("InternalError", 500)
        except OSError as error:
            raise FileNotFoundError("a") from error
    except FileNotFoundError as error:
        assert is_transient(error) and http_status(error) == 500


def test_a_failure_of_the_cleanup_does_not_hide_the_cause() -> None:
    try:
        try:
            raise refusal("SlowDown", 503)
        except OSError:
            raise refusal("NoSuchUpload", 404)  # noqa: B904
    except OSError as error:
        assert is_transient(error) and answer(error) == "SlowDown"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (refusal("AccessDenied", 403), r"permission denied \(AccessDenied\)\. Fix: check the credentials"),
        (refusal("NoSuchBucket", 404), "there is no such bucket"),
        (refusal("NoSuchKey", 404), "there is no such file"),
        (NoCredentialsError(), "Unable to locate credentials. Fix: set AWS_PROFILE"),
        (
            TypeError("got an unexpected keyword argument 'endpont_url'"),
            "its storage_options are invalid: .*endpont_url",
        ),
    ],
)
def test_a_refusal_is_one_paragraph(error: Exception, message: str) -> None:
    with pytest.raises(UserError, match=f"^s3://a/b cannot be read: {message}"), explained("s3://me:word@a/b", "read"):
        raise error


def test_a_mistake_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError), explained("s3://a", "read"):
        1 / 0  # noqa: B018


class Store:
    """Fails `times` times with `error`."""

    def __init__(self, error: Exception, times: float = float("inf")) -> None:
        self.error, self.times, self.calls = error, times, 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return "done"


def test_a_broken_connection_is_tried_again_and_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store_errors, "_FIRST_WAIT_SECONDS", 0.01)
    store = Store(ConnectionResetError(), times=2)
    assert with_retries("s3://user:word@a/b", "read", store) == "done" and store.calls == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("s3://a/b answers with a broken connection; retrying in 0.0")


def test_what_fails_for_good_is_tried_once(capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(PermissionError("no"))
    with pytest.raises(PermissionError):
        with_retries("s3://a/b", "read", store)
    assert store.calls == 1 and capsys.readouterr().err == ""


def test_a_store_that_stays_away_is_given_up_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store_errors.RETRY_VARIABLE, "0.3")
    monkeypatch.setattr(store_errors, "_FIRST_WAIT_SECONDS", 0.05)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"s3://a/b cannot be written: the store answered nothing in time for 0 s"):
        with_retries("s3://a/b", "written", Store(TimeoutError()))
    assert 0.3 <= time.monotonic() - began < store_errors.RETRY_SECONDS / 2


def test_an_error_that_was_given_up_is_not_tried_again_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_errors, "_FIRST_WAIT_SECONDS", 0.01)
    inner = Store(TimeoutError())
    with pytest.raises(UserError):
        with_retries("s3://a", "read", lambda: with_retries("s3://a", "read", inner, 0.0), 1.0)
    assert inner.calls <= 2


@pytest.mark.parametrize("said", ["abc", "nan", "-1", "1s"])
def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv(store_errors.RETRY_VARIABLE, said)
    with pytest.raises(
        UsageError,
        match=f"CLOZEWORKS_RETRY_SECONDS={said} is not a number of seconds",
        check=coded("invalid-retry-seconds"),
    ):
        with_retries("s3://a/b", "read", Store(ConnectionResetError()))


def test_the_environment_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, seconds in (("", store_errors.RETRY_SECONDS), ("0", 0.0), ("1.5", 1.5)):
        monkeypatch.setenv(store_errors.RETRY_VARIABLE, said)
        assert store_errors.retry_seconds() == seconds
