"""What decoders of compressed files do that `data_prep/storage/compression.py` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import bz2
import gzip
import io
import os

import pytest


def test_zstandard_gives_no_error_where_the_last_frame_is_cut_short() -> None:
    import zstandard

    data = zstandard.ZstdCompressor().compress(os.urandom(100_000))
    cut = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data[:-50_000]), read_across_frames=True).read()
    assert len(cut) < 100_000, "_FrameReader of storage/compression.py may be zstandard's stream_reader"
    with pytest.raises(EOFError):
        gzip.decompress(gzip.compress(os.urandom(1_000))[:-500])


def test_bz2_takes_what_follows_a_stream_for_its_end() -> None:
    data = bz2.compress(b"first") + b"what is no stream"
    with bz2.open(io.BytesIO(data)) as file:
        assert file.read() == b"first", "_FrameReader of storage/compression.py may be Python's bz2 and lzma files"
