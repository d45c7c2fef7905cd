"""Micro-batches: the tensors of a range of samples."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch.utils.data import Dataset

from data_prep.base.errors import UserError
from trainer.data.assembly import assemble_rows, check_tokens, read_segments, without_damaged
from trainer.data.batch import Batch
from trainer.data.custom_masking import CustomMasking
from trainer.data.masking import Masking, mask_rows
from trainer.data.packing import Segments
from trainer.data.randomness import Purpose, fold, root_key
from trainer.data.sample_range import SampleRange
from trainer.data.samples import SampleSpace
from trainer.data.shard_set import Shard


class MicroBatches(Dataset[torch.Tensor | UserError]):
    """Builder of the micro-batch of any range of samples."""

    def __init__(
        self,
        samples: SampleSpace,
        masking: Masking,
        num_rows: int,
        seed: int,
        usage: Purpose,
        skip_corrupt_shards: bool = False,
    ) -> None:
        """`skip_corrupt_shards` replaces rows of a damaged shard by padding rows; otherwise the shard is an error."""
        self._samples = samples
        self._masking = masking
        custom = None if masking.custom is None else CustomMasking(masking.custom, masking)
        self._mask_rows = partial(mask_rows, masking=masking) if custom is None else custom.mask_rows
        self._num_rows = num_rows
        self._skip_corrupt_shards = skip_corrupt_shards
        self._mask_key = root_key(seed, usage, Purpose.MASKING)

    def __getitem__(self, which: tuple[SampleRange, float]) -> torch.Tensor | UserError:
        """Return the packed batch, or the `UserError` as a value: `DataLoader` wraps a raised one in a traceback."""
        try:
            return self.build(*which)[0].pack()
        except UserError as error:
            return error

    def build(self, which: SampleRange, mlm_probability: float) -> tuple[Batch, Segments, list[Shard], np.ndarray]:
        """Return the micro-batch of `num_rows` rows: those of the samples, then padding rows.

        Its segments, their shards, and the position (sum(lengths),) of each of their tokens come with it.
        """
        length = self._samples.settings.sequence_length
        numbers = np.arange(which.first, which.first + self._num_rows)
        segments, shards = self._samples.segments_of_samples(which.epoch, np.arange(which.first, which.stop))
        num_unreadable_rows = 0
        if self._skip_corrupt_shards:
            segments, num_unreadable_rows = without_damaged(segments, shards)
        special_tokens = self._masking.special_tokens
        tokens = read_segments(segments, shards)
        check_tokens(tokens, segments, shards, self._masking.vocab_size)
        rows = assemble_rows(segments, tokens, self._num_rows, self._samples.settings, special_tokens)
        keys = fold(fold(self._mask_key, which.epoch), numbers)
        input_ids = rows.input_ids.reshape(self._num_rows, length)
        masked = self._mask_rows(input_ids, keys, probability=mlm_probability)
        batch = Batch.of_sequences(
            masked.input_ids,
            rows.starts,
            length,
            masked.masked_positions,
            masked.labels,
            token_type_ids=rows.token_type_ids,
            cls_positions=rows.cls_positions,
            next_sentence_labels=rows.next_sentence_labels,
            num_unreadable_rows=num_unreadable_rows,
            pad_token_id=special_tokens.pad,
        )
        return batch, segments, shards, rows.token_positions
