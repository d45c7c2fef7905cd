"""Options of the model families BERT and ModernBERT.

The name of a family guarantees that transformers has a class that computes exactly this model, so it can be exported.
A family provides its published options as defaults, and fixes those that its class cannot vary. `custom` starts from
the options of BERT, fixes none and guarantees no export: such a model trains, is evaluated and fills masks here.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

MODERNBERT_OPTIONS: Mapping[str, Any] = {
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
"""Warner et al. 2024 (ModernBERT), section 2.1 and table 4. BERT's options (Devlin et al. 2018) are the defaults of
`ModelSettings`."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {"bert": {}, "modernbert": MODERNBERT_OPTIONS, "custom": {}}


class Rule(NamedTuple):
    """The values of one option that a family's class in transformers supports."""

    allowed: Container[Any]
    reason: str


RULES: Mapping[str, Mapping[str, Rule]] = {
    "bert": {
        "position_embedding": Rule(("learned",), "BERT has learned position embeddings"),
        "norm": Rule(("layernorm",), "BERT has LayerNorm"),
        "norm_position": Rule(("post",), "BERT normalizes after each residual sum"),
        "embedding_norm": Rule((True,), "BERT normalizes the embeddings"),
        "hidden_act": Rule(("gelu", "relu"), "BERT's feed-forward layer has no gate"),
        "bias": Rule((True,), "BERT has biases in all linear layers and norms"),
        "type_vocab_size": Rule(range(1, 1 << 31), "BERT has an embedding for token types"),
        "local_attention": Rule((None,), "BERT attends to the whole sequence"),
    },
    "modernbert": {
        "position_embedding": Rule(("rotary",), "ModernBERT has rotary positions"),
        "norm": Rule(("layernorm",), "ModernBERT has LayerNorm"),
        "norm_position": Rule(("pre",), "ModernBERT normalizes before each sublayer"),
        "embedding_norm": Rule((True,), "ModernBERT normalizes the embeddings"),
        "hidden_act": Rule(("geglu",), "ModernBERT's feed-forward layer is a GeGLU"),
        "type_vocab_size": Rule((0,), "ModernBERT has no token types"),
    },
}


class SublayerDropouts(NamedTuple):
    """Dropout probabilities within a block, without that on the attention probabilities."""

    attention_output: float
    feed_forward_inner: float
    """On the input of the second linear layer of a gated feed-forward layer."""
    feed_forward_output: float


def sublayer_dropouts(family: str, hidden: float, attention_probs: float) -> SublayerDropouts:
    """Return the dropout probabilities of a block for `hidden_dropout_prob` and `attention_probs_dropout_prob`.

    BERT and custom models: each sublayer's output. ModernBERT as transformers has it (its `mlp_dropout` and
    `attention_dropout`): within the feed-forward layer, and attention's output by the probability of attention.
    """
    if family == "modernbert":
        return SublayerDropouts(attention_probs, hidden, 0.0)
    return SublayerDropouts(hidden, 0.0, hidden)


def violations(family: str, options: Mapping[str, Any]) -> list[str]:
    """Return the options that `family` does not support, each as "model.NAME=VALUE (reason)"."""
    return [
        f"model.{name}={options[name]} ({rule.reason})"
        for name, rule in RULES.get(family, {}).items()
        if options[name] not in rule.allowed
    ]
