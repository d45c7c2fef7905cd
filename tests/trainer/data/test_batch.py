from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
import torch

from trainer.data import batch as batch_module
from trainer.data.batch import IGNORED, TENSOR_NAMES, Batch, on_device

CPU = torch.device("cpu")


def batch_of(num_sequences: int, num_pairs: int) -> Batch:
    """Two rows of 4 positions with the given capacities."""
    return Batch(
        input_ids=torch.tensor([2, 7, 3, 0, 2, 4, 9, 3]),
        position_ids=torch.tensor([0, 1, 2, 0, 0, 1, 2, 3]),
        token_type_ids=torch.zeros(8, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 3, 4] + [8] * (num_sequences - 2), dtype=torch.int32),
        masked_positions=torch.tensor([5, 0]),
        labels=torch.tensor([8, IGNORED]),
        cls_positions=torch.zeros(num_pairs, dtype=torch.int64),
        next_sentence_labels=torch.arange(num_pairs) - 1,
        sequence_length=4,
        longest_sequence=3,
    )


@pytest.mark.parametrize(("num_sequences", "num_pairs"), [(3, 0), (4, 3)])
def test_a_packed_batch_is_unpacked_as_it_was(num_sequences: int, num_pairs: int) -> None:
    batch = batch_of(num_sequences, num_pairs)
    packed = batch.pack()
    assert (packed.dtype, packed.dim()) == (torch.int64, 1)
    again = Batch.unpack(packed)
    assert (again.sequence_length, again.longest_sequence, again.has_segment_b) == (4, 3, True)
    for name in TENSOR_NAMES:
        tensor, expected = getattr(again, name), getattr(batch, name)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
        # Pinned once, pinned altogether; and one copy less.
        assert tensor.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


def test_a_packed_batch_keeps_which_tokens_see_each_other() -> None:
    for is_causal in (False, True):
        batch = replace(batch_of(3, 0), is_causal=is_causal)
        assert Batch.unpack(batch.pack()).is_causal is batch.to(CPU).is_causal is is_causal


def test_a_packed_batch_keeps_the_weights_of_its_rows_and_gives_them_to_their_predictions() -> None:
    batch = replace(
        batch_of(3, 0), row_weights=torch.tensor([2.5, 1 / 3], dtype=torch.float64), row_tokens=torch.tensor([1, 2])
    )
    again = Batch.unpack(batch.pack())
    assert again.row_weights.tolist() == [2.5, 1 / 3] and again.row_tokens.tolist() == [1, 2]
    assert again.label_weights is not None and again.label_weights.tolist() == pytest.approx([1 / 3, 2.5])
    left = again.without_predictions([1])
    assert left.row_tokens.tolist() == [1, 0] and again.row_tokens.tolist() == [1, 2] and not left.num_masked
    assert batch_of(3, 0).label_weights is None and not len(batch_of(3, 0).without_predictions([1]).row_tokens)


def test_a_batch_counts_its_content() -> None:
    batch = batch_of(3, 3)
    assert (batch.num_rows, batch.num_tokens, batch.num_masked, batch.num_pairs) == (2, 7, 1, 3)


def test_a_batch_moves_with_all_its_tensors() -> None:
    moved = batch_of(3, 3).to(torch.device("meta"))
    assert {getattr(moved, name).device.type for name in TENSOR_NAMES} == {"meta"}
    assert moved.sequence_length == 4


def make_batch(number: int, length: int = 8) -> Batch:
    tensors = {name: torch.full((length,), 100 * number + position) for position, name in enumerate(TENSOR_NAMES)}
    return Batch(**tensors | {"cu_seqlens": torch.tensor([0, length], dtype=torch.int32)}, sequence_length=length)


def same(ours: Batch, expected: Batch) -> bool:
    values = [(getattr(ours, field.name), getattr(expected, field.name)) for field in fields(Batch)]
    return all(torch.equal(a.cpu(), b) if isinstance(a, torch.Tensor) else a == b for a, b in values)


def test_on_the_cpu_the_batches_come_one_by_one_as_they_are() -> None:
    taken = []

    def batches() -> Iterator[Batch]:
        for number in range(3):
            taken.append(number)
            yield make_batch(number)

    given = on_device(batches(), CPU)
    assert same(next(given), make_batch(0)) and taken == [0]
    assert [same(batch, make_batch(number)) for number, batch in enumerate(given, start=1)] == [True, True]
    assert list(on_device([], CPU)) == []


class RecordingCuda:
    """Streams and events that note what is asked of them; copies go to the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.entered: list[str] = ["computing"]
        monkeypatch.setattr(batch_module, "_copy_stream", lambda device: "copying")
        monkeypatch.setattr(torch.cuda, "Event", lambda: RecordingEvent(self))
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: RecordingStream(self))
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.calls.append(f"keep on {stream}")
        )
        monkeypatch.setattr(Batch, "to", lambda batch, *given, **options: self.to(batch, *given, **options))

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        self.entered.append(stream)
        yield
        self.entered.pop()

    def to(self, batch: Batch, device: torch.device, non_blocking: bool = True) -> Batch:
        number = int(batch.input_ids[0]) // 100
        self.calls.append(f"copy {number} on {self.entered[-1]}{'' if non_blocking else ', waiting'}")
        return batch


class RecordingEvent:
    def __init__(self, cuda: RecordingCuda) -> None:
        self.cuda, self.after = cuda, ""

    def record(self, stream: str) -> None:
        assert stream == "copying"
        self.after = self.cuda.calls[-1].split(" on ")[0]


class RecordingStream:
    def __init__(self, cuda: RecordingCuda) -> None:
        self.cuda = cuda

    def wait_event(self, event: RecordingEvent) -> None:
        self.cuda.calls.append(f"computing waits for {event.after}")

    def __str__(self) -> str:
        return "computing"


def test_on_cuda_the_next_copy_is_under_way_before_a_batch_is_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = RecordingCuda(monkeypatch)
    for batch in on_device([make_batch(number) for number in range(3)], torch.device("cuda", 0)):
        cuda.calls.append(f"compute {int(batch.input_ids[0]) // 100}")
    kept = ["keep on computing"] * len(TENSOR_NAMES)
    assert cuda.calls == [
        "copy 0 on copying",
        "copy 1 on copying",
        "computing waits for copy 0",
        *kept,
        "compute 0",
        "copy 2 on copying",
        "computing waits for copy 1",
        *kept,
        "compute 1",
        "computing waits for copy 2",
        *kept,
        "compute 2",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_batches_arrive_whole_while_memory_is_used_again() -> None:
    device = torch.device("cuda", 0)
    batches = [make_batch(number, length=100_000) for number in range(20)]
    pinned = [
        Batch(**{name: getattr(batch, name).pin_memory() for name in TENSOR_NAMES}, sequence_length=100_000)
        for batch in batches
    ]
    matrix, sums = torch.randn(4000, 4000, device=device), []
    for batch in on_device(pinned, device):
        matrix = (matrix @ matrix).clamp(-1, 1)  # the device is behind the host
        sums.append(torch.stack([getattr(batch, name).sum() for name in TENSOR_NAMES]))
        del batch
    expected = [[int(getattr(batch, name).sum()) for name in TENSOR_NAMES] for batch in batches]
    assert [row.tolist() for row in sums] == expected
