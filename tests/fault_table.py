"""The table of the tests marked `fault`, a row a fault: a pytest plugin (`bash tests/run.sh --all` loads it).

A test says in its own words what it saw happen, what it measured, and what a person would miss afterwards, with the
fixture `observed`. Where it says nothing, the table says that what is required happened, which is what the test
asserts, and that nothing is lost. `--fault-report FILE` keeps every test's outcome as JSON; a file that is there
already is added to, so that several runs, of some tests each, make one table. As a command:

    python -m tests.fault_table FILE ...                     print the table of the reports, as Markdown
    python -m tests.fault_table FILE ... --into README.md    put it between the two marks of that page
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

try:
    import pytest
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    sys.exit("tests.fault_table needs pytest; make the environment with bash tests/run.sh, or install the extra [test]")

REPOSITORY = Path(__file__).resolve().parents[1]
ROWS = tuple(str(number) for number in range(1, 62)) + ("28b", "31b", "47b")
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
_LOST = {"passed": "nothing", "partly": "nothing of what was tried", "failed": "see the failure"}


@dataclass(frozen=True)
class Outcome:
    """What became of one mark of one test."""

    test: str
    row: str
    fault: str
    required: str
    outcome: str
    happened: str
    """In the test's words; "" where it has none."""
    lost: str = ""
    """In the test's words; "" for nothing."""


@dataclass(frozen=True)
class FaultRow:
    """One row of the fault list: what was done, what happened, and what a person would miss afterwards."""

    row: str
    fault: str
    outcome: str
    happened: str
    lost: str
    tests: tuple[str, ...]


@pytest.fixture
def observed(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`observed(HAPPENED, lost=LOST)`: what the test saw, for the table of faults; `lost` where something is."""

    def note(happened: str, lost: str = "") -> None:
        record_property("happened", happened)
        if lost:
            record_property("lost", lost)

    return note


def combine(outcomes: list[Outcome]) -> list[FaultRow]:
    """One row a fault, in the order of the fault list, those without a test too.

    A row fails with any of its tests, and is tried in part where some of them were skipped.
    """
    rows = []
    for name in sorted({*ROWS, *(outcome.row for outcome in outcomes)}, key=row_order):
        mine = [outcome for outcome in outcomes if outcome.row == name]
        kinds = {outcome.outcome for outcome in mine}
        if "failed" in kinds:
            kind = "failed"
        elif len(kinds) > 1:
            kind = "partly"
        else:
            kind = kinds.pop() if kinds else "missing"
        faults = "; ".join(dict.fromkeys(outcome.fault for outcome in mine)) or "-"
        tests = tuple(outcome.test for outcome in mine)
        rows.append(FaultRow(name, faults, kind, _happened(mine), _lost(kind, mine), tests))
    return rows


def _happened(outcomes: list[Outcome]) -> str:
    if not outcomes:
        return "no test ran"
    failed = [outcome for outcome in outcomes if outcome.outcome == "failed"]
    if failed:
        return "not what is required: " + ", ".join(outcome.test for outcome in failed)
    told = [outcome.happened or outcome.required for outcome in outcomes if outcome.outcome == "passed"]
    left = [f"not tried: {outcome.fault} ({outcome.happened})" for outcome in outcomes if outcome.outcome == "skipped"]
    return "; ".join(dict.fromkeys(told + left))


def _lost(kind: str, outcomes: list[Outcome]) -> str:
    told = dict.fromkeys(outcome.lost for outcome in outcomes if outcome.outcome == "passed" and outcome.lost)
    if kind in ("passed", "partly") and told:
        return "; ".join(told)
    return _LOST.get(kind, "not tried")


def as_markdown(rows: list[FaultRow]) -> str:
    """The table for people, as Markdown."""
    lines = ["| row | fault | what happened | lost |", "|---|---|---|---|"]
    for row in rows:
        cells = (row.row, row.fault, row.happened, row.lost)
        lines.append("| " + " | ".join(map(in_a_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def in_a_cell(text: str) -> str:
    """A text as it stands in a cell of the table."""
    return " ".join(text.split()).replace("|", "\\|")


def rows_of_table(page: str) -> dict[str, tuple[str, ...]]:
    """The cells of the table between the two marks of a page, by the name of their row.

    Raises:
        ValueError: the page does not hold each mark once.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"the page must hold {BEGIN} and {END}, once each")
    table = page[page.index(BEGIN) : page.index(END)]
    lines = [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines[3:] if line}


def put_into(page: str, table: str) -> str:
    """The page with this table between its marks."""
    rows_of_table(page)
    return page[: page.index(BEGIN)] + f"{BEGIN}\n{table}" + page[page.index(END) :]


def read_outcomes(path: Path) -> list[Outcome]:
    """The outcomes of a report, of tests that there still are."""
    outcomes = [Outcome(**values) for values in json.loads(path.read_text(encoding="utf-8"))]
    return [outcome for outcome in outcomes if _is_there(outcome.test)]


def write_outcomes(path: Path, outcomes: list[Outcome]) -> None:
    """Add these to the report; a test's earlier outcomes are replaced."""
    all_outcomes = replaced(read_outcomes(path) if path.exists() else [], outcomes)
    ordered = sorted(all_outcomes, key=lambda outcome: (row_order(outcome.row), outcome.test))
    path.write_text(json.dumps([asdict(each) for each in ordered], indent=1, ensure_ascii=False) + "\n", "utf-8")


def replaced(old: list[Outcome], new: list[Outcome]) -> list[Outcome]:
    """Both; of a test that is in both the new outcomes."""
    tests = {outcome.test for outcome in new}
    return [outcome for outcome in old if outcome.test not in tests] + new


def row_order(row: str) -> tuple[int, str]:
    found = re.match(r"(\d+)(.*)", row)
    return (int(found[1]), found[2]) if found else (10**6, row)


def _is_there(test: str) -> bool:
    path, _, name = test.partition("::")
    file = REPOSITORY / path
    return file.is_file() and f"def {name.partition('[')[0]}(" in file.read_text(encoding="utf-8")


class FaultTable:
    """Collects the outcomes of a run and prints their table at its end."""

    def __init__(self) -> None:
        self._outcomes: dict[str, list[Outcome]] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> object:
        report = (yield).get_result()
        if report.when != "call" and report.outcome == "passed":
            return
        happened, lost = (
            "; ".join(str(value) for name, value in report.user_properties if name == told)
            for told in ("happened", "lost")
        )
        if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
            happened = str(report.longrepr[2]).removeprefix("Skipped: ")
        words = [
            [str(mark.kwargs[name]) for name in ("row", "fault", "required")] for mark in item.iter_markers("fault")
        ]
        if outcomes := [Outcome(item.nodeid, *mark, report.outcome, happened, lost) for mark in words]:
            self._outcomes[item.nodeid] = outcomes
            if path := item.config.getoption("--fault-report"):  # now, for a run of hours may not come to its end
                write_outcomes(Path(path), outcomes)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        outcomes = [outcome for of_test in self._outcomes.values() for outcome in of_test]
        path = config.getoption("--fault-report")
        if path and Path(path).exists():
            outcomes = read_outcomes(Path(path))
        rows = combine(outcomes)
        terminalreporter.section("faults")
        terminalreporter.write(as_markdown(rows))
        survived = sum(row.outcome == "passed" for row in rows)
        terminalreporter.write_line(f"{survived} of {len(rows)} faults met as required")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-report", metavar="FILE", help="write every fault's outcome to this file, or add it there")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FaultTable(), "fault-table")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.fault_table", description="The table of a report of faults.")
    parser.add_argument(
        "reports", type=Path, nargs="+", metavar="FILE", help="what --fault-report wrote; the last wins"
    )
    parser.add_argument("--into", type=Path, metavar="PAGE", help=f"put it there, between {BEGIN} and {END}")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    for report in arguments.reports:
        try:
            outcomes = replaced(outcomes, read_outcomes(report))
        except (OSError, ValueError, TypeError, LookupError) as error:
            parser.error(f"{report} is no report of --fault-report: {error}")
    table = as_markdown(combine(outcomes))
    if arguments.into is None:
        print(table, end="")
    else:
        arguments.into.write_text(put_into(arguments.into.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
