"""Removal: what is named is gone from every record, all else is as it was, and a killed removal goes on."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_prep import open_dataset, verify
from data_prep.base.errors import UsageError, UserError
from data_prep.dataset.manifest import MANIFEST_NAME, list_versions
from data_prep.dataset.removed_names import read_document_ids, removed_ids
from data_prep.dataset.versions import delete_older_versions
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.kill_points import before_writing, stopped_after
from tests.support.living_data_sets import (
    contents,
    document_ids,
    file_bytes,
    make_data_set,
    problems_of,
    records_of,
    remove,
)
from tests.support.preparations import read_texts
from tests.support.s3_server import S3Bucket


@pytest.fixture(scope="module")
def original(small_corpus: Path, small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources north (90 documents), south (60) and east (50) in 3 train shards and 1 valid shard."""
    texts = read_texts(small_corpus)
    folder = tmp_path_factory.mktemp("living") / "shards"
    make_data_set(folder, {"north": texts[:90], "south": texts[90:150], "east": texts[150:]}, small_tokenizer)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "shards"))


def test_removing_a_source_changes_no_other_document(folder: Path) -> None:
    before = contents(folder)
    manifest, is_new = remove(folder, source="south")
    assert is_new and manifest == open_dataset(folder).manifest
    after = contents(folder)
    assert after == Counter({document: n for document, n in before.items() if document[1] != "south"})
    assert len(before) == 200 and len(after) == 140
    assert verify(folder).manifest == manifest
    first = list_versions(str(folder))[0]
    assert (manifest.version, manifest.parent) == (2, first.digest)
    assert contents(folder, first.digest) == before, "a run that began with it goes on"
    south = manifest.sources[1]
    assert (south.name, south.documents, south.tokens, south.dropped) == ("south", 0, 0, {"removed": 60})
    assert [(r.version, r.source, r.documents) for r in manifest.removals] == [(2, "south", 60)]
    assert manifest.steps[-1].dropped == {"removed": 60} and manifest.steps[-1].documents_out == 140


def test_only_shards_that_hold_the_source_are_rewritten(folder: Path) -> None:
    shard = open_dataset(folder).manifest.train.shards[1]
    record, *_ = records_of(folder / shard.name)
    manifest, _ = remove(folder, ids=record.document_ids[:2].tolist())
    names = [shard.name for shard in manifest.shards]
    assert names == ["train-000000.tar", "train-000003.tar", "train-000002.tar", "valid-000000.tar"]
    assert manifest.train.shards[1].documents == shard.documents - 2
    assert (folder / shard.name).exists(), "the old shard stays"
    assert problems_of(folder) == [] and problems_of(folder, version="1") == []


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_removal_keeps_exactly_the_other_documents(
    original: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = Path(shutil.copytree(original, tmp_path_factory.mktemp("any") / "shards"))
    before = contents(folder)
    ids = data.draw(st.lists(st.sampled_from(document_ids(folder)), min_size=1, max_size=120, unique=True))
    manifest, _ = remove(folder, ids=ids)
    gone = set(ids)
    assert contents(folder) == Counter({document: n for document, n in before.items() if document[2] not in gone})
    assert verify(folder).manifest == manifest
    assert removed_ids(str(folder), manifest).tolist() == sorted(gone)
    assert manifest.dropped["removed"] == len(gone)


def test_a_shard_that_a_removal_empties_is_dropped(folder: Path) -> None:
    shard = open_dataset(folder).manifest.train.shards[0]
    ids = [document for record in records_of(folder / shard.name) for document in record.document_ids.tolist()]
    manifest, _ = remove(folder, ids=ids)
    assert [shard.name for shard in manifest.train.shards] == ["train-000001.tar", "train-000002.tar"]
    assert problems_of(folder) == []


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_removal_that_would_empty_a_split_is_refused(folder: Path, split: str) -> None:
    ids = [document for name, _, document, _, _ in contents(folder) if name == split]
    with pytest.raises(UsageError, match=f"{split} split", check=coded("would-empty-split")):
        remove(folder, ids=ids)
    assert open_dataset(folder).manifest.version == 1 and not (folder / ".removal").exists()


def test_unknown_sources_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match="'north', 'south', 'east'", check=coded("unknown-source")):
        remove(folder, source="west")
    assert open_dataset(folder).manifest.version == 1 and not (folder / ".removal").exists()


def test_document_ids_that_no_document_has_are_remembered(folder: Path) -> None:
    first = document_ids(folder)[0]
    manifest, _ = remove(folder, ids=[7, 255, first])
    assert [(item.documents, item.not_present, item.kind) for item in manifest.removals] == [(1, 2, "document id")]
    assert removed_ids(str(folder), manifest).tolist() == sorted([7, 255, first])
    assert remove(folder, ids=[7, 255]) == (manifest, False)
    assert remove(folder, ids=[8, 255])[0].removals[-1].not_present == 1
    assert problems_of(folder) == []


def test_of_the_sources_of_a_data_set_those_with_documents_are_named(folder: Path) -> None:
    remove(folder, source="south")
    with pytest.raises(UserError, match="give one of 'north', 'east'.$", check=coded("unknown-source")):
        remove(folder, source="west")


def test_the_same_removal_again_does_nothing(folder: Path) -> None:
    ids = document_ids(folder, "east")[:3]
    first, _ = remove(folder, ids=ids)
    assert remove(folder, ids=ids) == (first, False)
    second, _ = remove(folder, source="south")
    assert remove(folder, source="south") == (second, False)
    third, is_new = remove(folder, ids=[*ids, *document_ids(folder, "east")[:1]])
    assert is_new and third.removals[-1].documents == 1, "what was removed before is not counted again"
    assert len(removed_ids(str(folder), third)) == 4
    assert problems_of(folder) == []


def test_a_source_without_documents_can_be_removed(tmp_path: Path, small_corpus: Path, small_tokenizer: Path) -> None:
    texts = read_texts(small_corpus)[:60]
    make_data_set(tmp_path / "shards", {"one": texts, "two": texts[:5]}, small_tokenizer)
    manifest, is_new = remove(tmp_path / "shards", source="two")
    assert is_new and manifest.removed_sources == {"two"} and manifest.removals[0].documents == 0
    assert problems_of(tmp_path / "shards") == []


def test_a_note_stands_in_manifest_and_card(folder: Path) -> None:
    note = "asked for by the owner | 2026-05-01"
    manifest, _ = remove(folder, source="south", note=note)
    assert manifest.removals[0].note == note
    assert r"asked for by the owner \| 2026-05-01" in (folder / "DATA_CARD.md").read_text(encoding="utf-8")


def test_purging_leaves_no_file_that_holds_it(folder: Path) -> None:
    gone = set(document_ids(folder, "south"))
    manifest, _ = remove(folder, source="south")
    delete_older_versions(str(folder))
    assert verify(folder).manifest == manifest
    for path in folder.glob("*.tar"):
        assert not gone & {i for record in records_of(path) for i in record.document_ids.tolist()}
    assert sorted(path.name for path in folder.glob("manifest*")) == [MANIFEST_NAME]
    assert len(list(folder.glob("*.tar"))) == len(manifest.shards)


def test_a_damaged_shard_is_not_rewritten(folder: Path) -> None:
    path = folder / "train-000001.tar"
    data = bytearray(path.read_bytes())
    data[5000] ^= 4
    path.write_bytes(data)
    with pytest.raises(UserError, match="train-000001.tar", check=coded("checksum-mismatch")):
        remove(folder, source="south")
    assert open_dataset(folder).manifest.version == 1


def test_an_unfinished_removal_of_another_source_is_refused(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), stopped_after(0, "manifest-*.json"):
        remove(folder, source="south")
    assert (folder / "train-000004.tar").exists() and problems_of(folder) == []
    with pytest.raises(UserError, match="'south'", check=coded("unfinished-work")):
        remove(folder, source="east")
    manifest, _ = remove(folder, source="east", fresh=True)
    assert manifest.removed_sources == {"east"} and len(contents(folder)) == 150
    assert verify(folder).manifest == manifest, "no shard of the other one is left"


def test_a_damaged_removal_is_reported_and_discarded_with_fresh(folder: Path) -> None:
    (folder / ".removal").mkdir()
    for damage in ("[]", "{}", "", '{"parent": 3}'):
        (folder / ".removal" / "plan.json").write_text(damage)
        with pytest.raises(UserError, match="plan.json", check=coded("damaged-work-file")):
            remove(folder, source="south")
    manifest, _ = remove(folder, source="south", fresh=True)
    assert manifest.removed_sources == {"south"} and not (folder / ".removal").exists()


def test_a_removal_starts_again_after_another_command_changed_the_set(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt), stopped_after(0, "manifest-*.json"):
        remove(folder, source="south")
    begun = (folder / ".removal").rename(folder.parent / "begun")
    remove(folder, ids=document_ids(folder, "east")[:1])
    begun.rename(folder / ".removal")
    manifest, is_new = remove(folder, source="south")
    assert is_new and manifest.version == 3 and len(contents(folder)) == 139
    assert verify(folder).manifest == manifest


def test_a_removal_from_an_unfinished_data_set_is_refused(folder: Path) -> None:
    (folder / ".work").mkdir()
    with pytest.raises(UserError, match="'shards'", check=coded("unfinished-work")):
        remove(folder, source="south")


def test_ids_are_read_as_inspect_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "ids.txt"
    path.write_bytes(b"\xef\xbb\xbf# asked for on 2026-05-01\r\n00000000000000FF # a page\r\n\r\n0000000000000007\r\n")
    assert read_document_ids(str(path)).tolist() == [7, 255]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_comment_may_hold_what_is_no_line_end_in_a_text_file(tmp_path: Path, end: str) -> None:
    path = tmp_path / "ids.txt"
    path.write_bytes(f"00000000000000FF # of\u2028two \u0085lines\x0c{end}0000000000000007{end}hello".encode())
    with pytest.raises(UserError, match="line 3 .*'hello'", check=coded("malformed-document-id")):
        read_document_ids(str(path))


@pytest.mark.parametrize(
    ("data", "message", "code"),
    [
        (b"7\n", "line 1 .*'7'", "malformed-document-id"),
        (b"0000000000000007\nhello\n", "line 2 .*'hello'", "malformed-document-id"),
        (b"# nothing\n", "ids.txt", "empty-list"),
        (b"\xff\xfe", "byte 0", "invalid-list"),
        (None, "ids.txt", "missing-path"),
    ],
)
def test_a_list_that_holds_no_document_ids_is_refused(
    tmp_path: Path, data: bytes | None, message: str, code: str
) -> None:
    if data is not None:
        (tmp_path / "ids.txt").write_bytes(data)
    with pytest.raises(UserError, match=message, check=coded(code)):
        read_document_ids(str(tmp_path / "ids.txt"))


@pytest.mark.long
@pytest.mark.spawn
def test_killed_at_any_moment_the_same_command_ends_with_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "data_prep", "remove", str(folder), "--source", "south", "--workers", "1"]
    expected = Path(shutil.copytree(folder, tmp_path / "expected"))
    started_at = time.monotonic()
    subprocess.run([*command[:4], str(expected), *command[5:]], check=True, capture_output=True, timeout=500)
    whole_seconds = time.monotonic() - started_at
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (folder / ".removal" / "plan.json").exists():
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    for share in (0.8, 0.95):  # some of which may come too late
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(whole_seconds * share)
        process.kill()
        process.wait()
        assert problems_of(folder) == [], "the old version or the new"
    subprocess.run(command, check=True, capture_output=True, timeout=500)
    assert file_bytes(folder) == file_bytes(expected)
    assert json.loads(file_bytes(folder)[MANIFEST_NAME])["version"] == 2


@pytest.mark.long
def test_stopped_after_any_write_the_same_removal_ends_with_the_same_bytes(original: Path, tmp_path: Path) -> None:
    expected = Path(shutil.copytree(original, tmp_path / "expected"))
    ids = document_ids(expected, "east")
    remove(expected, ids=ids)
    for num_writes in itertools.count():
        folder = Path(shutil.copytree(original, tmp_path / f"stopped-{num_writes}"))
        with stopped_after(num_writes):
            try:
                remove(folder, ids=ids)
            except KeyboardInterrupt:
                assert open_dataset(folder).manifest.version == 1
                assert problems_of(folder) == []
            else:
                break
        remove(folder, ids=ids)
        assert file_bytes(folder) == file_bytes(expected) and not (folder / ".removal").exists()
    assert num_writes > 15


def test_work_files_of_a_removal_killed_at_its_end_block_nothing(folder: Path) -> None:
    remove(folder, source="south")
    after = file_bytes(folder)
    for ids in (None, document_ids(folder)[:1]):
        (folder / ".removal").mkdir()
        (folder / ".removal" / "train-000003.done.json").write_text("{}")
        _, is_new = remove(folder, source="south") if ids is None else remove(folder, ids=ids)
        assert is_new is (ids is not None) and not (folder / ".removal").exists()
        assert ids is not None or file_bytes(folder) == after


@pytest.mark.long
def test_a_remote_data_set_is_removed_from_in_place(folder: Path, s3_bucket: S3Bucket, tmp_path: Path) -> None:
    url = f"{s3_bucket.url}/shards"
    for path in (path for path in folder.rglob("*") if path.is_file()):
        storage.write_bytes(f"{url}/{path.relative_to(folder)}", path.read_bytes())
    local, _ = remove(folder, source="south")
    remote, _ = remove(url, source="south")
    assert remote == local, "the same version, to the digest"
    assert verify(url).manifest == remote and problems_of(url, version="1") == []
    with storage.hold_lock(url):
        delete_older_versions(url)
    assert verify(url).manifest == remote
    assert sorted(name for name in storage.list_names(url) if name.endswith(".tar")) == sorted(
        shard.name for shard in remote.shards
    )


def test_files_of_a_killed_worker_are_removed(folder: Path) -> None:
    left = folder / ".train-000004.tar.1-ab.partial"
    with before_writing("train-*.tar", lambda: left.write_bytes(b"half")) as written:
        remove(folder, source=open_dataset(folder).manifest.sources[-1].name)
    assert written and not list(folder.glob(".*.partial"))
