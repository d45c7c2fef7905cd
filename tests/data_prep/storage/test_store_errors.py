"""Errors of stores: which are worth another attempt, and the message for the user about the others."""

from __future__ import annotations

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError, SSLError
from s3fs.errors import translate_boto_error

from data_prep.base.errors import UserError
from data_prep.storage.store_errors import answer, explained, http_status, is_transient


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
