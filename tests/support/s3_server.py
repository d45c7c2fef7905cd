"""A real S3 API for tests: moto's server in a process of its own, so that every process of a test reaches it.

All workers share one, which starts once and in which each bucket is new.
"""

from __future__ import annotations

import functools
import os
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support import fork_server

REGION = "us-east-1"
# No word of the command lines above the tests: a run refuses to start below a process that shows a login.
KEY_ID = "AKIA4CLOZEWORKSTEST1"
SECRET = "test-secret-access-key"

# The server ends with the test run, however that ends: its parent is gone then.
_PROGRAM = """
import logging, os, sys, time
from pathlib import Path
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
path, parent = Path(sys.argv[1]), os.getppid()
path.with_name("new").write_text(str(server.get_host_and_port()[1]))
path.with_name("new").rename(path)
while os.getppid() == parent:
    time.sleep(1)
os._exit(0)
"""


@dataclass(frozen=True)
class S3Bucket:
    """An empty bucket, and how to reach it."""

    name: str
    endpoint: str

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    @property
    def storage_options(self) -> dict[str, dict[str, Any]]:
        """What `storage.configure` takes; not needed in processes that have `environment`."""
        return {self.url: {"key": KEY_ID, "secret": SECRET, "endpoint_url": self.endpoint}}

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a process of its own reaches the bucket, whatever this machine's user has set up."""
        return {
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Every object by its key, asked of the server without our code or any cache."""
        client = make_client(self.endpoint)
        return {key: client.get_object(Bucket=self.name, Key=key)["Body"].read() for key in self.keys(prefix)}

    def keys(self, prefix: str = "") -> list[str]:
        pages = make_client(self.endpoint).get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def unfinished_uploads(self) -> list[str]:
        """Keys of the multipart uploads that were neither completed nor aborted."""
        answer = make_client(self.endpoint).list_multipart_uploads(Bucket=self.name)
        return [upload["Key"] for upload in answer.get("Uploads", [])]


@dataclass(frozen=True)
class S3Server:
    """The running server; every bucket it gives is new."""

    endpoint: str

    def make_bucket(self) -> S3Bucket:
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        make_client(self.endpoint).create_bucket(Bucket=name)
        return S3Bucket(name, self.endpoint)


def shared_server() -> S3Server:
    """The server of this test run."""
    port = fork_server.made_once("s3", _start) / "port"
    return S3Server(f"http://127.0.0.1:{port.read_text()}")


def _start(folder: Path) -> None:
    words = ["-c", _PROGRAM, str(folder / "port")]
    with open(folder / "log", "wb") as log:
        process = fork_server.start(words, folder, os.environ | fork_server.FIXED, log.fileno())
    deadline = time.monotonic() + 300
    while not (folder / "port").exists():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)


@functools.cache
def make_client(endpoint: str) -> Any:
    """A plain S3 client that owes nothing to the code under test."""
    import boto3  # here, for conftest.py imports this module where there is none

    return boto3.client(
        "s3", endpoint_url=endpoint, region_name=REGION, aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET
    )
