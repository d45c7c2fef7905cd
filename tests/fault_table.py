"""The table of the tests marked `fault`, a row a fault: a pytest plugin (`bash tests/run.sh --all` loads it).

A test says in its own words what it saw with `record_property("happened", TEXT)`; where it says nothing, the table
says that what is required happened, which is what the test asserts.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROWS = tuple(str(number) for number in range(1, 49)) + ("28b", "31b", "47b")
_LOST = {"passed": "nothing", "failed": "see the failure", "skipped": "not tried"}
_WORST_FIRST = ("failed", "skipped", "passed")


@dataclass(frozen=True)
class FaultRow:
    """One fault: what was done, what had to happen, and what did."""

    row: str
    fault: str
    required: str
    outcome: str
    happened: str
    tests: tuple[str, ...]


def combine(reports: list[FaultRow]) -> list[FaultRow]:
    """One row a fault, in the order of the fault list; the worst outcome counts; faults without a test are told."""
    rows = []
    for name in sorted({*ROWS, *(report.row for report in reports)}, key=_order):
        mine = [report for report in reports if report.row == name]
        if not mine:
            rows.append(FaultRow(name, "", "", "missing", "no test ran", ()))
            continue
        outcome = next(kind for kind in _WORST_FIRST if any(report.outcome == kind for report in mine))
        told = dict.fromkeys(report.happened for report in mine if report.outcome == outcome and report.happened)
        faults = dict.fromkeys(report.fault for report in mine)
        required = dict.fromkeys(report.required for report in mine)
        tests = tuple(test for report in mine for test in report.tests)
        rows.append(FaultRow(name, "; ".join(faults), "; ".join(required), outcome, "; ".join(told), tests))
    return rows


def as_markdown(rows: list[FaultRow]) -> str:
    """The table for people, as Markdown."""
    lines = ["| row | fault | what happened | lost |", "|---|---|---|---|"]
    for row in rows:
        happened = row.happened or row.required
        lines.append(f"| {row.row} | {row.fault} | {row.outcome}: {happened} | {_LOST.get(row.outcome, '-')} |")
    return "\n".join(lines) + "\n"


def _order(row: str) -> tuple[int, str]:
    found = re.match(r"(\d+)(.*)", row)
    return (int(found[1]), found[2]) if found else (10**6, row)


class FaultTable:
    """Collects the outcomes of a run and prints their table at its end."""

    def __init__(self) -> None:
        self._reports: dict[str, FaultRow] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> object:
        report = (yield).get_result()
        for number, mark in enumerate(item.iter_markers("fault")):
            key = f"{item.nodeid}#{number}"
            if report.when == "call" or report.outcome != "passed":
                happened = "; ".join(str(value) for name, value in report.user_properties if name == "happened")
                if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
                    happened = str(report.longrepr[2]).removeprefix("Skipped: ")
                self._reports[key] = FaultRow(
                    str(mark.kwargs["row"]),
                    mark.kwargs["fault"],
                    mark.kwargs["required"],
                    report.outcome,
                    happened,
                    (item.nodeid,),
                )

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        rows = combine(list(self._reports.values()))
        terminalreporter.section("faults")
        terminalreporter.write(as_markdown(rows))
        survived = sum(row.outcome == "passed" for row in rows)
        terminalreporter.write_line(f"{survived} of {len(rows)} faults met as required")
        if path := config.getoption("--fault-report"):
            Path(path).write_text(json.dumps([asdict(row) for row in rows], indent=1, ensure_ascii=False) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-report", metavar="FILE", help="write the table of faults to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FaultTable(), "fault-table")
