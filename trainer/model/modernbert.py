"""ModernBERT as transformers has it: the names of its weights, and its configuration both ways."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from data_prep.tokenizer.special_tokens import SpecialTokens
from trainer.config.model_settings import ModelSettings

_MODULES = {
    "encoder.embeddings.word_embeddings": "model.embeddings.tok_embeddings",
    "encoder.embeddings.norm": "model.embeddings.norm",
    "encoder.final_norm": "model.final_norm",
    "mlm_head": "decoder",
    "mlm_head.dense": "head.dense",
    "mlm_head.norm": "head.norm",
}
_BLOCK_MODULES = {
    "attention_norm": "attn_norm",
    "attention.qkv": "attn.Wqkv",
    "attention.output": "attn.Wo",
    "feed_forward_norm": "mlp_norm",
    "feed_forward.intermediate": "mlp.Wi",
    "feed_forward.output": "mlp.Wo",
}
_BLOCK = re.compile(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")


def hugging_face_names(name: str) -> list[str]:
    """Transformers' name for our parameter `name`; the QKV matrix is one on both sides."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        module, _, kind = name.rpartition(".")
        return [f"{_MODULES[module]}.{kind}"]
    number, module, kind = block.groups()
    return [f"model.layers.{number}.{_BLOCK_MODULES[module]}.{kind}"]


def hugging_face_config(config: ModelSettings, next_sentence: bool, special_tokens: SpecialTokens) -> dict[str, Any]:
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


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The architecture that transformers reads from a config.json of ModernBERT, in the names of `ModelSettings`.

    What `ModelSettings` cannot say is told as the value of the nearest setting, so that it shows as a difference.
    """
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
