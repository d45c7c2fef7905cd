"""Files that hash what is read: the same digest in whatever pieces and order the reading goes."""

from __future__ import annotations

import hashlib
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UserError
from data_prep.storage.hashing_files import HashingFile, RangeHashingFile
from tests.support.error_codes import coded

DATA = bytes(range(256)) * 10


@given(
    pieces=st.lists(st.integers(1, 600), max_size=8), head=st.integers(0, 50), limit=st.none() | st.integers(0, 3000)
)
def test_the_digest_is_of_the_first_bytes_however_much_is_asked_for(
    pieces: list[int], head: int, limit: int | None
) -> None:
    raw = io.BytesIO(DATA)
    file = HashingFile(raw, "x", limit, raw.read(head))
    assert b"".join(file.read(size) or b"" for size in pieces) == DATA[: raw.tell()][: sum(pieces)]
    assert file.hexdigest() == hashlib.sha256(DATA[:limit]).hexdigest()


@given(reads=st.lists(st.tuples(st.integers(0, 2600), st.integers(1, 900)), max_size=8))
def test_ranges_are_hashed_in_order_although_read_in_another(reads: list[tuple[int, int]]) -> None:
    file = RangeHashingFile(io.BytesIO(DATA), "x")
    ranges = [(10, 700), (700, 1500), (2000, 2100)]
    file.hash_ranges(ranges)
    for offset, size in reads:
        file.seek(offset)
        assert file.read(size) == DATA[offset : offset + size]
    digests = b"".join(hashlib.sha256(DATA[start:stop]).digest() for start, stop in ranges)
    assert file.hexdigest() == hashlib.sha256(digests).hexdigest()


def test_a_file_shorter_than_its_ranges_ends_them() -> None:
    file = RangeHashingFile(io.BytesIO(DATA[:100]), "x")
    file.hash_ranges([(50, 500)])
    assert file.hexdigest() == hashlib.sha256(hashlib.sha256(DATA[50:100]).digest()).hexdigest()


def test_a_failing_disk_is_reported_with_the_name_of_the_file() -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(UserError, match="a.jsonl cannot be read: .*Input/output error", check=coded("unreadable-file")):
        HashingFile(Failing(), "a.jsonl").read(10)
