"""A real MLflow server in a process of its own, for tests that kill it and start it again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.free_ports import free_port

START_SECONDS = 300.0  # it takes 8 s, and over a minute on a machine with ten other jobs
_NO_JOBS = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # its six processes for evaluating language models


class Server:
    """A real `mlflow server` on one port, which can be killed and started again."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder, self.database, self.port = folder, database, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.database, "--workers", "1"]
        command += ["--port", str(self.port), "--artifacts-destination", str(self.folder / "artifacts")]
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, env=os.environ | _NO_JOBS, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert self.process.poll() is None, (self.folder / "server.log").read_text()
                time.sleep(0.1)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def run_mlflow_server(folder: Path, database: str) -> Iterator[Server]:
    """Run a server over `database` (a URI), its artifacts below `folder`, while the block runs."""
    server = Server(folder, database)
    try:
        server.start()
        yield server
    finally:
        server.kill()
