"""The tensors of a checkpoint: fragments of flattened parameters in the ranks' files, read without an engine.

The files are written tensor by tensor, without a copy of the training state: `safetensors.torch.save_file` takes all
tensors at once, so the whole state of a GPU would be in host memory (and with older releases the CPU's once more), and
the file would be read again for its checksum. The format is public: 8 bytes of header length, little-endian; a JSON
header of dtype, shape and offsets; the data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from data_prep.base.errors import UserError
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage
from trainer.checkpoint.format import Checkpoint, CheckpointFolder, open_checkpoint, rank_file_name

if TYPE_CHECKING:
    from trainer.distributed.process_group import Ranks

_ALIGNMENT = 8
_FLOAT32_BYTES = 4
_MOST_ELEMENTS = 1 << 24
"""Approximate number of elements that a rank reads and sends at a time."""
_Problem = tuple[str, str, str]
"""A rank's error, as sent to the others: problem, fix and code."""

TensorToWrite = tuple[str, int, Callable[[], torch.Tensor]]
"""Key, number of elements, and a function that returns the 1-D float32 tensor."""


def read_weights(folder: str | Path) -> dict[str, torch.Tensor]:
    """Return the whole fp32 weights by parameter name, on the CPU.

    Raises:
        UserError: the directory is not a complete checkpoint; if it is that of a run, the error names the newest one.
    """
    checkpoint = open_checkpoint(folder)
    shapes = checkpoint.saved.shapes
    check_fragments(checkpoint)  # before memory is allocated for the recorded shapes
    weights = {name: torch.empty(shape, dtype=torch.float32) for name, shape in shapes.items()}
    for name in checkpoint.tensor_files:
        for fragment in read_fragments(checkpoint.folder / name):
            if fragment.kind == "weight" and fragment.name in weights:
                values = fragment.read(fragment.start, fragment.stop)
                weights[fragment.name].view(-1)[fragment.start : fragment.stop].copy_(values)
    return weights


@dataclass(frozen=True)
class StoredFragment:
    """Elements [start, stop) of one flattened tensor of the training state, in a file."""

    kind: str
    name: str
    start: int
    stop: int
    path: Path
    offset: int
    """Bytes before the first element."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of the flattened parameter, a part of this fragment; float32.

        The elements are read, not mapped: the mapped pages of a large file would count as memory of the process.
        """
        offset = self.offset + _FLOAT32_BYTES * (start - self.start)
        try:
            elements = np.fromfile(self.path, dtype="<f4", count=stop - start, offset=offset)
        except OSError as error:
            raise _damaged(self.path, str(error)) from None
        if len(elements) < stop - start:
            raise _damaged(self.path, "it ends too early")
        return torch.from_numpy(elements)


def read_fragments(path: Path) -> Iterator[StoredFragment]:
    """Yield the fragments of one rank's file; tensors are read only where `StoredFragment.read` asks for them."""
    try:
        with safe_open(path, framework="pt") as file:  # checks the header against the size of the file
            slices = {key: file.get_slice(key) for key in file.keys()}
            shapes = {key: (fragment.get_dtype(), fragment.get_shape()) for key, fragment in slices.items()}
            del slices
        with open(path, "rb") as plain:
            header_bytes = int.from_bytes(plain.read(8), "little")
            header = json.loads(plain.read(header_bytes))
        for key, (dtype, shape) in shapes.items():
            kind, start, name = key.split(":", 2)
            if int(start) < 0 or len(shape) != 1 or dtype != "F32":
                raise ValueError(f"{key!r} is {dtype} of shape {shape}")
            offset = 8 + header_bytes + header[key]["data_offsets"][0]
            yield StoredFragment(kind, name, int(start), int(start) + shape[0], path, offset)
    except (SafetensorError, ValueError, OSError) as error:
        raise _damaged(path, str(error)) from None


def _damaged(path: Path, reason: str) -> UserError:
    problem = f"{path} is not a checkpoint file ({reason})"
    return UserError(problem, fix="use another checkpoint", code="damaged-checkpoint")


def check_coverage(missing: dict[str, int], folder: Path) -> None:
    """Refuse a checkpoint whose fragments do not cover every parameter exactly once."""
    for name, count in missing.items():
        if count:
            problem = f"{count:,} elements of {name} are missing" if count > 0 else f"{name} is stored more than once"
            raise CheckpointFolder(folder).damaged(problem)


def check_fragments(checkpoint: Checkpoint) -> None:
    """Refuse weights whose fragments, one behind the other, are not the whole parameter."""
    reached = dict.fromkeys(checkpoint.saved.shapes, 0)
    fragments = [fragment for name in checkpoint.tensor_files for fragment in read_fragments(checkpoint.folder / name)]
    for fragment in sorted(fragments, key=lambda fragment: fragment.start):
        if fragment.kind == "weight" and fragment.name in reached and fragment.stop > fragment.start:
            if fragment.start != reached[fragment.name]:
                gap = {fragment.name: fragment.start - reached[fragment.name]}
                check_coverage(gap, checkpoint.folder)
            reached[fragment.name] = fragment.stop
    missing = {name: math.prod(shape) - reached[name] for name, shape in checkpoint.saved.shapes.items()}
    check_coverage(missing, checkpoint.folder)


def own_first(names: Sequence[str], ranks: Ranks) -> list[str]:
    """Return the files, first the one that this rank wrote if the number of ranks is the same."""
    return sorted(names, key=lambda name: name != rank_file_name(ranks.rank, ranks.world_size))


Wanted = tuple[str, int, int, tuple[str, ...]]
"""Parameter, elements [start, stop) of it, and kinds of tensors."""
Values = tuple[str, str, int, torch.Tensor]
"""Kind, parameter, first element, and the elements from there on; (n,) float32."""


def read_alone(
    folder: Path, names: Iterable[str], wanted: Sequence[Wanted], is_incomplete: Callable[[], bool]
) -> Iterator[Values]:
    """Yield the wanted elements, file by file, until none is missing."""
    holders = {each[0]: [(0, each)] for each in wanted}
    for name in names:
        if not is_incomplete():
            return
        for each in _transfers(read_fragments(folder / name), holders):
            yield each.fragment.kind, each.fragment.name, each.start, each.fragment.read(each.start, each.stop)


def read_shared(folder: Path, names: Sequence[str], wanted: Sequence[Wanted], ranks: Ranks) -> Iterator[Values]:
    """Yield the elements that this rank wants; one rank reads each file and sends every other rank its part.

    All ranks call it together, and all raise UserError if one cannot read a file. If each of 512 ranks looked for its
    parts, every rank would open up to all files.
    """
    from trainer.distributed.process_group import gather_objects  # here: an export has no process group

    bundles: list[list[_Transfer]] = []
    size = _MOST_ELEMENTS
    problem: _Problem | None = None
    holders: dict[str, list[tuple[int, Wanted]]] = {}
    for rank, of_rank in enumerate(gather_objects(list(wanted), ranks)):
        for each in of_rank:
            holders.setdefault(each[0], []).append((rank, each))
    try:
        for name in names[ranks.rank :: ranks.world_size]:
            for transfer in _transfers(read_fragments(folder / name), holders):
                if size >= _MOST_ELEMENTS:
                    bundles.append([])
                    size = 0
                bundles[-1].append(transfer)
                size += transfer.stop - transfer.start
    except UserError as error:
        problem = (error.problem, error.fix, error.code)
    outcomes = gather_objects((len(bundles), problem), ranks)
    _raise_first(problem for _, problem in outcomes)
    for number in range(max(count for count, _ in outcomes)):
        yield from _exchange(bundles[number] if number < len(bundles) else [], ranks)


@dataclass(frozen=True)
class _Transfer:
    """Elements [start, stop) of a parameter that are in a fragment, and the rank that wants them."""

    rank: int
    fragment: StoredFragment
    start: int
    stop: int


def _transfers(
    fragments: Iterable[StoredFragment], holders: dict[str, list[tuple[int, Wanted]]]
) -> Iterator[_Transfer]:
    for fragment in fragments:
        for rank, (_, first, last, kinds) in holders.get(fragment.name, ()):
            start, stop = max(fragment.start, first), min(fragment.stop, last)
            for at in range(start, stop, _MOST_ELEMENTS) if fragment.kind in kinds else ():
                yield _Transfer(rank, fragment, at, min(at + _MOST_ELEMENTS, stop))


def _exchange(bundle: Sequence[_Transfer], ranks: Ranks) -> Iterator[Values]:
    """Send parts to their ranks, and yield what all ranks send here; descriptions go first, then the elements.

    A rank that cannot read a part sends its problem instead.
    """
    from trainer.distributed.process_group import exchange

    heads: list[list[tuple[str, str, int, int]]] = [[] for _ in range(ranks.world_size)]
    parts: list[list[torch.Tensor]] = [[torch.empty(0)] for _ in range(ranks.world_size)]
    problem: _Problem | None = None
    try:
        for each in bundle:
            heads[each.rank].append((each.fragment.kind, each.fragment.name, each.start, each.stop - each.start))
            parts[each.rank].append(each.fragment.read(each.start, each.stop))
    except UserError as error:
        problem = (error.problem, error.fix, error.code)
    texts = [torch.frombuffer(bytearray(json.dumps([problem, head]).encode()), dtype=torch.uint8) for head in heads]
    sizes = exchange([torch.tensor([len(text)]) for text in texts], [1] * ranks.world_size, ranks)
    texts = exchange(texts, torch.cat(sizes).tolist(), ranks)
    messages = [json.loads(text.cpu().numpy().tobytes()) for text in texts]
    _raise_first(problem for problem, _ in messages)
    heads = [head for _, head in messages]
    received = exchange([torch.cat(own) for own in parts], [sum(each[3] for each in head) for head in heads], ranks)
    for head, values in zip(heads, received, strict=True):
        for (kind, name, start, _), part in zip(head, values.split([each[3] for each in head]), strict=True):
            yield kind, name, start, part


def _raise_first(problems: Iterable[_Problem | None]) -> None:
    """Raise the first of all ranks' problems, on all ranks."""
    for problem in filter(None, problems):
        raise UserError(problem[0], fix=problem[1], code=problem[2])


def write_tensors(path: Path, tensors: Iterable[TensorToWrite]) -> FileRecord:
    """Write the tensors in order, atomically; return the file's size and sha256."""
    tensors = list(tensors)
    digest = hashlib.sha256()
    size = 0
    with storage.local_write(path) as partial, open(partial, "wb") as file:
        for chunk in _chunks(tensors):
            digest.update(chunk)
            size += file.write(chunk)
    return FileRecord(name=path.name, bytes=size, sha256=digest.hexdigest())


def _chunks(tensors: list[TensorToWrite]) -> Iterable[bytes | memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, numel, _ in tensors:
        end = offset + numel * _FLOAT32_BYTES
        header[key] = {"dtype": "F32", "shape": [numel], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for key, numel, read in tensors:
        tensor = read().detach().cpu().contiguous()
        assert tensor.dtype == torch.float32 and tensor.shape == (numel,), f"{key}: {tensor.dtype}, {tensor.shape}"
        yield tensor.numpy().data.cast("B")
