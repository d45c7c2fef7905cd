"""The report of a soak: a line a fault (minute, round, fault, what happened, how it was overcome), as JSON and text."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Incident:
    """One fault that struck."""

    minute: float
    round: int
    phase: str
    fault: str
    happened: str
    overcome: str = "not yet"


@dataclass
class SoakReport:
    """What a soak did; rewritten with every change, so that it can be read meanwhile."""

    path: Path
    seed: int
    minutes: float
    rounds: int = 0
    incidents: list[Incident] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Faults that cannot be made here, and those that found no moment."""
    end: dict[str, object] = field(default_factory=dict)
    """What was compared at the end, and with what outcome."""
    started_at: float = field(default_factory=time.monotonic)

    @property
    def minute(self) -> float:
        """Minutes since the first round began."""
        return round((time.monotonic() - self.started_at) / 60, 2)

    def add(self, round_: int, phase: str, fault: str, happened: str) -> Incident:
        self.incidents.append(Incident(self.minute, round_, phase, fault, happened))
        self.write()
        return self.incidents[-1]

    def write(self) -> None:
        """Write the JSON, and beside it the text."""
        values = {
            "seed": self.seed,
            "minutes": self.minutes,
            "lasted_minutes": self.minute,
            "rounds": self.rounds,
            "incidents": [asdict(incident) for incident in self.incidents],
            "left_out": self.left_out,
            "end": self.end,
        }
        self.path.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        self.path.with_suffix(".txt").write_text(self.as_text(), encoding="utf-8")

    def as_text(self) -> str:
        """The table for people."""
        names = ("minute", "round", "fault", "what happened", "how it was overcome")
        rows = [
            (f"{each.minute:.1f}", str(each.round), each.fault, each.happened, each.overcome) for each in self.incidents
        ]
        widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
        lines = [
            f"soak with seed {self.seed}: {self.rounds} rounds and {len(rows)} faults in {self.minute} minutes",
            *(
                "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                for row in (names, *rows)
            ),
            *(f"left out: {what}" for what in self.left_out),
            *(f"{what}: {outcome}" for what, outcome in self.end.items()),
        ]
        return "\n".join(lines) + "\n"
