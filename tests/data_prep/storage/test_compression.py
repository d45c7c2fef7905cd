"""Compressed files: read whole whatever made them, and no damage taken for an end."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
from collections.abc import Callable

import pytest
import zstandard

from data_prep.storage.compression import DAMAGE, decompress, detect_compression

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TEXT = " ".join(str(random.Random(1).random()) for _ in range(20_000)).encode()


def expanded(data: bytes, compression: str) -> bytes:
    return decompress(io.BytesIO(data), compression).read()  # type: ignore[arg-type]


@pytest.mark.parametrize("compression", COMPRESS)
def test_files_written_in_several_frames_are_read_to_the_end(compression: str) -> None:
    compress = COMPRESS[compression]
    frames = [compress(TEXT[start : start + 30_000]) for start in range(0, len(TEXT), 30_000)]
    assert expanded(b"".join([*frames, compress(b""), compress(b"end")]), compression) == TEXT + b"end"
    assert expanded(b"", compression) == b""
    assert all(detect_compression(frame[:10]) == compression for frame in frames)


def test_padding_between_xz_streams_and_skippable_zstandard_frames_hold_nothing() -> None:
    assert expanded(lzma.compress(b"a") + bytes(8) + lzma.compress(b"b") + bytes(4), ".xz") == b"ab"
    skippable = bytes.fromhex("502a4d18") + (3).to_bytes(4, "little") + b"xyz"
    assert expanded(zstandard.compress(b"a") + skippable + zstandard.compress(b"b"), ".zst") == b"ab"


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "second frame cut", "second frame is none", "flipped", "garbage after it"])
def test_every_damage_is_an_error_and_never_an_end(compression: str, damage: str) -> None:
    one = COMPRESS[compression](TEXT)
    data = {
        "cut": one[:-1],
        "second frame cut": one + one[: len(one) // 2],
        "second frame is none": one + b"\x00\x01" + one[2:],
        "flipped": one[: len(one) // 2] + bytes([one[len(one) // 2] ^ 0xFF]) + one[len(one) // 2 + 1 :],
        "garbage after it": one + b"garbage of some length",
    }[damage]
    with pytest.raises(DAMAGE):
        expanded(data, compression)


@pytest.mark.parametrize("compression", COMPRESS)
def test_every_place_of_a_cut_is_an_error(compression: str) -> None:
    data = COMPRESS[compression](TEXT[:2000]) + COMPRESS[compression](TEXT[2000:4000])
    frame = len(COMPRESS[compression](TEXT[:2000]))
    for length in range(1, len(data)):
        if length != frame:
            with pytest.raises(DAMAGE):
                expanded(data[:length], compression)


@pytest.mark.parametrize("window_log", [27, 28, 31])
def test_zstandard_frames_of_long_windows_are_read(window_log: int) -> None:
    """As of `zstd --long=31`, which does not say how long the content is."""
    parameters = zstandard.ZstdCompressionParameters(
        window_log=window_log, hash_log=12, chain_log=12, write_content_size=False
    )
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = compressor.compress(TEXT) + compressor.flush()
    assert zstandard.get_frame_parameters(data).window_size == 1 << window_log
    assert expanded(data, ".zst") == TEXT


def test_a_zstandard_file_may_begin_with_a_skippable_frame() -> None:
    """As of pzstd, which writes the size of the next frame into it."""
    skippable = bytes.fromhex("5f2a4d18") + (4).to_bytes(4, "little") + b"size"
    data = skippable + zstandard.compress(TEXT)
    assert detect_compression(data[:10]) == ".zst" and expanded(data, ".zst") == TEXT
    assert expanded(skippable, ".zst") == b""
