"""What fsspec and s3fs do that `data_prep/storage` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import http.server
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import fsspec
import pytest


class _Refusing(http.server.BaseHTTPRequestHandler):
    """Answers /403 with 403, and all else with the whole file, whatever range is asked for."""

    def do_GET(self) -> None:
        self.send_response(403 if self.path == "/403" else 200)
        data = b"" if self.path == "/403" else bytes(range(256)) * 40
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def web() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_fsspec_says_of_a_forbidden_web_file_that_it_is_missing(web: str) -> None:
    with pytest.raises(FileNotFoundError):
        fsspec.filesystem("http", skip_instance_cache=True).info(f"{web}/403")
        pytest.fail("_raise_if_elsewhere of storage/remote_files.py need not look for 401 and 403")


def test_fsspec_cannot_read_ranges_of_a_server_that_gives_whole_files(web: str) -> None:
    file = fsspec.filesystem("http", skip_instance_cache=True).open(f"{web}/file", "rb", cache_type="none")
    with pytest.raises(ValueError, match=r"(?i)range"):
        file.seek(5)
        file.read(1)
        pytest.fail("_copy_without_ranges of storage/remote_reader.py may be taken out")


def test_open_files_of_the_memory_filesystem_share_one_position() -> None:
    filesystem = fsspec.filesystem("memory")
    filesystem.pipe_file("/workarounds/file", b"0123456789")
    first, second = filesystem.open("/workarounds/file"), filesystem.open("/workarounds/file")
    second.seek(5)
    assert first.read(1) == b"5", "_range_fetcher of storage/remote_reader.py need not treat memory:// by itself"


def test_the_glob_of_fsspec_takes_a_folder_that_cannot_be_listed_for_an_empty_one() -> None:
    from fsspec.spec import AbstractFileSystem

    class Failing(AbstractFileSystem):
        cachable = False

        def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
            if path.strip("/") != "top":
                raise PermissionError("the store is busy")
            folder = {"name": "top/a", "size": 0, "type": "directory"}
            return [folder] if detail else ["top/a"]

    assert Failing().glob("top/*/x") == [], "_list of storage/remote_files.py may be fsspec's glob"


def test_fsspec_remembers_listings_that_others_have_changed(s3_bucket: Any) -> None:
    name = s3_bucket.url.removeprefix("s3://")
    options = {"skip_instance_cache": True, **s3_bucket.storage_options[s3_bucket.url]}
    reader, writer = fsspec.filesystem("s3", **options), fsspec.filesystem("s3", **options)
    writer.pipe_file(f"{name}/folder/first", b"1")
    assert len(reader.ls(f"{name}/folder")) == 1
    writer.pipe_file(f"{name}/folder/second", b"2")
    assert len(reader.ls(f"{name}/folder")) == 1, "use_listings_cache in storage/remote_files.py may be taken out"


def test_s3fs_is_silent_about_files_that_the_store_did_not_delete(
    s3_bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = fsspec.filesystem("s3", skip_instance_cache=True, **s3_bucket.storage_options[s3_bucket.url])
    path = f"{s3_bucket.url.removeprefix('s3://')}/kept"
    filesystem.pipe_file(path, b"1")
    ask = filesystem._call_s3

    async def refuse(method: str, *arguments: Any, **keywords: Any) -> Any:
        if method == "delete_objects":
            return {"Errors": [{"Key": "kept", "Code": "AccessDenied", "Message": "it is locked"}]}
        return await ask(method, *arguments, **keywords)

    monkeypatch.setattr(filesystem, "_call_s3", refuse)
    try:
        filesystem.rm(path, recursive=True)
    except OSError:
        pytest.fail("the look after rm in remove of storage/remote_files.py may be taken out")
    assert filesystem.exists(path)


def test_s3fs_tries_again_by_itself_and_has_no_option_against_it() -> None:
    from s3fs import S3FileSystem

    assert S3FileSystem.retries > 1, "_filesystem of storage/remote_files.py need not set the retries"
    assert "retries" not in inspect.signature(S3FileSystem).parameters, (
        "_filesystem of storage/remote_files.py may give the retries as an option"
    )
