"""Fill masks with a checkpoint of a run: before an export, and for models that transformers lacks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from data_prep.tokenizer.hugging_face_tokenizer import write_hugging_face_tokenizer
from trainer.hf_export.export import build_model
from trainer.hf_export.export_source import read_source
from trainer.hf_export.parity import EncodedSequence, pack_rows
from trainer.inference.fill_mask import FillMask
from trainer.inference.masking_rates import rates_until
from trainer.model.pretrained import load_tokenizer
from trainer.objectives.pretraining import PretrainingModel


class MaskedLogits(NamedTuple):
    """The output of a masked language model, as transformers names it; `logits` (1, length, padded_vocab_size)."""

    logits: torch.Tensor


class CheckpointMaskedLM(nn.Module):
    """The pretrained model with the interface that `FillMask` needs: one text at a time."""

    def __init__(self, model: PretrainingModel) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> MaskedLogits:
        """Return the logits of every position; `input_ids` is (1, length) without padding."""
        (ids,) = input_ids.tolist()
        batch = pack_rows([EncodedSequence(ids, [0] * len(ids))], len(ids))
        return MaskedLogits(self.model.predict(batch).mlm_logits[None])


def load_checkpoint(checkpoint: Path) -> FillMask:
    """Load a checkpoint, or the newest one of a run.

    Raises:
        UserError: there is no complete checkpoint, or the run's tokenizer is missing or another one.
    """
    source = read_source(checkpoint)
    model = CheckpointMaskedLM(build_model(source.config, source.weights))
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        length = source.config.longest_sequence
        write_hugging_face_tokenizer(source.tokenizer_folder, temporary, model_max_length=length)
        loaded = FillMask(model, load_tokenizer(Path(temporary)))
    rates = rates_until(source.config, source.facts.step)
    loaded.trained_rates = lambda: rates
    return loaded
