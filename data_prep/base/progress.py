"""Progress of long work: a bar on a terminal, otherwise a line after a few seconds and every few more.

A unit of work that takes long reports how far it is (`report`), in whatever process it runs, so that the first line has
an estimate even if no unit is done.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from data_prep.base.terminal import counted, duration

if TYPE_CHECKING:
    import tqdm

_FIRST_SECONDS, _LINE_SECONDS, _SOON_SECONDS = 3.0, 5.0, 1.0

_begun: dict[object, int] = {}  # by worker, the amount that is done of its unit


def add_begun(worker: object, amount: int) -> None:
    """Count an amount of the unit that a worker is working on; None is this process."""
    _begun[worker] = _begun.get(worker, 0) + amount


def unit_ended(worker: object) -> None:
    """Forget what was counted of the unit of a worker, which is done or lost."""
    _begun.pop(worker, None)


_reported: Callable[[int], object] = functools.partial(add_begun, None)


def report(amount: int) -> None:
    """Report an amount of the unit that this process is working on; at most once a second."""
    _reported(amount)


def report_to(function: Callable[[int], object]) -> None:
    """Give what is reported in this process to a function, which takes it to another one."""
    global _reported
    _reported = function


class Progress:
    """Print share, rate and time left on standard error.

    Args:
        unit: names the amounts, which are divided by `scale` for display ("MB" with 1e6).
        num_tasks: units of work; each call of `add` is one.
        num_processes: that work on them; None if unknown.
    """

    def __init__(
        self,
        title: str,
        total: int,
        unit: str,
        scale: float = 1.0,
        num_tasks: int | None = None,
        num_processes: int | None = None,
    ) -> None:
        self._title, self._total, self._unit, self._scale = title, total, unit, scale
        self._num_tasks, self._num_processes = num_tasks, num_processes
        self._done = self._tasks_done = 0
        self._started_at = time.monotonic()
        self._first = 0
        self._is_over = threading.Event()
        self._bar: tqdm.tqdm[NoReturn] | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            import tqdm

            digits = ".0f" if self._scale == 1.0 else ".1f"
            self._bar = tqdm.tqdm(
                desc=self._title,
                total=self._total / self._scale,
                unit=f" {self._unit}",
                file=sys.stderr,
                leave=False,
                bar_format=f"{{desc}}: {{percentage:3.0f}}%|{{bar}}| {{n:{digits}}}/{{total:{digits}}}{{unit}}, "
                "{rate_fmt}, {remaining} left",
            )
        _begun.clear()  # of earlier work, which nobody showed
        self._thread = threading.Thread(target=self._show, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            print(f"{self._title}: {self._ending()}", file=sys.stderr, flush=True)

    def skip(self, amount: int, num_tasks: int = 0) -> None:
        """Count an amount that an earlier run finished; the rate ignores it."""
        self._first += amount
        self._done += amount
        self._tasks_done += num_tasks

    def add(self, amount: int) -> None:
        """Count an amount as done."""
        self._done += amount
        self._tasks_done += 1

    def _show(self) -> None:
        """Show how far the work is until it is over, from a thread of its own."""
        seconds = _FIRST_SECONDS if self._bar is None else _SOON_SECONDS
        while not self._is_over.wait(seconds):
            if self._bar is None:
                has_estimate = self._reached() > self._first
                if self._done < self._total and (has_estimate or seconds == _FIRST_SECONDS):
                    print(self._line(time.monotonic() - self._started_at), file=sys.stderr, flush=True)
                # An estimate is shown as soon as there is one.
                seconds = _LINE_SECONDS if has_estimate else _SOON_SECONDS
            else:
                self._bar.set_description_str(f"{self._title}{self._details()}", refresh=False)
                self._bar.n = self._reached() / self._scale
                self._bar.refresh()

    def _reached(self) -> int:
        """Return what is done, with what is done of units that are not."""
        return min(self._total, self._done + sum(list(_begun.values())))

    def _ending(self) -> str:
        own = self._done - self._first
        if self._first and not own:
            return "finished by an earlier run"
        elapsed_seconds = time.monotonic() - self._started_at
        earlier = f", {self._amount(self._first)} before" if self._first else ""
        rate = own / self._scale / max(elapsed_seconds, 1e-9)
        unit = self._unit
        if own == 1 and self._scale == 1.0:
            unit = f"{unit[:-3]}y" if unit.endswith("ies") else unit.removesuffix("s")
        return f"{self._amount(own)} {unit} in {elapsed_seconds:.1f} s ({_rate(rate)} {self._unit}/s){earlier}"

    def _amount(self, amount: int) -> str:
        """Format megabytes to a tenth and counts, such as shards, in full."""
        return f"{amount:,}" if self._scale == 1.0 else f"{amount / self._scale:.1f}"

    def _details(self) -> str:
        """Return the units and processes in brackets, after a space; empty if neither is known."""
        details = []
        if self._num_tasks not in (None, self._total):
            details.append(f"{self._tasks_done:,} of {counted(self._num_tasks, 'unit')}")
        if self._num_processes is not None:
            details.append("1 process" if self._num_processes == 1 else f"{self._num_processes:,} processes")
        return f" ({', '.join(details)})" if details else ""

    def _line(self, elapsed_seconds: float) -> str:
        reached = self._reached()
        rate = (reached - self._first) / max(elapsed_seconds, 1e-9)
        amounts = f"{self._amount(reached)} of {self._amount(self._total)} {self._unit}"
        amounts += self._details()
        left = f"{duration((self._total - reached) / rate)} left" if rate else "time left unknown"
        return f"{self._title}: {amounts}, {_rate(rate / self._scale)} {self._unit}/s, {left}"


def _rate(value: float) -> str:
    """Format a rate: 0.25, 27.90, 27,872."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
