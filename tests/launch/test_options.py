"""What commands share: where a file cannot go is refused before any work."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.base.errors import UsageError
from launch.options import check_new_file


def test_where_a_file_cannot_go_is_told_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no folder"):
        check_new_file(tmp_path / "none" / "said.csv", "--output")
    with pytest.raises(UsageError, match="is a folder"):
        check_new_file(tmp_path, "--output")
    with pytest.raises(UsageError, match=r"--output /proc/said.csv cannot be written: /proc takes no file \("):
        check_new_file(Path("/proc/said.csv"), "--output")
    check_new_file(tmp_path / "said.csv", "--output")
    assert list(tmp_path.iterdir()) == []
