"""A real S3 API for tests: moto's server in a process of its own, so that every process of a test reaches it."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

REGION = "us-east-1"
# No word of the command lines above the tests: a run refuses to start below a process that shows a login.
KEY_ID = "AKIA4CLOZEWORKSTEST1"
SECRET = "test-secret-access-key"

# The server ends with the test run, however that ends: its standard input closes then.
_PROGRAM = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
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
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", [])]
        return {key: client.get_object(Bucket=self.name, Key=key)["Body"].read() for key in keys}

    def unfinished_uploads(self) -> list[str]:
        """Keys of the multipart uploads that were neither completed nor aborted."""
        answer = make_client(self.endpoint).list_multipart_uploads(Bucket=self.name)
        return [upload["Key"] for upload in answer.get("Uploads", [])]


@dataclass
class S3Server:
    """The running server; every bucket it gives is new."""

    endpoint: str
    _names: list[str] = field(default_factory=list)

    def make_bucket(self) -> S3Bucket:
        self._names.append(f"bucket-{len(self._names)}")
        make_client(self.endpoint).create_bucket(Bucket=self._names[-1])
        return S3Bucket(self._names[-1], self.endpoint)


@contextlib.contextmanager
def run_server() -> Iterator[S3Server]:
    """Run the server while the block runs."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, "moto's server did not start"
        yield S3Server(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.communicate()


@functools.cache
def make_client(endpoint: str) -> Any:
    """A plain S3 client that owes nothing to the code under test."""
    import boto3  # here, for conftest.py imports this module where there is none

    return boto3.client(
        "s3", endpoint_url=endpoint, region_name=REGION, aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET
    )
