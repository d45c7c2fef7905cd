"""Progress of long work: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from data_prep.base.terminal import duration

if TYPE_CHECKING:
    import tqdm

_LINE_SECONDS = 5.0


class Progress:
    """Print share, rate and time left on standard error.

    `unit` names the amounts, which are divided by `scale` for display ("MB" with 1e6).
    """

    def __init__(self, title: str, total: int, unit: str, scale: float = 1.0) -> None:
        self._title, self._total, self._unit, self._scale = title, total, unit, scale
        self._done = 0
        self._started_at = self._printed_at = time.monotonic()
        self._first = 0
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        if kind is None:
            print(f"{self._title}: {self._ending()}", file=sys.stderr, flush=True)

    def skip(self, amount: int) -> None:
        """Count an amount that an earlier run finished; the rate ignores it."""
        self._first += amount
        self._done += amount
        if self._bar is not None:
            self._bar.update(amount / self._scale)

    def add(self, amount: int) -> None:
        """Count an amount as done."""
        self._done += amount
        if self._bar is not None:
            self._bar.update(amount / self._scale)
            return
        now = time.monotonic()
        if now - self._printed_at >= _LINE_SECONDS and self._done < self._total:
            self._printed_at = now
            print(self._line(now - self._started_at), file=sys.stderr, flush=True)

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

    def _line(self, elapsed_seconds: float) -> str:
        rate = (self._done - self._first) / elapsed_seconds
        left = (self._total - self._done) / rate if rate else 0.0
        amounts = f"{self._amount(self._done)} of {self._amount(self._total)} {self._unit}"
        return f"{self._title}: {amounts}, {_rate(rate / self._scale)} {self._unit}/s, {duration(left)} left"


def _rate(value: float) -> str:
    """Format a rate: 0.25, 27.90, 27,872."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"
