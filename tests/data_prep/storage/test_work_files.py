"""Files of parts and of state: read as they were written, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from data_prep.storage.work_files import PartsFile, PartsWriter, open_parts, read_state, write_state
from tests.support.error_codes import coded

VALUES = {"first_shard": 7, "names": ["a", "\udcff", None], "share": 0.1, "nested": {"counts": [[1, 2], [3, 4]]}}


def test_values_are_read_back(tmp_path: Path) -> None:
    for values in (VALUES, 3, [], {}):
        write_state(str(tmp_path / "state"), values)
        assert read_state(str(tmp_path / "state")) == values


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"0", b"null", b"\xff", b"[" * 50_000, b'{"first_shard": 7}'])
def test_an_invalid_state_file_counts_as_damaged(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "state").write_bytes(data)
    with pytest.raises(UserError, check=coded("damaged-work-file")):
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


KIND = b"letters1"
GRID = [[b"ab", b"", b"c"], [b"", b"defg", b""]]


def write_parts(path: Path, grid: list[list[bytes]] = GRID) -> str:
    with open(path, "wb") as file:
        writer = PartsWriter(file, KIND, 3)
        for part in (part for row in grid for part in row):
            with writer.part() as write:
                for number in range(len(part)):
                    write(part[number : number + 1])
        writer.close({"rows": len(grid)})
    return str(path)


def parts_of(parts: PartsFile) -> list[list[bytes]]:
    return [[bytes(parts.read(row, column)) for column in range(parts.num_columns)] for row in range(parts.num_rows)]


def test_each_part_and_each_range_of_parts_can_be_read(tmp_path: Path) -> None:
    with open_parts(write_parts(tmp_path / "parts"), KIND) as parts:
        assert parts_of(parts) == GRID and parts.table() == {"rows": 2}
        assert [bytes(parts.read(0, 0, 3)), bytes(parts.read(0, 1, 2)), bytes(parts.read(1, 0, 2))] == [
            b"abc",
            b"",
            b"defg",
        ]
        (entry,) = parts.entries(1, 1, 2)
        assert parts.read_unchecked(entry.offset + 1, 2) == b"ef"


def test_parts_of_several_files_follow_one_another_in_one(tmp_path: Path) -> None:
    urls = [
        write_parts(tmp_path / "first"),
        write_parts(tmp_path / "none", []),
        write_parts(tmp_path / "last", GRID[1:]),
    ]
    with open(tmp_path / "joined", "wb") as file:
        writer = PartsWriter(file, KIND, 3)
        for url in urls:
            with open_parts(url, KIND) as parts:
                writer.append(parts)
        writer.close(None)
    with open_parts(str(tmp_path / "joined"), KIND) as parts:
        assert parts_of(parts) == [*GRID, GRID[1]]


def test_a_damaged_part_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    url, data = write_parts(path), bytearray(path.read_bytes())
    data[data.index(b"c")] ^= 1
    path.write_bytes(data)
    with open_parts(url, KIND) as parts:
        assert bytes(parts.read(0, 0)) == b"ab" and bytes(parts.read(1, 1)) == b"defg"
        for first in (0, 2):
            with pytest.raises(UserError, check=coded("damaged-work-file")):
                parts.read(0, first, 3)


def test_every_flipped_bit_of_a_parts_file_and_every_lost_end_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "parts"
    url, whole = write_parts(path), path.read_bytes()
    changed = [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(len(whole))
    ]
    for data in (*changed, *(whole[:length] for length in range(len(whole)))):
        path.write_bytes(data)
        with pytest.raises(UserError, check=coded("damaged-work-file")), open_parts(url, KIND) as parts:
            parts_of(parts)
            parts.table()


def test_a_file_of_another_kind_is_not_misread(tmp_path: Path) -> None:
    url = write_parts(tmp_path / "parts")
    with (
        pytest.raises(UserError, match="an earlier release", check=coded("damaged-work-file")),
        open_parts(url, b"letters2"),
    ):
        pass
