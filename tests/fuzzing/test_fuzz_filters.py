"""Filters over damaged documents and of damaged lists: every document is kept or counted, or the list is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep import Document
from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.drops import Drop
from tests.fuzzing.mutations import HOSTILE_TEXTS, fuzz, mutated_bytes, mutated_document
from tests.fuzzing.test_fuzz_inputs import SKIP, read
from tests.fuzzing.watching import read_or_refuse
from tests.support.preparations import filter_settings, filter_step, forget_filters, load_filters
from tests.support.reading import Filtered

LEAK = "the quick brown fox of the north jumps over nine lazy dogs and sleeps until noon"
FILTERED: list[dict[str, object]] = [
    {"name": "metadata", "keep": "score >= 3 and source.name != 'x'"},
    {"name": "url_blocklist", "domains": ["bad.example"], "urls": ["good.example/a"]},
    {"name": "language", "keep": ["en", "de"], "min_probability": 0.1, "assign": True},
    {"name": "repeated_headers", "min_pages": 2},
    {"name": "join_hyphens"},
    {"name": "join_lines"},
    {"name": "datatrove:PIIFormatter"},
    {"name": "datatrove:GopherQualityFilter", "min_doc_words": 1},
]
RECORDS = [
    {"text": "One.", "url": "https://good.example/a", "score": 3, "source": {"name": "tales"}},
    {"text": "Two.", "url": "http://www.bad.example:80", "score": 4.5, "source": {"name": "tales"}},
    {"text": "Three.", "url": None, "score": 2, "source": {"name": "x"}},
    {"text": f"It is said that {LEAK}.", "url": None, "score": 5, "source": {"name": "tales"}},
]


@pytest.fixture(autouse=True)
def loaded_filters() -> Iterator[None]:
    yield
    forget_filters()


@pytest.fixture(scope="module")
def evaluation_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evaluation") / "leaks.jsonl"
    path.write_text(json.dumps({"text": LEAK}) + "\n")
    return path


@fuzz(60)
@given(lines=st.lists(st.sampled_from(RECORDS).flatmap(mutated_document), min_size=1, max_size=4))
def test_filters_keep_or_count_every_document_of_damaged_metadata(
    lines: list[bytes], evaluation_set: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("filters") / "input.jsonl"
    path.write_bytes(b"\n".join(lines))
    settings = DocumentSettings(
        on_bad_input="skip",
        url_field="url",
        metadata_fields=("score", "source.name"),
        filters=tuple(map(filter_settings, [*FILTERED, _decontamination(evaluation_set)])),
        max_document_bytes=100_000,
    )

    load_filters(settings.filters)  # which opens their files, before it is watched

    def read_filtered() -> tuple[list[str], Counter[Drop]]:
        kept = Filtered(path, settings)
        return [document.text for document in kept], kept.reader.drops

    unfiltered, found = (
        read_or_refuse(lambda: read(path, SKIP), path.parent),
        read_or_refuse(read_filtered, path.parent),
    )
    assert (found is None) == (unfiltered is None)
    if found is not None and unfiltered is not None:
        total = len(unfiltered[0]) + unfiltered[1].total()
        assert len(found[0]) + found[1].total() == total, "nothing is lost"


@fuzz(60)
@given(
    before=st.text(max_size=300) | st.sampled_from(HOSTILE_TEXTS),
    after=st.text(max_size=300) | st.sampled_from(HOSTILE_TEXTS),
    joint=st.sampled_from([" ", "\n", "... ", " -- "]),
    is_shouted=st.booleans(),
)
def test_a_planted_example_is_found_in_any_text(
    before: str, after: str, joint: str, is_shouted: bool, evaluation_set: Path
) -> None:
    step = filter_step(_decontamination(evaluation_set))
    planted = joint.join((LEAK.upper() if is_shouted else LEAK).split())
    assert step.apply(Document(f"{before} {planted} {after}")) == "leaks"


@fuzz(60)
@given(data=st.data(), kind=st.sampled_from(("decontamination", "url_blocklist")))
def test_a_damaged_list_of_a_filter_is_refused_or_gives_a_filter_that_judges(
    data: st.DataObject, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = {
        "decontamination": b"".join(json.dumps({"text": text}).encode() + b"\n" for text in (LEAK, "a b", LEAK[9:])),
        "url_blocklist": "# a comment\nbad.example\nhttps://www.bücher.example/a\n\nb.example # both\n".encode(),
    }[kind]
    path = tmp_path_factory.mktemp("lists") / ("list.jsonl" if kind == "decontamination" else "list.txt")
    path.write_bytes(data.draw(mutated_bytes(whole)))
    entry = {"name": kind, **({"sets": {"s": str(path)}} if kind == "decontamination" else {"domains": str(path)})}
    forget_filters()
    step = read_or_refuse(lambda: filter_step(entry), path.parent)
    if step is not None:
        outcome = step.apply(Document(LEAK, url="http://a.bad.example/x"))
        assert outcome in (None, "s", "domain")
        json.dumps(step.identity)


def _decontamination(path: Path) -> dict[str, object]:
    return {"name": "decontamination", "sets": {"leaks": str(path)}, "ngram": 8}
