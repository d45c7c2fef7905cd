"""What pyarrow does that `data_prep/storage/parquet.py` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import inspect
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest


def test_pyarrow_raises_what_is_not_its_own_where_a_text_is_no_utf8() -> None:
    offsets, values = pa.py_buffer(struct.pack("<ii", 0, 2)), pa.py_buffer(b"\xff\xfe")
    text = pa.Array.from_buffers(pa.string(), 1, [None, offsets, values])
    with pytest.raises(UnicodeDecodeError):
        text.to_pylist()
        pytest.fail("_bytes_of of storage/parquet.py need not cast to bytes")


def test_pyarrow_reads_whole_row_groups_ahead() -> None:
    assert inspect.signature(pq.ParquetFile).parameters["pre_buffer"].default is True, (
        "ParquetRows of storage/parquet.py need not turn pre_buffer off"
    )
