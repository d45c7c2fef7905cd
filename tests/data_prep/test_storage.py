"""Storage: what is under a final name is whole, patterns find each file once, errors say what and where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data_prep import storage
from data_prep.errors import UsageError, UserError


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "file.bin"
    with pytest.raises(RuntimeError), storage.local_write(target) as path:
        path.write_bytes(b"half")
        raise RuntimeError("power")
    assert os.listdir(tmp_path / "folder") == []


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path) -> None:
    storage.write_bytes(tmp_path / "file", b"old")
    with pytest.raises(RuntimeError), storage.local_write(tmp_path / "file") as path:
        path.write_bytes(b"new")
        raise RuntimeError("power")
    assert storage.read_bytes(tmp_path / "file") == b"old"


def test_writing_below_a_file_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(UserError, match="file/below cannot be written"):
        storage.write_bytes(tmp_path / "file" / "below", b"x")


def test_an_object_store_reads_back_what_was_written() -> None:
    url = "memory://bucket/folder/a.bin"
    storage.write_bytes(url, b"abc")
    assert storage.exists(url) and storage.size(url) == 3 and storage.read_bytes(url) == b"abc"
    assert storage.list_names("memory://bucket/folder") == ["a.bin"]
    assert storage.sha256_of(url).startswith("ba7816bf")
    storage.remove(url)
    assert not storage.exists(url)


def test_a_remote_file_is_fetched_once_and_checked(tmp_path: Path) -> None:
    url = "memory://bucket/copied.bin"
    storage.write_bytes(url, b"abc")
    sha256 = storage.sha256_of(url)
    copy = storage.local_copy(url, tmp_path, sha256)
    storage.write_bytes(url, b"changed")
    assert storage.local_copy(url, tmp_path, sha256) == copy and copy.read_bytes() == b"abc"
    with pytest.raises(UserError, match="copied.bin is damaged"):
        storage.local_copy(url, tmp_path / "other", sha256)
    assert not list((tmp_path / "other").iterdir())


def test_messages_show_no_password() -> None:
    assert storage.redact("s3://user:secret@host/bucket/key?token=1") == "s3://host/bucket/key"
    assert storage.redact("/plain/pa?th") == "/plain/pa?th"
    assert storage.redact("sqlite:///here.db") == "sqlite:///here.db"


def test_patterns_give_every_file_once_and_sorted(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("x")
    found = storage.expand([str(tmp_path / "*.txt"), str(tmp_path / "*.jsonl")])
    assert [Path(url).name for url in found] == ["a.jsonl", "b.jsonl", "c.txt"]


def test_a_file_whose_name_holds_a_bracket_is_found(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert storage.expand([str(tmp_path / "a[1].txt")]) == [str(tmp_path / "a[1].txt")]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [("*.jsonl", "no input file matches"), ("missing.txt", "no input file matches"), ("", "is a folder")],
)
def test_what_names_no_file_is_a_usage_error(tmp_path: Path, pattern: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        storage.expand([str(tmp_path / pattern)])


def test_a_file_named_twice_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match="named twice"):
        storage.expand([str(tmp_path / "a.txt"), str(tmp_path / "*.txt")])


def test_a_second_holder_of_a_lock_is_refused_and_told_the_first(tmp_path: Path) -> None:
    with storage.hold_lock(tmp_path):
        with pytest.raises(UserError, match=f"process {os.getpid()}"), storage.hold_lock(tmp_path):
            pass
    with storage.hold_lock(tmp_path):
        pass
    assert os.listdir(tmp_path) == []
