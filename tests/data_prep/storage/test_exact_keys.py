"""Names with characters of patterns, chains and queries in stores and folders: each is itself, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from data_prep.base.errors import UsageError
from data_prep.storage import exact_keys, remote_files, storage
from tests.support.error_codes import coded
from tests.support.reading import files_of_input
from tests.support.s3_server import S3Bucket, make_client

NAMES = ("run[1]", "run*", "run?", "a::b", "a#b", "a%20b", "{a,b}", "{1..3}", "a b", "ü", "s3:", "x&y=z", "a+b")


@pytest.fixture(params=["memory", "s3", "local"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty folder."""
    storage.configure({})
    if request.param == "s3":
        yield f"{request.getfixturevalue('s3_bucket').url}/data"
    elif request.param == "memory":
        yield f"memory://{tmp_path.name}/data"
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    else:
        yield str(tmp_path / "data")


def put(url: str) -> None:
    """Write a file whatever its name, as another program may."""
    if storage.is_remote(url):
        filesystem, path = remote_files._filesystem(url)
        filesystem.pipe_file(path, url.encode())
    else:
        storage.write_bytes(url, url.encode())


@pytest.mark.long
@pytest.mark.fault(
    row=67,
    fault="a folder with characters of a pattern in its name is removed",
    required="it goes, and its siblings stay",
)
def test_removal_takes_a_name_literally(place: str) -> None:
    siblings = ["run1", "run", "runs", "a", "1", "data", *NAMES]
    for name in siblings:
        put(storage.join(place, f"{name}/deep/file.tar"))
        put(storage.join(place, f"{name}/file.tar"))
    for name in NAMES:
        storage.remove(storage.join(place, name))
        siblings.remove(name)
        assert set(storage.list_names(place)) == set(siblings), name
        storage.remove(storage.join(place, name))  # of what is not there


def test_a_file_is_removed_by_its_exact_key(place: str) -> None:
    for name in ("part-1", "part-2", "part-*", "part-?", "part-[12]"):
        put(storage.join(place, name))
    for name in ("part-*", "part-?", "part-[12]"):
        storage.remove(storage.join(place, name))
    assert storage.list_names(place) == ["part-1", "part-2"]


def test_removal_takes_more_keys_than_one_request_holds_and_folder_placeholders(
    s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_keys, "_KEYS_PER_REQUEST", 3)
    client = make_client(s3_bucket.endpoint)
    for number in range(7):
        client.put_object(Bucket=s3_bucket.name, Key=f"work/{number}", Body=b"")
    for key in ("work/", "work/deep/", "work", "works"):
        client.put_object(Bucket=s3_bucket.name, Key=key, Body=b"")
    storage.remove(f"{s3_bucket.url}/work")
    assert list(s3_bucket.objects()) == ["works"]


@pytest.mark.fault(
    row=67, fault="files have characters of patterns, chains and queries", required="each is read by its own name"
)
def test_a_file_is_written_read_and_listed_by_its_exact_name(place: str) -> None:
    for name in NAMES:
        if storage.is_remote(place) and set(name) & set("*?"):
            continue
        url = storage.join(place, f"{name}/{name}.txt")
        storage.write_bytes(url, name.encode())
        with storage.local_write(storage.join(place, f"{name}/b.txt")) as path:
            path.write_bytes(b"b")
        assert storage.read_bytes(url) == name.encode() and storage.size(url) == len(name.encode())
        assert storage.list_names(storage.join(place, name)) == sorted((f"{name}.txt", "b.txt"))
        assert storage.redact(url) == url
        with storage.open_read(url) as file:
            assert file.read() == name.encode()


@pytest.mark.parametrize("name", NAMES)
def test_an_input_in_a_folder_named_like_a_pattern_is_found_without_its_siblings(name: str, place: str) -> None:
    for folder in ("run1", "a", "1", name):
        put(storage.join(place, f"{folder}/x.txt"))
        put(storage.join(place, f"{folder}/y.txt"))
    own = [storage.join(place, f"{name}/{file}.txt") for file in "xy"]
    assert files_of_input(own[0]) == own[:1]
    assert files_of_input(storage.join(place, f"{name}/*.txt")) == own
    assert files_of_input(storage.join(place, f"{name}/{{x,y}}.txt")) == own


@pytest.mark.parametrize("name", ["run*", "run?", "a?b/c", "k?versionId=1"])
def test_a_store_refuses_to_write_names_that_are_patterns(name: str, s3_bucket: S3Bucket) -> None:
    for url in (f"memory://x/{name}", f"{s3_bucket.url}/{name}"):
        for write in (storage.write_bytes, remote_files.create):
            with pytest.raises(UsageError, check=coded("pattern-in-output")):
                write(url, b"x")
        with pytest.raises(UsageError, check=coded("pattern-in-output")):
            storage.check_folder("--output", url)
        with pytest.raises(UsageError, check=coded("pattern-in-output")), storage.hold_lock(url):
            pass
    assert s3_bucket.objects() == {}


def test_a_chain_of_filesystems_is_refused(tmp_path: Path) -> None:
    for url in ("simplecache::s3://bucket/a", "zip://a.txt::memory://x/a.zip"):
        with pytest.raises(UsageError, check=coded("invalid-url")):
            storage.exists(url)


def test_a_version_of_an_s3_object_is_read(s3_bucket: S3Bucket) -> None:
    client = make_client(s3_bucket.endpoint)
    client.put_bucket_versioning(Bucket=s3_bucket.name, VersioningConfiguration={"Status": "Enabled"})
    first = client.put_object(Bucket=s3_bucket.name, Key="a", Body=b"first")["VersionId"]
    client.put_object(Bucket=s3_bucket.name, Key="a", Body=b"second")
    assert storage.read_bytes(f"{s3_bucket.url}/a?versionId={first}") == b"first"
    assert storage.read_bytes(f"{s3_bucket.url}/a") == b"second"


def test_a_login_in_the_url_of_a_store_is_refused_and_not_shown() -> None:
    for url in ("s3://LOGIN:do-not-show@bucket/shards", "memory://LOGIN:do/not-show@x/a"):
        with pytest.raises(UsageError, check=coded("credentials-in-url")) as caught:
            storage.exists(url)
        assert "LOGIN" not in str(caught.value) and "not-show" not in str(caught.value)
