"""Fixtures of the tests of the registry and of the Hub."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hub_server import ModelHub, reached_by

TOKEN = "hf_never-to-be-shown"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelHub]:
    """A stand-in for the Hub that the client reaches, with a token, without Xet and without waits."""
    server = ModelHub(TOKEN)
    reached_by(monkeypatch, server)
    yield server
    server.stop()
