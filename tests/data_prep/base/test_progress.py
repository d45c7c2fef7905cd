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


@pytest.mark.parametrize(
    ("amount", "unit", "ending"),
    [
        (1, "shards", "1 shard in 2.0 s (0.50 shards/s)"),
        (1, "copies", "1 copy in 2.0 s (0.50 copies/s)"),
        (55_744, "documents", "55,744 documents in 2.0 s (27,872 documents/s)"),
    ],
)
def test_one_is_singular_and_large_rates_have_separators(
    amount: int, unit: str, ending: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 2.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Progress("x", amount, unit) as shown:
        shown.add(amount)
    assert capsys.readouterr().err == f"x: {ending}\n"
