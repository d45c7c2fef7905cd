"""BERT (Devlin et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from data_prep.tokenizer.special_tokens import SpecialTokens
from trainer.config.families.family import PublishedFamily, Rule

if TYPE_CHECKING:
    from trainer.config.model_settings import ModelSettings


class Bert(PublishedFamily):
    """Its published options are the defaults of `ModelSettings`."""

    name = "bert"
    title = "BERT"
    rules: ClassVar = {
        "position_embedding": Rule(("learned",), "BERT has learned position embeddings"),
        "norm": Rule(("layernorm",), "BERT has LayerNorm"),
        "norm_position": Rule(("post",), "BERT normalizes after each residual sum"),
        "embedding_norm": Rule((True,), "BERT normalizes the embeddings"),
        "hidden_act": Rule(("gelu", "relu"), "BERT's feed-forward layer has no gate"),
        "bias": Rule((True,), "BERT has biases in all linear layers and norms"),
        "type_vocab_size": Rule(range(1, 1 << 31), "BERT has an embedding for token types"),
        "local_attention": Rule((None,), "BERT attends to the whole sequence"),
    }
    masked_lm_class = "BertForMaskedLM"  # has no pooler
    pairs_class: ClassVar[str | None] = "BertForPreTraining"
    modules: ClassVar = {
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
    blocks = "bert.encoder.layer"
    block_modules: ClassVar = {
        "attention.qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
        "attention.output": ("attention.output.dense",),
        "attention_norm": ("attention.output.LayerNorm",),
        "feed_forward.intermediate": ("intermediate.dense",),
        "feed_forward.output": ("output.dense",),
        "feed_forward_norm": ("output.LayerNorm",),
    }

    def config_json(self, model: ModelSettings, has_pairs: bool, special_tokens: SpecialTokens) -> dict[str, Any]:
        return {
            "architectures": [self.pairs_class if has_pairs else self.masked_lm_class],
            "model_type": self.name,
            "vocab_size": model.padded_vocab_size,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": model.num_hidden_layers,
            "num_attention_heads": model.num_attention_heads,
            "intermediate_size": model.intermediate_size,
            "hidden_act": model.hidden_act,
            "hidden_dropout_prob": model.hidden_dropout_prob,
            "attention_probs_dropout_prob": model.attention_probs_dropout_prob,
            "max_position_embeddings": model.max_position_embeddings,
            "type_vocab_size": model.type_vocab_size,
            "initializer_range": model.initializer_range,
            "layer_norm_eps": model.layer_norm_eps,
            "pad_token_id": special_tokens.pad,
            "tie_word_embeddings": True,
            "dtype": "float32",
        }

    def settings_of(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
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
        causal = {"local_attention": "to the left alone (is_decoder)"} if config_json.get("is_decoder") else {}
        positions = config_json.get("position_embedding_type", "absolute")
        learned = {"position_embedding": "learned" if positions == "absolute" else positions}
        return {name: config_json.get(name) for name in names} | learned | causal
