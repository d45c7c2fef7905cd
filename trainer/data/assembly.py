"""Assembly of a range of samples into a micro-batch: segments, their tokens, rows, masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch.utils.data import Dataset

from data_prep.base.errors import UserError
from data_prep.tokenizer.special_tokens import OWN_SPECIAL_TOKENS, SpecialTokens
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.config.data_settings import DataSettings
from trainer.config.masking_law import bound_weights, stratified_draws
from trainer.data.batch import IGNORED, Batch
from trainer.data.masker import masker_of, masking_of, needs_pieces
from trainer.data.masking import MaskedRows
from trainer.data.packing import SEGMENT_A, SEGMENT_B, RowSettings, Segments
from trainer.data.randomness import Purpose, fold, root_key, uniform
from trainer.data.sample_range import SampleRange
from trainer.data.samples import SampleSpace
from trainer.data.shard_set import Shard, ShardSet

_NOT_OURS = "prepare the text again"


@dataclass(frozen=True)
class Rows:
    """R rows of L positions before masking, as `Batch.of_sequences` takes them."""

    input_ids: np.ndarray
    starts: np.ndarray
    """(N,) int64: first positions of the sequences, padding included, ascending."""
    token_positions: np.ndarray
    """(sum(lengths),) int64: position of each token of the segments, ascending."""
    token_type_ids: np.ndarray | None
    """None without sentence pairs."""
    cls_positions: np.ndarray
    next_sentence_labels: np.ndarray


def read_segments(segments: Segments, shards: Sequence[Shard]) -> np.ndarray:
    """Read the tokens of all segments, concatenated, (sum(lengths),); adjacent segments of a shard take one read."""
    if not len(segments.rows):
        return np.empty(0, np.int64)
    stops = segments.starts + segments.lengths
    breaks = (segments.starts[1:] != stops[:-1]) | (segments.shards[1:] != segments.shards[:-1])
    firsts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    lasts = np.append(firsts[1:], len(stops)) - 1
    numbers = segments.shards[firsts].tolist()
    tokens = {number: shards[number].read_tokens() for number in set(numbers)}
    runs = zip(numbers, segments.starts[firsts].tolist(), stops[lasts].tolist(), strict=True)
    return np.concatenate([tokens[number][start:stop] for number, start, stop in runs])


def check_tokens(tokens: np.ndarray, segments: Segments, shards: Sequence[Shard], vocab_size: int) -> None:
    """Check that all tokens of the index exist and that their ids are in the tokenizer, before embeddings are indexed.

    Checksums detect a shard that was damaged later, not one that was written with wrong contents and a manifest.

    Raises:
        UserError: the check fails; names the shard.
    """
    if len(tokens) != segments.lengths.sum():
        stops = zip(segments.shards.tolist(), segments.starts + segments.lengths, strict=True)
        name = next(shards[number].record.name for number, stop in stops if stop > len(shards[number].read_tokens()))
        raise UserError(f"shard {name} ends before the positions in its index", fix=_NOT_OURS, code="foreign-shard")
    if len(tokens) and tokens.max() >= vocab_size:
        position = int(np.argmax(tokens >= vocab_size))
        name = shards[segments.shards[np.searchsorted(np.cumsum(segments.lengths), position, "right")]].record.name
        raise UserError(
            f"shard {name} contains token id {tokens[position]}, and its tokenizer has {vocab_size} tokens",
            fix=_NOT_OURS,
            code="foreign-shard",
        )


def without_damaged(segments: Segments, shards: Sequence[Shard]) -> tuple[Segments, int]:
    """Remove the rows whose shard cannot be read; return also their number."""
    damaged = [number for number in np.unique(segments.shards).tolist() if not shards[number].is_readable()]
    if not damaged:
        return segments, 0
    gone = np.isin(segments.shards, damaged)
    readable = Segments(**{field.name: getattr(segments, field.name)[~gone] for field in fields(Segments)})
    return readable, len(np.unique(segments.rows[gone]))


def assemble_rows(
    segments: Segments,
    tokens: np.ndarray,
    num_rows: int,
    settings: RowSettings,
    special_tokens: SpecialTokens = OWN_SPECIAL_TOKENS,
) -> Rows:
    """Place segments in rows with their special tokens; the rest of a row is padding.

    Padding is [PAD] and is a sequence of its own; rows without segments are all padding.

    Args:
        tokens: (sum(segments.lengths),) ids, as `read_segments` returns them.
    """
    length = settings.sequence_length
    opens = segments.types == SEGMENT_A
    positions = segments.lengths + 1 + opens  # [SEP], and [CLS] before an A
    used = np.bincount(segments.rows, weights=positions, minlength=num_rows).astype(np.int64)
    assert used.max(initial=0) <= length, "a row's segments fit into it"
    row_shifts = np.arange(num_rows) * length - (np.cumsum(used) - used)
    firsts = np.cumsum(positions) - positions + row_shifts[segments.rows]
    token_firsts = firsts + opens

    input_ids = np.full(num_rows * length, special_tokens.pad)
    shifts = token_firsts - (np.cumsum(segments.lengths) - segments.lengths)
    token_positions = np.repeat(shifts, segments.lengths) + np.arange(len(tokens))
    input_ids[token_positions] = tokens
    input_ids[firsts[opens]] = special_tokens.cls
    input_ids[token_firsts + segments.lengths] = special_tokens.sep

    padded = np.flatnonzero(used < length)
    starts = np.sort(np.concatenate([firsts[opens], padded * length + used[padded]]))
    cls_positions, labels = _pairs(firsts, segments.labels, num_rows * settings.max_pairs)
    return Rows(
        input_ids=input_ids,
        starts=starts,
        token_positions=token_positions,
        token_type_ids=_token_types(firsts, segments, num_rows * length) if settings.max_pairs else None,
        cls_positions=cls_positions,
        next_sentence_labels=labels,
    )


def _token_types(firsts: np.ndarray, segments: Segments, num_positions: int) -> np.ndarray:
    """Return 1 at the tokens and the [SEP] of every B, else 0; (num_positions,) int64."""
    of_b = segments.types == SEGMENT_B
    if not of_b.any():
        return np.zeros(num_positions, np.int64)
    steps = np.zeros(num_positions + 1, np.int64)
    steps[firsts[of_b]] = 1
    steps[firsts[of_b] + segments.lengths[of_b] + 1] = -1  # a [CLS], padding or the end: never another B
    return np.cumsum(steps[:-1])


def next_tokens(rows: Rows, pad: int) -> MaskedRows:
    """Return rows without masks, in which every token is predicted at the position before it.

    A sequence begins with [CLS], which nothing predicts, and its last token predicts [SEP]. That one and padding
    predict nothing, so R * L predictions are room for any rows.
    """
    is_predicted = rows.input_ids != pad
    is_predicted[rows.starts] = False
    predicted = np.flatnonzero(is_predicted)
    return MaskedRows.of(rows.input_ids, predicted - 1, rows.input_ids[predicted], len(rows.input_ids))


def _pairs(firsts: np.ndarray, labels: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    labeled = labels != IGNORED
    return _filled(firsts[labeled], capacity, 0), _filled(labels[labeled], capacity, IGNORED)


def _filled(values: np.ndarray, capacity: int, filler: int) -> np.ndarray:
    """Return `values`, extended by `filler` to `capacity`."""
    assert len(values) <= capacity, "capacities are bounds"
    result = np.full(capacity, filler)
    result[: len(values)] = values
    return result


class MicroBatches(Dataset[torch.Tensor | UserError]):
    """Builder of the micro-batch of any range of samples."""

    def __init__(self, samples: SampleSpace, data: DataSettings, shard_set: ShardSet, num_rows: int) -> None:
        """`shard_set` has the tokenizer that all components share."""
        self._samples = samples
        manifest = shard_set.manifest.tokenizer
        pieces = Tokenizer.load(shard_set.tokenizer_folder).pieces if needs_pieces(data) else None
        self._masking = masking_of(data, manifest.vocab_size, manifest.special_tokens, pieces)
        self._mask_rows = masker_of(self._masking)
        self._num_rows = num_rows
        self._skip_corrupt_shards = data.on_corrupt_shard == "skip"
        self._mask_key = root_key(samples.seed, samples.usage, Purpose.MASKING)
        self._rate_key = root_key(samples.seed, samples.usage, Purpose.MASKING_RATE)
        self._law, self._is_weighted = data.law, data.loss_weight == "elbo"

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
        settings = self._samples.settings
        length = settings.sequence_length
        numbers = np.arange(which.first, which.first + self._num_rows)
        segments, shards = self._samples.segments_of_samples(which.epoch, np.arange(which.first, which.stop))
        num_unreadable_rows = 0
        if self._skip_corrupt_shards:
            segments, num_unreadable_rows = without_damaged(segments, shards)
        special_tokens = self._masking.special_tokens
        tokens = read_segments(segments, shards)
        check_tokens(tokens, segments, shards, self._masking.vocab_size)
        rows = assemble_rows(segments, tokens, self._num_rows, settings, special_tokens)
        weights: dict[str, np.ndarray] = {}
        if settings.is_causal:
            masked = next_tokens(rows, special_tokens.pad)
        else:
            keys = fold(fold(self._mask_key, which.epoch), numbers)
            input_ids = rows.input_ids.reshape(self._num_rows, length)
            masked = self._mask_rows(input_ids, keys, rates=self._rates(which.epoch, numbers, mlm_probability))
            if self._is_weighted:
                weights = self._weights(input_ids, masked)
        batch = Batch.of_sequences(
            masked.input_ids,
            rows.starts,
            length,
            masked.masked_positions,
            masked.labels,
            token_type_ids=rows.token_type_ids,
            cls_positions=rows.cls_positions,
            next_sentence_labels=rows.next_sentence_labels,
            **weights,
            num_unreadable_rows=num_unreadable_rows,
            pad_token_id=special_tokens.pad,
            is_causal=settings.is_causal,
        )
        return batch, segments, shards, rows.token_positions

    def _rates(self, epoch: int, samples: np.ndarray, of_step: float) -> np.ndarray:
        """Return the masking rates of samples (R,): that of the step, or one drawn for each."""
        if not self._law.is_drawn:
            return np.full(len(samples), of_step)
        key = fold(self._rate_key, epoch)
        draws = stratified_draws(key, samples) if self._law.is_stratified else fold(key, samples)
        return self._law.quantile(uniform(draws))

    def _weights(self, input_ids: np.ndarray, masked: MaskedRows) -> dict[str, np.ndarray]:
        """Return the weight and the number of tokens of each row, as `Batch.of_sequences` takes them."""
        tokens = self._masking.special_tokens.are_ordinary(input_ids).sum(1)
        positions = masked.masked_positions[masked.labels != IGNORED]
        counts = np.bincount(positions // input_ids.shape[1], minlength=len(input_ids))
        return {"row_weights": bound_weights(self._law, counts, tokens), "row_tokens": tokens}
