"""EuroBERT (Boizard et al. 2025): the blocks of Llama 3 with attention in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from data_prep.tokenizer.special_tokens import SpecialTokens
from trainer.config.families.family import PublishedFamily, Rule

if TYPE_CHECKING:
    from trainer.config.model_settings import ModelSettings


class EuroBert(PublishedFamily):
    """EuroBERT has neither biases nor token types nor a head for sentence pairs; its decoder is tied or not.

    Defaults: arXiv 2503.05500 and the published config.json.
    """

    name = "eurobert"
    title = "EuroBERT"
    defaults: ClassVar = {
        "position_embedding": "rotary",
        "norm": "rmsnorm",
        "norm_position": "pre",
        "embedding_norm": False,
        "hidden_act": "swiglu",
        "bias": False,
        "mlm_head": "linear",
        "tie_word_embeddings": False,
        "decoder_bias": False,
        "type_vocab_size": 0,
        "layer_norm_eps": 1e-5,
        "hidden_dropout_prob": 0.0,
        "global_rope_theta": 250_000.0,
    }
    common_rules: ClassVar = {}
    rules: ClassVar = {
        "position_embedding": Rule(("rotary",), "EuroBERT has rotary positions"),
        "norm": Rule(("rmsnorm",), "EuroBERT has RMSNorm"),
        "norm_position": Rule(("pre",), "EuroBERT normalizes before each sublayer"),
        "embedding_norm": Rule((False,), "EuroBERT does not normalize the embeddings"),
        "hidden_act": Rule(("swiglu",), "EuroBERT's feed-forward layer is a SwiGLU"),
        "bias": Rule((False,), "EuroBERT has no biases"),
        "mlm_head": Rule(("linear",), "EuroBERT's MLM head is its decoder alone"),
        "decoder_bias": Rule((False,), "EuroBERT's MLM decoder has no bias"),
        "type_vocab_size": Rule((0,), "EuroBERT has no token types"),
        "local_attention": Rule((None,), "EuroBERT attends to the whole sequence"),
        "hidden_dropout_prob": Rule((0.0,), "EuroBERT has dropout on attention probabilities only"),
    }
    masked_lm_class = "EuroBertForMaskedLM"
    decoders: ClassVar = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
    modules: ClassVar = {
        "encoder.embeddings.word_embeddings": "model.embed_tokens",
        "encoder.final_norm": "model.norm",
        "mlm_head.decoder": "lm_head",
    }
    blocks = "model.layers"
    block_modules: ClassVar = {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": ("self_attn.o_proj",),
        "feed_forward_norm": ("post_attention_layernorm",),
        "feed_forward.intermediate": ("mlp.gate_proj", "mlp.up_proj"),  # transformers activates what it calls the gate
        "feed_forward.output": ("mlp.down_proj",),
    }

    def config_json(self, model: ModelSettings, has_pairs: bool, special_tokens: SpecialTokens) -> dict[str, Any]:
        return {
            "architectures": [self.masked_lm_class],
            "model_type": self.name,
            "vocab_size": model.padded_vocab_size,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": model.num_hidden_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.key_value_heads,
            "head_dim": model.head_size,
            "intermediate_size": model.intermediate_size,
            "hidden_act": "silu",
            "max_position_embeddings": model.max_position_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": model.global_rope_theta},
            "rms_norm_eps": model.layer_norm_eps,
            "attention_bias": model.bias,
            "mlp_bias": model.bias,
            "attention_dropout": model.attention_probs_dropout_prob,
            "classifier_pooling": "late",
            "initializer_range": model.initializer_range,
            "pad_token_id": special_tokens.pad,
            "bos_token_id": special_tokens.cls,
            "eos_token_id": special_tokens.sep,
            "mask_token_id": special_tokens.mask,
            "tie_word_embeddings": model.tie_word_embeddings,
            "dtype": "float32",
        }

    def settings_of(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        rope, activation = config_json["rope_parameters"], config_json["hidden_act"]
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        biases = {config_json.get(f"{part}_bias", False) for part in ("attention", "mlp")}  # Mistral has none
        window = config_json.get("sliding_window")
        return {name: config_json[name] for name in names} | {
            "key_value_heads": config_json["num_key_value_heads"],
            "head_size": config_json["head_dim"],
            "local_attention": window and f"{window} tokens to the left (sliding_window)",
            "hidden_act": "swiglu" if activation == "silu" else f"gated {activation}",
            "bias": biases.pop() if len(biases) == 1 else "in some modules only",
            "layer_norm_eps": config_json["rms_norm_eps"],
            "global_rope_theta": rope["rope_theta"] if rope.get("rope_type", "default") == "default" else "scaled",
        }
