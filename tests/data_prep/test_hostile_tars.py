"""Tars made to do harm: each is refused by name, with nothing written, run, evaluated or blown up in memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.data_set.shards import read_records
from data_prep.errors import UserError
from tests.hostile_tars import BOMB_BYTES, HOSTILE, members, whole_record


def test_a_whole_record_is_read(tmp_path: Path) -> None:
    members(tmp_path / "good.tar", *whole_record(), *whole_record("000000-00001"))
    assert [key for key, _, _ in read_records(tmp_path / "good.tar")] == ["000000-00000", "000000-00001"]


@pytest.mark.parametrize("write", [pytest.param(case, id=name) for name, case in HOSTILE.items()])
def test_a_hostile_tar_is_refused(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "evil.tar")
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match="evil.tar"):
            list(read_records(tmp_path / "evil.tar"))
        assert tracemalloc.get_traced_memory()[1] < BOMB_BYTES // 4
    finally:
        tracemalloc.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["evil.tar"]
