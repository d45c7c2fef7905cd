"""What Python's own library does that `data_prep` works around.

A test that fails here is good news: its message names the code that may be simpler now.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

import pytest

from tests.workarounds.new_process import ROOT, run_python, still_runs

_POOL = """
import multiprocessing, os, signal, sys, time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

def pool_of(num_workers):
    return ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("forkserver"))
"""


@pytest.mark.spawn
def test_a_pool_is_lost_with_one_of_its_processes() -> None:
    code = """
pool = pool_of(2)
os.kill(pool.submit(os.getpid).result(), signal.SIGKILL)
try:
    for _ in range(50):
        pool.submit(time.sleep, 0.1).result()
except BrokenProcessPool:
    print("lost")
"""
    answer = run_python(_POOL + code)
    assert answer.stdout.strip() == "lost", (
        f"{answer.stderr}\nexecutors/process_executor.py may use concurrent.futures again"
    )


@pytest.mark.spawn
def test_a_process_of_a_pool_outlives_its_parent(tmp_path: Path) -> None:
    code = """
pool = pool_of(1)  # kept, for a pool that nobody holds shuts down
pid = pool.submit(os.getpid).result()
with open(sys.argv[1], "w") as file:
    file.write(str(pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", _POOL + code, str(tmp_path / "pid")]
    killed = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    worker = int((tmp_path / "pid").read_text())
    time.sleep(2)
    assert still_runs(worker), "_end_with_parent in executors/process_executor.py may be taken out"
    os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("capital", ["\ua7cb", "\ua7ce"], ids=["of Unicode 16", "of Unicode 17"])
def test_the_oldest_python_leaves_new_capitals_as_they_are(capital: str) -> None:
    """The tokenizers library lowers them, whatever the Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if project["requires-python"] != f">={sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip("the oldest Python that pyproject.toml allows decides")
    assert capital.lower() == capital, (
        "the capitals of that Unicode may be taken out of _LATE_CAPITALS of text/cleaning.py"
    )


class _Asked(io.BytesIO):
    """Notes how much is asked of it."""

    most = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.most = max(self.most, size or 0)
        return super().read(min(size or 0, 1 << 20))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_tarfile_asks_for_as_much_as_a_header_says(kind: bytes) -> None:
    header = tarfile.TarInfo("name")
    header.type, header.size = kind, 1 << 40
    file = _Asked(header.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with pytest.raises(tarfile.TarError):
        tarfile.open(fileobj=file, mode="r:").getmembers()
    assert file.most >= 1 << 40, "_BoundedFile of dataset/shards.py may be taken out"


def test_tarfile_raises_other_errors_than_its_own() -> None:
    """Which of the two depends on the release of Python."""
    raised = []
    for headers in (b"99999999999999999999 a=b\n", b"22 GNU.sparse.map=x,y\n"):
        header = tarfile.TarInfo("name")
        header.type, header.size = tarfile.XHDTYPE, len(headers)
        file = io.BytesIO(header.tobuf() + headers.ljust(512, b"\0") + tarfile.TarInfo("a").tobuf() + bytes(10240))
        with pytest.raises(Exception, match=".") as caught:
            tarfile.open(fileobj=file, mode="r:").getmembers()
        raised.append(caught.value)
    assert not all(isinstance(error, tarfile.TarError) for error in raised), (
        "read_records of dataset/shards.py need not catch ValueError and OverflowError"
    )
