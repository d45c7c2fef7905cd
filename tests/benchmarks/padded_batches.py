"""The padded form of a micro-batch: the same samples, a row for each sequence, as models outside take them."""

from __future__ import annotations

import torch

from trainer.data.batch import IGNORED, Batch


def to_padded(batch: Batch) -> dict[str, torch.Tensor]:
    """The sequences of a batch as transformers' `BertForPreTraining` takes them, in their order.

    Returns:
        input_ids, attention_mask, token_type_ids, labels: (S, longest sequence) int64, the labels -100 where nothing
        is predicted; next_sentence_label: (S,) int64, -100 for a sequence that is not judged (its forward takes it
        only where the batch has pairs). Padding is left out.
    """
    total = batch.input_ids.numel()
    starts = torch.unique(batch.cu_seqlens.long())[:-1]  # unused entries repeat the total
    lengths = torch.diff(starts, append=starts.new_tensor([total]))
    alive = batch.input_ids[starts] != batch.pad_token_id  # a row's padding is a sequence of their own, of [PAD]
    starts, lengths = starts[alive], lengths[alive]

    labels = torch.full_like(batch.input_ids, IGNORED)
    used = batch.labels != IGNORED
    labels[batch.masked_positions[used]] = batch.labels[used]
    judged = torch.full_like(batch.input_ids, IGNORED)
    used = batch.next_sentence_labels != IGNORED
    judged[batch.cls_positions[used]] = batch.next_sentence_labels[used]

    places = torch.arange(int(lengths.max()) if len(lengths) else 0)
    attended = places < lengths[:, None]  # (S, longest)
    flat = torch.where(attended, starts[:, None] + places, 0)

    def padded(values: torch.Tensor, filler: int) -> torch.Tensor:
        return torch.where(attended, values[flat], filler)

    return {
        "input_ids": padded(batch.input_ids, batch.pad_token_id),
        "attention_mask": attended.long(),
        "token_type_ids": padded(batch.token_type_ids, 0),
        "labels": padded(labels, IGNORED),
        "next_sentence_label": judged[starts],
    }
