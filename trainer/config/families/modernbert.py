"""ModernBERT (Warner et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from data_prep.tokenizer.special_tokens import SpecialTokens
from trainer.config.families.family import PublishedFamily, Rule, SublayerDropouts

if TYPE_CHECKING:
    from trainer.config.model_settings import ModelSettings


class ModernBert(PublishedFamily):
    """ModernBERT has neither token types nor a head for sentence pairs; defaults: section 2.1 and table 4."""

    name = "modernbert"
    title = "ModernBERT"
    defaults: ClassVar = {
        "position_embedding": "rotary",
        "norm_position": "pre",
        "hidden_act": "geglu",
        "bias": False,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-5,
        "hidden_dropout_prob": 0.0,
        "local_attention": 128,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160_000.0,
        "initialization": "depth_scaled",
    }
    rules: ClassVar = {
        "position_embedding": Rule(("rotary",), "ModernBERT has rotary positions"),
        "norm": Rule(("layernorm",), "ModernBERT has LayerNorm"),
        "norm_position": Rule(("pre",), "ModernBERT normalizes before each sublayer"),
        "embedding_norm": Rule((True,), "ModernBERT normalizes the embeddings"),
        "hidden_act": Rule(("geglu",), "ModernBERT's feed-forward layer is a GeGLU"),
        "type_vocab_size": Rule((0,), "ModernBERT has no token types"),
    }
    masked_lm_class = "ModernBertForMaskedLM"
    modules: ClassVar = {
        "encoder.embeddings.word_embeddings": "model.embeddings.tok_embeddings",
        "encoder.embeddings.norm": "model.embeddings.norm",
        "encoder.final_norm": "model.final_norm",
        "mlm_head": "decoder",
        "mlm_head.dense": "head.dense",
        "mlm_head.norm": "head.norm",
    }
    blocks = "model.layers"
    block_modules: ClassVar = {
        "attention_norm": ("attn_norm",),
        "attention.qkv": ("attn.Wqkv",),
        "attention.output": ("attn.Wo",),
        "feed_forward_norm": ("mlp_norm",),
        "feed_forward.intermediate": ("mlp.Wi",),
        "feed_forward.output": ("mlp.Wo",),
    }

    def sublayer_dropouts(self, hidden: float, attention_probs: float) -> SublayerDropouts:
        """Drop as transformers does (`mlp_dropout` and `attention_dropout`): within the feed-forward layer, and the
        output of attention with the probability of attention."""
        return SublayerDropouts(attention_probs, hidden, 0.0)

    def config_json(self, model: ModelSettings, has_pairs: bool, special_tokens: SpecialTokens) -> dict[str, Any]:
        """Return config.json with the names of the published files, which transformers 5 converts into newer names."""
        return {
            "architectures": [self.masked_lm_class],
            "model_type": self.name,
            "vocab_size": model.padded_vocab_size,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": model.num_hidden_layers,
            "num_attention_heads": model.num_attention_heads,
            "intermediate_size": model.intermediate_size,
            "hidden_activation": "gelu",
            "classifier_activation": "gelu",
            "classifier_pooling": "mean",  # without sentence pairs nothing taught [CLS] to stand for the whole
            "max_position_embeddings": model.max_position_embeddings,
            "local_attention": model.local_attention or 128,  # no layer reads it where all are global
            "global_attn_every_n_layers": model.global_attn_every_n_layers,
            "global_rope_theta": model.global_rope_theta,
            "local_rope_theta": model.local_rope_theta,
            "norm_eps": model.layer_norm_eps,
            "norm_bias": model.bias,
            "attention_bias": model.bias,
            "mlp_bias": model.bias,
            "classifier_bias": model.bias,
            "decoder_bias": True,
            "embedding_dropout": model.hidden_dropout_prob,
            "mlp_dropout": model.hidden_dropout_prob,
            "attention_dropout": model.attention_probs_dropout_prob,
            "initializer_range": model.initializer_range,
            "pad_token_id": special_tokens.pad,
            "bos_token_id": special_tokens.cls,
            "cls_token_id": special_tokens.cls,
            "eos_token_id": special_tokens.sep,
            "sep_token_id": special_tokens.sep,
            "tie_word_embeddings": True,
            "dtype": "float32",
        }

    def settings_of(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        biases = {config_json[f"{part}_bias"] for part in ("norm", "attention", "mlp", "classifier")}
        layer_types = ["local" if kind == "sliding_attention" else "global" for kind in config_json["layer_types"]]
        rope = {kind: config_json["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding")}
        activations = {config_json["hidden_activation"], config_json["classifier_activation"]}  # blocks and MLM head
        is_plain = all(parameters.get("rope_type", "default") == "default" for parameters in rope.values())
        settings = {
            "hidden_size": config_json["hidden_size"],
            "num_hidden_layers": config_json["num_hidden_layers"],
            "num_attention_heads": config_json["num_attention_heads"],
            "intermediate_size": config_json["intermediate_size"],
            "hidden_act": "geglu" if activations == {"gelu"} else f"gated {' and '.join(sorted(activations))}",
            "bias": biases.pop() if len(biases) == 1 else "in some modules only",
            "layer_norm_eps": config_json["norm_eps"],
            "attention_kinds": tuple(layer_types),
            "global_rope_theta": rope["full"]["rope_theta"] if is_plain else "scaled",
        }
        if "local" in layer_types:
            settings["local_attention"] = config_json["local_attention"]
            settings["local_rope_theta"] = rope["sliding"]["rope_theta"] if is_plain else "scaled"
        return settings
