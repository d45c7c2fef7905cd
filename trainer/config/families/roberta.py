"""RoBERTa (Liu et al. 2019) and XLM-RoBERTa (Conneau et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from data_prep.tokenizer.special_tokens import SpecialTokens
from trainer.config.families.bert import Bert
from trainer.config.families.family import Rule

if TYPE_CHECKING:
    from trainer.config.model_settings import ModelSettings


def _rules(title: str) -> dict[str, Rule]:
    """Return the rules of BERT, and those of one token type and of a head that always has GELU."""
    rules = {name: rule._replace(reason=rule.reason.replace("BERT", title)) for name, rule in Bert.rules.items()}
    return rules | {
        "hidden_act": Rule(("gelu",), f"{title}'s head has GELU whatever its blocks have"),
        "type_vocab_size": Rule((1,), f"{title} has one token type and no head for sentence pairs"),
    }


class Roberta(Bert):
    """BERT without sentence pairs, with names of its own.

    In transformers the position of a token is counted from the id of [PAD] on, so the table has rows in front that no
    token uses: the published models have 514 rows for 512 positions. `max_position_embeddings` of ours counts without
    them.
    """

    name = "roberta"
    title = "RoBERTa"
    defaults: ClassVar = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
    rules: ClassVar = _rules(title)
    masked_lm_class = "RobertaForMaskedLM"
    pairs_class = None
    modules: ClassVar = {
        ours: theirs.replace("bert.", "roberta.")
        for ours, theirs in Bert.modules.items()
        if ours.startswith("encoder.")
    } | {
        "mlm_head": "lm_head",
        "mlm_head.dense": "lm_head.dense",
        "mlm_head.norm": "lm_head.layer_norm",
    }
    blocks = "roberta.encoder.layer"

    def first_position(self, pad_token_id: int) -> int:
        return pad_token_id + 1

    def config_json(self, model: ModelSettings, has_pairs: bool, special_tokens: SpecialTokens) -> dict[str, Any]:
        first = self.first_position(special_tokens.pad)
        return super().config_json(model, has_pairs, special_tokens) | {
            "max_position_embeddings": first + model.max_position_embeddings,
            "bos_token_id": special_tokens.cls,
            "eos_token_id": special_tokens.sep,
        }

    def settings_of(self, config_json: Mapping[str, Any]) -> dict[str, Any]:
        pad, rows = config_json["pad_token_id"], config_json["max_position_embeddings"]
        positions = "unknown (no pad_token_id)" if pad is None else rows - self.first_position(pad)
        return super().settings_of(config_json) | {"max_position_embeddings": positions}


class XlmRoberta(Roberta):
    """RoBERTa under other names."""

    name = "xlm-roberta"
    title = "XLM-RoBERTa"
    rules: ClassVar = _rules(title)
    masked_lm_class = "XLMRobertaForMaskedLM"
