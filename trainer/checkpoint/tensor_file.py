"""Write a safetensors file tensor by tensor, without a copy of the training state.

`safetensors.torch.save_file` takes all tensors at once: the whole state of a GPU would be in host memory (and with
older releases the CPU's once more), and the file would be read again for its checksum. The format is public: 8 bytes
of header length, little-endian; a JSON header of dtype, shape and offsets; the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage

_ALIGNMENT = 8
_FLOAT32_BYTES = 4

Part = tuple[str, int, Callable[[], torch.Tensor]]
"""Key, number of elements, and how to get the 1-D float32 tensor."""


def write_tensors(path: Path, parts: Iterable[Part]) -> FileRecord:
    """Write the parts in order, atomically; returns the file's size and sha256.

    Raises:
        UserError: the disk is full, or the folder cannot be written.
    """
    parts = list(parts)
    digest = hashlib.sha256()
    size = 0
    with storage.local_write(path) as partial, open(partial, "wb") as file:
        for chunk in _chunks(parts):
            digest.update(chunk)
            size += file.write(chunk)
    return FileRecord(name=path.name, bytes=size, sha256=digest.hexdigest())


def _chunks(parts: list[Part]) -> Iterable[bytes | memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, numel, _ in parts:
        end = offset + numel * _FLOAT32_BYTES
        header[key] = {"dtype": "F32", "shape": [numel], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for key, numel, read in parts:
        tensor = read().detach().cpu().contiguous()
        assert tensor.dtype == torch.float32 and tensor.shape == (numel,), f"{key}: {tensor.dtype}, {tensor.shape}"
        yield tensor.numpy().data.cast("B")
