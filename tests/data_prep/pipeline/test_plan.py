"""Plans that cannot be carried out are refused before work begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep import Tokenizer
from data_prep.base.errors import UsageError, UserError
from data_prep.config.preparation_config import (
    WITHOUT_EFFECT,
    DeduplicationSettings,
    DocumentSettings,
    PreparationConfig,
)
from data_prep.dataset.manifest import MANIFEST_NAME, Manifest
from data_prep.pipeline.plan import make_plan
from tests.support.error_codes import coded
from tests.support.preparations import config_of
from tests.support.work_units import limit_shards

NOTHING = {"shards": [], "documents": 0, "sentences": 0, "tokens": 0, "unigram_entropy_nats": None}


def test_every_section_is_part_of_the_identity_unless_it_is_named_as_without_effect(
    small_corpus: Path, tokenizer: Tokenizer
) -> None:
    """A new section or setting of the schema cannot be forgotten."""
    config = config_of(small_corpus)
    described = make_plan(config, tokenizer).described_config()
    assert set(described) == set(PreparationConfig.model_fields) - WITHOUT_EFFECT
    assert set(WITHOUT_EFFECT) == {"tokenizer", "storage_options", "num_workers", "keep_dropped", "text_output"}
    assert set(described["documents"]) == DocumentSettings.model_fields.keys() - {"format", "sentences"}
    none = make_plan(config_of(small_corpus, "documents.sentences=none"), tokenizer).described_config()
    assert none["documents"] == {**described["documents"], "sentences": "none"}, "the default is left out"

    class Extended(PreparationConfig):
        rewriting: DeduplicationSettings = DeduplicationSettings()

    extended = Extended(**{name: getattr(config, name) for name in PreparationConfig.model_fields})
    assert make_plan(extended, tokenizer).described_config()["rewriting"]["exact"] is True


def test_filters_are_part_of_the_identity(small_corpus: Path, tokenizer: Tokenizer) -> None:
    overrides = ["documents.metadata_fields=[score]", "documents.filters=[{name: metadata, keep: score > 1}]"]
    described = make_plan(config_of(small_corpus, *overrides), tokenizer).described_config()["documents"]
    assert described["metadata_fields"] == ["score"]
    assert described["filters"] == [{"name": "metadata", "parameters": {"keep": "score > 1"}, "version": "1"}]
    with pytest.raises(UsageError, check=coded("filter-field-not-read")):
        make_plan(config_of(small_corpus, *overrides[1:]), tokenizer)


def test_more_shards_than_there_are_names_for_are_refused(
    small_corpus: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(small_corpus, "shards.shard_bytes=100")
    assert len(make_plan(config, tokenizer).destinations) > 100
    limit_shards(monkeypatch, 100)
    with pytest.raises(UsageError, match=r"shards.shard_bytes=100 makes [\d,]+ shards", check=coded("too-many-shards")):
        make_plan(config, tokenizer)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: values.update(version=999_999), "at version 999,999, the highest possible number"),
        (lambda values: values.update(sources=[]), "names no source"),
        (lambda values: values.update(train=NOTHING), "names no train shard"),
    ],
)
def test_an_addition_to_an_unusable_data_set_is_refused(
    small_shards: Path, small_corpus: Path, tokenizer: Tokenizer, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    values = json.loads((small_shards / MANIFEST_NAME).read_bytes())
    edit(values)
    with pytest.raises(UserError, match=message):
        make_plan(config_of(small_corpus), tokenizer, Manifest.model_validate(values))
