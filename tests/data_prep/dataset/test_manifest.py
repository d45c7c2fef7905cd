"""Manifests whose parts contradict each other are refused when they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from data_prep.base.errors import UserError
from data_prep.dataset.data_card import data_card
from data_prep.dataset.manifest import MANIFEST_NAME, Manifest, read_manifest
from tests.support.error_codes import coded

GOLDEN = Path(__file__).parents[2] / "golden"


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
        (lambda values: set_fraction(values, "a tenth"), "shards.valid_fraction=a tenth is not a number"),
        (lambda values: set_fraction(values, None), "shards.valid_fraction=None is not a number"),
        (lambda values: set_fraction(values, -1), "shards.valid_fraction=-1 is not a number"),
        (lambda values: set_fraction(values, 2), "shards.valid_fraction=2 is not a number"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    small_shards: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str
) -> None:
    values = json.loads((small_shards / MANIFEST_NAME).read_bytes())
    edit(values)
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"manifest.json.*{message}", check=coded("damaged-manifest")):
        read_manifest(str(tmp_path))


def test_an_empty_split_and_no_sources_are_allowed(small_shards: Path) -> None:
    """A benchmark's made-up data sets have no sources, and a data set may hold out nothing."""
    values = json.loads((small_shards / MANIFEST_NAME).read_bytes())
    nothing = {"shards": [], "documents": 0, "sentences": 0, "tokens": 0, "unigram_entropy_nats": None}
    assert not Manifest.model_validate({**values, "valid": nothing, "sources": []}).valid.shards


EARLIER = GOLDEN / "drops_by_reason"
"""Manifest and card by commit d184c335, which counted drops by reason: two preparations and a removal."""


def test_a_manifest_of_an_earlier_release_keeps_its_digest_its_card_and_its_steps() -> None:
    manifest = read_manifest(str(EARLIER))
    assert manifest.digest == hashlib.sha256((EARLIER / MANIFEST_NAME).read_bytes()).hexdigest()
    card = (EARLIER / "DATA_CARD.md").read_text(encoding="utf-8")
    for section in ("Sources", "Counts", "Steps of preparation", "Removals"):
        assert _section(data_card(manifest), section) == _section(card, section) != ""
    assert [(step.name, step.documents_in, step.dropped, step.documents_out) for step in manifest.steps] == [
        ("reading", 136, {"invalid JSON": 1, "no object": 1, "not text": 1}, 133),
        ("filtering", 133, {"filter metadata: not score >= 1": 28, "filter metadata: not score >= 2": 14}, 91),
        ("cleaning", 91, {"empty": 1, "too short": 1}, 89),
        (
            "deduplication",
            89,
            {"duplicate": 3, "near duplicate": 1, "in the data set already": 2, "removed earlier": 1},
            82,
        ),
        ("removal", 82, {"removed": 1}, 81),
    ]


def _section(card: str, name: str) -> str:
    return card.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_drops_of_the_same_reason_and_the_same_filter_twice_are_apart(small_shards: Path) -> None:
    steps = {
        "cleaning": {"empty": 1},
        "encoding": {"empty": 2},
        "filter 10 m:f": {"empty": 4},
        "filter 2 m:f": {"empty": 8, "removed": 16},
        "filter 2 m:f: a\nb": {},
        "removal": {"removed": 32},
    }
    dropped = {"empty": 3, "filter m:f: empty": 12, "filter m:f: removed": 16, "removed": 32}
    manifest = _with_drops(small_shards, dropped, steps)
    names = ["reading", "filter 2 m:f", "filter 2 m:f: a\nb", "filter 10 m:f"]
    names += ["cleaning", "encoding", "deduplication", "removal"]
    assert [step.name for step in manifest.steps] == names
    assert {step.name: step.dropped for step in manifest.steps if step.dropped} == {
        name: reasons for name, reasons in steps.items() if reasons
    }
    assert manifest.dropped == dropped
    assert Manifest.model_validate_json(manifest.to_json()) == manifest
    card = data_card(manifest)
    assert "| corpus | filter 10 m:f | empty | 4 |" in card and "| corpus | encoding | empty | 2 |" in card


@pytest.mark.parametrize(
    "steps",
    [
        {},
        {"cleaning": {"empty": 1}},
        {"cleaning": {"empty": 2}, "removal": {"removed": 1}},
        {"filter 1 x": {"empty": 2}},
    ],
)
def test_drops_by_step_that_contradict_those_by_reason_are_refused(
    small_shards: Path, steps: dict[str, dict[str, int]]
) -> None:
    with pytest.raises(ValidationError, match="its drops by step differ from its drops by reason"):
        _with_drops(small_shards, {"empty": 2}, steps)


def _with_drops(folder: Path, dropped: dict[str, int], steps: dict[str, dict[str, int]]) -> Manifest:
    values = json.loads((folder / MANIFEST_NAME).read_bytes())
    values["sources"][0] |= {"dropped": dropped, "dropped_by_step": steps}
    return Manifest.model_validate(values)


def test_reasons_of_an_earlier_release_are_counted_in_the_steps(small_shards: Path) -> None:
    manifest = read_manifest(str(small_shards))
    (source,) = manifest.sources
    dropped = {"too short": 3, "filter metadata: no score": 2, "forgotten": 5, "invalid JSON": 1}
    manifest = manifest.model_copy(
        update={"sources": (source.model_copy(update={"dropped": dropped, "dropped_by_step": None}),)}
    )
    assert manifest.dropped == {
        "forgotten": 5, "invalid JSON": 1, "filter metadata: no score": 2, "too short": 3
    }  # fmt: skip
    steps = {step.name: step for step in manifest.steps}
    assert list(steps) == ["reading", "filtering", "cleaning", "deduplication", "removal"]
    assert steps["reading"].dropped == {"forgotten": 5, "invalid JSON": 1}
    assert steps["filtering"].dropped == {"filter metadata: no score": 2}
    assert manifest.steps[0].documents_in == source.documents + 11
    assert manifest.steps[-1].documents_out == source.documents, "nothing is lost"
    card = data_card(manifest)
    assert "2 filter metadata: no score" in card and "5 forgotten" in card


def test_the_card_shows_every_section_of_the_settings(small_shards: Path) -> None:
    manifest = read_manifest(str(small_shards))
    manifest = manifest.model_copy(update={"config": {**manifest.config, "rewriting": {"rate": 0.5}}})
    assert "  - rewriting: rate 0.5" in data_card(manifest).split("\n")


def test_the_fix_of_a_damaged_manifest_is_a_command_that_works(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(UserError, check=coded("damaged-manifest")) as caught:
        read_manifest(str(tmp_path))
    assert "--fresh" in caught.value.fix and "removals and additions" in caught.value.fix
