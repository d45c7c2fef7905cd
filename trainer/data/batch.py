"""Micro-batch: concatenated whole rows, with shapes that are fixed within a stage except that of `cu_seqlens`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache

import numpy as np
import torch

from data_prep.tokenizer.special_tokens import PAD_TOKEN_ID

IGNORED = -100
"""Label of a position without a prediction, as in `torch.nn.functional.cross_entropy`."""
SEQUENCE_BUCKET = 64
"""Sequence capacities are multiples of it, so that few allocation sizes occur."""
LENGTH_BUCKET = 128
"""Positions per block of FlashAttention 2: a bound of the longest sequence between two multiples saves nothing."""


def _nothing() -> torch.Tensor:
    return torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Batch:
    """One micro-batch of R rows of L positions; T = R * L.

    Sequences (part of a document, a sentence pair, or the padding that closes a row) never cross a row, never
    attend to each other, and each counts its positions from 0. The capacity S of `cu_seqlens` follows the number of
    sequences in the micro-batch (`sequence_capacity`); unused entries repeat T. The other capacities are bounds, so
    nothing overflows: P = R * ceil(mlm_probability * L) predictions (R * L in a causal batch; with rates that are drawn
    what `trainer/config/masking_law.py` proves), C pairs (0 without sentence pairs). An unused entry of
    `masked_positions` or `cls_positions` is 0 and its label -100.
    """

    input_ids: torch.Tensor
    """(T,) int64: token ids after masking."""
    position_ids: torch.Tensor
    """(T,) int64: position within the sequence."""
    token_type_ids: torch.Tensor
    """(T,) int64: 0 for segment A (and without pairs), 1 for segment B."""
    cu_seqlens: torch.Tensor
    """(S + 1,) int32: starts of the sequences, then T."""
    masked_positions: torch.Tensor
    """(P,) int64: indices into (T,) of the predicted tokens; in a causal batch of the tokens before them."""
    labels: torch.Tensor
    """(P,) int64: the original ids of the predicted tokens, -100 where unused."""
    sequence_length: int
    """L: positions in a row, the largest length of a sequence."""
    cls_positions: torch.Tensor = field(default_factory=_nothing)
    """(C,) int64: indices into (T,) of the [CLS] of each sentence pair."""
    next_sentence_labels: torch.Tensor = field(default_factory=_nothing)
    """(C,) int64: 0 = B follows A, 1 = B is from another document, -100 where unused."""
    row_weights: torch.Tensor = field(default_factory=_nothing)
    """(R,) float64: factor of the losses of each row's predictions (`data.loss_weight`); (0,) where it is 1."""
    row_tokens: torch.Tensor = field(default_factory=_nothing)
    """(R,) int64: tokens of text of each row, whose number divides the weighted loss; (0,) without weights."""
    num_unreadable_rows: int = 0
    """Rows that are padding because their shard is damaged (`data.on_corrupt_shard=skip`)."""
    pad_token_id: int = PAD_TOKEN_ID
    """Id of the padding token."""
    has_segment_b: bool = True
    """False if all `token_type_ids` are known to be 0, so that models need not check."""
    longest_sequence: int = 0
    """Bound of the sequences' lengths in positions, padding included (`longest_sequence`); 0: unknown."""
    is_causal: bool = False
    """Whether a position sees only itself and what is before it in its sequence, and predicts the next token."""

    @classmethod
    def of_sequences(
        cls,
        input_ids: np.ndarray,
        starts: np.ndarray,
        sequence_length: int,
        masked_positions: np.ndarray,
        labels: np.ndarray,
        *,
        token_type_ids: np.ndarray | None = None,
        cls_positions: np.ndarray | None = None,
        next_sentence_labels: np.ndarray | None = None,
        row_weights: np.ndarray | None = None,
        row_tokens: np.ndarray | None = None,
        num_unreadable_rows: int = 0,
        pad_token_id: int = PAD_TOKEN_ID,
        is_causal: bool = False,
    ) -> Batch:
        """Return the batch of the sequences that begin at `starts` (N,), ascending from 0; padding is a sequence too.

        Args:
            token_type_ids: None where all sequences are of one segment.
        """
        num_positions = len(input_ids)
        lengths = np.diff(starts, append=num_positions)
        cu_seqlens = np.full(sequence_capacity(len(starts)) + 1, num_positions, np.int32)
        cu_seqlens[: len(starts)] = starts
        arrays = {
            "input_ids": input_ids,
            "position_ids": np.arange(num_positions) - np.repeat(starts, lengths),
            "token_type_ids": np.zeros(num_positions, np.int64) if token_type_ids is None else token_type_ids,
            "cu_seqlens": cu_seqlens,
            "masked_positions": masked_positions,
            "labels": labels,
            "cls_positions": cls_positions,
            "next_sentence_labels": next_sentence_labels,
            "row_weights": row_weights,
            "row_tokens": row_tokens,
        }
        return cls(
            **{name: torch.from_numpy(array) for name, array in arrays.items() if array is not None},
            sequence_length=sequence_length,
            num_unreadable_rows=num_unreadable_rows,
            pad_token_id=pad_token_id,
            has_segment_b=token_type_ids is not None,
            longest_sequence=longest_sequence(int(lengths.max()), sequence_length),
            is_causal=is_causal,
        )

    @property
    def num_rows(self) -> int:
        return self.input_ids.numel() // self.sequence_length

    @property
    def num_tokens(self) -> int:
        """Number of positions with a token, without the padding that closes a row."""
        return int((self.input_ids != self.pad_token_id).sum())

    @property
    def num_masked(self) -> int:
        """Number of predicted tokens in this micro-batch."""
        return int((self.labels != IGNORED).sum())

    @property
    def num_pairs(self) -> int:
        """Number of labeled sentence pairs in this micro-batch."""
        return int((self.next_sentence_labels != IGNORED).sum())

    @property
    def label_weights(self) -> torch.Tensor | None:
        """(P,) float32: factor of the loss of each prediction; None where it is 1."""
        if not len(self.row_weights):
            return None
        return self.row_weights[self.masked_positions // self.sequence_length].float()

    def without_predictions(self, rows: Sequence[int]) -> Batch:
        """Return the batch with padding in place of the tokens of `rows`, of which nothing is predicted."""
        if not rows:
            return self
        chosen = torch.tensor(rows)

        def ignored(labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return labels.masked_fill(torch.isin(positions // self.sequence_length, chosen), IGNORED)

        positions = torch.arange(len(self.input_ids))
        kept_tokens = self.row_tokens.clone()
        if len(kept_tokens):
            kept_tokens[chosen] = 0
        return replace(
            self,
            row_tokens=kept_tokens,
            input_ids=self.input_ids.masked_fill(
                torch.isin(positions // self.sequence_length, chosen), self.pad_token_id
            ),
            labels=ignored(self.labels, self.masked_positions),
            next_sentence_labels=ignored(self.next_sentence_labels, self.cls_positions),
        )

    def to(self, device: torch.device, non_blocking: bool = True) -> Batch:
        tensors = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in TENSOR_NAMES}
        return replace(self, **tensors)

    def pack(self) -> torch.Tensor:
        """Pack the batch into one (N,) int64 tensor, which passes between processes faster than ten tensors."""
        tensors = [getattr(self, name) for name in TENSOR_NAMES]
        header = torch.tensor([*(getattr(self, name) for name in _NUMBERS), *(tensor.numel() for tensor in tensors)])
        return torch.cat([header, *(_as_int64(tensor) for tensor in tensors)])

    @classmethod
    def unpack(cls, packed: torch.Tensor) -> Batch:
        """Return the batch that `pack` packed; its tensors share the memory of `packed`."""
        header_size = len(_NUMBERS) + len(TENSOR_NAMES)
        header = packed[:header_size].tolist()
        numbers = dict(zip(_NUMBERS, header, strict=False))
        sizes = dict(zip(TENSOR_NAMES, header[len(_NUMBERS) :], strict=True))
        words = [-(-size // 2) if name == "cu_seqlens" else size for name, size in sizes.items()]
        parts = packed[header_size:].split(words)
        tensors = dict(zip(TENSOR_NAMES, parts, strict=True))
        tensors["cu_seqlens"] = tensors["cu_seqlens"].view(torch.int32)[: sizes["cu_seqlens"]]
        if sizes["row_weights"]:
            tensors["row_weights"] = tensors["row_weights"].view(torch.float64)
        return cls(**tensors, **numbers | {name: bool(numbers[name]) for name in ("has_segment_b", "is_causal")})


TENSOR_NAMES = tuple(field.name for field in fields(Batch) if field.type == "torch.Tensor")
_NUMBERS = tuple(field.name for field in fields(Batch) if field.name not in TENSOR_NAMES)


def _as_int64(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same bytes as int64; an odd number of int32 is padded with a 0."""
    if tensor.dtype == torch.int64:
        return tensor
    odd = tensor.numel() % 2 if tensor.dtype == torch.int32 else 0
    return torch.nn.functional.pad(tensor, (0, odd)).view(torch.int64)


def sequence_capacity(num_sequences: int) -> int:
    """Return the sequence capacity of a micro-batch: the number of sequences rounded up to `SEQUENCE_BUCKET`.

    It is close to the real number, because variable-length attention also pays for an empty sequence: a block launch
    per head, and 128 positions of fp32 scratch in the backward (FlashAttention 2).
    """
    return max(1, -(-num_sequences // SEQUENCE_BUCKET)) * SEQUENCE_BUCKET


def longest_sequence(longest: int, sequence_length: int) -> int:
    """Return the bound that attention gets: `longest` rounded up to `LENGTH_BUCKET`, at most a row.

    Variable-length attention launches this many positions' blocks for each sequence, and those of shorter ones end at
    once.
    """
    return min(sequence_length, -(-longest // LENGTH_BUCKET) * LENGTH_BUCKET)


def on_device(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the micro-batches on `device` in order; on CUDA the copy of the next one starts before one is yielded.

    With pinned memory (`Loader(pin_memory=True)`) neither host nor device waits for a copy that is complete in time.
    """
    if device.type == "cuda":
        yield from _copied_ahead(batches, device)
    else:
        for batch in batches:
            yield batch.to(device)


def _copied_ahead(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    coming: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        following = _start_copy(batch, device)
        if coming is not None:
            yield _arrived(*coming, device)
        coming = following
    if coming is not None:
        yield _arrived(*coming, device)


def _start_copy(batch: Batch, device: torch.device) -> tuple[Batch, torch.cuda.Event]:
    """Return the batch on the device, and the event that completes its copy."""
    stream, copied = _copy_stream(device), torch.cuda.Event()
    with torch.cuda.stream(stream):
        on_its_way = batch.to(device, non_blocking=True)
        copied.record(stream)
    return on_its_way, copied


def _arrived(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    """Return the batch for work that is queued from now on."""
    computing = torch.cuda.current_stream(device)
    computing.wait_event(copied)
    for name in TENSOR_NAMES:
        # Allocated on the other stream: a later copy must not reuse its memory before this stream is done.
        getattr(batch, name).record_stream(computing)
    return batch


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
