"""The one shape of results/*.json: date, commit, machine, versions, command, rows, and all else found as details.

A row is one figure of ours beside one of a peer's, both medians, with how many times better ours is; a figure that no
peer has stands alone. Every script turns its details into rows itself, and writes both with `save` or `add_run`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

RESULTS = Path(__file__).parent / "results"
CONTESTANTS = {"ours": "ours", "run_mlm": "run_mlm", "ltg_bert": "LTG-BERT's architecture"}
"""Of the comparison of what encoders learn, with their names in tables and pictures."""
_MACHINE = ("cpu", "instruction_sets", "cores", "memory_gib", "load_average")
_DESCRIBED = (*_MACHINE, "versions", "python", "date", "commit", "command")


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


def alone(name: str, ours: float, unit: str, better: Literal["more", "less"], runs: int = 1) -> Row:
    """A figure that nobody else has."""
    return Row(name, ours, None, None, unit, better, runs)


Report = dict[str, Any]
_IMPLIED = ("avx", "avx512_fp16", "asimd")
"""Instruction sets on which no figure here depends beside those that imply them or are named."""
_WRITTEN_TO = ("--work", "--results", "--output", "--environment")


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line with the options that all benchmarks have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--work", type=Path, metavar="DIR", help="folder for temporary files, several GB")
    made.add_argument("--results", type=Path, metavar="FILE", help="write everything as JSON")
    return made


def save(path: Path | None, described: Mapping[str, Any], details: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Print the rows, and write them with everything else if there is a path; `described` is that of `machine.py`."""
    for row in rows:
        beside = "" if row.peer is None else f"  {figure(row.peer)} {row.peer_name}  {figure(row.ratio)} times better"
        print(f"  {row.name}: {figure(row.ours)} {row.unit}{beside}", flush=True)
    if path is not None:
        write(path, _shaped(described, details, rows))


def kept(path: Path | None, described: Mapping[str, Any]) -> dict[str, Any]:
    """The details that an interrupted measurement has written: by the same command, commit and machine."""
    if path is None or not path.exists():
        return {}
    report = read(path)
    new = _shaped(described, {}, ())
    same = all(report.get(name) == new.get(name) for name in ("commit", "command", "versions"))
    return dict(report["details"]) if same and report["machine"]["cpu"] == new["machine"]["cpu"] else {}


def _shaped(described: Mapping[str, Any], details: Mapping[str, Any], rows: Sequence[Row]) -> Report:
    return {
        "date": described["date"],
        **{name: described[name] for name in ("commit",) if name in described},
        "machine": {name: described[name] for name in _MACHINE if name in described},
        "versions": {**described["versions"], "python": described["python"]},
        "command": without_folders(described["command"]),
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "details": dict(details),
    }


def rows_of(report: Report) -> list[Row]:
    """The rows of a report."""
    return [Row(**{name: value for name, value in row.items() if name != "ratio"}) for row in report["rows"]]


def read(path: Path) -> Any:
    """What is in a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def read_report(path: Path) -> Report:
    """A result file in the shape that all have; earlier versions of `add_run` wrote another one."""
    report: Report = read(path)
    if "details" in report:
        return report
    return _shaped(report, {name: value for name, value in report.items() if name not in _DESCRIBED}, ())


def write(path: Path, values: Any) -> None:
    """Write it under its name at once, so that no half of it is ever read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def runs_in(path: Path) -> list[dict[str, Any]]:
    """The runs of a result file that grows run by run; none if it does not exist."""
    return list(read_report(path)["details"]["runs"]) if path.exists() else []


def add_run(path: Path, described: Mapping[str, Any], run: Mapping[str, Any], **values: Any) -> None:
    """Add a run to such a file: `described` (of `machine.py`) is kept with the run, `values` with the file."""
    where = {"date": described["date"], "cpu": described["cpu"], "load_average": round(described["load_average"], 1)}
    added = {**run, **where, "command": without_folders(described["command"])}
    write(path, _shaped(described, {**values, "runs": [*runs_in(path), added]}, ()))


def without_folders(command: str) -> str:
    """The command of a script without the folders that it wrote to; of paths from outside the last part is left.

    Of a path in NAME=FILE,FILE the last two parts are left.
    """
    python, script, *words = command.split(" ")
    for option in _WRITTEN_TO:
        while option in words:
            index = words.index(option)
            del words[index : index + 2]
    path = Path(script)
    started = f"-m tests.system.{path.stem}" if path.parent.name == "system" else f"tests/benchmarks/{path.name}"
    return " ".join([python, started, *map(_without_folder, words)])


def _without_folder(word: str) -> str:
    name, equals, value = word.rpartition("=")
    kept = 2 if equals else 1
    paths = ("/".join(Path(path).parts[-kept:]) if path.startswith(("/", "../")) else path for path in value.split(","))
    return name + equals + ",".join(paths)


def measured(report: Report) -> str:
    """Machine, date, load average and command, for the caption of a table."""
    when = f"{report['date']}, load average {report['machine']['load_average']:.1f}"
    return f"{machine_of(report)}, {when}. `{report['command']}`"


def machine_of(report: Report) -> str:
    """Cores and processor, for people, with the instruction sets where the report names them."""
    machine = report["machine"]
    sets = [name for name in machine.get("instruction_sets", ()) if name not in _IMPLIED]
    told = f" with {', '.join(sets)}" if sets else ""
    return f"{machine['cores']} cores of {machine['cpu']}{told}"


def figure(value: float | None) -> str:
    """Three digits that count, with commas: 0.634, 8.25, 25.4, 163, 19,970."""
    assert value is not None
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}" if value >= 0.9995 else f"{value:.3f}"
