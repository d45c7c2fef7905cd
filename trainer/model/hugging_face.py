"""Our weights and settings as those of transformers' BERT and ModernBERT, both ways.

Names differ, and our one query-key-value matrix is three in BERT; nothing is computed, so the map is exact. The rows
that pad the vocabulary are real rows on both sides (`MaskedLanguageModelHead` says why).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from data_prep.base.errors import UserError
from data_prep.tokenizer.special_tokens import OWN_SPECIAL_TOKENS, SpecialTokens
from trainer.config.families import RULES, violations
from trainer.config.model_settings import ModelSettings
from trainer.model import bert, modernbert


class Family(Protocol):
    """What the module of a family knows."""

    def hugging_face_names(self, name: str) -> list[str]: ...
    def hugging_face_config(
        self, config: ModelSettings, next_sentence: bool, special_tokens: SpecialTokens
    ) -> dict[str, Any]: ...
    def settings_of(self, config: Mapping[str, Any]) -> dict[str, Any]: ...


FAMILIES: Mapping[str, Family] = {"bert": bert, "modernbert": modernbert}


def family_in_transformers(config: ModelSettings, next_sentence: bool) -> str:
    """The family whose class in transformers computes what `config` says; a custom model may be of one, too.

    Raises:
        UserError: there is none; it says what stands in the way.
    """
    reasons = []
    for family in [config.family] if config.family in FAMILIES else list(RULES):
        found = violations(family, dict(config))
        if next_sentence and family == "modernbert":
            found.append("the head for sentence pairs (ModernBERT has none)")
        if not found:
            return family
        reasons.append(f"not as {family}, for {'; '.join(found)}")
    raise UserError(
        f"transformers has no class that computes this model: {', and '.join(reasons)}. It can neither be exported "
        "nor begin with a Hugging Face checkpoint; it trains, is evaluated and fills masks from its own checkpoints"
    )


def hugging_face_config(
    config: ModelSettings, next_sentence: bool, special_tokens: SpecialTokens = OWN_SPECIAL_TOKENS
) -> dict[str, Any]:
    """The contents of config.json; `special_tokens` are the tokenizer's."""
    family = FAMILIES[family_in_transformers(config, next_sentence)]
    return family.hugging_face_config(config, next_sentence, special_tokens)


def to_hugging_face(weights: Mapping[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Rename `weights` (those of `PretrainingModel`) to transformers' names, splitting BERT's QKV matrices.

    Works for anything of a parameter's shape, gradients too. The tied decoder has no entry of its own.
    """
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        targets = FAMILIES[family].hugging_face_names(name)
        converted.update(zip(targets, tensor.chunk(len(targets)), strict=True))
    return converted


def from_hugging_face(
    weights: Mapping[str, torch.Tensor], names: Iterable[str], family: str
) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """The tensors for our parameters `names` from transformers' state dict, and for the others what it lacks."""
    converted: dict[str, torch.Tensor] = {}
    lacking: dict[str, list[str]] = {}
    for name in names:
        sources = FAMILIES[family].hugging_face_names(name)
        missing = [source for source in sources if source not in weights]
        if missing:
            lacking[name] = missing
        else:
            converted[name] = torch.cat([weights[source] for source in sources])
    return converted, lacking
