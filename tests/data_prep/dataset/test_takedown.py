"""Takedown: documents found by URL or id, copies that were dropped included, are gone from shards and sidecars."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep import open_dataset, prepare
from data_prep.base.errors import UserError
from data_prep.dataset.data_card import write_data_card
from data_prep.dataset.provenance_sidecar import ProvenanceRow, read_provenance, write_provenance
from data_prep.dataset.removal_request import RemovalRequest, find_listed
from data_prep.dataset.removed_names import ID_NAMES, URL_NAMES, read_list, removed_ids
from data_prep.storage import storage
from tests.support.data_prep_command import Command
from tests.support.error_codes import coded
from tests.support.kill_points import stopped_after
from tests.support.living_data_sets import (
    change_manifest,
    document_ids,
    file_bytes,
    make_data_set,
    problems_of,
    records_of,
    remove,
)
from tests.support.preparations import Manifest, read_texts

NEAR = 77
"""Id of a near-duplicate of the first document: its text is in no shard."""


def ids_in(path: Path) -> set[int]:
    return {identity for record in records_of(path) for identity in record.document_ids.tolist()}


def url_of(identity: int) -> str:
    return f"https://example.org/{identity:016x}?q=1#top"


@pytest.fixture(scope="module")
def texts_of_corpus(small_corpus: Path) -> list[str]:
    return read_texts(small_corpus)


@pytest.fixture(scope="module")
def original(small_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every document has an id and a URL; the first has an exact copy from south, and a near-duplicate elsewhere."""
    texts = read_texts(small_corpus)
    folder = tmp_path_factory.mktemp("takedown") / "shards"
    manifest = make_data_set(folder, {"north": texts[:120], "south": texts[120:]}, small_tokenizer)
    first = document_ids(folder, "north")[0]
    others = [shard for shard in manifest.shards if first not in ids_in(folder / shard.name)]
    names = [source.name for source in manifest.sources]
    written = {}
    for shard in manifest.shards:
        rows = []
        for record in records_of(folder / shard.name):
            for identity, source in zip(record.document_ids.tolist(), record.sources.tolist(), strict=True):
                row = ProvenanceRow(identity, names[source], f"id-{identity}", url_of(identity), '{"a":1}', identity)
                rows.append(row)
                if identity == first:
                    rows.append(row._replace(source="south", id="copy", url="https://copy.org/", metadata=None))
        if shard == others[0]:
            rows.append(ProvenanceRow(NEAR, "south", "near", "https://near.org/", None, first))
        written[shard.name] = write_provenance(str(folder), shard.name.partition(".")[0], rows)
    splits = {}
    for split in ("train", "valid"):
        record = manifest.split(split)  # type: ignore[arg-type]
        shards = tuple(item.model_copy(update={"provenance": written[item.name]}) for item in record.shards)
        splits[split] = record.model_copy(update={"shards": shards})
    change_manifest(folder, **splits)
    write_data_card(str(folder), open_dataset(folder).manifest)
    assert problems_of(folder) == []
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "shards"))


def provenance_of(folder: Path, manifest: Manifest) -> set[tuple[int, str, str | None]]:
    tables = [read_provenance(str(folder), file) for file in manifest.provenance_files]
    return {(row["document_id"], row["source"], row["url"]) for table in tables for row in table.to_pylist()}


def take_down(folder: Path, *urls: str) -> Manifest:
    found = find_listed(str(folder), open_dataset(folder).manifest, "url", urls)
    return remove(folder, ids=found.ids, absent=found.absent)[0]


@pytest.mark.long
@pytest.mark.parametrize("url", ["own", "https://copy.org/", "https://near.org/"])
def test_a_text_is_removed_by_the_url_of_any_copy(folder: Path, url: str) -> None:
    first = document_ids(folder, "north")[0]
    before = provenance_of(folder, open_dataset(folder).manifest)
    manifest = take_down(folder, url_of(first) if url == "own" else url)
    assert first not in document_ids(folder) and len(document_ids(folder)) == 199
    gone = before - provenance_of(folder, manifest)
    assert {identity for identity, _, _ in gone} == {first, NEAR} and len(gone) == 3
    assert set(removed_ids(str(folder), manifest).tolist()) == ({first, NEAR} if "near" in url else {first})
    assert problems_of(folder) == []
    assert problems_of(folder, version="1") == [], "the older version keeps its files"


def test_only_the_shards_that_hold_it_are_rewritten(folder: Path) -> None:
    before = open_dataset(folder).manifest
    manifest = take_down(folder, url_of(document_ids(folder, "south")[5]))
    assert len({shard.name for shard in before.shards} - {shard.name for shard in manifest.shards}) == 1
    assert len(set(before.provenance_files) - set(manifest.provenance_files)) == 1


def test_a_sidecar_is_rewritten_without_its_unchanged_shard(folder: Path) -> None:
    first = document_ids(folder, "north")[0]
    before = open_dataset(folder).manifest
    manifest = take_down(folder, "https://near.org/")
    alone = [shard for shard in manifest.shards if shard.provenance and shard.name[:12] != shard.provenance.name[:12]]
    others = [shard.name for shard in before.shards if first not in ids_in(folder / shard.name)]
    assert [shard.name for shard in alone] == others[:1]
    assert problems_of(folder) == [] and first not in document_ids(folder)


def test_a_shard_that_is_emptied_leaves_its_other_rows_detached(folder: Path) -> None:
    manifest = open_dataset(folder).manifest
    shard = manifest.train.shards[2]
    assert shard.provenance is not None
    table = read_provenance(str(folder), shard.provenance).to_pylist()
    rows = [
        *(ProvenanceRow(**row) for row in table),
        ProvenanceRow(5, "south", "lost", "https://lost.org/", None, None),
    ]
    record = write_provenance(str(folder), shard.name.partition(".")[0], rows)
    shards = tuple(
        item.model_copy(update={"provenance": record}) if item == shard else item for item in manifest.train.shards
    )
    train = manifest.train.model_copy(update={"shards": shards})
    change_manifest(folder, train=train)
    write_data_card(str(folder), open_dataset(folder).manifest)
    manifest = take_down(folder, *(url_of(row["document_id"]) for row in table))
    assert [file.name[:5] for file in manifest.detached_provenance] == ["train"]
    assert [row["url"] for row in read_provenance(str(folder), manifest.detached_provenance[0]).to_pylist()] == [
        "https://lost.org/"
    ]
    assert problems_of(folder) == []
    manifest = take_down(folder, "https://lost.org/")
    assert manifest.detached_provenance == () and problems_of(folder) == []


def test_removing_a_source_removes_its_rows_from_the_sidecars(folder: Path) -> None:
    manifest, _ = remove(folder, source="south")
    assert {source for _, source, _ in provenance_of(folder, manifest)} == {"north"}
    assert problems_of(folder) == []


@pytest.mark.parametrize("num_writes", range(0, 9, 2))
def test_a_takedown_stopped_at_any_write_ends_with_the_same_bytes(
    folder: Path, tmp_path: Path, num_writes: int
) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    urls = [url_of(identity) for identity in document_ids(folder, "north")[:6]]
    take_down(other, *urls)
    with pytest.raises(KeyboardInterrupt), stopped_after(num_writes):
        take_down(folder, *urls)
    take_down(folder, *urls)
    assert file_bytes(folder) == file_bytes(other)


@pytest.mark.long
def test_verify_finds_damaged_and_wrong_sidecars(folder: Path, original: Path) -> None:
    manifest = open_dataset(folder).manifest
    name = manifest.provenance_files[0].name
    (folder / name).write_bytes((folder / name).read_bytes() + b"!")
    assert any(name in problem and "sha256" in problem for problem in problems_of(folder))
    (folder / name).unlink()
    assert any(name in problem and "missing" in problem for problem in problems_of(folder))

    def forge(change: list[ProvenanceRow]) -> list[str]:
        shard = manifest.train.shards[0]
        assert shard.provenance is not None
        rows = [ProvenanceRow(**row) for row in read_provenance(str(original), shard.provenance).to_pylist()]
        record = write_provenance(
            str(folder),
            shard.name.partition(".")[0],
            [*(row for row in rows if row.document_id != rows[-1].document_id), *change],
        )
        shards = (shard.model_copy(update={"provenance": record}), *manifest.train.shards[1:])
        train = manifest.train.model_copy(update={"shards": shards})
        change_manifest(folder, train=train)
        write_data_card(str(folder), open_dataset(folder).manifest)
        return problems_of(folder)

    assert any("no row for 1 documents" in problem for problem in forge([]))
    assert any(f"{99:016x}" in problem for problem in forge([ProvenanceRow(1, "north", None, None, None, 99)]))
    assert any("'west'" in problem for problem in forge([ProvenanceRow(1, "west", None, None, None, None)]))


def test_without_provenance_the_setting_is_named(small_shards: Path) -> None:
    for column in ("id", "url"):
        with pytest.raises(UserError, match=f"documents.{column}_field", check=coded("missing-provenance")):
            find_listed(str(small_shards), open_dataset(small_shards).manifest, column, ["x"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text", "values"),
    [
        ("l.txt", "# list\nhttps://a.org/#x\r\n\nb\n", [(2, "https://a.org/#x"), (4, "b")]),
        ("l.csv", 'name,URL\nx,https://a.org/?a=1\n"y, z",b\n,\n', [(2, "https://a.org/?a=1"), (3, "b")]),
        ("l.tsv", "url\tname\na\tx\n", [(2, "a")]),
        ("l.csv", "anything\na\n", [(2, "a")]),
        ("l.csv", 'note,url\nx," a\u00a0"\nx,"b\nc"\nx, \n', [(2, " a\u00a0"), (4, "b\nc")]),
    ],
)
def test_lists_of_every_kind_are_read(tmp_path: Path, name: str, text: str, values: list[tuple[int, str]]) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert read_list(str(tmp_path / name), URL_NAMES) == values


@pytest.mark.parametrize(
    ("name", "data", "place", "code"),
    [
        ("l.csv", b"a,b\n1,2\n", "line 1", "missing-column"),
        ("l.csv", b'url,b\n"1,2\n', "line 2", "invalid-list"),
        ("l.csv", b"", "line 1", "missing-column"),
        ("l.csv", b"url\nb\nhttps://a.org/?q=1,2\n", "line 3", "invalid-list"),
        ("l.csv", b"name,url\nx\n", "line 2", "invalid-list"),
        ("l.csv", b"https://a.org/1\nhttps://a.org/2\n", "line 1", "missing-column"),
        ("l.csv", b"url\n", "l.csv", "empty-list"),
        ("l.txt", b"a\n\xff\n", "byte 2", "invalid-list"),
    ],
)
def test_lists_that_are_wrong_are_named(tmp_path: Path, name: str, data: bytes, place: str, code: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=place, check=coded(code)):
        read_list(str(tmp_path / name), ID_NAMES + URL_NAMES)


@pytest.mark.long
def test_the_command_takes_lists_and_shows_what_it_takes(command: Command, folder: Path, tmp_path: Path) -> None:
    first, second = document_ids(folder, "north")[:2]
    assert command("inspect", folder, "--document", f"{first:016x}") == 0
    for shown in (f"id-{first}", url_of(first), '{"a":1}', "https://copy.org/"):
        assert shown in command.output
    (tmp_path / "urls.csv").write_text("when,url\n2026-05-01,https://near.org/\n2026-05-01,https://never.org/\n")
    (tmp_path / "ids.txt").write_text(f"id-{second}\n")
    before = file_bytes(folder)
    assert command("remove", folder, "--urls", tmp_path / "urls.csv", "--dry-run", "--workers", 1) == 0
    assert "1 of 2 URLs" in command.output and "1 of " in command.output and file_bytes(folder) == before
    assert command("remove", folder, "--urls", tmp_path / "urls.csv", "--workers", 1) == 0
    assert "removed 1 document by URL, " in command.output
    assert "requested, not present: 1: https://never.org/\n" in command.output
    assert command("remove", folder, "--ids", tmp_path / "ids.txt", "--workers", 1, "--purge") == 0
    assert not {first, second} & set(document_ids(folder))
    assert command("remove", folder, "--ids", tmp_path / "ids.txt", "--workers", 1) == 0, "and once more"
    assert f"removed before: id-{second}\n" in command.output and "not present" not in command.output
    assert "0 of 1 corpus id" in command.output and "nothing was done" in command.output
    assert command("verify", folder, "--workers", 1) == 0, command.errors
    kept = {name: storage.read_bytes(folder / name) for name in file_bytes(folder) if name.endswith(".parquet")}
    assert not any(url_of(first).encode() in data for data in kept.values())


def test_decoded_documents_have_their_provenance(folder: Path) -> None:
    for document in open_dataset(folder).documents("valid"):
        identity = int(document.metadata["document_id"], 16)
        assert (document.id, document.url) == (f"id-{identity}", url_of(identity)) and document.metadata["a"] == 1


def test_ids_of_absent_copies_are_excluded_later_too() -> None:
    request = RemovalRequest(ids=np.array([3], np.uint64), absent=np.array([1, 9], np.uint64))
    excluded = request.excluded_ids
    assert excluded is not None and excluded.tolist() == [1, 3, 9]


@pytest.mark.long
def test_a_prepared_corpus_loses_the_kept_document_of_a_dropped_copy(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    """The whole way: exact and near copies are dropped at preparation, and their URLs take the kept texts down."""
    lines = [
        {"text": text, "url": f"https://example.org/{number}"} for number, text in enumerate(read_texts(small_corpus))
    ]
    exact = max(lines[:100], key=lambda line: len(line["text"]))
    near = max(lines[100:], key=lambda line: len(line["text"]))
    words = near["text"].split(" ")
    lines.append({"text": exact["text"], "url": "https://copy.org/exact"})
    lines.append({"text": " ".join([*words[:40], *words[41:]]), "url": "https://copy.org/near"})
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset = prepare(
        tmp_path / "corpus.jsonl",
        tokenizer=small_tokenizer,
        output=tmp_path / "set",
        config={"documents": {"url_field": "url"}, "deduplication": {"near": True}, "shards": {"min_shards": 3}},
        num_workers=1,
    )
    assert dataset.dropped == {"duplicate": 1, "near duplicate": 1}
    (tmp_path / "urls.txt").write_text("https://copy.org/exact\nhttps://copy.org/near\n")
    assert command("remove", tmp_path / "set", "--urls", tmp_path / "urls.txt", "--workers", 1) == 0, command.errors
    assert "2 of 2 URLs" in command.output and "removed 2 documents" in command.output
    left = {document.url for document in open_dataset(tmp_path / "set")}
    assert len(left) == 198 and not {exact["url"], near["url"]} & left
    assert problems_of(tmp_path / "set") == []


def test_values_that_are_not_found_are_listed(command: Command, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "urls.txt").write_text("".join(f"https://never.org/{number}\n" for number in range(1, 1234)))
    before = file_bytes(folder)
    assert command("remove", folder, "--urls", tmp_path / "urls.txt", "--workers", 1, "--dry-run") == 0
    assert "would remember 1,233 values" in command.output and file_bytes(folder) == before
    assert command("remove", folder, "--urls", tmp_path / "urls.txt", "--workers", 1) == 0
    assert "0 of 1,233 URLs" in command.output and "exact" in command.output
    assert "https://never.org/10 and 1,223 more\n" in command.output and "never.org/11" not in command.output
    assert "removed before" not in command.output and "remembered 1,233 values" in command.output
    assert {name for name in before if name.endswith(".tar")} == {n for n in file_bytes(folder) if n.endswith(".tar")}


@pytest.mark.long
def test_a_removed_url_or_id_does_not_come_back_with_another_text(
    command: Command, texts_of_corpus: list[str], small_tokenizer: Path, tmp_path: Path
) -> None:
    def write(name: str, lines: list[tuple[str, str, str]]) -> Path:
        fields = [{"text": text, "url": url, "id": identity} for text, url, identity in lines]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in fields))
        return tmp_path / name

    texts = texts_of_corpus
    corpus = write("corpus.jsonl", [(text, f"https://a.org/{n}", f"a{n}") for n, text in enumerate(texts[:120])])
    settings = {"documents": {"url_field": "url", "id_field": "id"}, "shards": {"min_shards": 3, "valid_fraction": 0.2}}
    prepare(corpus, tokenizer=small_tokenizer, output=tmp_path / "set", config=settings, num_workers=1)
    (tmp_path / "urls.txt").write_text("https://a.org/3\nhttps://a.org/5\nhttps://never.org/\n")
    (tmp_path / "ids.txt").write_text("a7\n")
    assert command("remove", tmp_path / "set", "--urls", tmp_path / "urls.txt", "--workers", 1) == 0
    assert command("remove", tmp_path / "set", "--ids", tmp_path / "ids.txt", "--workers", 1) == 0
    assert "removed 1 document by corpus id, " in command.output
    manifest = open_dataset(tmp_path / "set").manifest
    assert [(item.urls, item.corpus_ids, item.kind) for item in manifest.removals] == [
        (3, 0, "URL"),
        (0, 1, "corpus id"),
    ]
    assert b"a.org" not in b"".join(path.read_bytes() for path in (tmp_path / "set").glob("removed-*"))
    more = write(
        "more.jsonl",
        [
            (f"{texts[3]} A later edition.", "https://a.org/3", "b0"),
            (f"{texts[5]} A later edition.", "https://a.org/5#top", "b1"),  # another URL: the match is exact
            (f"{texts[7]} A later edition.", "https://b.org/2", "a7"),
            (texts[3], "https://b.org/3", "b3"),  # the same text elsewhere
            *((text, f"https://b.org/{n}", f"b{n}") for n, text in enumerate(texts[120:140], 4)),
        ],
    )
    shutil.copytree(tmp_path / "set", tmp_path / "other")
    for name, workers in (("set", 1), ("other", 2)):
        dataset = prepare(
            more,
            add_to=tmp_path / name,
            source_name="more",
            config={**settings, "shards": {"unit_bytes": 4000, "valid_fraction": 0.2}},
            num_workers=workers,
        )
        assert dataset.sources["more"].dropped == {"removed earlier": 3}
        urls = {document.url for document in dataset if document.source == "more"}
        assert len(urls) == 21 and "https://a.org/5#top" in urls and not {"https://a.org/3", "https://b.org/2"} & urls
        assert problems_of(tmp_path / name) == []
    assert file_bytes(tmp_path / "set") == file_bytes(tmp_path / "other")


def test_an_addition_that_does_not_read_removed_urls_is_warned_of(
    command: Command, folder: Path, texts_of_corpus: list[str], tmp_path: Path
) -> None:
    first = document_ids(folder, "north")[0]
    (tmp_path / "urls.txt").write_text(url_of(first))
    assert command("remove", folder, "--urls", tmp_path / "urls.txt", "--workers", 1) == 0
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": f"{texts_of_corpus[0]} A later edition."}) + "\n")
    arguments = ("--input", tmp_path / "more.jsonl", "--source-name", "more", "--add-to", folder, "--workers", 1)
    assert command("shards", *arguments, "shards.valid_fraction=0.2") == 0, command.errors
    assert "warning: 1 URL removed" in command.errors and "documents.url_field" in command.errors


def test_a_document_is_found_by_each_of_its_names(command: Command, folder: Path) -> None:
    first, second = document_ids(folder, "north")[:2]
    dataset = open_dataset(folder)
    document = dataset.document(f"{second:016x}")
    assert (document.id, document.document_id) == (f"id-{second}", f"{second:016x}")
    assert dataset.document(f"id-{second}") == dataset.document(corpus_id=f"id-{second}") == document
    assert dataset.document(url=url_of(second)) == document
    for copy in ("copy", "near"):
        assert dataset.document(copy).document_id == f"{first:016x}", "a copy is represented by the kept document"
    for wrong in ("b3", f"{second:x}"[:15], f"id-{second} ", "0" * 17):
        with pytest.raises(UserError, check=coded("unknown-document")):
            dataset.document(wrong)
    with pytest.raises(UserError, check=coded("contradicting-arguments")):
        dataset.document("copy", url="https://copy.org/")
    for option, value in (("--document", f"{second:016x}"), ("--id", f"id-{second}"), ("--url", url_of(second))):
        assert command("inspect", folder, option, value) == 0
        assert f"document id   {second:016x}" in command.output and f"corpus id     id-{second}" in command.output
        assert "source url    -" in command.output and f"document url  {url_of(second)}" in command.output
    assert command("inspect", folder, "--id", "b3") == 2 and "[unknown-document]" in command.errors
    assert command("inspect", folder, "--document", "b3") == 2
    assert "--id" in command.errors and "[malformed-document-id]" in command.errors


@pytest.mark.long
def test_several_documents_of_one_url_are_all_shown(command: Command, folder: Path) -> None:
    manifest = open_dataset(folder).manifest
    shard = manifest.train.shards[0]
    assert shard.provenance is not None
    table = read_provenance(str(folder), shard.provenance).to_pylist()
    kept = {row["kept_as"] for row in table}
    rows = [ProvenanceRow(**row)._replace(url="https://same.org/") for row in table]
    record = write_provenance(str(folder), shard.name.partition(".")[0], rows)
    shards = (shard.model_copy(update={"provenance": record}), *manifest.train.shards[1:])
    train = manifest.train.model_copy(update={"shards": shards})
    change_manifest(folder, train=train)
    with pytest.raises(UserError, match=f"{min(kept):016x}", check=coded("several-documents")):
        open_dataset(folder).document(url="https://same.org/")
    assert command("inspect", folder, "--url", "https://same.org/") == 0
    assert command.output.count("document id   ") == len(kept)
