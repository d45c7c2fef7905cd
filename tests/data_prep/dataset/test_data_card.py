"""The data card: what a person must know stands in it, and nothing in it acts as Markdown."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from data_prep import open_dataset
from data_prep.dataset.data_card import CARD_NAME, data_card, escaped
from tests.support.living_data_sets import document_ids, make_data_set, remove
from tests.support.preparations import Manifest, read_texts


def with_source(manifest: Manifest, **changes: object) -> Manifest:
    return manifest.model_copy(update={"sources": (manifest.sources[0].model_copy(update=changes),)})


def table_rows(card: str, section: str) -> list[list[str]]:
    text = card.partition(f"## {section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_data_set_has_a_card(small_shards: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    card = (small_shards / CARD_NAME).read_text(encoding="utf-8")
    assert f"`{manifest.digest}`" in card and manifest.tokenizer.fingerprint in card
    assert f"{manifest.train.tokens:,}" in card and 'form "NFC"' in card
    assert "valid\\_fraction 0.1" in card, "names of settings are escaped too"


def test_a_missing_license_is_stated_in_the_card(small_shards: Path) -> None:
    manifest = open_dataset(small_shards).manifest
    assert manifest.sources[0].license is None
    assert "| not stated |" in data_card(manifest)
    assert "**Warning: the license of corpus is not stated.**" in data_card(manifest)
    stated = data_card(with_source(manifest, license="CC-BY-SA-4.0"))
    assert "Warning" not in stated and "CC-BY-SA-4.0" in stated
    assert stated.count("not stated") == data_card(manifest).count("not stated") - 2


@pytest.mark.parametrize("name", ["a|b\n# c", "<script>alert(1)</script>", "[x](javascript:y)", "\u202e\x1b[31m `*_"])
def test_text_of_the_user_is_escaped_in_the_card(small_shards: Path, name: str) -> None:
    card = data_card(
        with_source(open_dataset(small_shards).manifest, name=name, license=name, url=f"https://u:p@h/{name}")
    )
    head, _, *rows = table_rows(card, "Sources")
    assert [len(row) for row in rows] == [len(head)]
    assert "<script" not in card and "\x1b" not in card and "\u202e" not in card and "u:p@" not in card
    assert card.count("\n# ") == 0, "no heading of its own"
    card.encode()


def test_escaping_by_hand() -> None:
    assert escaped("a|b\n c_d <e> & `f`") == r"a\|b c\_d &lt;e&gt; &amp; \`f\`"


def test_the_card_lists_versions_drops_and_removals(small_corpus: Path, small_tokenizer: Path, tmp_path: Path) -> None:
    texts = read_texts(small_corpus)
    folder = tmp_path / "shards"
    first = make_data_set(folder, {"one": [*texts[:60], *texts[:3], " "], "two": texts[60:90]}, small_tokenizer)
    ids = np.array(document_ids(folder, "one")[:4], np.uint64)
    remove(folder, ids=ids)
    manifest, _ = remove(folder, source="two")
    card = (folder / CARD_NAME).read_text(encoding="utf-8")
    assert "- version: 3, derived from the version" in card and f"`{manifest.parent}`" in card
    steps = {row[0]: row[1:] for row in table_rows(card, "Steps of preparation")[2:7]}
    assert steps["cleaning"] == ["94", "1", "93", "1 empty"]
    assert steps["deduplication"] == ["93", "3", "90", "3 duplicate"]
    assert steps["removal"] == ["90", "34", "56", "34 removed"]
    removals = table_rows(card, "Removals")[2:]
    assert [row[0] for row in removals] == ["2", "3"] and "removed-000002.safetensors" in removals[0][1]
    assert removals[1][1:3] == ["source two", "30"]
    assert first.digest not in card, "the parent is version 2"


def test_the_loading_code_of_the_card_works(small_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = (small_shards / CARD_NAME).read_text(encoding="utf-8")
    code = card.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(small_shards)
    values: dict[str, object] = {"total": 0}
    exec(code + "    total += len(tokens)\n", values)  # the loop's body is the last line
    train = json.loads((small_shards / "manifest.json").read_text())["train"]
    assert values["total"] == train["tokens"]
