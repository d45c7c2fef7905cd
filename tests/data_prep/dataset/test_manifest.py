"""Manifests whose parts contradict each other are refused when they are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.base.errors import UserError
from data_prep.dataset.manifest import MANIFEST_NAME, Manifest, read_manifest


def name_shard(values: dict[str, Any], name: str) -> None:
    values["train"]["shards"][1]["name"] = name


def repeat_shard(values: dict[str, Any]) -> None:
    shard = values["train"]["shards"][0]
    values["train"]["shards"].append(shard)
    for field in ("documents", "sentences", "tokens"):
        values["train"][field] += shard[field]


def set_fraction(values: dict[str, Any], fraction: object) -> None:
    values["config"]["shards"]["valid_fraction"] = fraction


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda values: name_shard(values, "manifest.json"), r"train\.shards\.1\.name: .*match pattern"),
        (lambda values: name_shard(values, "train-1.tar"), r"train\.shards\.1\.name: .*match pattern"),
        (lambda values: name_shard(values, "train-000000.tar"), "shard 'train-000000.tar' is named twice"),
        (repeat_shard, "shard 'train-000000.tar' is named twice"),
        (lambda values: values["sources"].append(values["sources"][0]), "source 'corpus' is named twice"),
        (lambda values: values["train"].update(tokens=5), "train: .*it counts 5 tokens and its shards hold"),
        (lambda values: values["valid"]["shards"].clear(), "valid: .*its shards hold 0"),
        (lambda values: set_fraction(values, "a tenth"), "shards.valid_fraction=a tenth is no number"),
        (lambda values: set_fraction(values, None), "shards.valid_fraction=None is no number"),
        (lambda values: set_fraction(values, 2), "shards.valid_fraction=2 is no number"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    small_shards: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    values = json.loads((small_shards / MANIFEST_NAME).read_bytes())
    edit(values)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"manifest.json is damaged.*{message}"):
        read_manifest(str(tmp_path))


def test_an_empty_split_and_no_sources_are_allowed(small_shards: Path) -> None:
    """A benchmark's made-up data sets have no sources, and a data set may hold out nothing."""
    values = json.loads((small_shards / MANIFEST_NAME).read_bytes())
    nothing = {"shards": [], "documents": 0, "sentences": 0, "tokens": 0, "unigram_entropy_nats": None}
    assert not Manifest.model_validate({**values, "valid": nothing, "sources": []}).valid.shards
