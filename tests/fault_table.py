"""The tables of the tests marked `fault`: a pytest plugin (`bash tests/run.sh --all` loads it) and a command.

A test reports with the fixture `observed` what it saw and measured, and what has to be done again. Without a
report the table states the requirement, which the test asserts, and that nothing is lost. `--fault-report=FILE` keeps
the outcome of every test as JSON. An existing file is extended, so that several runs make one table.

    python -m tests.fault_table FILE ...                print the detailed table: what each test measured
    python -m tests.fault_table FILE ... --into PAGE    write the short table of tests/fault_list.py into the page

The short table states an outcome only where every test of the row passed.
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

from tests.fault_list import FAULTS

REPOSITORY = Path(__file__).resolve().parents[1]
ROWS = tuple(FAULTS)
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
_LOST = {"passed": "nothing", "partly": "nothing of what was tried", "failed": "see the failure"}


@dataclass(frozen=True)
class Outcome:
    """The outcome of one mark of one test."""

    test: str
    row: str
    fault: str
    required: str
    outcome: str
    happened: str
    """As the test reports it; "" without a report."""
    lost: str = ""
    """As the test reports it; "" for nothing."""


@dataclass(frozen=True)
class FaultRow:
    """One row of the fault list: the fault, what happened, and what has to be done again."""

    row: str
    fault: str
    outcome: str
    happened: str
    lost: str
    tests: tuple[str, ...]


@pytest.fixture
def observed(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`observed(HAPPENED, lost=LOST)`: report what the test saw, and what is lost if anything is."""

    def note(happened: str, lost: str = "") -> None:
        record_property("happened", happened)
        if lost:
            record_property("lost", lost)

    return note


def combine(outcomes: list[Outcome]) -> list[FaultRow]:
    """One row per fault in the order of the fault list, also for faults without a test.

    A row fails if any of its tests fails, and is tested in part if some of them were skipped.
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
    observed = [outcome.happened or outcome.required for outcome in outcomes if outcome.outcome == "passed"]
    skipped = [
        f"not tried: {outcome.fault} ({outcome.happened})" for outcome in outcomes if outcome.outcome == "skipped"
    ]
    return "; ".join(dict.fromkeys(observed + skipped))


def _lost(kind: str, outcomes: list[Outcome]) -> str:
    lost = dict.fromkeys(outcome.lost for outcome in outcomes if outcome.outcome == "passed" and outcome.lost)
    if kind in ("passed", "partly") and lost:
        return "; ".join(lost)
    return _LOST.get(kind, "not tried")


def short_table(rows: list[FaultRow]) -> str:
    """The table of a page: one short sentence per cell where a row passed, else what is wrong with its tests."""
    lines = ["| row | fault | outcome | lost |", "|---|---|---|---|"]
    for row in rows:
        fault = FAULTS[row.row]
        cells = (fault.outcome, fault.lost)
        if row.outcome != "passed":
            cells = {"failed": ("failed", _LOST["failed"]), "partly": ("tested in part", _LOST["partly"])}.get(
                row.outcome, ("not tried", "not tried")
            )
        lines.append("| " + " | ".join(map(in_a_cell, (row.row, fault.fault, *cells))) + " |")
    return "\n".join(lines) + "\n"


def as_markdown(rows: list[FaultRow]) -> str:
    """The detailed table, as Markdown: what each test measured."""
    lines = ["| row | fault | what happened | lost |", "|---|---|---|---|"]
    for row in rows:
        cells = (row.row, row.fault, row.happened, row.lost)
        lines.append("| " + " | ".join(map(in_a_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def in_a_cell(text: str) -> str:
    """A text escaped for a table cell."""
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
    """The outcomes of a report; tests that no longer exist are left out."""
    outcomes = [Outcome(**values) for values in json.loads(path.read_text(encoding="utf-8"))]
    return [outcome for outcome in outcomes if _is_there(outcome.test)]


def write_outcomes(path: Path, outcomes: list[Outcome]) -> None:
    """Add these to the report; a test's earlier outcomes are replaced."""
    all_outcomes = replaced(read_outcomes(path) if path.exists() else [], outcomes)
    ordered = sorted(all_outcomes, key=lambda outcome: (row_order(outcome.row), outcome.test))
    path.write_text(json.dumps([asdict(each) for each in ordered], indent=1, ensure_ascii=False) + "\n", "utf-8")


def replaced(old: list[Outcome], new: list[Outcome]) -> list[Outcome]:
    """Both lists; the new outcomes of a test replace the old ones."""
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
    """Collect the outcomes of a run and print their table at its end."""

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
        terminalreporter.write_line(f"{survived} of {len(rows)} faults handled as required")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-report",
        metavar="FILE",
        help="write the outcome of every fault to this file; an existing file is extended",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FaultTable(), "fault-table")


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.fault_table", description="Print or write the fault table.")
    parser.add_argument(
        "reports", type=Path, nargs="+", metavar="FILE", help="file that --fault-report=FILE wrote; the last one wins"
    )
    parser.add_argument("--into", type=Path, metavar="PAGE", help=f"write the short table between {BEGIN} and {END}")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    for report in arguments.reports:
        try:
            outcomes = replaced(outcomes, read_outcomes(report))
        except (OSError, ValueError, TypeError, LookupError) as error:
            parser.error(f"{report} is not a report of --fault-report: {error}")
    rows = combine(outcomes)
    if arguments.into is None:
        print(as_markdown(rows), end="")
    else:
        page = put_into(arguments.into.read_text(encoding="utf-8"), short_table(rows))
        arguments.into.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
