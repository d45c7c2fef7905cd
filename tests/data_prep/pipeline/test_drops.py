"""Each drop is counted with the step that drops it, wherever reasons, filters or chains are alike."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep.dataset.manifest import Manifest
from data_prep.documents.drops import (
    Drop,
    by_step,
    by_summary,
    drops_of_json,
    filter_step,
    name_of_filter,
    step_order,
    with_places,
)
from data_prep.pipeline.sections import read_summary
from tests.support.data_prep_command import Command
from tests.support.kill_points import stopped_after
from tests.support.preparations import prepared
from tests.support.work_units import limit_sums

REASON = "tests.support.filters:give_reason"
CHAIN = [
    {"name": REASON, "field": "first"},
    {"name": "metadata", "keep": "score >= 1"},
    {"name": REASON, "field": "second"},
    {"name": "metadata", "keep": "score >= 2"},
]
WHOLE = {"valid_fraction": 0}
ROWS = [
    {"first": "empty"},
    {"first": "removed"},
    {"second": "empty"},
    {"second": "duplicate"},
    {"second": "filter metadata: not score >= 2"},
    {"score": 0},
    {"score": 1},
    {"text": ""},
    {"text": "b"},
    {"text": "of eight words that are no copy of others"},
    {"text": "of eight words that are no copy of others"},
]
EXPECTED = {
    f"filter 1 {REASON}": {"empty": 1, "removed": 1},
    "filter 2 metadata": {"not score >= 1": 1},
    f"filter 3 {REASON}": {"duplicate": 1, "empty": 1, "filter metadata: not score >= 2": 1},
    "filter 4 metadata": {"not score >= 2": 1},
    "cleaning": {"empty": 1, "too short": 1},
    "deduplication": {"duplicate": 1},
}


def written(folder: Path, name: str, rows: list[dict[str, Any]], times: int = 1) -> str:
    lines = []
    for time in range(times):
        for number, row in enumerate(rows):
            default = {"id": f"{name}{time}-{number}", "score": 2, "text": f"document {number} of {name} with {time}"}
            lines.append(json.dumps(default | row))
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return str(folder / f"{name}.jsonl")


def documents(filters: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    fields = {"id_field": "id", "metadata_fields": ["first", "second", "score"], "min_document_characters": 2}
    return {**fields, "filters": filters, **settings}


def steps_of(manifest: Manifest) -> dict[str, dict[str, int]]:
    return {step.title: step.dropped for step in manifest.steps if step.dropped}


def rows_in(folder: Path) -> list[dict[str, Any]]:
    files = json.loads((folder / "dropped.json").read_bytes())["files"]
    return [json.loads(line) for name in files for line in gzip.decompress((folder / name).read_bytes()).splitlines()]


def test_filters_with_the_reasons_of_others_and_the_same_filter_twice_are_counted_apart(
    small_tokenizer: Path, tmp_path: Path, command: Command
) -> None:
    path, output, dropped = written(tmp_path, "own", ROWS), tmp_path / "set", tmp_path / "dropped"
    manifest = prepared(
        {"own": path}, small_tokenizer, output, f"keep_dropped={dropped}", documents=documents(CHAIN), shards=WHOLE
    )
    assert steps_of(manifest) == EXPECTED
    assert manifest.dropped[f"filter {REASON}: empty"] == 2 and manifest.dropped["empty"] == 1
    counts = [(step.documents_in, step.documents_out) for step in manifest.steps]
    assert counts[0] == (11, 11) and counts[-1] == (1, 1)
    assert all(before[1] == after[0] for before, after in zip(counts, counts[1:], strict=False))
    kept = {step: reasons for step, reasons in EXPECTED.items() if step != "deduplication"}
    found = Counter(Drop(row["step"], name) for row in rows_in(dropped) for name in [row["reason"]])
    assert found == Counter(
        {Drop(step, Drop(step, each).summary): n for step, of in kept.items() for each, n in of.items()}
    )
    index = json.loads((dropped / "dropped.json").read_bytes())
    assert index["dropped_by_step"] == {"own": kept}
    assert index["dropped"] == {
        "own": by_summary(Counter({Drop(s, r): n for s, of in kept.items() for r, n in of.items()}))
    }
    assert f"| filter 3 {REASON.replace('_', chr(92) + '_')} |" in (output / "DATA_CARD.md").read_text()
    assert command("stats", output) == 0 and "filter 4 metadata  " in command.output


def test_a_dry_run_shows_the_drops_of_each_step(small_tokenizer: Path, tmp_path: Path, command: Command) -> None:
    config = tmp_path / "data.yaml"
    sources = [{"name": "own", "input": written(tmp_path, "own", ROWS)}]
    config.write_text(json.dumps({"sources": sources, "documents": documents(CHAIN)}))
    arguments = ["--tokenizer", str(small_tokenizer), "--output", str(tmp_path / "set"), "--config", str(config)]
    assert command("shards", *arguments, "--dry-run", "--describe") == 0
    assert f"left out of own: 1 filter 1 {REASON}: empty, 1 filter 1 {REASON}: removed, " in command.output
    odd = [{"first": f"reason {number}"} for number in range(10)]
    written(tmp_path, "own", [*ROWS, *odd, odd[0]])
    assert command("shards", *arguments, "--dry-run") == 0
    assert f"left out of own: 2 filter 1 {REASON}: reason 0, " in command.output
    assert ", 12 of 12 other reasons\n" in command.output
    written(tmp_path, "own", ROWS)
    assert command("shards", *arguments, "--dry-run", "--describe") == 0
    rows = [line.split() for line in command.output.partition("\n#")[2].splitlines()[1:]]
    described = {row[0]: (row[1], row[2], row[-3]) for row in rows if row and row[0].isdigit()}
    assert [described[str(number)][2] for number in range(1, 6)] == ["0", "2", "1", "3", "1"]
    assert [row[-3] for row in rows if row[1] in ("clean,", "deduplicate")] == ["2", "1"]


def test_filters_of_other_settings_at_the_same_place_are_steps_of_their_sources(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    rows = [{"score": number} for number in range(4)]
    keep = [[{"name": "metadata", "keep": f"score >= {least}"}] for least in (1, 2, 1)]
    names = ["a", "b", "c"]
    sources = [
        {"name": name, "input": written(tmp_path, name, rows), "filters": filters}
        for name, filters in zip(names, keep, strict=True)
    ]
    sources.append({"name": "d", "input": written(tmp_path, "d", rows)})
    output = tmp_path / "set"
    manifest = prepared((), small_tokenizer, output, documents=documents([]), sources=sources, shards=WHOLE)
    found = {step.title: (step.documents_in, step.dropped, step.documents_out) for step in manifest.steps}
    assert found["filter 1 metadata (of a, c)"] == (8, {"not score >= 1": 2}, 6)
    assert found["filter 1 metadata (of b)"] == (4, {"not score >= 2": 2}, 2)
    assert found["cleaning"] == (12, {}, 12)
    card = (output / "DATA_CARD.md").read_text().replace("\\", "")
    own = [line for line in card.splitlines() if line.startswith("  - source ")]
    assert [line.partition(":")[0] for line in own] == ["  - source a", "  - source b", "  - source c"]
    assert '"score &gt;= 2"' in own[1] and '"score &gt;= 2"' not in own[0] + own[2]
    added = prepared(
        {"e": written(tmp_path, "e", rows)},
        small_tokenizer,
        output,
        add=True,
        documents=documents(keep[1]),
        shards=WHOLE,
    )
    found = {step.title: (step.documents_in, step.dropped, step.documents_out) for step in added.steps}
    assert found["filter 1 metadata (of b, e)"] == (8, {"not score >= 2": 4}, 4)
    assert found["filter 1 metadata (of a, c)"] == (8, {"not score >= 1": 2}, 6)


def test_a_filter_that_drops_nothing_is_a_step_and_odd_names_read_back() -> None:
    for name in ("m:f", "2 x", "a: b", "filter 3 y", "line\nfeed", "\u202egnp", ""):
        step = filter_step(12, name)
        assert name_of_filter(step) == name and Drop(step, "why").summary == f"filter {name}: why"
    assert name_of_filter("filter 0 x") is name_of_filter("filter x") is name_of_filter("filter \u0663 x") is None
    names = ["reading", "filter 2 b", "filter 10 a", "filtered text", "cleaning", "removal", "of a later release"]
    assert sorted({*names}, key=step_order) == names
    assert by_step({Drop("removal", "removed"): 1, Drop("filter 1 x", "b"): 2, Drop("filter 1 x", "a"): 3}) == {
        "filter 1 x": {"a": 3, "b": 2}, "removal": {"removed": 1}
    }  # fmt: skip


def test_work_of_an_earlier_release_is_counted_in_the_steps_that_its_reasons_had(
    small_tokenizer: Path, tmp_path: Path
) -> None:
    found = drops_of_json({"empty": 2, "filter metadata: x": 3, "near duplicate": 4, "damaged file": 5})
    assert found == {
        Drop("cleaning", "empty"): 2, Drop("filtering", "filter metadata: x"): 3,
        Drop("near duplicates", "near duplicate"): 4, Drop("reading", "damaged file"): 5,
    }  # fmt: skip
    assert drops_of_json({"removed earlier": 2}) == {Drop("takedowns", "removed earlier"): 2}
    assert by_summary(found) == {"damaged file": 5, "empty": 2, "filter metadata: x": 3, "near duplicate": 4}
    assert drops_of_json([["cleaning", "empty", 2]]) == {Drop("cleaning", "empty"): 2}
    of_filter, unknown = Drop("filter 2 metadata", "x"), Drop("filtering", "filter metadata: x")
    assert with_places({**found, of_filter: 1}, ["a", "metadata"])[of_filter] == 4
    assert with_places(found, ["metadata", "metadata"]) == with_places(found, ["a"]) == found
    assert with_places({unknown: 1}, ["metadata: x", "a"]) == {unknown: 1}


@pytest.mark.parametrize("is_twice", [False, True])
def test_resumed_work_of_an_earlier_release_never_says_that_a_filter_dropped_nothing(
    is_twice: bool, small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The summaries of earlier releases have reasons alone, with the name of the filter."""
    rows = [{"score": number} for number in (0, 1, 2, 3)]
    path, other = written(tmp_path, "own", rows), {"name": REASON, "field": "first"}
    chain = [
        {"name": "metadata", "keep": "score >= 1"},
        {"name": "metadata", "keep": "score >= 2"} if is_twice else other,
    ]
    settings: dict[str, Any] = {"documents": documents(chain), "shards": WHOLE}
    whole = prepared({"own": path}, small_tokenizer, tmp_path / "whole", **settings)

    def as_earlier(url: str) -> tuple[dict[str, Any], Any]:
        values, counts = read_summary(url)
        drops = drops_of_json(values["dropped"])
        return {**values, "dropped": {drop.summary: count for drop, count in drops.items()}}, counts

    monkeypatch.setattr("data_prep.pipeline.map_phase.read_summary", as_earlier)
    resumed = prepared({"own": path}, small_tokenizer, tmp_path / "resumed", **settings)
    if is_twice:
        assert resumed.dropped == whole.dropped
        assert resumed.sources[0].dropped_by_step == {
            "filtering": {"filter metadata: not score >= 1": 1, "filter metadata: not score >= 2": 1}
        }
    else:
        assert resumed.to_json() == whole.to_json()


@pytest.mark.parametrize("sums", [1, 128])
def test_a_stopped_run_counts_as_an_undisturbed_one(
    sums: int, small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_sums(monkeypatch, sums)
    path = written(tmp_path, "own", ROWS, times=3)
    settings: dict[str, Any] = {"documents": documents(CHAIN), "shards": {"unit_bytes": 500, **WHOLE}}
    whole = prepared({"own": path}, small_tokenizer, tmp_path / "whole", **settings)
    for writes, pattern in ((2, "map-*.sections"), (0, "manifest.json")):
        with pytest.raises(KeyboardInterrupt), stopped_after(writes, pattern):
            prepared({"own": path}, small_tokenizer, tmp_path / "stopped", **settings)
    assert prepared({"own": path}, small_tokenizer, tmp_path / "stopped", **settings).to_json() == whole.to_json()
    assert steps_of(whole)[f"filter 3 {REASON}"] == {"duplicate": 3, "empty": 3, "filter metadata: not score >= 2": 3}
