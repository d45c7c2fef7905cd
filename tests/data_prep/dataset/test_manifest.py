"""Manifests whose parts contradict each other are refused when they are read."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import data_prep
from data_prep.base.errors import UserError
from data_prep.dataset.data_card import data_card
from data_prep.dataset.manifest import MANIFEST_NAME, Manifest, read_manifest
from data_prep.dataset.manifest_records import step_of
from tests.support.error_codes import coded


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
        (lambda values: set_fraction(values, -1), "shards.valid_fraction=-1 is no number"),
        (lambda values: set_fraction(values, 2), "shards.valid_fraction=2 is no number"),
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


def reasons_of_later_steps() -> set[str]:
    """Every reason for dropping a document that the code of the pipeline names."""
    folder = Path(data_prep.__path__[0]) / "pipeline"
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    texts: list[ast.expr | None] = []
    for node in nodes:
        if isinstance(node, ast.Call) and _name(node.func) == "_drop":
            texts.append(node.args[0])
        elif isinstance(node, ast.Subscript) and _name(node.value) in ("dropped", "_dropped", "drops", "ids_by_reason"):
            texts.append(node.slice)
    return {text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)}


def _name(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@pytest.mark.long
def test_every_reason_of_a_later_step_belongs_to_it() -> None:
    """Reading has all reasons that no later step has, so that a new one of the pipeline must be in the table."""
    reasons = reasons_of_later_steps()
    assert {"empty", "too short", "duplicate", "near duplicate"} <= reasons
    assert {reason for reason in reasons if step_of(reason) == "reading"} == set()


def test_reasons_of_filters_and_formats_are_counted_in_the_steps(small_shards: Path) -> None:
    manifest = read_manifest(str(small_shards))
    (source,) = manifest.sources
    dropped = {"too short": 3, "filter metadata: no score": 2, "forgotten": 5, "invalid JSON": 1}
    manifest = manifest.model_copy(update={"sources": (source.model_copy(update={"dropped": dropped}),)})
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
