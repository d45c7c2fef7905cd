"""Starting real runs in processes of their own, and reading what they left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.fault_table import observed as observed
from tests.support.free_ports import free_port
from tests.support.mlflow_servers import Server, run_mlflow_server
from tests.support.toy_run import make_run
from trainer.hf_export.export import export_checkpoint

REPOSITORY = Path(__file__).resolve().parents[2]
PRETRAIN = str(REPOSITORY / "launch" / "pretrain.py")

TINY_RUN = """\
output_dir: runs/tiny
model: {vocab_size: 800, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64,
        max_position_embeddings: 64, hidden_dropout_prob: 0.1}
data: {shards: shards, sequence_length: 64, sentence_pairs: next_sentence, num_workers: 1}
training: {max_steps: 24, seed: 7, global_batch_tokens: 1024, micro_batch_tokens: 256, precision: fp32}
optimizer: {learning_rate: 2.0e-3}
schedule: {warmup_steps: 4}
zero: {stage: 1}
checkpoint: {every_steps: 7}
evaluation: {every_steps: 12, max_tokens: 2112}
logging: {every_steps: 1}
"""


@dataclass
class Training:
    """A training in a folder of its own; every start has the same settings."""

    folder: Path
    shards: Path
    overrides: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    preset: str | None = None
    """The configuration; by default the tiny one above."""

    @property
    def output_dir(self) -> Path:
        return self.folder / "run"

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.folder}/mlflow.db"

    def start(self, num_ranks: int = 2, *more: str, python: str = sys.executable) -> subprocess.Popen[str]:
        """Start under the deepspeed launcher."""
        launcher = [python, "-m", "deepspeed.launcher.runner", "--num_gpus", str(num_ranks)]
        return self._popen([*launcher, "--master_port", str(free_port()), PRETRAIN, *self.arguments(), *more])

    def run(self, num_ranks: int = 2, *more: str) -> str:
        """Start, wait, and return all output; the training must have finished well."""
        process = self.start(num_ranks, *more)
        output, _ = process.communicate(timeout=1500)
        assert process.returncode == 0, output
        return output

    def last_logged_step(self) -> int:
        path = self.output_dir / "tracking" / "points.jsonl"
        return path.read_text().count('"train/loss"') if path.exists() else 0

    def kill_after_step(self, step: int) -> None:
        """Start, and SIGKILL the launcher and every rank once `step` was logged."""
        process = self.start()
        try:
            deadline = time.monotonic() + 900
            while self.last_logged_step() < step:
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline, "the training did not come to the step in time"
                time.sleep(0.005)
        finally:
            self.kill()
            process.communicate(timeout=300)

    def processes(self) -> list[psutil.Process]:
        """Launcher, ranks and their workers: whoever was started with this run's folder."""
        mark = f"output_dir={self.output_dir}"
        return [process for process in psutil.process_iter(["cmdline"]) if mark in (process.info["cmdline"] or [])]

    def kill(self, number: int = signal.SIGKILL) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def arguments(self) -> list[str]:
        config = self.preset or str(self.folder / "tiny.yaml")
        if not (self.folder / "tiny.yaml").exists():  # once: another rank may be reading it
            (self.folder / "tiny.yaml").write_text(TINY_RUN, encoding="utf-8")
        return [
            "--config",
            config,
            f"output_dir={self.output_dir}",
            f"data.shards={self.shards}",
            f"tracking.uri={self.tracking_uri}",
            *self.overrides,
        ]

    def _popen(self, command: list[str]) -> subprocess.Popen[str]:
        env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)} | self.env
        return subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.fixture(scope="module")
def training(
    tmp_path_factory: pytest.TempPathFactory, small_shards: Path, empty_database: Path
) -> Iterator[Callable[..., Training]]:
    """Make runs on the small shards, each in a folder of its own, with MLflow's tables already in its database."""
    made: list[Training] = []

    def make(*overrides: str, **env: str) -> Training:
        made.append(Training(tmp_path_factory.mktemp("training"), small_shards, overrides, env))
        shutil.copy(empty_database, made[-1].folder / "mlflow.db")
        return made[-1]

    yield make
    for one in made:
        one.kill()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """An export of a run without training; not to be changed."""
    run = make_run(tmp_path_factory.mktemp("run"), tokenizer_folder)
    return export_checkpoint(run, run / "export").output


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of the test's own."""
    folder = tmp_path / "desk"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[Server]:
    """A real MLflow server for the tests of a file."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "mlflow.db")
    with run_mlflow_server(folder, f"sqlite:///{folder}/mlflow.db") as server:
        yield server
