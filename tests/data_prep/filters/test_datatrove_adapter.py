"""Filters and formatters of the real datatrove, run document by document with the results of its own pipeline."""

from __future__ import annotations

import copy
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from data_prep import Document
from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from tests.support.preparations import filter_identity, filter_step

FILTERS: list[dict[str, Any]] = [
    {"name": "datatrove:GopherQualityFilter", "min_doc_words": 50},
    {"name": "datatrove:GopherRepetitionFilter"},
    {"name": "datatrove:C4QualityFilter"},
    {"name": "datatrove:FineWebQualityFilter"},
]
MAIL = "Write to jane.doe@mail.com or from 8.8.8.8 to john@mail.com now."


def texts(corpora: Path) -> list[str]:
    with gzip.open(corpora / "pack_small.jsonl.gz", "rt", encoding="utf-8") as file:
        lines = [json.loads(line)["text"] for line, _ in zip(file, range(50), strict=False)]
    return [text[:5_000] for text in lines] + [
        "Too short.",
        "lorem ipsum dolor. " * 40,
        "# # # #\n" * 50,
        "a {b} c.\n" * 9,
    ]


@pytest.mark.long
@pytest.mark.parametrize("entry", FILTERS, ids=lambda entry: entry["name"].split(":")[1])
def test_a_filter_decides_as_in_its_own_pipeline(corpora: Path, entry: dict[str, Any]) -> None:
    from datatrove.data import Document as Theirs
    from datatrove.pipeline import filters

    step = filter_step(entry)
    name, parameters = entry["name"].split(":")[1], {key: entry[key] for key in set(entry) - {"name"}}
    pipeline = getattr(filters, name)(**parameters)
    given = texts(corpora)
    kept = {item.id: item.text for item in pipeline.run(Theirs(text, str(n)) for n, text in enumerate(given))}
    found = {}
    for number, text in enumerate(given):
        outcome = step.apply(Document(text, source="web"))
        if not isinstance(outcome, str):
            found[str(number)] = text if outcome is None else outcome.text
    assert found == kept
    assert 0 < len(kept) < len(given), "some are kept and some are not"


def test_replacements_do_not_depend_on_the_documents_before() -> None:
    step = filter_step("datatrove:PIIFormatter")
    first, second = step.apply(Document(MAIL, id="1", source="web")), step.apply(Document(MAIL, id="1", source="web"))
    assert isinstance(first, Document) and first == second
    assert "mail.com" not in first.text and "8.8.8.8" not in first.text and (first.id, first.source) == ("1", "web")
    assert step.apply(Document("nothing to replace")) is None


@pytest.mark.long
def test_text_that_a_filter_cannot_read_is_left_to_cleaning() -> None:
    for entry in copy.deepcopy(FILTERS):
        step = filter_step(entry)
        assert step.apply(Document(" \n ")) is None
        step.apply(Document("\ud800 lone. " * 100))


def test_the_versions_of_the_libraries_are_part_of_the_identity() -> None:
    described = filter_identity(FILTERS[0])
    assert described["parameters"] == {"min_doc_words": 50}
    assert set(described["libraries"]) >= {"datatrove", "spacy"}


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"name": "datatrove:Absent"}, "unknown-filter"),
        ({"name": "datatrove:SamplerFilter", "rate": 0.5}, "unknown-filter"),
        ({"name": "datatrove:LanguageFilter"}, "unknown-filter"),
        ({"name": "datatrove:GopherQualityFilter", "min_words": 3}, "filter-parameters"),
    ],
)
def test_a_wrong_name_or_parameter_is_refused(entry: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError, check=coded(code)):
        filter_step(entry)
