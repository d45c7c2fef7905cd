"""`model`: the encoder."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from data_prep.base.settings import Settings
from trainer.config.families import OPTIONS, SublayerDropouts, sublayer_dropouts, violations
from trainer.config.setting_types import NonNegativeInt


class ModelSettings(Settings):
    """The encoder, in the words of the published configurations of BERT and ModernBERT."""

    family: Literal["bert", "modernbert", "custom"] = Field(
        "bert",
        description="architecture whose published options count where none are set: bert (the defaults shown here), "
        "modernbert, or custom (bert's, and any may be changed; only what transformers computes can be exported)",
    )
    vocab_size: PositiveInt = Field(30522, description="pieces of the tokenizer; at least the shards' vocabulary")
    pad_vocab_size_to_multiple_of: PositiveInt = Field(64, description="rows of the embedding are rounded up to this")
    hidden_size: PositiveInt = Field(768, description="width of the residual stream")
    num_hidden_layers: PositiveInt = Field(12, description="transformer blocks")
    num_attention_heads: PositiveInt = Field(12, description="heads; divides hidden_size")
    intermediate_size: PositiveInt = Field(3072, description="width of the feed-forward layer")
    max_position_embeddings: PositiveInt = Field(
        512, description="longest sequence the model knows positions for, places"
    )
    type_vocab_size: NonNegativeInt = Field(2, description="segments (A and B); 0: no embedding for them")
    position_embedding: Literal["learned", "sinusoidal", "rotary"] = Field(
        "learned", description="positions: added to the embeddings (learned, sinusoidal), or rotating queries and keys"
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="kind of every norm")
    norm_position: Literal["post", "pre"] = Field(
        "post", description="norms after each residual sum, or before each sublayer and after the last block"
    )
    embedding_norm: bool = Field(True, description="norm after the embeddings")
    hidden_act: Literal["gelu", "geglu", "relu"] = Field(
        "gelu", description="activation of the feed-forward layer; the MLM head's is gelu with geglu"
    )
    bias: bool = Field(True, description="biases in linear layers and LayerNorms; the MLM decoder always has one")
    local_attention: PositiveInt | None = Field(
        None, description="window of the local layers, places: half of it to each side, the place itself besides"
    )
    global_attn_every_n_layers: PositiveInt = Field(
        1, description="every n-th layer, from the first, attends to the whole sequence; the others are local"
    )
    global_rope_theta: PositiveFloat = Field(10_000.0, description="base of the rotary frequencies of global layers")
    local_rope_theta: PositiveFloat = Field(10_000.0, description="base of the rotary frequencies of local layers")
    hidden_dropout_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.1,
        description="dropout after embeddings and sublayers; modernbert: after embeddings and within the feed-forward "
        "layer, where transformers' ModernBERT has it",
    )
    attention_probs_dropout_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0,
        description="attention dropout (modernbert: of attention's output too); over 0 takes the reference attention, "
        "which is slower",
    )
    layer_norm_eps: PositiveFloat = Field(1e-12, description="epsilon of every norm")
    initializer_range: PositiveFloat = Field(
        0.02, description="standard deviation of the truncated normal initialization"
    )
    initialization: Literal["normal", "depth_scaled"] = Field(
        "normal",
        description="normal: every matrix alike; depth_scaled: those that write into the residual stream, and the MLM "
        "head's dense layer, by 1 / sqrt(2 num_hidden_layers)",
    )
    output_bias: Literal["zeros", "frequencies"] = Field(
        "zeros",
        description="beginning of the MLM decoder's bias: zeros as published, or the log of each piece's frequency in "
        "the shards, which saves the first few hundred steps",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_options_of_family(cls, values: Any) -> Any:
        family = values.get("family") if isinstance(values, dict) else None
        return {**OPTIONS[family], **values} if isinstance(family, str) and family in OPTIONS else values

    @model_validator(mode="after")
    def _options_are_of_the_family(self) -> ModelSettings:
        if found := violations(self.family, dict(self)):
            raise ValueError(
                f"model.family={self.family} does not have {'; '.join(found)}; leave the setting out, or set "
                "model.family=custom, which has any options and may be beyond what transformers can load"
            )
        return self

    @model_validator(mode="after")
    def _sizes_agree(self) -> ModelSettings:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}; choose heads that divide it"
            )
        if self.position_embedding == "rotary" and self.head_size % 2:
            raise ValueError(
                f"model.position_embedding=rotary turns pairs, and model.hidden_size={self.hidden_size} over "
                f"model.num_attention_heads={self.num_attention_heads} gives heads of odd size {self.head_size}; "
                "change one of them"
            )
        if self.position_embedding == "sinusoidal" and self.hidden_size % 2:
            raise ValueError(
                f"model.position_embedding=sinusoidal needs pairs of sine and cosine, and "
                f"model.hidden_size={self.hidden_size} is odd; choose an even one"
            )
        return self

    @model_validator(mode="after")
    def _local_layers_have_a_window(self) -> ModelSettings:
        window, period = self.local_attention, self.global_attn_every_n_layers
        if window is not None and window % 2:
            raise ValueError(
                f"model.local_attention={window} is odd, and half of it lies on each side of a place; set {window + 1}"
            )
        if window is None and period > 1:
            raise ValueError(
                f"model.global_attn_every_n_layers={period} makes layers local, and model.local_attention is not set; "
                "set its window, such as 128, or global_attn_every_n_layers=1"
            )
        if window is not None and period == 1:
            raise ValueError(
                f"model.local_attention={window} is never used with model.global_attn_every_n_layers=1, where every "
                "layer is global; set local_attention=null, or the other to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _rotations_are_used(self) -> ModelSettings:
        is_rotary = self.position_embedding == "rotary"
        used = {"global_rope_theta": is_rotary, "local_rope_theta": is_rotary and "local" in self.attention_kinds}
        for name, is_used in used.items():
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and not is_used:
                why = "no layer is local" if is_rotary else f"model.position_embedding={self.position_embedding}"
                raise ValueError(f"model.{name}={value:g} is never used where {why}; leave it out")
        return self

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_kinds(self) -> tuple[Literal["global", "local"], ...]:
        """What each layer attends to: the whole sequence, or a window around each place."""
        period = self.global_attn_every_n_layers
        return tuple("local" if number % period else "global" for number in range(self.num_hidden_layers))

    @property
    def sublayer_dropouts(self) -> SublayerDropouts:
        """Where a block drops, and how much."""
        return sublayer_dropouts(self.family, self.hidden_dropout_prob, self.attention_probs_dropout_prob)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding matrix: `vocab_size` rounded up to `pad_vocab_size_to_multiple_of`."""
        multiple = self.pad_vocab_size_to_multiple_of
        return -(-self.vocab_size // multiple) * multiple
