"""Lines and blocks: every one exactly once wherever a file is cut, and in bounded memory however long it is."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_prep.documents.lines import Line, blank_line_blocks, bounded_lines, line_number_at, skip_to_line

LIMIT = 1 << 20


class CountingFile(io.BytesIO):
    """A file that knows how many bytes were read from it."""

    read_bytes = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(size)
        self.read_bytes += len(line)
        return line


def lines_of(data: bytes, start: int, stop: int, limit: int = LIMIT) -> list[Line]:
    file = io.BytesIO(data)
    file.seek(max(start - 1, 0))
    position = skip_to_line(file, start - 1, stop) if start else 0
    return list(bounded_lines(file, limit, position, stop))


def blocks_of(data: bytes, start: int, stop: int, limit: int = LIMIT) -> list[Line]:
    file = io.BytesIO(data)
    file.seek(max(start - 1, 0))
    position = skip_to_line(file, start - 1, stop) if start else 0
    if position >= stop:
        return []
    return list(blank_line_blocks(bounded_lines(file, limit, position), limit, start == 0, stop))


def parts(data: bytes, cuts: list[int]) -> list[tuple[int, int]]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return list(zip(edges[:-1], edges[1:], strict=True))


pieces = st.sampled_from(
    [b"\n", b"\n\n", b"\r\n", b" \t\n", b"a", b"bb\n", b"\xc3\xa9", b" ", b"a long line of text\n"]
)
cut_places = st.lists(st.integers(0, 60), max_size=6)


@pytest.mark.long
@given(data=st.lists(pieces, max_size=25).map(b"".join), cuts=cut_places)
@settings(max_examples=150, deadline=None)
def test_the_parts_of_a_file_hold_each_line_once_and_in_order(data: bytes, cuts: list[int]) -> None:
    found = [line for start, stop in parts(data, cuts) for line in lines_of(data, start, stop)]
    assert [line.data for line in found] == re.findall(rb"[^\n]*\n|[^\n]+$", data)
    assert all(data[line.start :].startswith(line.data) for line in found)


@pytest.mark.long
@given(data=st.lists(pieces, max_size=25).map(b"".join), cuts=cut_places)
@example(data=b"a\n\nb\n\nc", cuts=[2, 3])
@example(data=b"a\n\n\n\nb", cuts=[1, 2, 3, 4, 5])
@settings(max_examples=150, deadline=None)
def test_the_parts_of_a_file_hold_each_block_once_and_in_order(data: bytes, cuts: list[int]) -> None:
    found = [block for start, stop in parts(data, cuts) for block in blocks_of(data, start, stop)]
    expected = [block for block in re.split(rb"(?:(?:^|(?<=\n))[ \t\r]*(?:\n|$))+", data) if block.strip()]
    assert [block.data for block in found] == expected
    assert all(data[block.start :].startswith(block.data) for block in found)


@given(data=st.lists(pieces, max_size=25).map(b"".join), cuts=cut_places, limit=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_every_division_of_a_file_drops_the_same_long_lines(data: bytes, cuts: list[int], limit: int) -> None:
    found = [block for start, stop in parts(data, cuts) for block in blocks_of(data, start, stop, limit)]
    assert found == [
        block._replace(number=mine.number)
        for block, mine in zip(blocks_of(data, 0, len(data), limit), found, strict=True)
    ]
    assert all(not block.data for block in found if block.num_bytes > limit)


def test_positions_numbers_and_lengths_are_those_of_the_file() -> None:
    data = b"\xef\xbb\xbffirst\r\n\nthird"
    assert lines_of(data, 0, len(data)) == [
        Line(0, 1, 9, b"first\r\n"),
        Line(10, 2, 0, b"\n"),
        Line(11, 3, 5, b"third"),
    ]
    assert blocks_of(data, 0, len(data)) == [Line(0, 1, 9, b"first\r\n"), Line(11, 3, 5, b"third")]


def test_a_line_over_the_limit_gives_only_its_length() -> None:
    data = b"12345\n123456\n" + b"x" * 5_000_000 + b"\nend"
    found = [(line.num_bytes, line.data) for line in lines_of(data, 0, len(data), limit=5)]
    assert found == [(5, b"12345\n"), (6, b""), (5_000_000, b""), (3, b"end")]


def test_a_part_within_one_long_line_reads_little_beyond_its_end() -> None:
    for data in (b"x" * 50_000_000, b"line of a block\n" * 3_000_000):
        file = CountingFile(data)
        file.seek(9_999_999)
        position = skip_to_line(file, 9_999_999, 11_000_000)
        if position < 11_000_000:
            assert list(blank_line_blocks(bounded_lines(file, LIMIT, position), LIMIT, False, 11_000_000)) == []
        assert file.read_bytes < 4_000_000


def test_the_number_of_a_line_is_counted_from_the_files_beginning(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthree\n")
    assert [line_number_at(str(tmp_path / "a.txt"), position) for position in (0, 4, 8)] == [1, 2, 3]
