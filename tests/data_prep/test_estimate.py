"""The estimate of --dry-run against what the preparation then makes."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import estimate as estimate_module
from data_prep.config import PreparationConfig
from data_prep.errors import UserError
from data_prep.estimate import estimate, estimate_report
from data_prep.manifest import Manifest
from data_prep.plan import Plan, make_plan
from data_prep.prepare import prepare_shards
from data_prep.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer: Path) -> Tokenizer:
    return Tokenizer.load(small_tokenizer)


def plan_of(tokenizer: Tokenizer, sources: dict[str, list[Path]], **documents: object) -> Plan:
    config = PreparationConfig.model_validate(
        {
            "sources": [{"name": name, "input": list(map(str, paths))} for name, paths in sources.items()],
            "documents": documents,
            "deduplication": {"exact": False},
            "shards": {"min_shards": 2, "valid_fraction": 0.1, "unit_bytes": 20000},
        }
    )
    return make_plan(config, tokenizer)


def made(plan: Plan, tokenizer: Tokenizer, folder: Path) -> Manifest:
    return prepare_shards(plan, tokenizer, str(folder), 1)[0]


@pytest.mark.parametrize(("sample_bytes", "sampled_units"), [(1_000_000, 1000), (40_000, 20)])
def test_the_estimate_of_every_format_is_near_what_is_made(
    sample_bytes: int,
    sampled_units: int,
    small_corpus: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimate_module, "SAMPLE_BYTES", sample_bytes)
    monkeypatch.setattr(estimate_module, "SAMPLED_UNITS", sampled_units)
    data = small_corpus.read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(data))
    (tmp_path / "a.txt").write_text("One document. It has two sentences.")
    texts = [json.loads(line)["text"] for line in data.decode().splitlines()]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=50)
    sources = {
        "plain": [small_corpus],
        "packed": [tmp_path / "a.jsonl.gz", tmp_path / "a.jsonl.xz"],
        "other": [tmp_path / "a.parquet", tmp_path / "a.txt"],
    }
    plan = plan_of(tokenizer, sources)
    estimates = estimate(plan, tokenizer)
    manifest = made(plan, tokenizer, tmp_path / "out")
    tolerance = 0.001 if sample_bytes > len(data) else 0.25
    for source in manifest.sources:
        figures = estimates[source.name]
        for name in ("documents", "sentences", "tokens", "text_bytes"):
            assert getattr(figures, name) == pytest.approx(getattr(source, name), rel=tolerance), (source.name, name)
        assert figures.seconds > 0
    report = list(estimate_report(plan, estimates, 2, 4, "out"))
    size = sum(shard.bytes + shard.index.bytes for shard in manifest.shards) / 1e6
    told = float(next(line for line in report if "MB of shards" in line).split()[1])
    assert told == pytest.approx(size, rel=0.3)
    text = "\n".join(report)
    assert "an estimate, from" in text and "in all: about" in text and "with 4 processes" in text
    assert f"cannot be split, so one worker reads each: {tmp_path / 'a.jsonl.gz'}" in text
    assert list(tmp_path.glob("out/.work")) == []


def test_bad_input_in_the_sample_is_told_or_counted_by_policy(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "SAMPLED_UNITS", 1000)
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(small_corpus.read_bytes() + b'{"text": 5}\n{"text": " "}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(small_corpus.read_bytes())[:3000])
    with pytest.raises(UserError, match="bad.jsonl line 201"):
        estimate(plan_of(tokenizer, {"bad": [bad]}), tokenizer)
    sources = {"bad": [bad], "cut": [tmp_path / "cut.jsonl.gz"]}
    estimates = estimate(plan_of(tokenizer, sources, on_bad_input="skip"), tokenizer)
    assert (estimates["bad"].documents, estimates["bad"].dropped) == (200, 2)
    assert (estimates["cut"].documents, estimates["cut"].dropped) == (0, 1)


def test_a_dry_run_of_nothing_but_empty_files_says_so(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    plan = plan_of(tokenizer, {"empty": [tmp_path / "empty.jsonl"]})
    report = "\n".join(estimate_report(plan, estimate(plan, tokenizer), 2, 1, "out"))
    assert "empty: about 0 documents" in report
