"""The one shape of results/*.json: machine, versions, date, command, rows, and the script's own report as details.

A row is one figure of ours beside one of a peer's, both medians, with how many times better ours is; a figure that no
peer has stands alone. Scripts write reports of their own; `in_common_shape` makes this of them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parent / "results"
_MACHINE = ("cpu", "instruction_sets", "cores", "memory_gib", "load_average")
_DESCRIBED = ("machine", "versions", "date", "command", "python", *_MACHINE)


@dataclass(frozen=True)
class Row:
    """One figure of ours; `peer` and `peer_name` are None where nobody else has it."""

    name: str
    ours: float
    peer: float | None
    peer_name: str | None
    unit: str
    better: Literal["more", "less"]
    runs: int
    """Of which the figures are the medians."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """By corpus or seed, where there are several; the figures are then of all of them together."""

    @property
    def ratio(self) -> float | None:
        """How many times better ours is; below 1 where it is worse."""
        if self.peer is None:
            return None
        return self.ours / self.peer if self.better == "more" else self.peer / self.ours

    @property
    def range(self) -> str:
        """The lowest and the highest of the ratios and what they were measured on; empty for a single one."""
        if len(self.ratios) < 2:
            return ""
        low, high = (pick(self.ratios, key=lambda name: self.ratios[name]) for pick in (min, max))
        return f"{figure(self.ratios[low])} ({low}) to {figure(self.ratios[high])} ({high})"


Report = dict[str, Any]
_IMPLIED = ("avx", "avx512_fp16", "asimd")
"""Instruction sets on which no figure here depends beside those that imply them or are named."""
_WRITTEN_TO = ("--work", "--results", "--output", "--environment")


def in_common_shape(
    benchmark: str, raw: Report, rows: Callable[[Report], Sequence[Row]], date: str | None = None
) -> Report:
    """The report of a script in the shape that all have; `date` is for those that tell none."""
    machine = dict(raw.get("machine") or {name: raw[name] for name in _MACHINE if name in raw})
    versions = dict(raw.get("versions") or machine.pop("versions"))
    versions["python"] = raw.get("python") or machine.pop("python", None) or versions["python"]
    command = raw.get("command") or machine.pop("command")
    told = raw.get("date") or machine.pop("date", None) or date
    assert told is not None, "a report says when it was measured"
    for name in ("versions", "python", "command", "date"):
        machine.pop(name, None)
    return {
        "benchmark": benchmark,
        "date": told[:10],
        "machine": machine,
        "versions": versions,
        "command": without_folders(command),
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows(raw)],
        "details": {name: value for name, value in raw.items() if name not in _DESCRIBED},
    }


def is_in_common_shape(report: Report) -> bool:
    """Whether it has been through `in_common_shape`."""
    return "rows" in report and "details" in report


def rows_of(report: Report) -> list[Row]:
    """The rows of a report in the common shape."""
    return [Row(**{name: value for name, value in row.items() if name != "ratio"}) for row in report["rows"]]


def read(path: Path) -> Report:
    """A report as it lies in a file."""
    report: Report = json.loads(path.read_text(encoding="utf-8"))
    return report


def write(path: Path, report: Report) -> None:
    """Write it under its name at once, so that no half of it is ever read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def runs_in(path: Path) -> list[dict[str, Any]]:
    """The runs of a result file that grows run by run; none if it does not exist."""
    if not path.exists():
        return []
    report = read(path)
    runs: list[dict[str, Any]] = report["details"]["runs"] if is_in_common_shape(report) else report["runs"]
    return runs


def add_run(path: Path, described: Mapping[str, Any], run: Mapping[str, Any], **values: Any) -> None:
    """Add a run to such a file: `described` (of `machine.py`) is kept with the run, `values` with the file."""
    where = {"date": described["date"], "cpu": described["cpu"], "load_average": round(described["load_average"], 1)}
    command = without_folders(described["command"])
    runs = [*runs_in(path), {**run, **where, "command": command}]
    write(path, {**described, "command": command, **values, "runs": runs})


def without_folders(command: str | Sequence[str]) -> str:
    """The command with every path from outside cut to its last part, without the folders that it wrote to."""
    words = shlex.split(command) if isinstance(command, str) else list(command)
    for option in _WRITTEN_TO:
        while option in words:
            place = words.index(option)
            del words[place : place + 2]
    if not words[0].startswith("python"):
        script = Path(words[0])
        words = ["python", f"tests/benchmarks/{script.name}" if script.suffix == ".py" else words[0], *words[1:]]
    return " ".join(Path(word).name if word.startswith(("/", "../")) else word for word in words)


def machine_of(report: Report) -> str:
    """Cores and processor, for people, with the instruction sets where the report names them."""
    machine = report["machine"]
    sets = [name for name in machine.get("instruction_sets", ()) if name not in _IMPLIED]
    told = f" with {', '.join(sets)}" if sets else ""
    return f"{machine['cores']} cores of {machine.get('cpu') or machine.get('processor')}{told}"


def figure(value: float) -> str:
    """Three digits that count, with commas: 0.634, 8.25, 25.4, 163, 19,970."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.9995 else f"{value:.3f}"
