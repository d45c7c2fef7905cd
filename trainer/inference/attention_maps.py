"""The attention of an encoder's heads over a sentence, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data_prep.base.errors import UsageError
from trainer.inference.fill_mask import METASPACE
from trainer.inference.preprocessor import Preprocessor
from trainer.model.pretrained import load_pretrained, refuse_random_weights


@dataclass(frozen=True)
class AttentionMaps:
    """`weights` (num_layers, num_heads, length, length) float32: a row for each token that attends; rows sum to 1."""

    tokens: tuple[str, ...]
    weights: np.ndarray


def attention_maps(folder: Path, first: str, second: str | None = None) -> AttentionMaps:
    """Run the encoder in `folder` over a sentence or a pair.

    Raises:
        UsageError: the text is empty or longer than the model takes; it is raised before the model is loaded.
    """
    if not first.strip():
        raise UsageError("the text is empty", fix="give a sentence", code="empty-text")
    preprocessor = Preprocessor.load(folder)
    rows, (length,) = preprocessor.rows([first], None if second is None else [second])
    if length > preprocessor.max_length:
        raise UsageError(
            f"the text has {length:,} tokens, and the model takes {preprocessor.max_length:,}",
            fix="give a shorter text",
            code="text-too-long",
        )
    # The fused implementations of attention never compute the weights.
    model, missing = load_pretrained("AutoModel", folder, "an encoder", attn_implementation="eager")
    refuse_random_weights(missing, folder, "an encoder", but=("pooler.",))
    with torch.inference_mode():
        attentions = model(**preprocessor.collate(rows), output_attentions=True).attentions
    tokens = tuple(
        piece.replace(METASPACE, " ").strip() or piece
        for piece in preprocessor.tokenizer.convert_ids_to_tokens(rows[0]["input_ids"])
    )
    return AttentionMaps(tokens, torch.stack([layer[0] for layer in attentions]).float().numpy())


def choose(numbers: list[int] | None, count: int, option: str) -> list[int]:
    """Return the given numbers, counted from 1, as indices; all indices if none is given."""
    for number in numbers or []:
        if not 1 <= number <= count:
            raise UsageError(
                f"{option} {number} does not exist: the model has 1 to {count}",
                fix=f"give a number from 1 to {count}",
                code="unknown-layer",
            )
    return [number - 1 for number in numbers] if numbers else list(range(count))
