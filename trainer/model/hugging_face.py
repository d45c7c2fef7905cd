"""Our weights and settings as those of transformers' class of a family, both ways.

Names differ, one matrix of ours may be several there (in BERT queries, keys and values), and RoBERTa's table of
positions begins with unused rows; nothing is computed, so the mapping is exact. The rows that pad the vocabulary are
real rows on both sides (`MaskedLanguageModelHead` says why).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from data_prep.base.errors import UserError
from data_prep.tokenizer.special_tokens import OWN_SPECIAL_TOKENS, PAD_TOKEN_ID, SpecialTokens
from trainer.config.families.family import PublishedFamily
from trainer.config.families.registry import FAMILIES, published_families
from trainer.config.model_settings import ModelSettings

_POSITIONS = "encoder.embeddings.position_embeddings.weight"


def family_in_transformers(config: ModelSettings, next_sentence: bool) -> PublishedFamily:
    """Return the family whose class in transformers computes what `config` says; a custom model may be of one, too.

    Raises:
        UserError: there is none; the message names the reasons.
    """
    reasons = []
    named = FAMILIES[config.family]
    for family in [named] if isinstance(named, PublishedFamily) else published_families():
        obstacles = family.violations(dict(config))
        if next_sentence and family.pairs_class is None:
            obstacles.append(f"the head for sentence pairs ({family.title} has none)")
        if not obstacles:
            return family
        reasons.append(f"not as {family.name}, for {'; '.join(obstacles)}")
    raise UserError(
        f"transformers has no class for this model: {', and '.join(reasons)}. It cannot be "
        "exported or initialized from a Hugging Face checkpoint; it trains, is evaluated and "
        "fills masks from its own checkpoints",
        fix="change these settings, or use the run's own checkpoints",
        code="not-in-transformers",
    )


def hugging_face_config(
    config: ModelSettings, next_sentence: bool, special_tokens: SpecialTokens = OWN_SPECIAL_TOKENS
) -> dict[str, Any]:
    """Return the contents of config.json; `special_tokens` are those of the tokenizer."""
    return family_in_transformers(config, next_sentence).config_json(config, next_sentence, special_tokens)


def to_hugging_face(
    weights: Mapping[str, torch.Tensor],
    config: ModelSettings,
    family: PublishedFamily,
    pad_token_id: int = PAD_TOKEN_ID,
) -> dict[str, torch.Tensor]:
    """Rename `weights` (those of a `PretrainingModel` of `config`) to transformers' names, and split what is several
    tensors there.

    Works for anything of a parameter's shape, gradients too. A tied decoder has no entry of its own. Rows of the
    position table that no token uses are zeros.
    """
    of_heads = [heads * config.head_size for heads in (config.num_attention_heads, *(config.key_value_heads,) * 2)]
    converted: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name == _POSITIONS and (unused := family.first_position(pad_token_id)):
            tensor = torch.cat([tensor.new_zeros(unused, *tensor.shape[1:]), tensor])
        targets = family.tensor_names(name)
        is_qkv = name.rpartition(".")[0].endswith("attention.qkv")
        heights = of_heads if is_qkv and len(targets) > 1 else [len(tensor) // len(targets)] * len(targets)
        converted.update(zip(targets, tensor.split(heights), strict=True))
    return converted


def from_hugging_face(
    weights: Mapping[str, torch.Tensor],
    names: Iterable[str],
    family: PublishedFamily,
    pad_token_id: int = PAD_TOKEN_ID,
) -> tuple[dict[str, torch.Tensor], dict[str, list[str]]]:
    """Return the tensors of our parameters `names` from transformers' state dict.

    The second result lists, for each parameter that is incomplete there, the names that are missing.
    """
    converted: dict[str, torch.Tensor] = {}
    incomplete: dict[str, list[str]] = {}
    for name in names:
        sources = family.tensor_names(name)
        missing = [source for source in sources if source not in weights]
        if missing:
            incomplete[name] = missing
        else:
            converted[name] = torch.cat([weights[source] for source in sources])
            if name == _POSITIONS:
                converted[name] = converted[name][family.first_position(pad_token_id) :]
    return converted, incomplete
