"""Versions of a data set: the one before is kept, and a stopped command leaves the old version or the new."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep import verify
from data_prep.base.errors import UserError
from data_prep.dataset.counts import split_record
from data_prep.dataset.manifest import MANIFEST_NAME, Manifest, UnknownVersion, list_versions, read_manifest
from data_prep.dataset.shards import shard_name
from data_prep.dataset.versions import (
    PREPARATION_WORK,
    delete_older_versions,
    next_shard_number,
    next_version,
    owned_files,
    publish,
    select_version,
    stray_files,
    unfinished_work,
)
from tests.support.error_codes import coded
from tests.support.kill_points import stopped_after
from tests.support.living_data_sets import problems_of


@pytest.fixture
def folder(small_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_shards, tmp_path / "shards"))


def child_of(manifest: Manifest) -> Manifest:
    """A version without the last train shard's twin: the same data under another number."""
    return manifest.model_copy(update={"version": manifest.version + 1, "parent": manifest.digest})


def smaller_child_of(manifest: Manifest) -> Manifest:
    """A version of the first two train shards."""
    kept = split_record(manifest.train.shards[:2], np.ones(1, np.int64))
    return child_of(manifest).model_copy(update={"train": kept})


def test_the_version_before_is_kept_byte_for_byte(folder: Path) -> None:
    before = (folder / MANIFEST_NAME).read_bytes()
    first = read_manifest(str(folder))
    second = child_of(first)
    publish(str(folder), second)
    assert (folder / "manifest-000001.json").read_bytes() == before
    assert read_manifest(str(folder)) == second
    assert read_manifest(str(folder), first.digest) == first
    assert list_versions(str(folder)) == [first, second]
    assert [select_version(str(folder), text).version for text in ("1", "2", first.digest, second.digest[:12])] == [
        1,
        2,
        1,
        2,
    ]


def test_a_damaged_older_manifest_is_reported_with_the_fix(folder: Path) -> None:
    publish(str(folder), child_of(read_manifest(str(folder))))
    (folder / "manifest-000001.json").write_text("{")
    with pytest.raises(UserError, check=coded("damaged-manifest"), match=r"manifest-000001.json .* --purge'"):
        verify(folder)
    delete_older_versions(str(folder))
    assert problems_of(folder) == []


def test_the_digest_is_the_sha256_of_the_file(folder: Path) -> None:
    manifest = read_manifest(str(folder))
    assert hashlib.sha256((folder / MANIFEST_NAME).read_bytes()).hexdigest() == manifest.digest


def test_a_missing_version_is_reported_with_the_existing_versions(folder: Path) -> None:
    known = read_manifest(str(folder)).digest[:16]
    with pytest.raises(UnknownVersion, match=f"digest {'f' * 16}, only 1 .{known}.*remove --purge"):
        read_manifest(str(folder), "f" * 64)
    for name in ("2", "f" * 64, known[:3]):
        with pytest.raises(UserError, match=f"version {name}.*1", check=coded("unknown-version")):
            select_version(str(folder), name)


def test_a_version_that_was_not_made_from_the_current_one_is_refused(folder: Path) -> None:
    first = read_manifest(str(folder))
    publish(str(folder), child_of(first))
    rival = child_of(first).model_copy(update={"config": {"other": True}})
    with pytest.raises(UserError, check=coded("version-changed")):
        publish(str(folder), rival)


def test_a_publication_stopped_at_any_write_leaves_a_whole_version(folder: Path) -> None:
    first = read_manifest(str(folder))
    second = child_of(first)
    for num_writes in range(4):
        try:
            with stopped_after(num_writes):
                publish(str(folder), second)
        except KeyboardInterrupt:
            pass
        else:
            assert num_writes == 3, "manifest kept, card, manifest: three writes"
        assert verify(folder).manifest == (second if num_writes == 3 else first)
    publish(str(folder), second)
    assert list_versions(str(folder)) == [first, second]


def test_the_last_version_and_the_last_shard_have_no_successor(folder: Path) -> None:
    manifest = read_manifest(str(folder))
    assert next_version(manifest) == 2 and shard_name("train", 999_999) == "train-999999"
    with pytest.raises(UserError, check=coded("too-many-versions")):
        next_version(manifest.model_copy(update={"version": 999_999}))
    with pytest.raises(UserError, match="1,000,000", check=coded("too-many-shards")):
        shard_name("train", 1_000_000)


def test_numbers_of_shards_are_never_used_again(folder: Path) -> None:
    assert next_shard_number(str(folder)) == 4
    first = read_manifest(str(folder))
    publish(str(folder), smaller_child_of(first))
    (folder / "train-000003.tar").unlink()
    assert next_shard_number(str(folder)) == 4, "version 1 names it though its file is gone"
    (folder / "valid-000011.index.safetensors").write_bytes(b"left by a command that was stopped")
    assert next_shard_number(str(folder)) == 12
    assert next_shard_number(str(folder.parent / "nothing")) == 0


def test_purging_deletes_what_the_current_version_does_not_need(folder: Path) -> None:
    first = read_manifest(str(folder))
    publish(str(folder), smaller_child_of(first))
    (folder / "notes.txt").write_text("the user's own")
    assert stray_files(str(folder)) == []
    gone = ["manifest-000001.json", *(f"train-00000{n}.{end}" for n in (2, 3) for end in ("index.safetensors", "tar"))]
    assert delete_older_versions(str(folder)) == gone
    assert not [name for name in gone if (folder / name).exists()]
    assert (folder / "notes.txt").exists() and (folder / "tokenizer").is_dir()
    assert len(owned_files(str(folder))) == 5 + 2 * 3
    assert delete_older_versions(str(folder)) == []
    with pytest.raises(UnknownVersion):
        read_manifest(str(folder), first.digest)


def test_a_stopped_purge_is_reported_and_completed_next_time(folder: Path) -> None:
    first = read_manifest(str(folder))
    publish(str(folder), smaller_child_of(first))
    (folder / "manifest-000001.json").unlink()  # the first that goes
    assert len(stray_files(str(folder))) == 4
    assert len(delete_older_versions(str(folder))) == 4


def test_the_work_of_an_interrupted_repair_of_earlier_releases_is_reported_and_purged(folder: Path) -> None:
    """It may hold text that was removed since, and nothing resumes it."""
    (folder / ".repair").mkdir()
    (folder / ".repair" / "map-0000000.sections").write_bytes(b"text")
    (problem,) = problems_of(folder)
    assert ".repair" in problem and problem.endswith("Fix: delete it")
    delete_older_versions(str(folder))
    assert not (folder / ".repair").exists() and problems_of(folder) == []


def test_unfinished_work_is_not_purged(folder: Path) -> None:
    assert unfinished_work(str(folder)) == []
    (folder / PREPARATION_WORK).mkdir()
    assert unfinished_work(str(folder)) == ["shards"]
    with pytest.raises(UserError, match="'shards'", check=coded("unfinished-work")):
        delete_older_versions(str(folder))
