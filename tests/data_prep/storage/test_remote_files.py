"""Remote files: an S3 API behind a proxy that makes faults, web servers, and what every process must see."""

from __future__ import annotations

import functools
import http.server
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data_prep.base.errors import UsageError, UserError
from data_prep.storage import remote_files, remote_reader, storage, store_errors
from tests.support.error_codes import coded
from tests.support.fault_proxy import Fault, FaultProxy, Kind, Request, run_proxy
from tests.support.s3_server import S3Bucket, make_client

MIB = 1 << 20
DATA = random.Random(1).randbytes(3 * MIB)
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store_errors, "_FIRST_WAIT_SECONDS", 0.02)
    yield
    storage.configure({})


@pytest.fixture
def proxy(s3_bucket: S3Bucket) -> Iterator[FaultProxy]:
    """A proxy through which this process reaches the bucket; silence counts as a fault after a second."""
    with run_proxy(s3_bucket.endpoint) as proxy:
        storage.configure({s3_bucket.url: {"endpoint_url": proxy.endpoint}})
        yield proxy


def be_impatient(s3_bucket: S3Bucket, proxy: FaultProxy) -> None:
    """Take a store for silent after a second."""
    options = {"endpoint_url": proxy.endpoint, "config_kwargs": {"read_timeout": 1}}
    storage.configure({s3_bucket.url: options})


def is_part(number: int) -> Callable[[Request], bool]:
    return lambda request: request.method == "PUT" and f"partNumber={number}" in request.target


def completes(request: Request) -> bool:
    return request.method == "POST" and "uploadId" in request.target


def test_an_object_store_reads_back_what_was_written(s3_bucket: S3Bucket) -> None:
    url = storage.join(s3_bucket.url, "folder/a.bin")
    storage.write_bytes(url, DATA)
    with storage.local_write(storage.join(s3_bucket.url, "folder/b.bin")) as path:
        path.write_bytes(b"abc")
    assert s3_bucket.objects() == {"folder/a.bin": DATA, "folder/b.bin": b"abc"}
    assert storage.exists(url) and storage.size(url) == len(DATA) and storage.read_bytes(url) == DATA
    assert storage.list_names(f"{s3_bucket.url}/folder") == ["a.bin", "b.bin"]
    with storage.open_read(url) as file:
        file.seek(-100, os.SEEK_END)
        assert file.read() == DATA[-100:]
    before = storage.stamp(url)
    storage.write_bytes(url, DATA[::-1])
    assert storage.stamp(url) != before


def test_writes_and_removals_of_other_processes_are_seen_at_once(s3_bucket: S3Bucket) -> None:
    folder = f"{s3_bucket.url}/folder"
    client = make_client(s3_bucket.endpoint)
    assert not storage.exists(f"{folder}/a") and storage.list_names(folder) == []
    client.put_object(Bucket=s3_bucket.name, Key="folder/a", Body=b"abc")
    assert storage.exists(f"{folder}/a") and storage.list_names(folder) == ["a"] and storage.size(f"{folder}/a") == 3
    client.delete_object(Bucket=s3_bucket.name, Key="folder/a")
    assert not storage.exists(f"{folder}/a") and storage.list_names(folder) == []


def test_removing_a_folder_keeps_its_siblings(s3_bucket: S3Bucket) -> None:
    for key in ("work/a", "work/deep/b", "work-not/c", "d"):
        storage.write_bytes(f"{s3_bucket.url}/{key}", b"x")
    storage.remove(f"{s3_bucket.url}/work")
    storage.remove(f"{s3_bucket.url}/d")
    storage.remove(f"{s3_bucket.url}/never-there")
    assert list(s3_bucket.objects()) == ["work-not/c"]


@pytest.mark.fault(
    row=74, fault="another login in the environment of a living process", required="the next request is signed with it"
)
def test_a_change_of_the_login_in_the_environment_is_noticed(
    s3_bucket: S3Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("FIRSTLOGIN", "SECONDLOGIN"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        proxy.requests.clear()
        storage.write_bytes(f"{s3_bucket.url}/a", b"x")
        assert proxy.requests and all(
            f"Credential={key}/" in request.headers["authorization"] for request in proxy.requests
        )


@pytest.mark.parametrize("kind", ["refuse", "reset", "cut", "lose_answer"])
def test_every_operation_is_retried_after_a_fault(kind: Kind, s3_bucket: S3Bucket, proxy: FaultProxy) -> None:
    url = f"{s3_bucket.url}/folder/a.bin"
    operations: list[tuple[Callable[[], object], object]] = [
        (lambda: storage.write_bytes(url, DATA), None),
        (lambda: storage.read_bytes(url) == DATA, True),
        (lambda: storage.open_read(url).read() == DATA, True),
        (lambda: storage.exists(url), True),
        (lambda: storage.size(url), len(DATA)),
        (lambda: storage.list_names(f"{s3_bucket.url}/folder"), ["a.bin"]),
        (lambda: storage.matches(f"{s3_bucket.url}/*/a*"), [url]),
        (lambda: storage.remove(url), None),
        (lambda: storage.exists(url), False),
    ]
    for operation, expected in operations:
        # aiohttp itself tries a broken connection once more: the second time is ours.
        proxy.faults = [fault := Fault(kind, times=1 if kind == "refuse" else 2)]
        assert operation() == expected
        assert fault.happened
    assert s3_bucket.objects() == {}


@pytest.mark.long
def test_a_request_without_an_answer_is_sent_again(s3_bucket: S3Bucket, proxy: FaultProxy) -> None:
    be_impatient(s3_bucket, proxy)
    url = f"{s3_bucket.url}/a"
    for operation in (lambda: storage.write_bytes(url, b"abc"), lambda: storage.read_bytes(url)):
        proxy.faults = [Fault("hang", times=1)]
        operation()
        assert proxy.faults[0].happened
    assert s3_bucket.objects() == {"a": b"abc"}


def test_only_a_broken_block_is_fetched_again(
    s3_bucket: S3Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_reader, "LARGEST_BLOCK_BYTES", MIB)
    storage.write_bytes(f"{s3_bucket.url}/a", DATA)
    first, second, third = (f"bytes={start}-{start + MIB - 1}" for start in (0, MIB, 2 * MIB))
    proxy.faults = [Fault("cut", times=1, concerns=lambda request: request.headers.get("range") == second)]
    proxy.requests.clear()
    assert storage.open_read(f"{s3_bucket.url}/a").read() == DATA
    asked = [request.headers["range"] for request in proxy.requests if request.method == "GET"]
    assert asked == [first, second, second, third]


def test_a_store_that_is_busy_for_seconds_is_waited_for(
    s3_bucket: S3Bucket, proxy: FaultProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = Fault("refuse", status=503, code="SlowDown")
    proxy.faults = [busy]

    def recover() -> None:
        while not busy.happened:  # the first request may be long in coming
            time.sleep(0.01)
        time.sleep(1.0)
        proxy.faults.clear()

    threading.Thread(target=recover, daemon=True).start()
    began = time.monotonic()
    storage.write_bytes(f"{s3_bucket.url}/a", b"abc")
    assert time.monotonic() - began >= 0.9 and s3_bucket.objects() == {"a": b"abc"}
    assert f"{s3_bucket.url}/a answers SlowDown; retrying in" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["refuse", pytest.param("hang", marks=pytest.mark.long)])
def test_a_store_that_is_down_for_good_ends_in_a_clear_stop(
    kind: Kind, s3_bucket: S3Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_impatient(s3_bucket, proxy)
    monkeypatch.setenv(store_errors.RETRY_VARIABLE, "0.3")
    proxy.faults = [Fault(kind, status=500, code="InternalError")]
    began = time.monotonic()
    with pytest.raises(UserError, match="/a cannot be read: the store answered", check=coded("store-unavailable")):
        storage.read_bytes(f"{s3_bucket.url}/a")
    assert time.monotonic() - began < store_errors.RETRY_SECONDS / 2
    with pytest.raises(UserError, match="/a", check=coded("store-unavailable")):
        storage.write_bytes(f"{s3_bucket.url}/a", b"abc")
    assert s3_bucket.objects() == {}


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [(403, "AccessDenied", "permission denied"), (404, "NoSuchBucket", "there is no such bucket")],
)
def test_a_refusal_that_lasts_fails_at_once(
    status: int, code: str, message: str, s3_bucket: S3Bucket, proxy: FaultProxy
) -> None:
    proxy.faults = [Fault("refuse", status=status, code=code)]
    url = f"{s3_bucket.url}/folder/a"
    for operation in (
        functools.partial(storage.write_bytes, url, b"abc"),
        functools.partial(storage.read_bytes, url),
        functools.partial(storage.open_read, url),
        functools.partial(storage.exists, url),
        functools.partial(storage.list_names, f"{s3_bucket.url}/folder"),
        functools.partial(storage.matches, f"{s3_bucket.url}/folder/*"),
    ):
        proxy.requests.clear()
        with pytest.raises(UserError, match=message):
            operation()
        assert len(proxy.requests) <= 3


def test_a_missing_file_does_not_exist_and_raises_no_error(s3_bucket: S3Bucket) -> None:
    url = f"{s3_bucket.url}/never"
    assert not storage.exists(url) and storage.matches(url) == [] and storage.list_names(url) == []
    for read in (storage.read_bytes, storage.open_read, storage.size):
        with pytest.raises(UserError, match="never cannot", check=coded("missing-file")):
            read(url)


def test_an_object_that_is_replaced_while_it_is_read_is_noticed(s3_bucket: S3Bucket) -> None:
    url = f"{s3_bucket.url}/a"
    data = random.Random(3).randbytes(10 * MIB)
    storage.write_bytes(url, data)
    file = storage.open_read(url)
    assert file.read(100) == data[:100]
    storage.write_bytes(url, data[::-1])
    with pytest.raises(UserError, match="/a", check=coded("changed-while-read")):
        file.read()


def test_a_replaced_object_is_noticed_at_the_end_without_conditional_reads() -> None:
    url = "memory://bucket/changing"
    storage.write_bytes(url, DATA)
    file = storage.open_read(url)
    storage.write_bytes(url, DATA[::-1])
    with pytest.raises(UserError, check=coded("changed-while-read")):
        file.read()
    storage.remove(url)


@pytest.mark.parametrize("kind", ["refuse", "reset"])
def test_an_upload_that_dies_in_the_middle_leaves_no_object_and_no_parts(
    kind: Kind, s3_bucket: S3Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "_PART_BYTES", 5 * MIB)
    monkeypatch.setenv(store_errors.RETRY_VARIABLE, "0.3")
    data = DATA * 4
    url = f"{s3_bucket.url}/shards/train-000000.tar"
    proxy.faults = [Fault(kind, status=500, code="InternalError", concerns=is_part(2))]
    with pytest.raises(UserError, match="train-0", check=coded("store-unavailable")), storage.local_write(url) as path:
        path.write_bytes(data)
    assert proxy.faults[0].happened and s3_bucket.objects() == {} and s3_bucket.unfinished_uploads() == []
    proxy.faults.clear()
    monkeypatch.delenv(store_errors.RETRY_VARIABLE)
    with storage.local_write(url) as path:
        path.write_bytes(data)
    assert s3_bucket.objects() == {"shards/train-000000.tar": data}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "concerns"), [("refuse", is_part(2)), ("lose_answer", completes)], ids=["a part", "the completion"]
)
def test_a_failed_upload_starts_again_from_its_beginning(
    kind: Kind,
    concerns: Callable[[Request], bool],
    s3_bucket: S3Bucket,
    proxy: FaultProxy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_files, "_PART_BYTES", 5 * MIB)
    proxy.faults = [Fault(kind, times=2, concerns=concerns)]
    with storage.local_write(f"{s3_bucket.url}/a") as path:
        path.write_bytes(DATA * 4)
    assert s3_bucket.objects() == {"a": DATA * 4} and s3_bucket.unfinished_uploads() == []


@pytest.mark.long
@pytest.mark.spawn
def test_a_process_killed_while_it_uploads_leaves_no_object(
    s3_bucket: S3Bucket, proxy: FaultProxy, tmp_path: Path
) -> None:
    proxy.faults = [Fault("hang", concerns=is_part(2))]
    program = (
        "import sys; from data_prep.storage import remote_files, storage\n"
        "remote_files._PART_BYTES = 5 << 20\n"
        "with storage.local_write(sys.argv[1]) as path: path.write_bytes(bytes(11 << 20))\n"
    )
    url = f"{s3_bucket.url}/shards/a"
    environment = os.environ | {"AWS_ENDPOINT_URL": proxy.endpoint, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", program, url], cwd=ROOT, env=environment)
    end = time.monotonic() + 180
    while not proxy.faults[0].happened and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and proxy.faults[0].happened
    assert s3_bucket.objects() == {} and s3_bucket.unfinished_uploads() == ["shards/a"]
    storage.remove_unfinished(f"{s3_bucket.url}/shards")
    assert s3_bucket.unfinished_uploads() == []


def test_the_client_sends_a_checksum_with_every_object(s3_bucket: S3Bucket, proxy: FaultProxy) -> None:
    storage.write_bytes(f"{s3_bucket.url}/a", b"abc")
    put = next(request for request in proxy.requests if request.method == "PUT")
    assert "x-amz-checksum-crc32" in {*put.headers, put.headers.get("x-amz-trailer")}


def test_conditional_create_and_replace_keep_the_first_writer(s3_bucket: S3Bucket) -> None:
    for url in (f"{s3_bucket.url}/a.json", "memory://bucket/a.json"):
        assert remote_files.create(url, b"1") and not remote_files.create(url, b"2")
        first = remote_files.info(url)
        assert first is not None and remote_files.replace(url, b"three", first)
        assert not remote_files.replace(url, b"four", first) and storage.read_bytes(url) == b"three"
        storage.remove(url)
        assert not remote_files.replace(url, b"five", first) and not storage.exists(url)


@pytest.mark.parametrize("store", ["s3", "memory"])
def test_patterns_find_what_a_shell_finds(store: str, s3_bucket: S3Bucket) -> None:
    folder = f"{s3_bucket.url}/in" if store == "s3" else f"memory://{s3_bucket.name}/in"
    for name in ("a.jsonl", "b.jsonl", ".lock.jsonl", "x/c.jsonl", "x/y/d.jsonl", "x/.work/e.jsonl", "e[1].txt"):
        storage.write_bytes(f"{folder}/{name}", b"x")
    for pattern, found in {
        "*.jsonl": ["a.jsonl", "b.jsonl"],
        "?.jsonl": ["a.jsonl", "b.jsonl"],
        "[b-z].jsonl": ["b.jsonl"],
        "*/*.jsonl": ["x/c.jsonl"],
        "**/*.jsonl": ["a.jsonl", "b.jsonl", "x/c.jsonl", "x/y/d.jsonl"],
        "x/**/d*": ["x/y/d.jsonl"],
        "a.jsonl": ["a.jsonl"],
        "e[1].txt": ["e[1].txt"],
        "*.parquet": [],
    }.items():
        assert storage.matches(f"{folder}/{pattern}") == [f"{folder}/{name}" for name in found], pattern


def test_a_file_beside_a_folder_of_its_name_is_found_and_the_folder_is_not_left_out(s3_bucket: S3Bucket) -> None:
    for name in ("x.jsonl", "x.jsonl/part.txt"):
        storage.write_bytes(f"{s3_bucket.url}/in/{name}", b"x")
    with pytest.raises(UsageError, check=coded("input-is-folder")):
        storage.matches(f"{s3_bucket.url}/in/*.jsonl")
    assert storage.matches(f"{s3_bucket.url}/**") == [
        f"{s3_bucket.url}/in/x.jsonl",
        f"{s3_bucket.url}/in/x.jsonl/part.txt",
    ]


def test_a_folder_is_no_input(s3_bucket: S3Bucket) -> None:
    storage.write_bytes(f"{s3_bucket.url}/in/a.txt", b"x")
    with pytest.raises(UsageError, match=r"/in is a folder\. Fix: .*'s3://.*/in/\*", check=coded("input-is-folder")):
        storage.matches(f"{s3_bucket.url}/in")


def test_a_listing_that_fails_is_not_taken_for_an_empty_folder(
    s3_bucket: S3Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write_bytes(f"{s3_bucket.url}/in/a.txt", b"x")
    monkeypatch.setenv(store_errors.RETRY_VARIABLE, "0.2")
    proxy.faults = [Fault("refuse", concerns=lambda request: "delimiter" in request.target)]
    with pytest.raises(UserError, match="SlowDown", check=coded("store-unavailable")):
        storage.matches(f"{s3_bucket.url}/in/*.txt")


@pytest.mark.parametrize("place", ["endpoint_url", "client_kwargs", "config file"])
def test_profiles_and_endpoints_are_used(
    place: str, s3_bucket: S3Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text(
        "[profile research]\naws_access_key_id = research-key-id\naws_secret_access_key = research-secret\n"
        + (f"endpoint_url = {proxy.endpoint}\n" if place == "config file" else "")
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    endpoint = {"endpoint_url": proxy.endpoint}
    given = {"endpoint_url": endpoint, "client_kwargs": {"client_kwargs": endpoint}, "config file": {}}[place]
    storage.configure({s3_bucket.url: {"profile": "research"} | given})
    storage.write_bytes(f"{s3_bucket.url}/a", b"abc")
    assert all("research-key-id" in request.headers["authorization"] for request in proxy.requests)
    assert proxy.requests and s3_bucket.objects() == {"a": b"abc"}


def test_an_unknown_profile_or_option_is_reported(s3_bucket: S3Bucket) -> None:
    storage.configure({s3_bucket.url: {"profile": "nobody"}})
    with pytest.raises(UserError, match="nobody", check=coded("unreadable-file")):
        storage.exists(f"{s3_bucket.url}/a")
    storage.configure({s3_bucket.url: {"endpont_url": "http://x", "secret": "do-not-show"}})
    with pytest.raises(UserError, match="endpont_url", check=coded("invalid-storage-options")) as caught:
        storage.exists(f"{s3_bucket.url}/a")
    assert "do-not-show" not in str(caught.value)


def test_no_error_and_no_note_shows_a_secret(
    s3_bucket: S3Bucket, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(store_errors.RETRY_VARIABLE, "0.1")
    options = {"key": "do-not-show-1", "secret": "do-not-show-2", "endpoint_url": "http://me:do-not-show-3@127.0.0.1:9"}
    storage.configure({s3_bucket.url: options})
    texts = []
    for url in (f"{s3_bucket.url}/a", "http://me:do-not-show-4@127.0.0.1:9/a?sig=do-not-show-5"):
        for operation in (storage.exists, storage.read_bytes, storage.open_read):
            with pytest.raises(UserError) as caught:
                operation(url)
            texts.append(str(caught.value))
    assert len(texts) == 6 and "do-not-show" not in "".join(texts) + capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "extra"), [("s3://a/b", "s3"), ("gs://a/b", "gcs"), ("https://host/a", "http")], ids=["s3", "gs", "https"]
)
def test_a_missing_package_names_the_extra(url: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.get_filesystem_class", refuse)
    with pytest.raises(UsageError, match=rf"\[{extra}\]", check=coded("missing-extra")):
        storage.read_bytes(url)


def test_an_unknown_kind_of_url_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nonsense://a", check=coded("invalid-url")):
        storage.exists("nonsense://a")


@pytest.fixture
def plain_web(tmp_path: Path) -> Iterator[str]:
    """A web server that gives whole files only."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a reader that saw that it gets no range, and went

    server = Server(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path))
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_web_server_with_and_one_without_ranges_are_read_alike(
    plain_web: str, s3_bucket: S3Bucket, tmp_path: Path
) -> None:
    (tmp_path / "a.bin").write_bytes(DATA)
    public = {"Bucket": s3_bucket.name, "Key": "a.bin", "Body": DATA, "ACL": "public-read"}
    make_client(s3_bucket.endpoint).put_object(**public)
    for url in (f"{plain_web}/a.bin", f"{s3_bucket.endpoint}/{s3_bucket.name}/a.bin"):
        assert storage.exists(url) and storage.matches(url) == [url]
        with storage.open_read(url) as file:
            file.seek(MIB)
            assert file.read(1000) == DATA[MIB : MIB + 1000]
            file.seek(0)
            assert file.read() == DATA
        assert storage.read_bytes(url) == DATA and storage.size(url) == len(DATA)


def test_an_operation_that_a_web_server_lacks_is_reported(plain_web: str, proxy: FaultProxy) -> None:
    assert not storage.exists(f"{plain_web}/never")
    with pytest.raises(UsageError, check=coded("pattern-of-web-addresses")):
        storage.matches(f"{plain_web}/*.txt")
    with pytest.raises(UserError, check=coded("web-address-read-only")):
        storage.write_bytes(f"{plain_web}/a", b"x")
    proxy.faults = [Fault("refuse", status=403)]
    with pytest.raises(UserError, check=coded("permission-denied")):
        storage.exists(f"{proxy.endpoint}/a")
    # Not "there is no such file", as fsspec would have it.
    proxy.faults = [Fault("refuse", status=500, times=2)]
    assert not storage.exists(f"{proxy.endpoint}/a")
    assert proxy.faults[0].happened == 2
