"""The families that `model.family` may name."""

from __future__ import annotations

from trainer.config.families.bert import Bert
from trainer.config.families.eurobert import EuroBert
from trainer.config.families.family import Custom, Family, PublishedFamily
from trainer.config.families.modernbert import ModernBert
from trainer.config.families.roberta import Roberta, XlmRoberta

FAMILIES: dict[str, Family] = {
    family.name: family for family in (Bert(), ModernBert(), Roberta(), XlmRoberta(), EuroBert(), Custom())
}


def published_families() -> list[PublishedFamily]:
    """Return the families with classes in transformers, in the order in which a custom model is compared with them."""
    return [family for family in FAMILIES.values() if isinstance(family, PublishedFamily)]
