"""BERT as transformers has it: the names of its weights, and its configuration both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from data_prep.tokenizer.special_tokens import SpecialTokens
from trainer.config.model_settings import ModelSettings

_MODULES = {
    "encoder.embeddings.word_embeddings": "bert.embeddings.word_embeddings",
    "encoder.embeddings.position_embeddings": "bert.embeddings.position_embeddings",
    "encoder.embeddings.token_type_embeddings": "bert.embeddings.token_type_embeddings",
    "encoder.embeddings.norm": "bert.embeddings.LayerNorm",
    "mlm_head": "cls.predictions",
    "mlm_head.dense": "cls.predictions.transform.dense",
    "mlm_head.norm": "cls.predictions.transform.LayerNorm",
    "pooler.dense": "bert.pooler.dense",
    "next_sentence_head.dense": "cls.seq_relationship",
}
_BLOCK_MODULES = {
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.intermediate": "intermediate.dense",
    "feed_forward.output": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
_QKV = ("query", "key", "value")
_BLOCK = re.compile(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")


def hugging_face_names(name: str) -> list[str]:
    """Transformers' name for our parameter `name`; three for a QKV matrix or bias."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        module, _, kind = name.rpartition(".")
        return [f"{_MODULES[module]}.{kind}"]
    number, module, kind = block.groups()
    prefix = f"bert.encoder.layer.{number}"
    if module == "attention.qkv":
        return [f"{prefix}.attention.self.{part}.{kind}" for part in _QKV]
    return [f"{prefix}.{_BLOCK_MODULES[module]}.{kind}"]


def hugging_face_config(config: ModelSettings, next_sentence: bool, special_tokens: SpecialTokens) -> dict[str, Any]:
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


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture that a config.json of BERT says, in the names of `ModelSettings`.

    What `ModelSettings` cannot say is told as the value of the nearest setting, so that it shows as a difference.
    """
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
