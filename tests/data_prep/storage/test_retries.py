"""Retries: what passes is tried again for a while, what does not fails at once."""

from __future__ import annotations

import time

import pytest

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import retries
from tests.support.error_codes import coded


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
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.01)
    store = Store(ConnectionResetError(), times=2)
    assert retries.with_retries("s3://user:word@a/b", "read", store) == "done" and store.calls == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("s3://a/b answers with a broken connection; retrying in 0.0")


def test_what_fails_for_good_is_tried_once(capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(PermissionError("no"))
    with pytest.raises(PermissionError):
        retries.with_retries("s3://a/b", "read", store)
    assert store.calls == 1 and capsys.readouterr().err == ""


def test_a_store_that_stays_away_is_given_up_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(retries.RETRY_VARIABLE, "0.3")
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.05)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"s3://a/b cannot be written: the store answered nothing in time for 0 s"):
        retries.with_retries("s3://a/b", "written", Store(TimeoutError()))
    assert 0.3 <= time.monotonic() - began < retries.RETRY_SECONDS / 2


def test_an_error_that_was_given_up_is_not_tried_again_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_FIRST_WAIT_SECONDS", 0.01)
    inner = Store(TimeoutError())
    with pytest.raises(UserError):
        retries.with_retries("s3://a", "read", lambda: retries.with_retries("s3://a", "read", inner, 0.0), 1.0)
    assert inner.calls <= 2


@pytest.mark.parametrize("said", ["abc", "nan", "-1", "1s"])
def test_a_time_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv(retries.RETRY_VARIABLE, said)
    with pytest.raises(
        UsageError,
        match=f"CLOZEWORKS_RETRY_SECONDS={said} is not a number of seconds",
        check=coded("invalid-retry-seconds"),
    ):
        retries.with_retries("s3://a/b", "read", Store(ConnectionResetError()))


def test_the_environment_says_for_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, seconds in (("", retries.RETRY_SECONDS), ("0", 0.0), ("1.5", 1.5)):
        monkeypatch.setenv(retries.RETRY_VARIABLE, said)
        assert retries.retry_seconds() == seconds
