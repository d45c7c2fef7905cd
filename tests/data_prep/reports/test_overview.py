"""The first screen of the report: its numbers add up, its words are plain, and names that users write are only text."""

from __future__ import annotations

import html
import inspect
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from data_prep import open_dataset
from data_prep.dataset.data_card import data_card
from data_prep.dataset.manifest import Manifest
from data_prep.documents.drops import Drop, filter_step
from data_prep.documents.rejects import READING_REASONS
from data_prep.reports.overview import (
    headline,
    plain_reason,
    reason_overview,
    removal_overview,
    source_overview,
    training_use,
)
from data_prep.reports.page import markdown_html, read_samples
from tests.support.preparations import prepared, read_texts, write_texts

HOSTILE = '<b>&amp;</b> | `x` **y** \\ "\u202e\u05d0\u05d1\u05d2'


def source_rows(manifest: Manifest) -> dict[str, dict[str, str]]:
    table = source_overview(manifest)
    names = [column.name for column in table.columns]
    return {row[0]: dict(zip(names, row, strict=True)) for row in table.rows}


@pytest.fixture(scope="module")
def texts(small_corpus: Path) -> list[str]:
    return read_texts(small_corpus)[:60]


@pytest.fixture(scope="module")
def folder(texts: list[str], small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One source of every kind: hostile name, copies of another one, and no document."""
    inputs = tmp_path_factory.mktemp("overview")
    parts = {HOSTILE: texts[:50], "copies": [*texts[:3], *texts[50:], ""], "none": ["", " "]}
    sources = {}
    for number, (name, own) in enumerate(parts.items()):
        sources[name] = {"input": write_texts(inputs / f"{number}.jsonl", own)}
    sources[HOSTILE]["license"] = "CC0-1.0"
    prepared(sources, small_tokenizer, inputs / "set")
    return inputs / "set"


def test_each_source_has_a_row_that_adds_up(folder: Path) -> None:
    manifest = open_dataset(folder).manifest
    rows = source_rows(manifest)
    assert list(rows) == [HOSTILE, "copies", "none"]
    assert [row["came in"] for row in rows.values()] == ["50", "14", "2"]
    assert [row["kept"] for row in rows.values()] == ["50", "10", "0"]
    assert [row["kept in %"] for row in rows.values()] == ["100.0%", "71.4%", "0.0%"]
    assert rows["copies"]["because the document ..."] == "has the same text as another document (3); has no text (1)"
    assert rows[HOSTILE]["license"] == "CC0-1.0" and rows["none"]["license"] == "not stated"
    assert rows["none"]["share of training"] == rows["none"]["repetitions"] == "-"
    shares = [float(row["share of training"].rstrip("%")) for row in list(rows.values())[:2]]
    assert sum(shares) == pytest.approx(100, abs=0.1) and rows["copies"]["repetitions"] == "1.00"
    assert next(headline(manifest)).startswith("66 documents came in; 60 (90.9%) are in the data set now")
    assert list(headline(manifest))[1] == (
        "6 (9.1%) were left out, because the document has no text (3); has the same text as another document (3)."
    )
    assert list(headline(manifest))[-1].startswith("The license of copies is not stated.")
    assert [row[0] for row in reason_overview(manifest).rows] == ["1", "2", "3", "4"]


def test_parts_and_reasons_are_not_rounded_away(folder: Path) -> None:
    manifest = open_dataset(folder).manifest

    def with_drops(source: int, reasons: dict[str, int], documents: int) -> dict[str, str]:
        own = {"dropped": reasons, "dropped_by_step": {"reading": reasons}, "documents": documents}
        sources = [*manifest.sources]
        sources[source] = sources[source].model_copy(update=own)
        return source_rows(manifest.model_copy(update={"sources": tuple(sources)}))[sources[source].name]

    assert with_drops(1, {"not text": 1}, 9_999_999)["kept in %"] == "over 99.9%"
    assert with_drops(1, {"not text": 9_999_999}, 1)["kept in %"] == "under 0.1%"
    assert with_drops(1, {}, 3)["kept in %"] == "100.0%" and with_drops(1, {"not text": 3}, 0)["kept in %"] == "0.0%"
    reasons = {"a": 9, "b": 8, "c": 7, "d": 6}
    assert with_drops(1, reasons, 9)["because the document ..."].endswith('was dropped as "d" (6)')
    found = with_drops(1, {**reasons, "e": 5}, 9)["because the document ..."]
    assert found.endswith('was dropped as "c" (7); was left out for one of 2 other reasons (11)')


def test_each_source_with_a_document_has_one_sample(folder: Path, texts: list[str]) -> None:
    samples = read_samples(str(folder), open_dataset(folder).manifest)
    assert [sample.source for sample in samples] == [HOSTILE, "copies"]
    assert any(text.startswith(samples[1].text[:30]) for text in texts[50:])


def test_removals_are_counted_apart_from_what_preparation_left_out(folder: Path) -> None:
    manifest = open_dataset(folder).manifest
    assert removal_overview(manifest) is None
    source = manifest.sources[1].without({"documents": 4, "sentences": 4, "tokens": 9, "words": 9, "text_bytes": 9})
    removal = {"version": 2, "source": "copies", "documents": 4, "tokens": 9, "note": HOSTILE}
    removed = Manifest.model_validate(
        {**manifest.model_dump(), "sources": (manifest.sources[0], source, manifest.sources[2]), "removals": [removal]}
    )
    row = source_rows(removed)["copies"]
    assert (row["came in"], row["kept"], row["left out"], row["removed"]) == ("14", "6", "4", "4")
    assert list(headline(removed))[2] == "4 documents were removed afterwards, by 1 request."
    table = removal_overview(removed)
    assert table is not None and table.rows == (("2", "the source copies", "4", "9", HOSTILE),)


@pytest.mark.parametrize(
    ("budgets", "shares", "repetitions"),
    [
        ([{}, {}], [0.8, 0.2], [1.0, 1.0]),
        ([{"epochs": 3.0}, {}], [12 / 13, 1 / 13], [3.0, 1.0]),
        ([{"max_tokens": 400}, {"epochs": 2.0}], [0.5, 0.5], [0.5, 2.0]),
        ([{"weight": 1.0}, {"weight": 3.0}], [0.25, 0.75], [0.3125, 3.75]),
    ],
)
def test_shares_and_repetitions_follow_weights_and_budgets(
    folder: Path, budgets: list[dict[str, Any]], shares: list[float], repetitions: list[float]
) -> None:
    manifest = open_dataset(folder).manifest
    sources = tuple(
        source.model_copy(update={"tokens": tokens, **own})
        for source, tokens, own in zip(manifest.sources, (800, 200), budgets, strict=False)
    )
    shard = manifest.train.shards[0]
    shards = tuple(
        shard.model_copy(update={"source": source.name if any(budgets) else None, "tokens": source.tokens})
        for source in sources
    )
    train = manifest.train.model_copy(update={"shards": shards})
    use = training_use(manifest.model_copy(update={"sources": sources, "train": train}))
    assert use.shares == pytest.approx(shares) and use.repetitions == pytest.approx(repetitions)


def test_a_run_without_budgets_reads_what_is_for_training_once(folder: Path) -> None:
    manifest = open_dataset(folder).manifest
    assert manifest.valid.tokens, "else this test says nothing"
    use = training_use(manifest)
    assert use.run_tokens == pytest.approx(manifest.train.tokens)
    assert use.repetitions == pytest.approx([1.0, 1.0, 0.0])


def test_reasons_of_filters_are_plain_words_and_those_of_users_stay() -> None:
    words = {
        ("datatrove:GopherQualityFilter", "gopher_short_doc"): "has too few words",
        ("datatrove:C4QualityFilter", "< 3 paragraphs"): "has fewer than 3 long paragraphs",
        ("datatrove:GopherRepetitionFilter", "top_2_gram"): "repeats one phrase of 2 words too often",
        ("metadata", "not score >= 3 and lang == '{0}'"): "does not meet the condition score >= 3 and lang == '{0}'",
        ("metadata", "cannot be judged"): "has values that the filter cannot judge",
        ("decontamination", "sst2"): "contains text of the evaluation set sst2",
        ("language", "fr"): "is in another language (fr)",
        ("mine:filter", "empty"): 'was dropped as "empty"',
        ("mine:filter", "gopher_short_doc"): 'was dropped as "gopher_short_doc"',
        ("language:check", "boring"): 'was dropped as "boring"',
        ("metadata:check", "no title"): 'was dropped as "no title"',
        ("datatrove:Mine", "no_such_reason"): 'was dropped as "no_such_reason"',
    }
    for (name, reason), meaning in words.items():
        assert plain_reason(Drop(filter_step(3, name), reason)) == meaning
        if name not in {"mine:filter", "language:check", "metadata:check"}:
            assert plain_reason(Drop("filtering", f"filter {name}: {reason}")) == meaning
    for summary in ("filter mine:filter: empty", "filter language:check: boring"):
        assert plain_reason(Drop("filtering", summary)) == f'was dropped as "{summary}"'
    reasons = [*READING_REASONS, "empty", "too short", "too long", "duplicate", "near duplicate", "removed"]
    assert not [reason for reason in reasons if "dropped as" in plain_reason(Drop("reading", reason))]
    assert plain_reason(Drop("reading", "format .x: no title")) == 'was dropped as "format .x: no title"'


def test_every_reason_of_the_installed_datatrove_is_translated() -> None:
    """Found in its source: a new version may have further ones."""
    from datatrove.pipeline import filters

    for kind in ("GopherQualityFilter", "GopherRepetitionFilter", "FineWebQualityFilter", "C4QualityFilter"):
        source = inspect.getsource(getattr(filters, kind))
        reasons = re.findall(r'return False, f?"([^"]+)"', source)
        assert reasons
        for reason in reasons:
            given = re.sub(r"\{[^}]+\}", "5", reason)
            assert "dropped as" not in plain_reason(Drop(filter_step(1, f"datatrove:{kind}"), given)), reason


def test_the_card_is_shown_as_text_without_markup_of_names(folder: Path) -> None:
    manifest = open_dataset(folder).manifest
    page = "\n".join(markdown_html(data_card(manifest)))
    tags = Counter(re.findall(r"</?[a-z0-9]+", page))
    assert {tag.removeprefix("<").removeprefix("/") for tag in tags} <= {
        *("h3", "p", "br", "b", "code", "pre", "div", "table", "thead", "tbody", "tr", "th", "td", "bdi")
    }
    assert all(count == tags[f"</{tag[1:]}"] for tag, count in tags.items() if tag[1] != "/" and tag != "<br")
    shown = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert HOSTILE.replace("\u202e", "\\u202e") in shown and "\u202e" not in page
    assert "import webdataset" in page and "\\(" not in shown.partition("Settings")[0]
