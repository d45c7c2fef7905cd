"""The estimate of --dry-run against what the preparation then makes."""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep import Tokenizer
from data_prep.base.errors import UserError
from data_prep.pipeline.plan import Plan
from data_prep.reports import estimate as estimate_module
from data_prep.reports.estimate import estimate
from data_prep.reports.estimate_report import described_steps, estimate_report
from tests.support.error_codes import coded
from tests.support.preparations import Planned, planned, read_texts, write_texts


def plan_of(tokenizer: Tokenizer, sources: dict[str, list[Path]], **documents: object) -> Plan:
    shards = {"min_shards": 2, "valid_fraction": 0.1, "unit_bytes": 20000}
    return planned(sources, tokenizer, documents=documents, deduplication={"exact": False}, shards=shards).plan


def formats_of(corpus: Path, folder: Path) -> dict[str, list[Path]]:
    """The corpus in every format, as three sources."""
    data = corpus.read_bytes()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(data))
    (folder / "a.jsonl.xz").write_bytes(lzma.compress(data))
    (folder / "a.txt").write_text("One document. It has two sentences.")
    texts = [json.loads(line)["text"] for line in data.decode().splitlines()]
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=50)
    (folder / "b.parquet.gz").write_bytes(gzip.compress((folder / "a.parquet").read_bytes()))
    return {
        "plain": [corpus],
        "packed": [folder / "a.jsonl.gz", folder / "a.jsonl.xz"],
        "other": [folder / "a.parquet", folder / "a.txt", folder / "b.parquet.gz"],
    }


def test_settings_of_a_source_are_shown(small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"body": "Some text.", "link": "https://b"}\n')
    own = {"input": tmp_path / "b.jsonl", "text_field": "body", "url_field": "link"}
    filters = [{"name": "url_blocklist", "urls": ["https://b"]}]
    preparation = planned({"plain": small_corpus, "own": {**own, "filters": filters}}, tokenizer)
    found = estimate(preparation.plan, tokenizer)
    assert (found.sources["own"].documents, found.sources["own"].dropped) == (0, 1)
    report = list(estimate_report(preparation.plan, tokenizer, found, 1, "out"))
    shown = "  source own has its own text_field body, url_field link, filters url_blocklist"
    assert [line for line in report if "of its own" in line or "its own" in line] == [shown]


def test_steps_are_described_in_order_with_the_rates_and_hours_of_the_filters(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "SAMPLE_CHARACTERS", 400_000)
    texts = read_texts(small_corpus)
    write_texts(tmp_path / "a.jsonl", [f"{text} {number}" for number in range(40) for text in texts])
    slow = {"name": "tests.support.filters:take_time", "milliseconds": 3}
    source = {"input": tmp_path / "a.jsonl", "filters": [{"name": "metadata", "keep": "source == 'a'"}, slow]}
    folders = [f"text_output={tmp_path / 'texts'}", f"keep_dropped={tmp_path / 'dropped'}"]
    preparation = planned({"a": source, "plain": small_corpus}, tokenizer, *folders, deduplication={"near": True})
    found = estimate(preparation.plan, tokenizer)
    lines = "\n".join(described_steps(preparation.plan, tokenizer, found)).splitlines()
    steps = "read filter filter clean, read clean, deduplicate write write write".split()
    assert [line.split()[1] for line in lines[1:-1]] == steps
    assert "take_time of a: milliseconds=3" in lines[3] and "exact, near (threshold 0.8, 128 hashes)" in lines[7]
    sampled, rate = found.costs["a"][2], float(lines[3].split()[-2])
    assert rate == pytest.approx(sampled.text_bytes / sampled.seconds / 1e6, abs=0.01)
    text_bytes = 40 * sum(len(text.encode()) for text in texts)
    assert found.hours("a", 2) * 3600 == pytest.approx(text_bytes / 1e6 / rate, rel=0.2)
    assert found.hours("a", 2) * 3600 > 0.003 * 8000
    assert lines[-2].split()[-2:] == lines[-4].split()[-2:] == ["-", "-"]
    monkeypatch.setattr(estimate_module, "SAMPLE_SECONDS", 0.2)
    hurried = estimate(preparation.plan, tokenizer)
    assert 0 < hurried.costs["a"][2].text_bytes < sampled.text_bytes / 2 and not hurried.is_all


def test_the_steps_say_whether_sentences_are_split(small_corpus: Path, tokenizer: Tokenizer) -> None:
    for setting, is_said in (("split", False), ("none", True)):
        plan = planned(small_corpus, tokenizer, f"documents.sentences={setting}").plan
        steps = "\n".join(described_steps(plan, tokenizer, estimate(plan, tokenizer)))
        assert ("sentences not split" in steps) == is_said


@pytest.mark.long
@pytest.mark.parametrize("exact", [True, False])
def test_a_small_corpus_is_read_whole_and_counted_exactly(
    exact: bool, small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "SAMPLED_UNITS", 1000)
    blank = tmp_path / "blank.jsonl"
    blank.write_bytes(b'\n\n{"text": " "}\n\n{"text": "One more text."}\n\n')
    (tmp_path / "empty.jsonl").touch()
    sources = formats_of(small_corpus, tmp_path) | {"blank": [blank, tmp_path / "empty.jsonl"]}
    plan = plan_of(tokenizer, sources)
    deduplication = plan.config.deduplication.model_copy(update={"exact": exact})
    plan = replace(plan, config=plan.config.model_copy(update={"deduplication": deduplication}))
    found = estimate(plan, tokenizer)
    manifest = Planned(plan, tokenizer).make(tmp_path / "out")
    assert found.is_all
    for source in manifest.sources:
        figures = found.sources[source.name]
        for name in ("documents", "sentences", "tokens", "text_bytes"):
            assert getattr(figures, name) == pytest.approx(getattr(source, name), rel=1e-9), (source.name, name)
        reasons = dict(source.dropped)
        assert figures.copies == pytest.approx(reasons.pop("duplicate", 0))
        assert figures.dropped == pytest.approx(sum(reasons.values()))
    size = sum(shard.bytes + shard.index.bytes for shard in manifest.shards)
    assert found.shard_bytes(plan, tokenizer) == pytest.approx(size, rel=0.1)
    report = "\n".join(estimate_report(plan, tokenizer, found, 4, "out"))
    assert "the counts are exact" in report and "not looked for here" not in report
    assert ("copies of others left out" in report) == exact
    assert list(tmp_path.glob("out/.work")) == []


@pytest.mark.long
@pytest.mark.parametrize(("sample_characters", "sampled_units"), [(500_000, 1000), (200_000, 20)])
def test_the_estimate_of_a_larger_corpus_is_close_in_every_format(
    sample_characters: int,
    sampled_units: int,
    small_corpus: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimate_module, "SAMPLE_CHARACTERS", sample_characters)
    monkeypatch.setattr(estimate_module, "SAMPLED_UNITS", sampled_units)
    plan = plan_of(tokenizer, formats_of(small_corpus, tmp_path))
    found = estimate(plan, tokenizer)
    manifest = Planned(plan, tokenizer).make(tmp_path / "out")
    assert not found.is_all
    for source in manifest.sources:
        for name in ("documents", "sentences", "tokens", "text_bytes"):
            told, real = getattr(found.sources[source.name], name), getattr(source, name)
            assert told == pytest.approx(real, rel=0.25), (source.name, name)
    size = sum(shard.bytes + shard.index.bytes for shard in manifest.shards)
    assert found.shard_bytes(plan, tokenizer) == pytest.approx(size, rel=0.3)
    report = "\n".join(estimate_report(plan, tokenizer, found, 4, "out"))
    assert "estimated from" in report and "in all: about" in report and "with 4 processes" in report
    unsplittable = report.partition("cannot be split, so one worker reads each: ")[2]
    assert all(f"{tmp_path / name} (" in unsplittable for name in ("a.jsonl.gz", "a.jsonl.xz", "b.parquet.gz"))
    assert "a.parquet (" not in unsplittable


def test_the_report_has_the_share_of_each_source_where_one_has_a_rule(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    names = ["weighted", "capped", "twice", "plain"]
    paths = [Path(shutil.copy(small_corpus, tmp_path / f"{name}.jsonl")) for name in names]
    plan = plan_of(tokenizer, {name: [path] for name, path in zip(names, paths, strict=True)})
    found = estimate(plan, tokenizer)
    assert "share of" not in "\n".join(estimate_report(plan, tokenizer, found, 1, "out"))
    rules = [{"weight": 2.0}, {"max_tokens": 1000}, {"epochs": 2.0}, {}]
    sources = tuple(s.model_copy(update=rule) for s, rule in zip(plan.config.sources, rules, strict=True))
    plan = replace(plan, config=plan.config.model_copy(update={"sources": sources}))
    lines = [line for line in estimate_report(plan, tokenizer, found, 1, "out") if "share of training samples" in line]
    train = {name: found.sources[name].tokens * (1 - plan.config.shards.valid_fraction) for name in names}
    weights = [2.0, 1000.0, train["twice"] * 2, train["plain"]]
    for line, name, weight, rule in zip(
        lines, names, weights, ("weight 2.0", "max_tokens 1,000", "epochs 2.0", "its tokens"), strict=True
    ):
        assert line.endswith(f"{name} {weight / sum(weights):.2%} ({rule})")
    total = round(5 * train["twice"])
    sources = tuple(s.model_copy(update={"weight": None}) for s in sources)
    config = plan.config.model_copy(update={"sources": sources, "total_tokens": total})
    lines = [
        line for line in estimate_report(replace(plan, config=config), tokenizer, found, 1, "out") if "share of" in line
    ]
    rest = round(total - 1000 - 2 * train["twice"])
    for line, name, use in zip(lines, names, (rest / 2, 1000, 2 * train["twice"], rest / 2), strict=True):
        numbers = line.partition(name)[2].replace(",", "").split(" of total_tokens ")
        assert float(numbers[0].split()[-1].lstrip("(")) == pytest.approx(use, abs=2), line
        assert numbers[1].startswith(f"{total} {use / train[name]:.2f} epochs"), line
    config = config.model_copy(update={"total_tokens": 1000})
    report = "\n".join(estimate_report(replace(plan, config=config), tokenizer, found, 1, "out"))
    assert "would be refused" in report and "total_tokens=1,000" in report


def test_a_source_with_a_budget_and_no_document_is_refused_as_by_the_preparation(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    part, copy = tmp_path / "part.jsonl", tmp_path / "copy.jsonl"
    part.write_bytes(b"".join(small_corpus.read_bytes().splitlines(keepends=True)[:50]))
    plan = plan_of(tokenizer, {"a": [part], "b": [Path(shutil.copy(part, copy))]})
    exact = plan.config.deduplication.model_copy(update={"exact": True})
    plan = replace(plan, config=plan.config.model_copy(update={"deduplication": exact}))
    assert estimate(plan, tokenizer).is_all  # with a warning alone
    a, b = plan.config.sources
    config = plan.config.model_copy(update={"sources": (a, b.model_copy(update={"epochs": 2.0}))})
    with pytest.raises(UserError, check=coded("source-without-documents"), match="b gives no document .*duplicate"):
        estimate(replace(plan, config=config), tokenizer)


def test_blank_lines_count_as_bytes_and_not_as_documents(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "SAMPLE_CHARACTERS", 2_000)
    lines = [json.dumps({"text": f"The old teacher crossed river {number}."}) + "\n\n \n" for number in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))
    texts = [f"The old teacher crossed\nriver {number}.\n\n\n" for number in range(400)]
    (tmp_path / "c.txt").write_text("".join(texts))
    (tmp_path / "d.csv").write_text("text\n" + "".join(f"The old teacher crossed river {n}.\n\n" for n in range(400)))
    sources = {name: [tmp_path / name] for name in ("a.jsonl", "b.jsonl.gz", "c.txt", "d.csv")}
    found = estimate(plan_of(tokenizer, sources, txt_documents="blank_lines"), tokenizer)
    for name in sources:
        assert found.sources[name].documents == pytest.approx(400, rel=0.1), name


def test_documents_that_are_files_are_counted_by_files_and_their_text_by_bytes(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "SAMPLED_UNITS", 4)
    files = [tmp_path / f"{number:02d}.txt" for number in range(40)]
    for number, path in enumerate(files):
        path.write_text(f"The teacher crossed river {number}. " * (1 if number % 10 else 200))
    found = estimate(plan_of(tokenizer, {"files": files}), tokenizer).sources["files"]
    assert found.documents == 40
    assert found.text_bytes == pytest.approx(sum(path.stat().st_size for path in files), rel=0.1)


def test_time_is_that_of_all_units_or_of_the_longest_one(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "SAMPLED_UNITS", 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(small_corpus.read_bytes() * 5))
    plan = plan_of(tokenizer, {"one": [tmp_path / "a.jsonl.gz"], "plain": [small_corpus]})
    started_at = time.perf_counter()
    found = estimate(plan, tokenizer)
    elapsed_seconds = time.perf_counter() - started_at
    assert found.is_all
    longest = found.sources["one"].seconds  # one unit; those of the plain file are small
    assert 0 < longest < found.seconds(1) <= elapsed_seconds
    assert found.seconds(1) == pytest.approx(longest + found.sources["plain"].seconds)
    assert found.longest_unit_seconds == found.seconds(1000) == pytest.approx(longest)


def test_bad_input_in_the_sample_is_reported_or_counted_by_policy(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate_module, "SAMPLED_UNITS", 1000)
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(small_corpus.read_bytes() + b'{"text": 5}\n{"text": " "}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(small_corpus.read_bytes())[:3000])
    with pytest.raises(UserError, match="bad.jsonl line 201", check=coded("not-text")):
        estimate(plan_of(tokenizer, {"bad": [bad]}), tokenizer)
    sources = {"bad": [bad], "cut": [tmp_path / "cut.jsonl.gz"]}
    estimates = estimate(plan_of(tokenizer, sources, on_bad_input="skip"), tokenizer)
    assert (estimates.sources["bad"].documents, estimates.sources["bad"].dropped) == (200, 2)
    assert (estimates.sources["cut"].documents, estimates.sources["cut"].dropped) == (0, 1)


def test_a_dry_run_of_empty_files_reports_it(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    plan = plan_of(tokenizer, {"empty": [tmp_path / "empty.jsonl"]})
    report = "\n".join(estimate_report(plan, tokenizer, estimate(plan, tokenizer), 1, "out"))
    assert "empty: 0 documents, " in report
