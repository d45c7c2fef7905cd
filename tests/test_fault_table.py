"""The fault tables: how outcomes become rows, how reports add up, and that the page shows every fault."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault_list import FAULTS
from tests.fault_table import (
    BEGIN,
    END,
    REPOSITORY,
    ROWS,
    Outcome,
    as_markdown,
    combine,
    in_a_cell,
    main,
    put_into,
    read_outcomes,
    rows_of_table,
    short_table,
    write_outcomes,
)

pytest_plugins = "pytester"

PAGE = REPOSITORY / "tests" / "system" / "README.md"
HERE = "tests/test_fault_table.py::test_a_row_fails_with_any_of_its_tests"


def outcome(row: str, kind: str = "passed", happened: str = "", test: str = HERE, lost: str = "") -> Outcome:
    return Outcome(test, row, f"fault of {row}", f"required of {row}", kind, happened, lost)


def test_a_row_fails_with_any_of_its_tests() -> None:
    outcomes = [
        outcome("2", happened="it said so"),
        outcome("28b"),
        outcome("28b", "failed"),
        outcome("3"),
        outcome("3", "skipped", "no disk"),
        outcome("4", "skipped", "no network"),
    ]
    rows = {row.row: row for row in combine(outcomes)}
    assert [(rows[name].outcome, rows[name].lost) for name in ("1", "2", "3", "4", "28b")] == [
        ("missing", "not tried"),
        ("passed", "nothing"),
        ("partly", "nothing of what was tried"),
        ("skipped", "not tried"),
        ("failed", "see the failure"),
    ]
    assert rows["1"].happened == "no test ran" and rows["2"].happened == "it said so"
    assert rows["3"].happened == "required of 3; not tried: fault of 3 (no disk)"
    assert rows["28b"].happened == f"not what is required: {HERE}"
    assert list(rows)[27:30] == ["28", "28b", "29"]


def test_what_is_lost_is_what_the_tests_say() -> None:
    outcomes = [
        outcome("2", lost="step 3"),
        outcome("2", lost="step 3"),
        outcome("2", lost="step 4"),
        outcome("2"),
        outcome("3", lost="a row"),
        outcome("3", "skipped", "no disk", lost="not seen"),
        outcome("4", lost="a row"),
        outcome("4", "failed", lost="all"),
    ]
    rows = {row.row: row.lost for row in combine(outcomes)}
    assert (rows["2"], rows["3"], rows["4"]) == ("step 3; step 4", "a row", "see the failure")


def test_a_test_says_what_it_observed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import pytest

        @pytest.mark.fault(row=7, fault="a fault", required="survived")
        def test_measured(observed):
            observed("2 of 3 steps kept", lost="a step")

        @pytest.mark.fault(row=7, fault="a fault", required="survived")
        def test_plain():
            pass
    """)
    result = pytester.runpytest("-p", "tests.fault_table")
    result.assert_outcomes(passed=2)
    assert "| 7 | a fault | 2 of 3 steps kept; survived | a step |" in result.outlines


def test_several_runs_make_one_report(tmp_path: Path) -> None:
    path, gone = tmp_path / "report.json", "tests/test_fault_table.py::test_of_another_time"
    write_outcomes(path, [outcome("2", "failed"), outcome("1", test=f"{HERE}[x]"), outcome("3", test=gone)])
    write_outcomes(path, [outcome("2"), outcome("4")])
    assert [(each.row, each.outcome) for each in read_outcomes(path)] == [
        ("1", "passed"),
        ("2", "passed"),
        ("4", "passed"),
    ]
    assert [values["row"] for values in json.loads(path.read_text())] == ["1", "2", "4"], "a test that is gone"


def test_the_table_goes_between_the_marks_of_a_page() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    rows = combine([outcome("2", happened="a | b\nc")])
    new = put_into(page, as_markdown(rows))
    assert new.startswith(f"before\n{BEGIN}\n| row |") and new.endswith(f"{END}\nafter\n") and "old" not in new
    assert rows_of_table(new)["2"] == ("fault of 2", "a \\| b c", "nothing")
    assert tuple(rows_of_table(new)) == tuple(row.row for row in rows)
    assert put_into(new, as_markdown(rows)) == new
    with pytest.raises(ValueError, match="once each"):
        put_into(page + BEGIN, "")


def test_the_command_puts_several_reports_into_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_outcomes(tmp_path / "one.json", [outcome("1", "failed"), outcome("2", test=f"{HERE}[x]")])
    write_outcomes(tmp_path / "two.json", [outcome("1")])
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    reports = [str(tmp_path / "one.json"), str(tmp_path / "two.json")]
    monkeypatch.setattr("sys.argv", ["fault_table", *reports, "--into", str(page)])
    main()
    rows = rows_of_table(page.read_text())
    assert rows["1"] == FAULTS["1"] and rows["3"] == (FAULTS["3"].fault, "not tried", "not tried")
    monkeypatch.setattr("sys.argv", ["fault_table", *reports])
    main()
    assert "| 1 | fault of 1 | required of 1 | nothing |" in capsys.readouterr().out


def test_the_short_table_states_an_outcome_only_where_every_test_passed() -> None:
    outcomes = [outcome("1"), outcome("2"), outcome("2", "failed"), outcome("3"), outcome("3", "skipped", "no disk")]
    rows = rows_of_table(f"{BEGIN}\n{short_table(combine(outcomes))}{END}\n")
    assert [rows[name][1] for name in ("1", "2", "3", "4")] == [
        FAULTS["1"].outcome,
        "failed",
        "tested in part",
        "not tried",
    ]


def test_without_pytest_the_command_says_what_it_needs() -> None:
    program = (
        "import runpy, sys; sys.modules['pytest'] = None; runpy.run_module('tests.fault_table', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--help"], capture_output=True, text=True, cwd=REPOSITORY, timeout=100
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("tests.fault_table needs pytest; ") and done.stderr.count("\n") == 1


def marked_tests() -> list[tuple[str, str, str, str]]:
    """Row, fault, file and name of every test with a mark, as the files have them."""
    found = []
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        constants = {ast.unparse(each.targets[0]): each.value for each in body if isinstance(each, ast.Assign)}
        for function in body:
            if isinstance(function, ast.FunctionDef):
                marks = [constants.get(ast.unparse(mark), mark) for mark in function.decorator_list]
                where = (str(path.relative_to(REPOSITORY)), function.name)
                found += [(*words, *where) for mark in marks if (words := row_and_fault_of(mark)) is not None]
    return found


def row_and_fault_of(mark: ast.expr) -> tuple[str, str] | None:
    if not isinstance(mark, ast.Call) or ast.unparse(mark.func) != "pytest.mark.fault":
        return None
    words = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
    return str(words["row"]), words["fault"]


def test_every_row_of_the_fault_list_has_a_test_and_system_tests_are_named_after_their_rows() -> None:
    found = marked_tests()
    assert {row for row, *_ in found} == set(ROWS)
    names = {row: "test_row_" + row.zfill(3 if row.endswith("b") else 2) + "_" for row in ROWS}
    system = [(row, name) for row, _, path, name in found if path.startswith("tests/system/")]
    assert [name for row, name in system if not name.startswith(names[row])] == []


def test_the_page_shows_every_fault_as_the_list_states_it() -> None:
    rows = rows_of_table(PAGE.read_text(encoding="utf-8"))
    assert rows == {row.row: tuple(map(in_a_cell, FAULTS[row.row])) for row in combine([])}, "rewrite the table"


def test_a_cell_is_one_short_sentence() -> None:
    assert [cell for fault in FAULTS.values() for cell in fault if len(cell) > 90 or ". " in cell] == []
