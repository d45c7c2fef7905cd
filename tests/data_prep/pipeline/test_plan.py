"""Plans that cannot be carried out are refused before work begins."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.base.errors import UsageError, UserError
from data_prep.config.preparation_config import load_config
from data_prep.dataset.manifest import MANIFEST_NAME, Manifest
from data_prep.pipeline.plan import make_plan
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded

NOTHING = {"shards": [], "documents": 0, "sentences": 0, "tokens": 0, "unigram_entropy_nats": None}


def test_more_shards_than_there_are_names_for_are_refused(
    small_corpus: Path, small_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(None, ["shards.shard_bytes=100"], [str(small_corpus)])
    tokenizer = Tokenizer.load(small_tokenizer)
    assert len(make_plan(config, tokenizer).destinations) > 100
    monkeypatch.setattr("data_prep.pipeline.scale_plan.MAX_SHARDS", 100)
    with pytest.raises(UsageError, match=r"shards.shard_bytes=100 makes [\d,]+ shards", check=coded("too-many-shards")):
        make_plan(config, tokenizer)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: values.update(version=999_999), "at version 999,999, the last that there can be"),
        (lambda values: values.update(sources=[]), "names no source"),
        (lambda values: values.update(train=NOTHING), "names no train shard"),
    ],
)
def test_what_nothing_can_be_added_to_is_refused(
    small_shards: Path,
    small_corpus: Path,
    small_tokenizer: Path,
    edit: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    values = json.loads((small_shards / MANIFEST_NAME).read_bytes())
    edit(values)
    config = load_config(None, [], [str(small_corpus)])
    with pytest.raises(UserError, match=message):
        make_plan(config, Tokenizer.load(small_tokenizer), Manifest.model_validate(values))
