"""What commands share: where a file cannot go is refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from launch.options import check_new_file, command_parser
from tests.support.error_codes import coded


def test_an_output_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, check=coded("missing-output-folder")):
        check_new_file(tmp_path / "none" / "out.csv")
    with pytest.raises(UsageError, check=coded("output-is-a-folder")):
        check_new_file(tmp_path)
    with pytest.raises(UsageError, match=r"--output /proc/out.csv .*\(", check=coded("output-not-writable")):
        check_new_file(Path("/proc/out.csv"))
    check_new_file(tmp_path / "out.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["--color", "red"], ["--color", "red", "blue"]),
        (["--nothing"], ["--nothing"]),
        ([], ["--count"]),
    ],
)
def test_a_wrong_command_line_is_one_line_with_status_two(
    words: list[str], values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = command_parser("draw.py", "Draw.")
    parser.add_argument("--color", choices=("blue", "green"))
    parser.add_argument("--count", required=not words)
    with pytest.raises(SystemExit) as stopped:
        parser.parse_args(words)
    out, err = capsys.readouterr()
    assert (
        stopped.value.code == 2
        and not out
        and err.count("\n") == 1
        and not [each for each in values if each not in err]
    )
    assert err.startswith("error: ") and err.endswith("Fix: see `draw.py --help`. [usage]\n")
