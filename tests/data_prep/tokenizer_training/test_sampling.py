"""The sample of a corpus is the same over any number of processes, units, files and orders."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UserError
from data_prep.config.preparation_config import PreparationConfig
from data_prep.tokenizer_training import corpus_sampling, training_sample
from data_prep.tokenizer_training.corpus_sampling import draw_sample
from data_prep.tokenizer_training.sampling import CorpusCounts, _cleaned, language_label
from tests.support.error_codes import coded
from tests.support.made_up_documents import TrainingSample, lines_of
from tests.support.preparations import NORMALIZATION, config_of, paragraphs_of
from tests.support.reading import find_inputs, find_units

WORDS = "river village teacher engine letter garden winter morning harbour library \u4f60\u597d caf\u00e9".split()


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 60))) + f" {number}" for number in range(count)]


LARGE, SMALL = texts(400, 1), texts(40, 2)


def write(folder: Path, name: str, lines: Sequence[str | dict[str, Any]]) -> str:
    folder.mkdir(exist_ok=True)
    values = [line if isinstance(line, dict) else {"text": line} for line in lines]
    data = "".join(json.dumps(value) + "\n" for value in values).encode()
    path = folder / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return str(path)


def sampled_from(sources: dict[str, Any], **settings: Any) -> PreparationConfig:
    return config_of(sources, **settings | {"tokenizer": {"sample_bytes": 20_000, **settings.get("tokenizer", {})}})


def drawn(config: PreparationConfig, work: Path, workers: int = 1) -> tuple[TrainingSample, CorpusCounts]:
    sample, counts = draw_sample(config, find_units(find_inputs(config), config), work, workers)
    assert not work.exists()
    return sample, counts


def everything_of(result: tuple[TrainingSample, CorpusCounts]) -> tuple[Any, ...]:
    sample, counts = result
    by = [part.bytes_by(kind) for part in result for kind in ("source", "language")]
    return list(lines_of(sample.texts())), sample.held_out(), sample.num_bytes, counts.documents, counts.dropped, by


TEMPERED = {"sampling_alpha": 0.3}


@pytest.mark.parametrize("tokenizer", [{}, TEMPERED], ids=["even", "tempered"])
def test_files_units_and_order_change_nothing(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    shuffled = random.Random(0).sample(LARGE, len(LARGE))
    one = sampled_from(
        {"large": [write(tmp_path, "large.jsonl", LARGE)], "small": [write(tmp_path, "small.jsonl", SMALL)]},
        tokenizer=tokenizer,
    )
    many = sampled_from(
        {
            "small": [write(tmp_path / "many", "a.jsonl.gz", SMALL[::-1])],
            "large": [write(tmp_path / "many", f"{part}.jsonl", shuffled[part::7]) for part in range(7)],
        },
        tokenizer=tokenizer,
        shards={"unit_bytes": 3_000},
    )
    whole = drawn(one, tmp_path / "work")
    assert whole[0].num_bytes == 20_000 and whole[0].num_documents < 440
    assert len(find_units(find_inputs(many), many)) > 20
    assert everything_of(drawn(many, tmp_path / "work")) == everything_of(whole)


@pytest.mark.spawn
@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_processes_changes_nothing(tmp_path: Path, workers: int) -> None:
    config = sampled_from(
        {"large": [write(tmp_path, "large.jsonl", LARGE)], "small": [write(tmp_path, "small.jsonl", SMALL)]},
        tokenizer=TEMPERED,
        shards={"unit_bytes": 15_000},
    )
    assert everything_of(drawn(config, tmp_path / "work", workers)) == everything_of(drawn(config, tmp_path / "work"))


def test_the_sample_is_that_of_the_texts_at_hand(tmp_path: Path) -> None:
    config = sampled_from({"large": [write(tmp_path, "large.jsonl", LARGE)]})
    direct = TrainingSample(20_000, 0)
    for text in LARGE:
        direct.add([text])
    assert list(lines_of(drawn(config, tmp_path / "work")[0].texts())) == list(lines_of(direct.texts()))


def test_tempering_raises_small_sources_and_reports_the_shares(tmp_path: Path) -> None:
    files = {"large": [write(tmp_path, "large.jsonl", LARGE)], "small": [write(tmp_path, "small.jsonl", SMALL)]}
    shares = []
    for alpha in (1.0, 0.5, 0.0):
        config = sampled_from(files, tokenizer={"sampling_alpha": alpha, "sample_bytes": 8_000})
        sample, counts = drawn(config, tmp_path / "work")
        shares.append(sample.bytes_by("source")["small"] / sample.num_bytes)
        assert counts.bytes_by("source") == {
            "large": sum(len(text.encode()) for text in LARGE),
            "small": sum(len(text.encode()) for text in SMALL),
        }
    assert shares[0] == pytest.approx(0.09, abs=0.06)
    assert shares[0] < shares[1] < shares[2] == pytest.approx(0.5, abs=0.12)


def test_languages_come_from_the_document_then_the_source(tmp_path: Path) -> None:
    lines = [{"text": text, "lang": ("de-AT", None, "no language")[i % 3]} for i, text in enumerate(LARGE[:90])]
    config = sampled_from(
        {"mixed": [write(tmp_path, "mixed.jsonl", lines)]},
        documents={"language": "fr", "language_field": "lang"},
        tokenizer={"sampling_alpha": 0.0, "sampling_by": "language", "sample_bytes": 3_000},
    )
    sample, counts = drawn(config, tmp_path / "work")
    assert counts.documents == {("mixed", "de"): 30, ("mixed", "fr"): 30, ("mixed", "unknown"): 30}
    assert set(sample.bytes_by("language")) == {"de", "fr", "unknown"}
    assert [language_label(code) for code in ("en", "EN_gb", "zh-Hans", "", "english")] == [
        "en",
        "en",
        "zh",
        "unknown",
        "unknown",
    ]


def test_a_damaged_file_is_skipped_by_name_or_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write(tmp_path, "good.jsonl", SMALL)
    damaged = Path(write(tmp_path, "damaged.jsonl.gz", LARGE))
    damaged.write_bytes(damaged.read_bytes()[:-2_000])
    for alpha in (1.0, 0.5):
        settings = {"tokenizer": {"sampling_alpha": alpha}}
        config = sampled_from({"a": [good, str(damaged)]}, documents={"on_bad_input": "skip"}, **settings)
        sample, counts = drawn(config, tmp_path / "work")
        assert counts.dropped == {("a", "reading", "damaged file"): 1} and counts.documents == {("a", "en"): 40}
        assert sample.num_documents == 40 and len(sample.held_out()) == 40
        assert "damaged.jsonl.gz" in capsys.readouterr().err
        with pytest.raises(UserError, match="damaged.jsonl.gz", check=coded("damaged-file")):
            drawn(sampled_from({"a": [good, str(damaged)]}, tokenizer={"sampling_alpha": alpha}), tmp_path / "work")
        assert not (tmp_path / "work").exists()


@pytest.mark.long
@pytest.mark.parametrize("by", ["source", "language"])
def test_a_source_of_only_damaged_files_gives_no_text(tmp_path: Path, by: str) -> None:
    good = write(tmp_path, "good.jsonl", SMALL)
    lines = [{"text": text, "lang": "fr"} for text in LARGE * 20]  # enough for documents before the damage is met
    damaged = Path(write(tmp_path, "damaged.jsonl.gz", lines))
    damaged.write_bytes(damaged.read_bytes()[:-2_000])
    sources = {"a": [good], "b": [str(damaged)]} if by == "source" else {"a": [good, str(damaged)]}
    config = sampled_from(
        sources,
        documents={"on_bad_input": "skip", "language_field": "lang"},
        tokenizer={"sampling_alpha": 0.5, "sampling_by": by},
    )
    sample, counts = drawn(config, tmp_path / "work")
    assert sample.num_documents == 40 and counts.documents == {("a", "en"): 40}
    assert sum(counts.dropped.values()) == 1


def test_documents_that_preparation_drops_are_counted_and_not_learned_from(tmp_path: Path) -> None:
    lines = ["\x00 \n", "short", "just right, this", "x" * 100]
    config = sampled_from(
        {"a": [write(tmp_path, "a.jsonl", lines)]},
        documents={"min_document_characters": 6, "max_document_characters": 99},
    )
    sample, counts = drawn(config, tmp_path / "work")
    assert list(lines_of(sample.texts())) == [" just right, this"]
    assert counts.dropped == {("a", "cleaning", reason): 1 for reason in ("empty", "too short", "too long")}


def test_later_units_write_only_candidates_for_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    original = corpus_sampling.sample_unit

    def watched(*unit: Any) -> Any:
        result = original(*unit)
        sizes.append(sum('"chosen"' in line for line in Path(result[1]).read_text().splitlines()))
        return result

    monkeypatch.setattr(corpus_sampling, "sample_unit", watched)
    config = sampled_from({"large": [write(tmp_path, "large.jsonl", LARGE * 1)]}, tokenizer={"sample_bytes": 2_000})
    config = config.model_copy(update={"shards": config.shards.model_copy(update={"unit_bytes": 8_000})})
    drawn(config, tmp_path / "work")
    assert len(sizes) > 5 and sum(sizes[3:]) / len(sizes[3:]) < sizes[0] / 2


FILTERS = [{"name": "tests.support.filters:count_call"}, {"name": "tests.support.filters:shorten", "words": 20}]
FILTERS += [{"name": "metadata", "keep": "score >= 1"}]


def filtered(folder: Path, num_documents: int, unit_bytes: int = 6_000, **tokenizer: Any) -> PreparationConfig:
    """Documents of which one of three is dropped, and long ones are shortened."""
    rows = [{"text": text, "score": number % 3} for number, text in enumerate(texts(num_documents, 3))]
    documents = {"metadata_fields": ["score"], "filters": FILTERS, "min_document_characters": 20}
    source = {"a": [write(folder, "a.jsonl", rows)]}
    return sampled_from(source, documents=documents, tokenizer=tokenizer, shards={"unit_bytes": unit_bytes})


@pytest.mark.long
def test_filters_judge_only_what_the_sample_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    monkeypatch.setenv("FILTER_CALLS", str(calls))
    monkeypatch.setattr(training_sample, "MAX_HELD_OUT", 10)
    config = filtered(tmp_path, 6_000, sample_bytes=20_000)
    sample, counts = drawn(config, tmp_path / "work")
    num_calls = len(calls.read_text().splitlines())
    assert sample.num_bytes >= 20_000 and sample.num_documents < num_calls < 6_000 / 3
    assert counts.is_before_filters and counts.documents.total() == 6_000
    judged = sample.num_documents + counts.dropped.total()
    assert counts.dropped["a", "filter 3 metadata", "not score >= 1"] == pytest.approx(judged / 3, rel=0.25)
    assert all(len(line.split()) <= 20 for line in lines_of(sample.texts()))


@pytest.mark.long
def test_the_sample_of_filtered_documents_is_the_same_over_units_orders_and_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FILTER_CALLS", str(tmp_path / "calls"))
    config = filtered(tmp_path, 900, unit_bytes=1 << 20, sample_bytes=9_000)
    expected = everything_of(drawn(config, tmp_path / "work"))
    parted = filtered(tmp_path, 900, unit_bytes=5_000, sample_bytes=9_000)
    units = find_units(find_inputs(parted), parted)
    for order in (units, units[::-1]):
        assert everything_of(draw_sample(parted, order, tmp_path / "work", 1)) == expected
    whole = filtered(tmp_path, 900, sample_bytes=10**6)
    sample, counts = drawn(whole, tmp_path / "work")
    tempered, all_judged = drawn(filtered(tmp_path, 900, sample_bytes=10**6, sampling_alpha=0.5), tmp_path / "work")
    assert sorted(lines_of(sample.texts())) == sorted(lines_of(tempered.texts()))
    assert counts == all_judged and not counts.is_before_filters


def test_a_filter_that_fails_names_the_line_of_its_document(tmp_path: Path) -> None:
    rows = [{"text": text, "score": "?" if number == 17 else 3} for number, text in enumerate(texts(30, 3))]
    documents = {"metadata_fields": ["score"], "filters": FILTERS[-1:]}
    config = sampled_from({"a": [write(tmp_path, "a.jsonl", rows)]}, documents=documents)
    with pytest.raises(UserError, match=r"a\.jsonl line 18\b", check=coded("unreadable")):
        drawn(config, tmp_path / "work")


def test_without_transforms_the_sample_is_that_of_the_documents_that_stay(tmp_path: Path) -> None:
    rows = [{"text": text, "score": number % 3} for number, text in enumerate(texts(900, 3))]
    settings: dict[str, Any] = {"documents": {"metadata_fields": ["score"]}, "tokenizer": {"sample_bytes": 9_000}}
    kept = sampled_from({"a": [write(tmp_path, "kept.jsonl", [row for row in rows if row["score"]])]}, **settings)
    settings["documents"] |= {"filters": FILTERS[-1:]}
    config = sampled_from({"a": [write(tmp_path, "a.jsonl", rows)]}, **settings)
    expected, found = drawn(kept, tmp_path / "work")[0], drawn(config, tmp_path / "work")[0]
    assert list(found.texts()) == list(expected.texts()) and found.held_out() == expected.held_out()


def test_the_command_line_source_is_one_source(tmp_path: Path) -> None:
    config = config_of(write(tmp_path, "small.jsonl", SMALL))
    assert set(drawn(config, tmp_path / "work")[1].documents) == {("corpus", "en")}


@given(
    st.lists(
        st.text(st.sampled_from("aB .\r\n\t\u00a0\u00e9\u0301\u2029\u4e2d\U0001f600\x00"), max_size=40), max_size=5
    )
)
def test_documents_are_cleaned_together_as_one_by_one(texts: list[str]) -> None:
    expected = ["\n".join(paragraphs_of(text)) for text in texts]
    assert list(_cleaned(texts, NORMALIZATION)) == expected
