"""What documents say of their language: nothing at all, or what is no code, is reported."""

from __future__ import annotations

import dataclasses

from data_prep.documents.documents import DocumentLanguages


def counted(*languages: str | None) -> DocumentLanguages:
    found = DocumentLanguages()
    for language in languages:
        found.add(language)
    return found


def test_known_languages_and_some_missing_ones_give_no_warning() -> None:
    assert not list(counted("de", "pt-BR", None).warnings("lang"))
    assert not list(counted().warnings("lang"))


def test_a_language_field_that_no_document_has_is_reported() -> None:
    assert list(counted(None, None).warnings("lnag")) == [
        "none of its 2 documents names a language in the field 'lnag'"
    ]


def test_unknown_languages_are_counted_and_the_first_shown_in_part() -> None:
    (warning,) = counted("de", "German" * 20, "xx", None).warnings("lang")
    assert warning.startswith("2 of its documents name a language in the field 'lang' that is unknown")
    assert "'GermanGermanGermanGermanGermanGermanGerm'" in warning


def test_parts_add_up_to_the_whole() -> None:
    parts, whole = counted("de", None), counted("de", None, "xx", "yy", None)
    parts.merge(counted("xx", "yy"))
    parts.merge(counted(None))
    assert parts == whole


def test_a_field_that_no_document_has_is_reported() -> None:
    first, second = DocumentLanguages(), DocumentLanguages()
    first.add_absent(["id", "url"])
    second.add_absent(["url"])
    first.merge(DocumentLanguages(**dataclasses.asdict(second)))
    assert list(first.absent_warnings()) == ["none of its 2 documents has a value in the field 'url'"]
    assert list(DocumentLanguages().absent_warnings()) == []
