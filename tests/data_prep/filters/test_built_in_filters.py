"""The built-in filters: thresholds, blocklists and languages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from data_prep import Document
from data_prep.base.errors import UserError
from data_prep.config.preparation_config import DocumentSettings
from data_prep.documents.drops import of_step
from tests.support.error_codes import coded
from tests.support.preparations import filter_identity, filter_step
from tests.support.reading import BadInput, Filtered

ENGLISH = "The committee met in the morning and decided that the bridge would be repaired before the winter."
FRENCH = "Le comité s'est réuni le matin et a décidé que le pont serait réparé avant l'hiver, malgré son prix."


def outcome(document: Document, **entry: Any) -> Any:
    return filter_step(entry).apply(document)


def read(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Filtered:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Filtered(path, DocumentSettings(**settings))


SCORED = {"metadata_fields": ["score"], "filters": [{"name": "metadata", "keep": "score >= 3"}]}


def test_metadata_thresholds_count_each_failed_condition(tmp_path: Path) -> None:
    rows = [{"text": "a", "score": 2}, {"text": "b", "score": 3}, {"text": "c"}, {"text": "d", "score": None}]
    kept = read(tmp_path / "a.jsonl", rows, **SCORED)
    assert [document.text for document in kept] == ["b"]
    assert kept.reader.drops == of_step("filter 1 metadata", {"not score >= 3": 1, "no score": 2})


@pytest.mark.fault(row=4, fault="a score is text", required="named by line, or counted by policy")
def test_a_score_that_is_text_is_bad_input(tmp_path: Path) -> None:
    rows = [{"text": "a", "score": 4}, {"text": "b", "score": "4"}]
    with pytest.raises(BadInput, match="a.jsonl line 2.*'metadata': score='4'", check=coded("unreadable")):
        list(read(tmp_path / "a.jsonl", rows, **SCORED))
    kept = read(tmp_path / "a.jsonl", rows, on_bad_input="skip", **SCORED)
    assert len(list(kept)) == 1 and kept.reader.drops == of_step("filter 1 metadata", {"cannot be judged": 1})


@pytest.mark.parametrize(
    ("entry", "fix"),
    [
        ({"name": "metadata", "keep": "date > 1"}, "set documents.metadata_fields=[score, date], or"),
        ({"name": "url_blocklist", "urls": ["a"]}, "set documents.url_field=url, or"),
    ],
)
def test_a_field_that_is_not_read_is_refused(tmp_path: Path, entry: dict[str, Any], fix: str) -> None:
    with pytest.raises(UserError, match=re.escape(fix), check=coded("filter-field-not-read")):
        read(tmp_path / "a.jsonl", [], metadata_fields=["score"], filters=[entry])


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://spam.example/x", "domain"),
        ("http://www.deep.SPAM.example:80/x?y", "domain"),
        ("https://user@spam.example.", "domain"),
        ("//spam.example/x", "domain"),
        ("https://notspam.example/", None),
        ("https://spam.example.org/", None),
        ("https://xn--bcher-kva.example/a", "domain"),
        ("https://bücher.example/a", "domain"),
        ("https://good.example/page/#top", "url"),
        ("http://www.good.example/page", "url"),
        ("https://good.example/page/2", None),
        ("https://[::1", None),
        ("", None),
        (None, None),
    ],
)
def test_domains_take_their_subdomains_and_urls_are_compared_without_scheme(
    tmp_path: Path, url: str | None, reason: str | None
) -> None:
    listed = tmp_path / "domains.txt"
    listed.write_text("# bad ones\nspam.example\n\nbücher.example # a shop\n")
    blocklist = {"name": "url_blocklist", "domains": str(listed), "urls": ["https://good.example/page"]}
    assert outcome(Document("text", url=url), **blocklist) == reason


def test_a_blocklist_is_identified_by_its_content(tmp_path: Path) -> None:
    listed = tmp_path / "domains.txt"
    listed.write_text("a.example\nb.example\n")
    from_file = filter_identity("url_blocklist", domains=str(listed))
    given = filter_identity("url_blocklist", domains=["b.example", "a.example"])
    assert from_file == given and given["parameters"]["domains"]["entries"] == 2
    assert filter_identity("url_blocklist", domains=["b.example"]) != given


def test_a_byte_order_mark_is_not_part_of_the_first_entry(tmp_path: Path) -> None:
    listed = tmp_path / "domains.txt"
    listed.write_text("# bad ones\nspam.example\n", encoding="utf-8-sig")
    given = filter_identity("url_blocklist", domains=str(listed))
    assert given["parameters"]["domains"]["entries"] == 1


@pytest.mark.parametrize("entry", ["0.0.0.0 ads.example", "*.example", "||ads.example^", "."])
def test_an_entry_that_is_no_domain_is_named_with_its_line(tmp_path: Path, entry: str) -> None:
    (tmp_path / "domains.txt").write_text(f"# bad ones\n{entry}\n")
    with pytest.raises(UserError, check=coded("filter-parameters"), match=r"domains\.txt line 2 is not a domain"):
        outcome(Document("a"), name="url_blocklist", domains=str(tmp_path / "domains.txt"))


def test_an_empty_blocklist_or_one_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for entry, code in (({}, "empty-blocklist"), ({"urls": str(tmp_path / "latin")}, "not-utf8")):
        (tmp_path / "latin").write_bytes(b"caf\xe9")
        with pytest.raises(UserError, check=coded(code)):
            outcome(Document("a"), name="url_blocklist", **entry)


@pytest.mark.long
def test_languages_are_kept_dropped_and_assigned() -> None:
    assert outcome(Document(ENGLISH), name="language", keep=["en", "de"]) is None
    assert outcome(Document(FRENCH), name="language", keep="en") == "fr"
    assert outcome(Document("1 2 3"), name="language", keep="en", min_probability=0.9) == "uncertain"
    assert outcome(Document(FRENCH), name="language", assign=True) == Document(FRENCH, language="fr")
    assert outcome(Document("\ud800"), name="language", min_probability=0.9) == "uncertain"


@pytest.mark.long
@pytest.mark.parametrize(
    "entry", [{}, {"keep": "xx"}, {"keep": "en", "min_probability": 2}, {"keep": "en", "characters": 0}]
)
def test_a_wrong_language_filter_is_refused(entry: dict[str, Any]) -> None:
    with pytest.raises(UserError, check=coded("filter-parameters")):
        outcome(Document("a"), name="language", **entry)


def test_files_of_filters_begin_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "blocked.txt").write_text("bad.org\n")
    (tmp_path / "test.txt").write_text(ENGLISH + "\n")
    assert outcome(Document("x", url="http://bad.org/a"), name="url_blocklist", domains="~/blocked.txt") == "domain"
    assert outcome(Document(f"a {ENGLISH} b"), name="decontamination", sets={"a": "~/test.txt"})
