"""Progress: plain lines where there is no terminal, and no rate for what an earlier run did."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_prep.base import progress
from data_prep.base.progress import Progress, add_begun, unit_ended
from data_prep.documents import documents
from tests.support.preparations import prepared

SLOW = "{name: 'tests.support.filters:take_time', milliseconds: 5}"


def test_lines_give_amount_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 10.0, 20.0, 40.0])
    # The module's own clock: other threads go on reading the time.
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    line = lines_at_will(monkeypatch)
    add_begun(None, 50_000_000)  # of other work before
    with Progress("reading", 400_000_000, "MB", 1e6, num_tasks=5, num_processes=2) as shown:
        shown.skip(100_000_000, 2)
        shown.add(60_000_000)
        line()
        add_begun("a worker", 30_000_000)
        add_begun(None, 30_000_000)
        line()
        unit_ended("a worker")
        unit_ended(None)
        shown.add(240_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 160.0 of 400.0 MB (3 of 5 units, 2 processes), 6.00 MB/s, 0:40 left",
        "reading: 220.0 of 400.0 MB (3 of 5 units, 2 processes), 6.00 MB/s, 0:30 left",
        "reading: 300.0 MB in 40.0 s (7.50 MB/s), 100.0 before",
    ]


def lines_at_will(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that has the next line printed, instead of the time."""
    due, shown = threading.Event(), threading.Event()

    class OnDemand(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            shown.set()
            while not due.wait(0.01):
                if self.is_set():
                    return True
            due.clear()
            return self.is_set()

    def line() -> None:
        shown.wait()
        shown.clear()
        due.set()
        shown.wait()

    monkeypatch.setattr(progress, "threading", SimpleNamespace(Event=OnDemand, Thread=threading.Thread))
    return line


def test_a_line_appears_before_the_first_unit_is_done_and_has_an_estimate(
    small_corpus: Path,
    small_tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.5)
    monkeypatch.setattr(documents, "_REPORT_SECONDS", 0.05)
    prepared(small_corpus, small_tokenizer, tmp_path / "out", f"documents.filters=[{SLOW}]")
    line = next(each for each in capsys.readouterr().err.splitlines() if "of 1 unit" in each)
    assert re.fullmatch(
        r"reading: 0\.\d of 0\.\d MB of input \(0 of 1 unit, 1 process\), 0\.\d\d .*/s, 0:0\d left", line
    )


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize("command", ["shards", "tokenizer"])
def test_a_command_prints_an_estimate_while_it_works_on_its_first_units(
    command: str, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    texts = small_corpus.read_text(encoding="utf-8")
    for name in ("a", "b"):  # a unit each
        (tmp_path / f"{name}.jsonl").write_text(texts * 20, encoding="utf-8")
    arguments = ["--input", tmp_path / "*.jsonl", "--output", tmp_path / "out", "--workers", "2"]
    arguments += ["--tokenizer", small_tokenizer, "shards.unit_bytes=5000000"] if command == "shards" else []
    words = [sys.executable, "-m", "data_prep", command, *map(str, arguments), f"documents.filters=[{SLOW}]"]
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(words, cwd=root, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = next(each for each in process.stderr if "unit" in each)
        line = first if "unknown" not in first else next(process.stderr)
        process.kill()
    assert re.search(r"\(0 of 2 units, 2 processes\), [0-9.]+ MB.*/s, \d:\d\d left", line), line


def test_work_of_an_earlier_run_shows_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("writing", 9, "shards") as shown:
        shown.skip(9)
    assert capsys.readouterr().err == "writing: finished by an earlier run\n"


def test_failed_work_prints_no_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), Progress("writing", 9, "shards"):
        raise RuntimeError
    assert capsys.readouterr().err == ""


def test_counts_are_shown_without_decimals(capsys: pytest.CaptureFixture[str]) -> None:
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
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Progress("x", amount, unit) as shown:
        shown.add(amount)
    assert capsys.readouterr().err == f"x: {ending}\n"
