"""How patient MLflow's requests are, where several threads make them."""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from trainer.tracking.request_limits import RETRIES, SECONDS, request_limits


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tracking.request_limits._open", [])
    for name in (RETRIES, SECONDS):
        monkeypatch.delenv(name, raising=False)


def test_request_limits_end_with_their_block_and_leave_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECONDS, "77")
    with request_limits(max_retries=2, timeout_seconds=5):
        assert (os.environ[RETRIES], os.environ[SECONDS]) == ("2", "77")
    assert RETRIES not in os.environ
    assert os.environ[SECONDS] == "77"


def test_blocks_that_overlap_go_by_the_most_patient_until_the_last_has_ended() -> None:
    first, second, third = ExitStack(), ExitStack(), ExitStack()
    first.enter_context(request_limits(max_retries=0, timeout_seconds=30))
    second.enter_context(request_limits(max_retries=4, timeout_seconds=300))
    third.enter_context(request_limits(max_retries=0, timeout_seconds=30))
    assert (os.environ[RETRIES], os.environ[SECONDS]) == ("4", "300")
    first.close()
    assert (os.environ[RETRIES], os.environ[SECONDS]) == ("4", "300")
    second.close()
    assert (os.environ[RETRIES], os.environ[SECONDS]) == ("0", "30")
    third.close()
    assert RETRIES not in os.environ and SECONDS not in os.environ
