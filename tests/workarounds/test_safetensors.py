"""What safetensors does that `data_prep/dataset` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import json
import struct

import pytest


def tensor_file(dtype: str) -> bytes:
    header = json.dumps({"x": {"dtype": dtype, "shape": [2], "data_offsets": [0, 4]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4)


def test_safetensors_raises_key_errors_where_numpy_has_no_such_type() -> None:
    import safetensors.numpy

    assert len(safetensors.numpy.load(tensor_file("I16"))["x"]) == 2
    with pytest.raises(Exception, match=".") as caught:
        safetensors.numpy.load(tensor_file("BF16"))
    assert not isinstance(caught.value, safetensors.SafetensorError), (
        "TENSOR_FAULTS of dataset/shards.py may be SafetensorError alone"
    )
