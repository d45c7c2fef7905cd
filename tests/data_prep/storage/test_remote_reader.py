"""Reading by ranges: the right bytes in every order, few requests in order, small ones out of order."""

from __future__ import annotations

import io
import random

import pytest

from data_prep.storage.remote_reader import LARGEST_BLOCK_BYTES, SMALLEST_BLOCK_BYTES, RemoteFile

MIB = 1 << 20


class Remote:
    """A file whose requests are counted."""

    def __init__(self, size: int) -> None:
        self.content = random.Random(size).randbytes(size)
        self.requests: list[tuple[int, int]] = []
        self.file = io.BufferedReader(RemoteFile("a", size, self.fetch), SMALLEST_BLOCK_BYTES)

    def fetch(self, start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= len(self.content)
        self.requests.append((start, stop))
        return self.content[start:stop]

    def bytes_fetched(self) -> int:
        return sum(stop - start for start, stop in self.requests)


def test_a_file_read_from_its_beginning_takes_one_request_a_block() -> None:
    remote = Remote(20 * MIB + 5)
    pieces = []
    while piece := remote.file.read(100_000):
        pieces.append(piece)
    assert b"".join(pieces) == remote.content
    edges = [0, 8 * MIB, 16 * MIB, 20 * MIB + 5]
    assert remote.requests == list(zip(edges, edges[1:], strict=False)) and LARGEST_BLOCK_BYTES == 8 * MIB


def test_the_whole_file_at_once_is_read_block_by_block() -> None:
    remote = Remote(9 * MIB)
    assert remote.file.read() == remote.content and len(remote.requests) <= 3


def test_a_table_at_the_end_and_a_small_section_cost_little() -> None:
    remote = Remote(20 * MIB)
    remote.file.seek(-16, io.SEEK_END)
    assert remote.file.read(16) == remote.content[-16:]
    remote.file.seek(-2000, io.SEEK_END)
    assert remote.file.read(1000) == remote.content[-2000:-1000]
    assert remote.requests == [(20 * MIB - SMALLEST_BLOCK_BYTES, 20 * MIB)]
    remote.file.seek(5 * MIB)
    assert remote.file.read(3000) == remote.content[5 * MIB : 5 * MIB + 3000]
    assert remote.bytes_fetched() <= 2 * SMALLEST_BLOCK_BYTES


def test_reading_on_after_a_jump_grows_to_whole_blocks() -> None:
    remote = Remote(40 * MIB)
    remote.file.seek(MIB)
    while remote.file.read(MIB):
        pass
    assert remote.bytes_fetched() == 39 * MIB and len(remote.requests) <= 10


def test_every_order_of_seeks_and_reads_gives_the_bytes_of_a_local_file() -> None:
    remote = Remote(700_001)
    local = io.BytesIO(remote.content)
    generator = random.Random(5)
    for _ in range(300):
        offset, amount = generator.randrange(720_000), generator.choice([0, 1, 70, 5000, 300_000])
        for file in (remote.file, local):
            file.seek(offset)
        assert remote.file.read(amount) == local.read(amount) and remote.file.tell() == local.tell()


def test_an_empty_file_sends_no_request_and_a_negative_offset_is_refused() -> None:
    remote = Remote(0)
    assert remote.file.read() == b"" and remote.requests == []
    with pytest.raises(ValueError, match="negative seek position -1"):
        remote.file.seek(-1)
