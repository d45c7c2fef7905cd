"""`model`: the encoder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from data_prep.base.settings import NonNegativeInt, SettingError, Settings
from trainer.config.families.family import SublayerDropouts
from trainer.config.families.registry import FAMILIES

if TYPE_CHECKING:
    FamilyName = str
else:
    FamilyName = Literal[tuple(FAMILIES)]


class ModelSettings(Settings):
    """The encoder; names are those of the published configurations of BERT and ModernBERT."""

    family: FamilyName = Field(
        "bert",
        description="architecture, which sets the defaults (shown here: bert); custom begins with those of bert "
        "and lets every option change, but can be exported only if a class of transformers computes the same",
    )
    vocab_size: PositiveInt = Field(
        30522, le=2**32, description="tokens in the vocabulary; at least that of the shards"
    )
    pad_vocab_size_to_multiple_of: PositiveInt = Field(
        64, le=2**20, description="embedding rows are rounded up to a multiple of this"
    )
    hidden_size: PositiveInt = Field(768, le=2**17, description="width of the residual stream")
    num_hidden_layers: PositiveInt = Field(12, le=1_000, description="number of transformer blocks")
    num_attention_heads: PositiveInt = Field(12, le=2**17, description="attention heads per block; divides hidden_size")
    num_key_value_heads: PositiveInt | None = Field(
        None,
        le=2**17,
        description="heads of keys and values (grouped-query attention); divides num_attention_heads and equals it "
        "by default",
    )
    intermediate_size: PositiveInt = Field(3072, le=2**20, description="width of the feed-forward layer")
    max_position_embeddings: PositiveInt = Field(
        512, le=2**24, description="longest sequence that the model supports, in tokens"
    )
    type_vocab_size: NonNegativeInt = Field(
        2, le=2**16, description="token types (segments A and B); 0: no token type embedding"
    )
    position_embedding: Literal["learned", "sinusoidal", "rotary", "none"] = Field(
        "learned",
        description="position encoding: added to embeddings (learned, sinusoidal) or rotary (RoPE); without "
        "positions (none) only local attention or a causal objective shows the order of tokens, and the model "
        "cannot be exported",
    )
    norm: Literal["layernorm", "rmsnorm"] = Field("layernorm", description="type of all norms")
    norm_position: Literal["post", "pre"] = Field(
        "post",
        description="place of the norms: after each residual sum (post), or before each sublayer and after the last "
        "block (pre)",
    )
    embedding_norm: bool = Field(True, description="norm after the embeddings")
    hidden_act: Literal["gelu", "geglu", "swiglu", "relu"] = Field(
        "gelu",
        description="activation of the feed-forward layer; with geglu the MLM head uses gelu, with swiglu silu",
    )
    bias: bool = Field(True, description="biases in linear layers and LayerNorms; for the MLM decoder see decoder_bias")
    mlm_head: Literal["dense", "linear"] = Field(
        "dense",
        description="MLM head: linear layer, activation and norm before the decoder (dense), or the decoder alone "
        "(linear)",
    )
    tie_word_embeddings: bool = Field(
        True, description="the MLM decoder is the matrix of the word embeddings; false: a matrix of its own"
    )
    decoder_bias: bool = Field(True, description="bias of the MLM decoder, one per row of the vocabulary")
    local_attention: PositiveInt | None = Field(
        None, description="attention window of local layers in tokens, half to each side"
    )
    global_attn_every_n_layers: PositiveInt = Field(
        1, description="every n-th layer, starting with the first, uses global attention; the others are local"
    )
    global_rope_theta: PositiveFloat = Field(10_000.0, description="RoPE base of global layers")
    local_rope_theta: PositiveFloat = Field(10_000.0, description="RoPE base of local layers")
    hidden_dropout_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.1,
        description="dropout after embeddings and sublayers; modernbert: after embeddings and inside the feed-forward "
        "layer, as in transformers",
    )
    attention_probs_dropout_prob: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0,
        description="attention dropout (modernbert: on the attention output too); above 0 uses the reference "
        "attention, which is slower",
    )
    layer_norm_eps: PositiveFloat = Field(1e-12, description="epsilon of every norm")
    initializer_range: PositiveFloat = Field(
        0.02, description="standard deviation of the truncated normal initialization"
    )
    initialization: Literal["normal", "depth_scaled"] = Field(
        "normal",
        description="initial weights of matrices: of one standard deviation (normal), or of 1 / sqrt(2 "
        "num_hidden_layers) of it where they write into the residual stream, and in the MLM head's dense layer "
        "(depth_scaled)",
    )
    output_bias: Literal["zeros", "frequencies"] = Field(
        "zeros",
        description="initial bias of the MLM decoder: zeros as published, or the log of each token's frequency in "
        "the shards, which saves the first few hundred steps",
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_family_defaults(cls, values: Any) -> Any:
        family = values.get("family") if isinstance(values, dict) else None
        return {**FAMILIES[family].defaults, **values} if isinstance(family, str) and family in FAMILIES else values

    @model_validator(mode="after")
    def _options_are_of_the_family(self) -> ModelSettings:
        if broken_rules := FAMILIES[self.family].violations(dict(self)):
            raise SettingError(
                f"model.family={self.family} does not support {'; '.join(broken_rules)}",
                fix="remove the setting, or set model.family=custom (transformers may then not be able to load it)",
                code="option-not-of-family",
            )
        return self

    @model_validator(mode="after")
    def _sizes_agree(self) -> ModelSettings:
        if self.hidden_size % self.num_attention_heads:
            raise SettingError(
                f"model.hidden_size={self.hidden_size} is not a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}",
                fix="choose a number of heads that divides it",
                code="heads-do-not-divide-hidden-size",
            )
        if self.num_attention_heads % self.key_value_heads:
            raise SettingError(
                f"model.num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"model.num_key_value_heads={self.num_key_value_heads}",
                fix="choose a number of key and value heads that divides it",
                code="key-value-heads-do-not-divide-heads",
            )
        if self.position_embedding == "rotary" and self.head_size % 2:
            raise SettingError(
                f"model.position_embedding=rotary needs heads of even size, and model.hidden_size={self.hidden_size} / "
                f"model.num_attention_heads={self.num_attention_heads} is {self.head_size}",
                fix="change one of the two",
                code="odd-head-size",
            )
        if self.position_embedding == "sinusoidal" and self.hidden_size % 2:
            raise SettingError(
                f"model.position_embedding=sinusoidal needs an even model.hidden_size, got {self.hidden_size}",
                fix="set an even model.hidden_size",
                code="odd-hidden-size",
            )
        return self

    @model_validator(mode="after")
    def _local_layers_have_a_window(self) -> ModelSettings:
        window, period = self.local_attention, self.global_attn_every_n_layers
        if window is not None and window % 2:
            raise SettingError(
                f"model.local_attention={window} is odd, and half of it lies on each side of a token",
                fix=f"set model.local_attention={window + 1}",
                code="odd-local-attention",
            )
        if window is None and period > 1:
            raise SettingError(
                f"model.global_attn_every_n_layers={period} makes layers local, and model.local_attention is not set",
                fix="set model.local_attention to a window such as 128, or model.global_attn_every_n_layers=1",
                code="local-attention-not-set",
            )
        if window is not None and period == 1:
            raise SettingError(
                f"model.local_attention={window} has no effect with model.global_attn_every_n_layers=1: every layer is "
                "global",
                fix="set model.local_attention=null, or model.global_attn_every_n_layers to 2 or more",
                code="setting-without-effect",
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
                raise SettingError(
                    f"model.{name}={value:g} has no effect: {why}",
                    fix=f"remove model.{name}",
                    code="setting-without-effect",
                )
        return self

    @model_validator(mode="after")
    def _output_bias_exists(self) -> ModelSettings:
        if self.output_bias == "frequencies" and not self.decoder_bias:
            raise SettingError(
                "model.output_bias=frequencies sets the bias of the MLM decoder, which model.decoder_bias=false leaves "
                "out",
                fix="set model.output_bias=zeros, or model.decoder_bias=true",
                code="setting-without-effect",
            )
        return self

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Number of heads of keys and of values: `num_key_value_heads`, by default that of the queries."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def key_value_size(self) -> int:
        """Width of all keys, or values, of a position together."""
        return self.key_value_heads * self.head_size

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward layer multiplies its activated values with gates, so that it has three matrices."""
        return self.hidden_act in ("geglu", "swiglu")

    @property
    def attention_kinds(self) -> tuple[Literal["global", "local"], ...]:
        """Attention of each layer: over the whole sequence, or in a window around each token."""
        period = self.global_attn_every_n_layers
        return tuple("local" if number % period else "global" for number in range(self.num_hidden_layers))

    @property
    def sublayer_dropouts(self) -> SublayerDropouts:
        """Dropout probabilities within a block."""
        return FAMILIES[self.family].sublayer_dropouts(self.hidden_dropout_prob, self.attention_probs_dropout_prob)

    @property
    def padded_vocab_size(self) -> int:
        """Number of rows of the embedding matrix: `vocab_size` rounded up to `pad_vocab_size_to_multiple_of`."""
        multiple = self.pad_vocab_size_to_multiple_of
        return -(-self.vocab_size // multiple) * multiple
