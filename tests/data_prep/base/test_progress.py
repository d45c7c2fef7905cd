"""Progress: plain lines where there is no terminal, and no rate for what an earlier run did."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from data_prep.base import progress
from data_prep.base.progress import Progress


def test_lines_give_amount_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 10.0, 12.0, 20.0])
    # The module's own clock: other threads go on reading the time.
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Progress("reading", 400_000_000, "MB", 1e6) as shown:
        shown.skip(100_000_000)
        shown.add(60_000_000)
        shown.add(240_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 160.0 of 400.0 MB, 6.00 MB/s, 0:40 left",
        "reading: 300.0 MB in 20.0 s (15.00 MB/s), 100.0 before",
    ]


def test_what_was_done_before_has_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("writing", 9, "shards") as shown:
        shown.skip(9)
    assert capsys.readouterr().err == "writing: finished by an earlier run\n"


def test_nothing_is_said_of_work_that_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), Progress("writing", 9, "shards"):
        raise RuntimeError
    assert capsys.readouterr().err == ""


def test_what_is_counted_has_no_tenths(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("writing", 9, "shards") as shown:
        shown.add(9)
    assert capsys.readouterr().err.startswith("writing: 9 shards in ")
