"""Our weights and settings as those of transformers' BERT and ModernBERT, both ways.

Names differ, and our one query-key-value matrix is three in BERT; nothing is computed, so the map is exact. The rows
that pad the vocabulary are real rows on both sides (`MaskedLanguageModelHead` says why).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from data_prep.base.errors import UserError
from data_prep.tokenizer.special_tokens import OWN_SPECIAL_TOKENS, SpecialTokens
from trainer.config.families import RULES, violations
from trainer.config.model_settings import ModelSettings

_BLOCK = re.compile(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class Family:
    """What transformers calls our modules, and its configuration both ways."""

    modules: Mapping[str, str]
    block_modules: Mapping[str, tuple[str, ...]]
    """Within a block; a matrix of several modules is cut along its rows."""
    blocks: str
    config: Callable[[ModelSettings, bool, SpecialTokens], dict[str, Any]]
    """The contents of config.json for settings, sentence pairs (or none) and the tokenizer's special tokens."""
    settings_of: Callable[[Mapping[str, Any]], dict[str, Any]]
    """The architecture that a config.json says, in the names of `ModelSettings`.

    What `ModelSettings` cannot say is given as the value of the nearest setting, so that it shows as a difference.
    """

    def hugging_face_names(self, name: str) -> list[str]:
        """Transformers' names for our parameter `name`: several for BERT's QKV matrix or bias, else one."""
        block = _BLOCK.fullmatch(name)
        if block is None:
            module, _, kind = name.rpartition(".")
            return [f"{self.modules[module]}.{kind}"]
        number, module, kind = block.groups()
        return [f"{self.blocks}.{number}.{part}.{kind}" for part in self.block_modules[module]]


def family_in_transformers(config: ModelSettings, next_sentence: bool) -> str:
    """The family whose class in transformers computes what `config` says; a custom model may be of one, too.

    Raises:
        UserError: there is none; the message names the reasons.
    """
    reasons = []
    for family in [config.family] if config.family in FAMILIES else list(RULES):
        broken_rules = violations(family, dict(config))
        if next_sentence and family == "modernbert":
            broken_rules.append("the head for sentence pairs (ModernBERT has none)")
        if not broken_rules:
            return family
        reasons.append(f"not as {family}, for {'; '.join(broken_rules)}")
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
    """The contents of config.json; `special_tokens` are the tokenizer's."""
    family = FAMILIES[family_in_transformers(config, next_sentence)]
    return family.config(config, next_sentence, special_tokens)


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
    """Return the tensors of our parameters `names` from transformers' state dict, and the missing ones of the
    others.
    """
    converted: dict[str, torch.Tensor] = {}
    incomplete: dict[str, list[str]] = {}
    for name in names:
        sources = FAMILIES[family].hugging_face_names(name)
        missing = [source for source in sources if source not in weights]
        if missing:
            incomplete[name] = missing
        else:
            converted[name] = torch.cat([weights[source] for source in sources])
    return converted, incomplete


def _bert_config(config: ModelSettings, next_sentence: bool, special_tokens: SpecialTokens) -> dict[str, Any]:
    """The contents of config.json: `BertForPreTraining`, or `BertForMaskedLM` where there is no pooler."""
    return {
        "architectures": ["BertForPreTraining" if next_sentence else "BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_act": config.hidden_act,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "attention_probs_dropout_prob": config.attention_probs_dropout_prob,
        "max_position_embeddings": config.max_position_embeddings,
        "type_vocab_size": config.type_vocab_size,
        "initializer_range": config.initializer_range,
        "layer_norm_eps": config.layer_norm_eps,
        "pad_token_id": special_tokens.pad,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def _bert_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "type_vocab_size",
        "hidden_act",
        "layer_norm_eps",
    )
    causal = {"local_attention": "to the left alone (is_decoder)"} if config.get("is_decoder") else {}
    absolute = config.get("position_embedding_type", "absolute") == "absolute"
    positions = {"position_embedding": "learned" if absolute else config["position_embedding_type"]}
    return {name: config.get(name) for name in names} | positions | causal


def _modernbert_config(config: ModelSettings, next_sentence: bool, special_tokens: SpecialTokens) -> dict[str, Any]:
    """The contents of config.json, in the names of the published ones (which transformers 5 reads into newer ones)."""
    assert not next_sentence
    return {
        "architectures": ["ModernBertForMaskedLM"],
        "model_type": "modernbert",
        "vocab_size": config.padded_vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "classifier_pooling": "mean",  # without sentence pairs nothing taught [CLS] to stand for the whole
        "max_position_embeddings": config.max_position_embeddings,
        "local_attention": config.local_attention or 128,  # no layer reads it where all are global
        "global_attn_every_n_layers": config.global_attn_every_n_layers,
        "global_rope_theta": config.global_rope_theta,
        "local_rope_theta": config.local_rope_theta,
        "norm_eps": config.layer_norm_eps,
        "norm_bias": config.bias,
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "classifier_bias": config.bias,
        "decoder_bias": True,
        "embedding_dropout": config.hidden_dropout_prob,
        "mlp_dropout": config.hidden_dropout_prob,
        "attention_dropout": config.attention_probs_dropout_prob,
        "initializer_range": config.initializer_range,
        "pad_token_id": special_tokens.pad,
        "bos_token_id": special_tokens.cls,
        "cls_token_id": special_tokens.cls,
        "eos_token_id": special_tokens.sep,
        "sep_token_id": special_tokens.sep,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def _modernbert_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    biases = {config[f"{part}_bias"] for part in ("norm", "attention", "mlp", "classifier")}
    layer_types = ["local" if kind == "sliding_attention" else "global" for kind in config["layer_types"]]
    rope = {kind: config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding")}
    activations = {config["hidden_activation"], config["classifier_activation"]}  # of the blocks, and of the MLM head
    is_plain = all(parameters.get("rope_type", "default") == "default" for parameters in rope.values())
    return {
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "intermediate_size": config["intermediate_size"],
        "hidden_act": "geglu" if activations == {"gelu"} else f"gated {' and '.join(sorted(activations))}",
        "bias": biases.pop() if len(biases) == 1 else "in some modules only",
        "layer_norm_eps": config["norm_eps"],
        "attention_kinds": tuple(layer_types),
        "global_rope_theta": rope["full"]["rope_theta"] if is_plain else "scaled",
    } | (
        {
            "local_attention": config["local_attention"],
            "local_rope_theta": rope["sliding"]["rope_theta"] if is_plain else "scaled",
        }
        if "local" in layer_types
        else {}
    )


FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        modules={
            "encoder.embeddings.word_embeddings": "bert.embeddings.word_embeddings",
            "encoder.embeddings.position_embeddings": "bert.embeddings.position_embeddings",
            "encoder.embeddings.token_type_embeddings": "bert.embeddings.token_type_embeddings",
            "encoder.embeddings.norm": "bert.embeddings.LayerNorm",
            "mlm_head": "cls.predictions",
            "mlm_head.dense": "cls.predictions.transform.dense",
            "mlm_head.norm": "cls.predictions.transform.LayerNorm",
            "pooler.dense": "bert.pooler.dense",
            "next_sentence_head.dense": "cls.seq_relationship",
        },
        block_modules={
            "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
            "attention.output": ("attention.output.dense",),
            "attention_norm": ("attention.output.LayerNorm",),
            "feed_forward.intermediate": ("intermediate.dense",),
            "feed_forward.output": ("output.dense",),
            "feed_forward_norm": ("output.LayerNorm",),
        },
        blocks="bert.encoder.layer",
        config=_bert_config,
        settings_of=_bert_settings,
    ),
    "modernbert": Family(
        modules={
            "encoder.embeddings.word_embeddings": "model.embeddings.tok_embeddings",
            "encoder.embeddings.norm": "model.embeddings.norm",
            "encoder.final_norm": "model.final_norm",
            "mlm_head": "decoder",
            "mlm_head.dense": "head.dense",
            "mlm_head.norm": "head.norm",
        },
        block_modules={
            "attention_norm": ("attn_norm",),
            "attention.qkv": ("attn.Wqkv",),
            "attention.output": ("attn.Wo",),
            "feed_forward_norm": ("mlp_norm",),
            "feed_forward.intermediate": ("mlp.Wi",),
            "feed_forward.output": ("mlp.Wo",),
        },
        blocks="model.layers",
        config=_modernbert_config,
        settings_of=_modernbert_settings,
    ),
}
