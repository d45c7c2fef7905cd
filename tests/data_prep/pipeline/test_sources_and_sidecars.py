"""Sources with shards of their own and provenance sidecars through all of preparation, recounted from the files."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep import Document, Tokenizer, open_dataset, prepare
from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.provenance_sidecar import ProvenanceRow, read_provenance
from data_prep.dataset.rebuild_command import how_to_rebuild
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.kill_points import before_writing, stopped_after
from tests.support.living_data_sets import records_of
from tests.support.preparations import Manifest, id_of, prepared
from tests.support.work_units import gather

WORDS = (
    "river village teacher engine letter garden winter morning harbour library machine question answer mountain "
    "student doctor kitchen window painting journey market theory number method experiment language history forest"
).split()
FIELDS = {"id_field": "id", "url_field": "url", "metadata_fields": ["score"]}


def texts(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=100)) + "." for _ in range(count)]


def write(folder: Path, name: str, lines: list[str]) -> str:
    path = folder / f"{name}.jsonl"
    rows = [{"text": t, "id": n, "url": f"https://{name}/{n}", "score": n % 3} for n, t in enumerate(lines)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make(
    tokenizer: Tokenizer,
    folder: Path,
    sources: list[dict[str, Any]],
    near: bool = False,
    total: int | None = None,
    documents: dict[str, object] | None = None,
    **options: Any,
) -> Manifest:
    sections = {
        "total_tokens": total,
        "documents": documents or {},
        "deduplication": {"near": near, "threshold": 0.6},
        "shards": {"min_shards": 4, "valid_fraction": 0.2, "unit_bytes": 5000},
    }
    return prepared({str(each["name"]): each for each in sources}, tokenizer, folder, **sections, **options)


def rows_of(folder: Path) -> list[ProvenanceRow]:
    files = open_dataset(folder).manifest.provenance_files
    return [ProvenanceRow(**row) for file in files for row in read_provenance(str(folder), file).to_pylist()]


def recounted(folder: Path) -> dict[str, Counter[str]]:
    """Documents and tokens of each source, and the names of the shards that hold it, from the shards' records."""
    manifest = open_dataset(folder).manifest
    names = [source.name for source in manifest.sources]
    found: dict[str, Counter[str]] = {name: Counter() for name in names}
    for shard in manifest.shards:
        for record in records_of(folder / shard.name):
            lengths = np.diff(record.documents.astype(np.int64), append=len(record.tokens))
            for number in np.unique(record.sources).tolist():
                mine = record.sources == number
                found[names[number]].update(documents=int(mine.sum()), tokens=int(lengths[mine].sum()))
                found[names[number]][shard.name] += int(mine.sum())
    return found


def weighted(tmp_path: Path, near: bool = False) -> list[dict[str, object]]:
    books, web = texts(60, 1), texts(200, 2)
    near_copies = [text.replace("river", "rivers", 1) for text in books[30:34]] if near else []
    return [
        {"name": "books", "input": write(tmp_path, "books", [*books, books[0]]), "epochs": 3},
        {"name": "web", "input": write(tmp_path, "web", [*web, *books[:10], *web[:5], *near_copies]), "weight": 2.5},
        {"name": "code", "input": write(tmp_path, "code", texts(5, 3)), "max_tokens": 1000},
    ]


def test_a_shard_holds_one_source_and_a_text_of_two_sources_stays_in_the_first(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    manifest = make(tokenizer, tmp_path / "out", weighted(tmp_path))
    found = recounted(tmp_path / "out")
    assert manifest.has_source_budgets
    assert [(s.name, s.weight, s.max_tokens, s.epochs) for s in manifest.sources] == [
        ("books", None, None, 3.0),
        ("web", 2.5, None, None),
        ("code", None, 1000, None),
    ]
    for source in manifest.sources:
        counts = found[source.name]
        assert (counts.pop("documents"), counts.pop("tokens")) == (source.documents, source.tokens)
        assert set(counts) == {shard.name for shard in manifest.shards if shard.source == source.name}
        mine = [shard for shard in manifest.shards if shard.source == source.name]
        assert sum(shard.tokens for shard in mine) == source.tokens and source.tokens > 0
    assert [source.documents for source in manifest.sources] == [60, 200, 5]
    assert [source.dropped for source in manifest.sources] == [{"duplicate": 1}, {"duplicate": 15}, {}]
    # Several shards of a source, and the split is that of the text alone.
    assert len([shard for shard in manifest.train.shards if shard.source == "web"]) > 1
    for shard in manifest.shards:
        for record in records_of(tmp_path / "out" / shard.name):
            assert (record.document_ids >> np.uint64(32) < 0.2 * 2**32).tolist() == [shard.name[0] == "v"] * len(
                record.document_ids
            )


@pytest.mark.long
def test_the_rest_of_a_total_is_the_budget_of_the_other_sources(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = [
        {"name": "books", "input": write(tmp_path, "books", texts(60, 1)), "epochs": 3},
        {"name": "web", "input": write(tmp_path, "web", texts(200, 2))},
    ]
    needed = recounted_train_tokens(make(tokenizer, tmp_path / "first", sources))["books"] * 3
    folder = tmp_path / "out"
    with pytest.raises(UserError, check=coded("counted-budgets-exceed-total"), match=f"{needed:,}"):
        make(tokenizer, folder, sources, total=needed)
    assert not (folder / "manifest.json").exists()
    written = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tar")}
    manifest = make(tokenizer, folder, sources, total=needed + 1000)  # the finished work is kept
    assert written and {path.name: path.stat().st_mtime_ns for path in folder.glob("*.tar")} == written
    assert [(s.max_tokens, s.epochs) for s in manifest.sources] == [(None, 3.0), (1000, None)]
    assert manifest.config["total_tokens"] == needed + 1000 and all(shard.source for shard in manifest.shards)
    assert "repeats" not in capsys.readouterr().err
    with pytest.raises(UserError, check=coded("other-preparation"), match="total_tokens"):
        make(tokenizer, folder, sources, total=needed + 1001)
    web = recounted_train_tokens(manifest)["web"]
    manifest = make(tokenizer, tmp_path / "larger", sources, total=needed + 3 * web)
    assert manifest.sources[1].max_tokens == 3 * web and "repeats it 3.00 times" in capsys.readouterr().err
    weighted_web = [sources[0], {**sources[1], "weight": 0.5}]
    again = make(tokenizer, tmp_path / "weighted", weighted_web, total=needed + 3 * web)
    assert again.sources == manifest.sources, "the only weight takes all of the rest"
    new = [{"name": "new", "input": write(tmp_path, "new", texts(30, 9))}]
    with pytest.raises(UsageError, check=coded("total-in-addition")):
        make(tokenizer, folder, new, add=True, total=5000)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_source_of_a_few_documents_may_have_a_budget(tokenizer: Tokenizer, tmp_path: Path, count: int) -> None:
    """Most groups have no document; a shard reads them all the same."""
    source = {"name": "notes", "input": write(tmp_path, "notes", texts(count, 7)), "epochs": 2}
    manifest = make(tokenizer, tmp_path / "out", [source])
    assert manifest.sources[0].documents == count and manifest.train.documents and manifest.valid.documents


def test_a_source_that_shares_a_total_has_documents(tokenizer: Tokenizer, tmp_path: Path) -> None:
    books = texts(60, 1)
    sources = [
        {"name": "books", "input": write(tmp_path, "books", books), "epochs": 1},
        {"name": "web", "input": write(tmp_path, "web", books[:20])},
    ]
    with pytest.raises(UserError, check=coded("source-without-documents"), match="web"):
        make(tokenizer, tmp_path / "out", sources, total=10**6)


def recounted_train_tokens(manifest: Manifest) -> Counter[str]:
    found: Counter[str] = Counter()
    for shard in manifest.train.shards:
        found[str(shard.source)] += shard.tokens
    return found


def test_without_a_budget_sources_share_shards(tokenizer: Tokenizer, tmp_path: Path) -> None:
    sources = [{key: value for key, value in s.items() if key in ("name", "input")} for s in weighted(tmp_path)]
    manifest = make(tokenizer, tmp_path / "out", sources)
    assert not manifest.has_source_budgets and {source.weight for source in manifest.sources} == {None}
    assert max(len(counts) - 2 for counts in recounted(tmp_path / "out").values()) >= 5


@pytest.mark.long
@pytest.mark.parametrize("shape", ["direct", "gathered", "sources"])
def test_every_document_read_has_a_row_that_names_what_stands_for_it(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    gather(monkeypatch, shape == "gathered")
    sources = weighted(tmp_path, near=True)
    if shape != "sources":
        sources = [{key: value for key, value in source.items() if key in ("name", "input")} for source in sources]
    manifest = make(tokenizer, tmp_path / "out", sources, near=True, documents=FIELDS)
    assert manifest.dropped == {"duplicate": 16, "near duplicate": 4}
    rows = {(row.source, row.id): row for row in rows_of(tmp_path / "out")}
    books, web = texts(60, 1), texts(200, 2)
    assert len(rows) == len(rows_of(tmp_path / "out")) == 61 + 219 + 5
    kept = {
        int(n) for shard in manifest.shards for r in records_of(tmp_path / "out" / shard.name) for n in r.document_ids
    }
    assert {row.kept_as for row in rows.values()} == kept
    for number, text in enumerate(books):
        row = rows["books", str(number)]
        assert (row.document_id, row.kept_as) == (id_of(text), id_of(text))
        assert row.url == f"https://books/{number}" and row.metadata == json.dumps({"score": number % 3}).replace(
            " ", ""
        )
    assert rows["books", "60"].kept_as == id_of(books[0]) == rows["web", "200"].kept_as
    assert rows["web", "210"].kept_as == id_of(web[0])
    for number in range(4):
        row = rows["web", str(215 + number)]
        assert row.document_id == id_of(books[30 + number].replace("river", "rivers", 1)) != row.kept_as
        assert row.kept_as == id_of(books[30 + number])
    listed = {file.name for file in manifest.provenance_files}
    assert listed == {path.name for path in (tmp_path / "out").glob("*.parquet")}
    assert all(shard.provenance and shard.provenance.name[:12] == shard.name[:12] for shard in manifest.shards)


@pytest.mark.long
@pytest.mark.parametrize("has_budget", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_workers_and_order_change_no_byte(tokenizer: Tokenizer, tmp_path: Path, has_budget: bool) -> None:
    sources = weighted(tmp_path, near=True)
    if not has_budget:
        sources = [{key: value for key, value in source.items() if key in ("name", "input")} for source in sources]
    made = []
    for workers in (1, 2):
        make(tokenizer, tmp_path / f"out{workers}", sources, True, num_workers=workers, documents=FIELDS)
        made.append(files_of(tmp_path / f"out{workers}"))
    assert made[0] == made[1]


def test_an_addition_of_only_duplicates_keeps_their_rows(tokenizer: Tokenizer, tmp_path: Path) -> None:
    books = texts(40, 1)
    make(tokenizer, tmp_path / "out", [{"name": "books", "input": write(tmp_path, "books", books)}], documents=FIELDS)
    parent = open_dataset(tmp_path / "out").manifest
    copies = [{"name": "copies", "input": write(tmp_path, "copies", books[:6])}]
    manifest = make(tokenizer, tmp_path / "out", copies, add=True, documents=FIELDS)
    assert manifest.shards == parent.shards and manifest.detached_provenance
    assert {(row.source, row.url, row.kept_as) for row in rows_of(tmp_path / "out") if row.source == "copies"} == {
        ("copies", f"https://copies/{number}", id_of(text)) for number, text in enumerate(books[:6])
    }


def test_a_held_out_document_takes_its_row_along(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [text for text in texts(60, 4) if id_of(text) >> 32 >= 0.2 * 2**32][:8]
    for name, repeats in (("one", 1), ("two", 2)):
        source = {"name": "web", "input": write(tmp_path, f"web{name}", lines * repeats)}
        manifest = make(tokenizer, tmp_path / name, [source], documents=FIELDS)
        (shard,) = manifest.valid.shards
        smallest = min(map(id_of, lines))
        assert shard.documents == 1 and shard.provenance is not None
        valid = read_provenance(str(tmp_path / name), shard.provenance)
        assert valid["document_id"].to_pylist() == [smallest] * repeats
        found = Counter(row.document_id for row in rows_of(tmp_path / name))
        assert found == {id_of(text): repeats for text in lines}
        assert manifest.dropped == ({} if repeats == 1 else {"duplicate": 8})


@pytest.mark.long
def test_an_addition_has_shards_of_its_source_where_the_data_set_has(tokenizer: Tokenizer, tmp_path: Path) -> None:
    make(tokenizer, tmp_path / "out", weighted(tmp_path))
    new = [{"name": "new", "input": write(tmp_path, "new", [*texts(30, 9), texts(60, 1)[3]])}]
    manifest = make(tokenizer, tmp_path / "out", new, add=True)
    assert manifest.sources[3].dropped == {"in the data set already": 1} and manifest.sources[3].documents == 30
    counts = recounted(tmp_path / "out")["new"]
    mine = [shard for shard in manifest.shards if shard.source == "new"]
    assert counts["documents"] == sum(shard.documents for shard in mine) == 30
    assert all(shard.source is not None for shard in manifest.shards)


def test_a_budget_does_not_join_a_data_set_without(tokenizer: Tokenizer, tmp_path: Path) -> None:
    make(tokenizer, tmp_path / "out", [{"name": "web", "input": write(tmp_path, "web", texts(40, 1))}])
    new = [{"name": "new", "input": write(tmp_path, "new", texts(9, 2)), "weight": 2}]
    with pytest.raises(UsageError, check=coded("budget-in-addition")):
        make(tokenizer, tmp_path / "out", new, add=True)


def by_score(least: int) -> dict[str, Any]:
    return {"name": "metadata", "keep": f"score >= {least}"}


def long_enough(document: Document) -> str | None:
    return None if len(document.text) > 10 else "short"


def test_a_source_has_fields_and_filters_of_its_own_or_those_of_the_documents(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    wiki = tmp_path / "wiki.jsonl"
    rows = [{"body": text, "link": f"https://wiki/{number}"} for number, text in enumerate(texts(40, 2))]
    wiki.write_text("".join(json.dumps(row) + "\n" for row in rows))
    blocklist, own = {"name": "url_blocklist", "urls": ["https://wiki/3"]}, {"text_field": "body", "url_field": "link"}
    sources = [
        {"name": "web", "input": write(tmp_path, "web", texts(40, 1))},
        {"name": "wiki", "input": str(wiki), **own, "filters": [blocklist, long_enough]},
        {"name": "all", "input": write(tmp_path, "all", texts(40, 3)), "filters": []},
    ]
    documents = {"url_field": "url", "metadata_fields": ["score"], "filters": [by_score(2)]}
    manifest = make(tokenizer, tmp_path / "out", sources, documents=documents)
    assert {source.name: source.documents for source in manifest.sources} == {"web": 13, "wiki": 39, "all": 40}
    assert [sorted(source.dropped.items()) for source in manifest.sources] == [
        [("filter metadata: not score >= 2", 27)],
        [("filter url_blocklist: url", 1)],
        [],
    ]
    urls = {row.url for row in rows_of(tmp_path / "out")}
    assert {"https://web/2", "https://wiki/4", "https://all/1"} < urls and "https://wiki/3" not in urls
    web, of_wiki, everything = manifest.config["sources"]
    assert not {"filters", "url_field", "id_field", "language_field", "format"} & web.keys(), "as it ever was"
    assert of_wiki["url_field"] == "link" and len(of_wiki["filters"]) == 2
    assert everything["filters"] == []


def test_changed_filters_of_a_source_read_only_its_units_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    web = {"name": "web", "input": write(tmp_path, "web", texts(40, 1))}
    wiki = {"name": "wiki", "input": write(tmp_path, "wiki", texts(40, 2))}

    def sources(least: int) -> list[dict[str, Any]]:
        return [web, {**wiki, "filters": [by_score(least)]}]

    documents = {"url_field": "url", "metadata_fields": ["score"], "filters": [by_score(1)]}
    make(tokenizer, tmp_path / "expected", sources(2), documents=documents)
    with stopped_after(1, of="train-*"), pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "out", sources(0), documents=documents)
    done = {path.name: path.stat().st_ino for path in (tmp_path / "out" / ".work").glob("map-*")}
    with before_writing("map-*", lambda: None) as written:
        make(tokenizer, tmp_path / "out", sources(2), documents=documents)
    assert 0 < len(written) < len(done)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "expected")
    with pytest.raises(UserError, match="source wiki.filters|filter metadata", check=coded("other-preparation")):
        make(tokenizer, tmp_path / "out", sources(1), documents=documents)


def test_a_stopped_run_continues_where_a_source_names_the_format_that_its_files_have(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    web = {"name": "web", "input": write(tmp_path, "web", texts(40, 1))}
    with stopped_after(1, of="train-*"), pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "out", [web])
    with before_writing("map-*", lambda: None) as written:
        make(tokenizer, tmp_path / "out", [{**web, "format": "jsonl"}])
    assert not written, "its units are those of the same plan"


def test_a_source_may_have_a_name_that_ends_like_a_setting(tokenizer: Tokenizer, tmp_path: Path) -> None:
    sources = [{"name": "my.filters", "input": write(tmp_path, "web", texts(40, 1))}]
    assert make(tokenizer, tmp_path / "out", sources) == make(tokenizer, tmp_path / "out", sources)
    with pytest.raises(UserError, match="source my.filters.language was null", check=coded("other-preparation")):
        make(tokenizer, tmp_path / "out", [{**sources[0], "language": "fr"}])


def test_other_filters_of_all_sources_are_another_preparation(tokenizer: Tokenizer, tmp_path: Path) -> None:
    sources = [{"name": "web", "input": write(tmp_path, "web", texts(40, 1))}]
    documents = {"metadata_fields": ["score"], "filters": [by_score(1)]}
    with stopped_after(2, of="map-*"), pytest.raises(KeyboardInterrupt):
        make(tokenizer, tmp_path / "out", sources, documents=documents)
    with pytest.raises(UserError, check=coded("other-preparation")):
        make(tokenizer, tmp_path / "out", sources, documents={**documents, "filters": [by_score(2)]})


def test_a_source_without_filters_differs_from_one_with_those_of_the_documents(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    web = {"name": "web", "input": write(tmp_path, "web", texts(40, 1))}
    documents = {"metadata_fields": ["score"], "filters": [by_score(1)]}
    for first, then, what in (
        (web, {**web, "filters": []}, "was those of documents and is now empty"),
        ({**web, "filters": []}, web, "was empty and is now those of documents"),
    ):
        make(tokenizer, tmp_path / "out", [first], documents=documents, fresh=True)
        with pytest.raises(UserError, match=f"source web.filters {what}", check=coded("other-preparation")):
            make(tokenizer, tmp_path / "out", [then], documents=documents)


def test_an_addition_whose_source_passes_less_than_the_data_set_is_refused(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    documents = {"metadata_fields": ["score"], "filters": [by_score(1)]}
    make(
        tokenizer,
        tmp_path / "out",
        [{"name": "web", "input": write(tmp_path, "web", texts(40, 1))}],
        documents=documents,
    )
    new = {"input": write(tmp_path, "new", texts(9, 2))}

    def add(**own: Any) -> Manifest:
        given: dict[str, Any] = {"sources": [{"name": "new", **new, **own}], "overrides": ["shards.valid_fraction=0.2"]}
        return prepare(add_to=tmp_path / "out", num_workers=1, **given).manifest

    with pytest.raises(UsageError, match="source new.*metadata", check=coded("addition-differs")) as refused:
        add(filters=[])
    assert refused.value.code == "addition-differs"
    assert add(filters=[by_score(1), by_score(2)]).sources[1].documents == 3


@pytest.mark.parametrize(
    ("own", "code"),
    [
        ({"filters": [{"name": "no_such"}]}, "unknown-filter"),
        ({"filters": [{"name": "url_blocklist", "urls": ["https://a"]}]}, "filter-field-not-read"),
        ({"filters": [{"name": "metadata", "keeps": "score > 1"}]}, "filter-parameters"),
    ],
)
def test_a_wrong_filter_of_a_source_is_reported_with_the_source(
    tokenizer: Tokenizer, tmp_path: Path, own: dict[str, Any], code: str
) -> None:
    sources = [{"name": "web", "input": write(tmp_path, "web", texts(9, 1)), **own}]
    with pytest.raises(UsageError, match="source web: filter", check=coded(code)):
        make(tokenizer, tmp_path / "out", sources)


def test_the_command_that_rebuilds_a_data_set_names_the_filters_of_its_sources(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    sources = [{"name": "web", "input": write(tmp_path, "web", texts(9, 1)), "filters": [by_score(1)]}]
    manifest = make(tokenizer, tmp_path / "out", sources, documents={"metadata_fields": ["score"]})
    command, *_ = how_to_rebuild(str(tmp_path / "out"), manifest)
    assert '"filters": [{"name": "metadata", "keep": "score >= 1"}]' in command
