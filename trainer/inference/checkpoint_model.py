"""Fill masks with a run's own checkpoint: before an export, and for models that transformers lacks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from data_prep.tokenizer.hugging_face_tokenizer import write_hugging_face_tokenizer
from trainer.config.run_config import RunConfig
from trainer.hf_export.export import build_model
from trainer.hf_export.export_source import read_source
from trainer.hf_export.parity import EncodedSequence, pack_rows
from trainer.inference.fill_mask import FillMask
from trainer.model.pretrained import load_tokenizer
from trainer.objectives.pretraining import PretrainingModel


class MaskedLogits(NamedTuple):
    """As transformers' models answer."""

    logits: torch.Tensor
    """(1, length, padded_vocab_size)."""


class CheckpointMaskedLM(nn.Module):
    """Our model behind what `FillMask` asks of transformers' masked language models: one text at a time."""

    def __init__(self, model: PretrainingModel) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> MaskedLogits:
        """Ids (1, length), none of them padding, to logits of every position."""
        (ids,) = input_ids.tolist()
        batch = pack_rows([EncodedSequence(ids, [0] * len(ids))], len(ids))
        return MaskedLogits(self.model.predict(batch).mlm_logits[None])


def load_checkpoint(checkpoint: Path) -> FillMask:
    """Read a checkpoint, or a run's newest one.

    Raises:
        UserError: there is no complete checkpoint, or the run's tokenizer is missing or another one.
    """
    source = read_source(checkpoint)
    model = CheckpointMaskedLM(build_model(source.config, source.weights))
    return FillMask(model, _tokenizer(source.tokenizer_folder, source.config))


def _tokenizer(folder: Path, config: RunConfig) -> Any:
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        write_hugging_face_tokenizer(folder, temporary, model_max_length=config.longest_sequence)
        return load_tokenizer(Path(temporary))
