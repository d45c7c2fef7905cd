"""A micro-batch: whole rows laid end to end, at shapes that never change within a phase."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from data_prep.tokenizer import PAD_TOKEN_ID

IGNORED = -100
"""Label of a place without a prediction, as in `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of R rows of L places; T = R * L.

    Sequences (a document's piece, or a sentence pair, or the dead places that close a row) never cross a row, never
    attend to each other, and each counts its positions from 0. `cu_seqlens` has a fixed capacity: unused entries
    repeat T. Capacities are per row, so nothing overflows: P = R * ceil(mlm_probability * L) predictions,
    S sequences, C pairs (0 without sentence pairs). An unused entry of `masked_positions` or `cls_positions` is 0 and
    its label -100.
    """

    input_ids: torch.Tensor
    """(T,) int64: token ids after masking."""
    position_ids: torch.Tensor
    """(T,) int64: place within the sequence."""
    token_type_ids: torch.Tensor
    """(T,) int64: 0 for segment A (and without pairs), 1 for segment B."""
    cu_seqlens: torch.Tensor
    """(S + 1,) int32: starts of the sequences, then T."""
    masked_positions: torch.Tensor
    """(P,) int64: indices into (T,) of the predicted tokens."""
    labels: torch.Tensor
    """(P,) int64: the original ids there, -100 where unused."""
    cls_positions: torch.Tensor
    """(C,) int64: indices into (T,) of the [CLS] of each sentence pair."""
    next_sentence_labels: torch.Tensor
    """(C,) int64: 0 = B follows A, 1 = B is from another document, -100 where unused."""
    sequence_length: int
    """L: places in a row, the largest length of a sequence."""

    @property
    def num_rows(self) -> int:
        return self.input_ids.numel() // self.sequence_length

    @property
    def num_tokens(self) -> int:
        """Places that hold a token; the dead places that close a row are left out."""
        return int((self.input_ids != PAD_TOKEN_ID).sum())

    @property
    def num_masked(self) -> int:
        """Tokens predicted in this micro-batch."""
        return int((self.labels != IGNORED).sum())

    @property
    def num_pairs(self) -> int:
        """Sentence pairs judged in this micro-batch."""
        return int((self.next_sentence_labels != IGNORED).sum())

    def to(self, device: torch.device, non_blocking: bool = True) -> Batch:
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Called by `torch.utils.data.DataLoader(pin_memory=True)`."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors = {
            field.name: function(getattr(self, field.name))
            for field in fields(self)
            if isinstance(getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **tensors)
