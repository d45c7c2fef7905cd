"""What commands share: where a file cannot go is refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from launch.options import check_new_file
from tests.support.error_codes import coded


def test_an_output_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, check=coded("missing-output-folder")):
        check_new_file(tmp_path / "none" / "out.csv", "--output")
    with pytest.raises(UsageError, check=coded("output-is-a-folder")):
        check_new_file(tmp_path, "--output")
    with pytest.raises(UsageError, match=r"--output /proc/out.csv .*\(", check=coded("output-not-writable")):
        check_new_file(Path("/proc/out.csv"), "--output")
    check_new_file(tmp_path / "out.csv", "--output")
    assert list(tmp_path.iterdir()) == []
