"""Filters run where documents are read: outcomes, counts, and the errors about wrong filters."""

from __future__ import annotations

import json
import pickle
import re
import sys
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep import Document
from data_prep.base.errors import Stopped, UserError
from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.drops import Drop, of_step
from tests.support.error_codes import coded
from tests.support.preparations import filter_settings, filters_fingerprint
from tests.support.reading import Filtered

ROWS = [
    {"text": f"text {number}", "id": number, "url": f"https://a.example/{number}", "score": number}
    for number in range(6)
]


def even(document: Document) -> str | None:
    return "odd" if document.metadata["score"] % 2 else None


def capitals(document: Document) -> Document:
    return replace(document, text=document.text.upper())


def reader(tmp_path: Path, *filters: Any, policy: str = "error", **options: Any) -> Filtered:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = DocumentSettings(
        id_field="id",
        url_field="url",
        metadata_fields=("score",),
        filters=tuple(map(filter_settings, filters)),
        on_bad_input=policy,
    )
    return Filtered(path, pickle.loads(pickle.dumps(settings)), **options)


def test_documents_carry_their_provenance(tmp_path: Path) -> None:
    assert next(iter(reader(tmp_path))) == Document("text 0", "0", "web", None, "https://a.example/0", {"score": 0})


def test_filters_drop_and_transforms_replace_in_their_order(tmp_path: Path) -> None:
    dropped: list[tuple[str, Drop]] = []
    found = reader(tmp_path, even, capitals, on_drop=lambda document, drop: dropped.append((document.text, drop)))
    assert [document.text for document in found] == ["TEXT 0", "TEXT 2", "TEXT 4"]
    drop = Drop(f"filter 1 {__name__}:even", "odd")
    assert found.reader.drops == Counter({drop: 3})
    assert dropped == [(f"text {number}", drop) for number in (1, 3, 5)]
    unfiltered = reader(tmp_path)
    assert len(list(unfiltered)) == 6 and unfiltered.reader.sha256 == found.reader.sha256, "what was read is the same"


@pytest.mark.fault(row=4, fault="a filter that fails", required="it always stops; named with file, line and document")
@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (lambda document: True, "filter-result"),
        (lambda document: replace(document, source="other"), "filter-result"),
        (lambda document: replace(document, text=None), "filter-result"),
        (lambda document: replace(document, id="other"), "filter-result"),
        (lambda document: replace(document, id=None), "filter-result"),
        (lambda document: replace(document, url=5), "filter-result"),
        (lambda document: replace(document, language=b"en"), "filter-result"),
        (lambda document: replace(document, metadata=None), "filter-result"),
        (lambda document: replace(document, metadata={"tags": {"a"}}), "filter-result"),
        (lambda document: replace(document, metadata={"score": float("nan")}), "filter-result"),
        (lambda document: document.metadata.update(score={1}), "filter-result"),
        (lambda document: sys.exit(3), "filter-failed"),
        (lambda document: (_ for _ in ()).throw(CancelledError()), "filter-failed"),
        (lambda document: "", "filter-reasons"),
        (lambda document: "a\nb", "filter-reasons"),
        (lambda document: "x" * 101, "filter-reasons"),
        (lambda document: document.metadata["absent"], "filter-failed"),
    ],
)
def test_a_wrong_filter_is_named_with_file_line_and_document(
    tmp_path: Path, wrong: Callable[[Document], Any], code: str
) -> None:
    later = lambda document: None if document.id == "0" else wrong(document)  # noqa: E731
    later.version = "1"  # type: ignore[attr-defined]
    where = re.escape(f"{tmp_path / 'a.jsonl'} line 2 (document '1')")
    for policy in ("error", "skip"):
        with pytest.raises(UserError, check=coded(code), match=where):
            list(reader(tmp_path, later, policy=policy))


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped(15)])
def test_a_signal_within_a_filter_is_not_its_failure(tmp_path: Path, stop: BaseException) -> None:
    def interrupted(document: Document) -> None:
        raise stop

    interrupted.version = "1"  # type: ignore[attr-defined]
    with pytest.raises(type(stop)):
        list(reader(tmp_path, interrupted))


def test_a_failure_may_be_that_of_a_parameter(tmp_path: Path) -> None:
    wrong = lambda document: len(document.text) < "3"  # noqa: E731
    wrong.version = "1"  # type: ignore[attr-defined]
    with pytest.raises(UserError, check=coded("filter-failed"), match="correct the filter or its parameters"):
        list(reader(tmp_path, wrong))


def test_a_field_that_is_not_read_is_named_in_the_fix(tmp_path: Path) -> None:
    with pytest.raises(UserError, check=coded("filter-failed"), match=r"Fix: .*documents\.metadata_fields"):
        list(reader(tmp_path, lambda document: "low" if document.metadata["quality"] < 3 else None))


def test_too_many_different_reasons_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.filters.chain._MOST_REASONS", 3)
    with pytest.raises(UserError, check=coded("filter-reasons")):
        list(reader(tmp_path, lambda document: document.text))


def test_a_filter_that_differs_from_the_plans_is_refused(tmp_path: Path) -> None:
    fingerprint = filters_fingerprint((filter_settings(even),))
    assert len(list(reader(tmp_path, even, fingerprint=fingerprint))) == 3
    with pytest.raises(UserError, check=coded("filters-changed")):
        reader(tmp_path, capitals, fingerprint=fingerprint)


def test_marks_that_a_transform_makes_are_dropped(tmp_path: Path) -> None:
    found = reader(tmp_path, lambda document: replace(document, text="a" + "\u0301" * 100_000))
    assert list(found) == [] and found.reader.drops == of_step("filtered text", {"too many marks": 6})


def test_fields_that_documents_lack_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "id": 1}\n{"text": "y", "identity": 2}\n')
    found = Filtered(tmp_path / "a.jsonl", DocumentSettings(id_field="id", metadata_fields=("scroe",)))
    assert [document.id for document in found] == ["1", None]
    assert found.reader.languages.absent == {"id": 1, "scroe": 2} and found.reader.languages.read == 2
