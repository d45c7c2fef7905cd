"""What a family of models is.

The name of a published family guarantees that transformers has a class that computes exactly this model, so it can be
exported. A family provides its published options as defaults, and fixes those that its class cannot vary. To add one,
write its file beside this one and its line in `trainer/config/families/registry.py`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from data_prep.tokenizer.special_tokens import SpecialTokens

if TYPE_CHECKING:
    from trainer.config.model_settings import ModelSettings

_BLOCK = re.compile(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")


class Rule(NamedTuple):
    """The values of one option that a family's class in transformers supports."""

    allowed: Container[Any]
    reason: str


class SublayerDropouts(NamedTuple):
    """Dropout probabilities within a block, without that on the attention probabilities."""

    attention_output: float
    feed_forward_inner: float
    """Dropout on the input of the second linear layer of a gated feed-forward layer."""
    feed_forward_output: float


class Family:
    """A value of `model.family`; a name in `defaults` and `rules` is that of a setting of the model."""

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Default options where they differ from those of `ModelSettings`, which are BERT's."""
    common_rules: ClassVar[Mapping[str, Rule]] = {}
    """Rules that hold where `rules` has no rule of that name."""
    rules: ClassVar[Mapping[str, Rule]] = {}

    def sublayer_dropouts(self, hidden: float, attention_probs: float) -> SublayerDropouts:
        """Return the dropout probabilities of a block for `hidden_dropout_prob` and `attention_probs_dropout_prob`."""
        return SublayerDropouts(hidden, 0.0, hidden)

    def violations(self, options: Mapping[str, Any]) -> list[str]:
        """Return the options that the family does not support, each as "model.NAME=VALUE (reason)"."""
        return [
            f"model.{name}={options[name]} ({rule.reason})"
            for name, rule in {**self.common_rules, **self.rules}.items()
            if options[name] not in rule.allowed
        ]


class PublishedFamily(Family, ABC):
    """A family with classes in transformers: what they call our modules, and their configuration both ways.

    `name` is also the `model_type` of config.json.
    """

    title: ClassVar[str]
    """Name in publications."""
    common_rules: ClassVar[Mapping[str, Rule]] = {
        "num_key_value_heads": Rule((None,), "it has as many heads of keys and values as of queries"),
        "mlm_head": Rule(("dense",), "its MLM head begins with a dense layer, an activation and a norm"),
        "tie_word_embeddings": Rule((True,), "its MLM decoder is the word matrix"),
        "decoder_bias": Rule((True,), "its MLM decoder has a bias"),
    }
    """Attention and MLM head of BERT, which most classes share; the others have rules of their own, or none."""
    masked_lm_class: ClassVar[str]
    pairs_class: ClassVar[str | None] = None
    """The class with a head for sentence pairs too; None if a model with that head cannot be exported."""

    decoders: ClassVar[Mapping[str, str]] = {}
    """Classes of decoders by their `model_type`, which have the weights of this family under the same names."""

    modules: ClassVar[Mapping[str, str]]
    """Name in transformers by our name, for modules outside of the blocks."""
    blocks: ClassVar[str]
    """Name of the list of blocks in transformers."""
    block_modules: ClassVar[Mapping[str, tuple[str, ...]]]
    """Names in transformers by our name, for modules within a block: several names for a matrix that is cut by rows."""

    def tensor_names(self, name: str) -> list[str]:
        """Return the names of our parameter `name` in transformers: several for a matrix or bias that is cut."""
        block = _BLOCK.fullmatch(name)
        if block is None:
            module, _, kind = name.rpartition(".")
            return [f"{self.modules[module]}.{kind}"]
        number, module, kind = block.groups()
        return [f"{self.blocks}.{number}.{part}.{kind}" for part in self.block_modules[module]]

    def first_position(self, pad_token_id: int) -> int:
        """Return the row of the position table in transformers that a sequence's first token has; none uses those
        before."""
        return 0

    @abstractmethod
    def config_json(self, model: ModelSettings, has_pairs: bool, special_tokens: SpecialTokens) -> dict[str, Any]:
        """Return the contents of config.json for a model with or without a head for sentence pairs."""

    @abstractmethod
    def settings_of(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        """Return the architecture that a config.json (with all values that transformers fills in) states, in the names
        of `ModelSettings`.

        An option that `ModelSettings` cannot express is the value of the nearest setting, so that it is a difference.
        """


class Custom(Family):
    """A family that starts from the options of BERT, fixes none and guarantees no export.

    Such a model trains, is evaluated and fills masks here. If its options are those of a published family, it is
    exported as a model of that family.
    """

    name = "custom"
