"""A real MLflow server in a process of its own, for tests that kill it and start it again.

It is the application of `mlflow server` under uvicorn, in a fork of `fork_server` (2 CPU seconds, where the command and
its job runners take 20). As a script, this file is that process: DATABASE PORT ARTIFACTS.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import fork_server
from tests.support.free_ports import free_port

START_SECONDS = 300.0


class Server:
    """A real MLflow server on one port, which can be killed and started again."""

    def __init__(self, folder: Path, database: str) -> None:
        self.folder, self.database, self.port = folder, database, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: fork_server.Started | None = None

    def start(self) -> None:
        words = [__file__, self.database, str(self.port), str(self.folder / "artifacts")]
        environment = os.environ | {
            "PYTHONPATH": str(fork_server.ROOT),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        with open(self.folder / "server.log", "ab") as log:
            self.process = fork_server.start(words, self.folder, environment, log.fileno())
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
            self.process.kill()
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


def _serve(database: str, port: str, artifacts: str) -> None:
    """Serve as `mlflow server --workers 1` does, which hands its options to the application by these variables."""
    import uvicorn
    from mlflow.server import constants

    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: database,
        constants.ARTIFACT_ROOT_ENV_VAR: "mlflow-artifacts:/",
        constants.ARTIFACTS_DESTINATION_ENV_VAR: artifacts,
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    uvicorn.run("mlflow.server.fastapi_app:app", host="127.0.0.1", port=int(port))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
