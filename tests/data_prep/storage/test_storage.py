"""Storage: what is under a final name is whole, patterns find each file once, errors say what and where."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError, UserError
from data_prep.base.urls import redact_text
from data_prep.storage import storage
from tests.support.disk_events import assert_replaced_durably, record_disk_events
from tests.support.error_codes import coded
from tests.support.s3_server import S3Bucket


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


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write_bytes(tmp_path / "file", b"old")
    events = record_disk_events(monkeypatch)
    storage.write_bytes(tmp_path / "file", b"all of it")
    assert_replaced_durably(events, tmp_path / "file", b"all of it")


def test_writing_below_a_file_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(UserError, match="file/below", check=coded("unwritable-file")):
        storage.write_bytes(tmp_path / "file" / "below", b"x")


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(UserError, match=f"{name} is a device", check=coded("output-not-a-file")):
            storage.write_bytes(tmp_path / name, b"x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


def test_threads_may_write_the_same_file_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: storage.write_bytes(tmp_path / "file", bytes([number]) * 100_000), range(40)))
    content = (tmp_path / "file").read_bytes()
    assert content == content[:1] * 100_000 and os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("remote", [False, True])
def test_an_unreadable_source_is_not_reported_as_the_written_file(tmp_path: Path, remote: bool) -> None:
    target, source = "memory://bucket/target" if remote else str(tmp_path / "target"), tmp_path / "gone.bin"
    with pytest.raises(UserError) as caught, storage.local_write(target) as partial:
        shutil.copyfile(source, partial)
    assert str(caught.value).startswith(f"{source} cannot be used while {target} is written: No such file or directory")
    assert not storage.exists(target) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("remote", [False, True])
def test_a_refusal_of_the_written_file_itself_names_the_place(tmp_path: Path, remote: bool) -> None:
    target = "memory://bucket/target" if remote else str(tmp_path / "target")
    with (
        pytest.raises(UserError, match="target cannot be written: No such file"),
        storage.local_write(target) as partial,
    ):
        (partial / "below").write_bytes(b"")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no permission to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_reported_and_the_same_call_works_with_space(small_disk: Path) -> None:
    storage.write_bytes(small_disk / "other", bytes(800_000))
    with pytest.raises(
        UserError, match="file.bin cannot be written: No space left on device", check=coded("unwritable-file")
    ):
        storage.write_bytes(small_disk / "file.bin", bytes(500_000))
    assert os.listdir(small_disk) == ["other"]
    storage.remove(small_disk / "other")
    storage.write_bytes(small_disk / "file.bin", bytes(500_000))
    assert storage.size(small_disk / "file.bin") == 500_000


def test_a_full_disk_of_temporary_files_stops_an_upload(
    small_disk: Path, s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    url = f"{s3_bucket.url}/a"
    message = f"/a .*{small_disk}, .* set TMPDIR"
    with (
        pytest.raises(UserError, match=message, check=coded("temporary-folder-full")),
        storage.local_write(url) as path,
    ):
        path.write_bytes(bytes(2_000_000))
    assert s3_bucket.objects() == {} and os.listdir(small_disk) == []
    with storage.local_write(url) as path:
        path.write_bytes(b"abc")
    assert s3_bucket.objects() == {"a": b"abc"}


def test_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (tmp_path / f".train-000000.tar.77-abcd{storage.PARTIAL_SUFFIX}").write_text("half")
    (tmp_path / "train-000001.tar").write_text("whole")
    storage.remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == ["train-000001.tar"]


def test_a_remote_file_is_fetched_once_and_checked(tmp_path: Path) -> None:
    url = "memory://bucket/copied.bin"
    storage.write_bytes(url, b"abc")
    sha256 = storage.sha256_of(url)
    copy = storage.local_copy(url, tmp_path, sha256)
    storage.write_bytes(url, b"changed")
    assert storage.local_copy(url, tmp_path, sha256) == copy and copy.read_bytes() == b"abc"
    with pytest.raises(UserError, match="copied.bin", check=coded("damaged-file")):
        storage.local_copy(url, tmp_path / "other", sha256)
    assert not list((tmp_path / "other").iterdir())


def test_a_copy_that_many_ask_for_at_once_is_whole(tmp_path: Path) -> None:
    url = "memory://bucket/asked.bin"
    storage.write_bytes(url, bytes(range(256)) * 10_000)
    sha256 = storage.sha256_of(url)
    with ThreadPoolExecutor(8) as pool:
        copies = set(pool.map(lambda _: storage.local_copy(url, tmp_path, sha256), range(16)))
    assert len(copies) == 1 and storage.sha256_of(copies.pop()) == sha256 and len(os.listdir(tmp_path)) == 1


def test_a_remote_folder_is_copied_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url, names = "memory://bucket/tokenizers/small", ("tokenizer.model", "tokenizer_info.json", "none.json")
    for name in ("tokenizer.model", "tokenizer_info.json", "model.safetensors", "old/tokenizer.model"):
        storage.write_bytes(f"{url}/{name}", name.encode())
    folder = storage.local_folder(url, names)
    assert sorted(os.listdir(folder)) == ["tokenizer.model", "tokenizer_info.json"]
    assert (folder / "tokenizer.model").read_bytes() == b"tokenizer.model"
    assert storage.local_folder(url, names) == folder and os.listdir(tmp_path / "clozeworks") == [folder.name]
    storage.write_bytes(f"{url}/model.safetensors", b"another")
    assert storage.local_folder(url, names) == folder
    storage.write_bytes(f"{url}/tokenizer.model", b"changed")
    assert (storage.local_folder(url, names) / "tokenizer.model").read_bytes() == b"changed"
    assert storage.local_folder(tmp_path, names) == tmp_path
    with pytest.raises(
        UserError, match="memory://bucket/none contains none of tokenizer.model, ", check=coded("missing-file")
    ):
        storage.local_folder("memory://bucket/none", names)


def test_messages_show_no_password() -> None:
    assert storage.redact("https://user:secret@host/bucket/key?token=1#part") == "https://host/bucket/key"
    assert storage.redact("s3://user:secret@bucket/key?token=1") == "s3://bucket/key?token=(hidden)"
    assert storage.redact("s3://bucket/what?#1") == "s3://bucket/what?#1"
    assert storage.redact("/plain/pa?th") == "/plain/pa?th"
    assert storage.redact("sqlite:////data/me@work/here.db") == "sqlite:////data/me@work/here.db"
    assert storage.redact("s3://bucket/mail:me@home/key") == "s3://bucket/mail:me@home/key"
    assert storage.redact("http://mirror:8080/data/a@main/p.jsonl") == "http://mirror:8080/data/a@main/p.jsonl"
    for redacted in storage.redact, redact_text:
        assert redacted("https://h:443/f.txt?user=a@b.c&token=SECRET") == "https://h:443/f.txt"


@pytest.mark.parametrize("user", ["me", "me:", "me:p/w", "me:p?w", "me:p#w", "me:p@w/x", "me@work:p/w", "me:p w"])
def test_the_password_of_a_url_ends_at_the_last_at_sign(user: str) -> None:
    assert (
        storage.redact(f"https://proxy/postgresql://{user}@host:9/key?a=b#c") == "https://proxy/postgresql://host:9/key"
    )
    if " " not in user:
        told = redact_text(f"'s3://{user}@host:9/key' and https://{user}@other/#page")
        assert told == "'s3://host:9/key' and https://other/#page"


def test_a_pattern_finds_the_files_it_matches_and_no_empty_folder(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt", "deep/d.jsonl"):
        storage.write_bytes(tmp_path / name, b"x")
    (tmp_path / "folder.jsonl").mkdir()
    found = [os.path.relpath(url, tmp_path) for url in storage.matches(f"{tmp_path}/*.jsonl")]
    assert found == ["a.jsonl", "b.jsonl"]
    found = [os.path.relpath(url, tmp_path) for url in storage.matches(f"file://{tmp_path}/**/*.jsonl")]
    assert found == ["a.jsonl", "b.jsonl", "deep/d.jsonl"]
    assert storage.matches(f"{tmp_path}/*.parquet") == [] == storage.matches(f"{tmp_path}/missing.txt")
    with pytest.raises(UsageError, check=coded("input-is-folder")):
        storage.matches(str(tmp_path))


def test_a_file_whose_name_holds_a_bracket_is_found(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert storage.matches(str(tmp_path / "a[1].txt")) == [str(tmp_path / "a[1].txt")]
