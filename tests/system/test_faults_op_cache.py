"""Row 35 of the fault list: a real compile of a native op is killed and leaves its lock; the doctor names it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.conftest import REPOSITORY

BUILD = """\
from torch.utils.cpp_extension import load_inline
load_inline(name="killed", cpp_sources="#include <torch/extension.h>\\nint one() { return 1; }", functions=["one"])
"""


def doctor(folder: Path, shards: Path) -> subprocess.CompletedProcess[str]:
    words = ["--config", "tiny_cpu", "--ranks", "1", f"data.shards={shards}", f"output_dir={folder}/run"]
    command = [sys.executable, str(REPOSITORY / "launch" / "doctor.py"), *words]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "TORCH_EXTENSIONS_DIR": str(folder / "ops")}
    return subprocess.run(
        [*command, f"tracking.uri=sqlite:///{folder}/mlflow.db"],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row="35",
    fault="SIGKILL of a real compile of a native op, which leaves its lock in the op cache",
    required="the doctor names the lock and what to do; with the lock removed it finds nothing",
)
def test_row_35_the_lock_of_a_killed_compile_is_named_by_the_doctor(small_shards: Path, tmp_path: Path) -> None:
    if shutil.which("g++") is None or shutil.which("ninja") is None:
        pytest.skip("no compiler (g++ and ninja) here")
    (tmp_path / "ops").mkdir()
    env = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
    build = subprocess.Popen([sys.executable, "-c", BUILD], env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not (found := list((tmp_path / "ops").rglob("lock"))):
            assert build.poll() is None and time.monotonic() < deadline, "it does not compile"
            time.sleep(0.01)
    finally:
        os.killpg(build.pid, signal.SIGKILL)
        build.wait()
    (lock,) = found
    assert lock.is_file(), "what a later build would wait for, for ever"
    an_hour_ago = time.time() - 3600
    os.utime(lock, (an_hour_ago, an_hour_ago))
    answer = doctor(tmp_path, small_shards)
    (line,) = [line for line in answer.stdout.splitlines() if "op cache" in line]
    assert answer.returncode == 1 and line.startswith("fail"), answer.stdout + answer.stderr
    assert str(lock) in line and "left by a killed build; remove it" in line
    lock.unlink()
    (line,) = [line for line in doctor(tmp_path, small_shards).stdout.splitlines() if "op cache" in line]
    assert line.startswith("ok")
