"""Files of state: read as they were written, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from data_prep.storage.work_files import read_state, write_state

VALUES = {"first_shard": 7, "names": ["a", "\udcff", None], "share": 0.1, "nested": {"counts": [[1, 2], [3, 4]]}}


def test_values_come_back(tmp_path: Path) -> None:
    for values in (VALUES, 3, [], {}):
        write_state(str(tmp_path / "state"), values)
        assert read_state(str(tmp_path / "state")) == values


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"0", b"null", b"\xff", b"[" * 50_000, b'{"first_shard": 7}'])
def test_what_is_no_state_is_damaged(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "state").write_bytes(data)
    with pytest.raises(UserError, match=r"state is damaged.*--fresh"):
        read_state(str(tmp_path / "state"))


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_state(str(path), VALUES)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            assert read_state(str(path)) == VALUES  # white space
        except UserError as error:
            assert "is damaged" in str(error)
