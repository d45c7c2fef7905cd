"""Jobs on checkpoints that are done by a small program, which files in a folder hold up or let fail."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_run import CONFIG, tiny_config
from trainer.checkpoint.format import (
    CheckpointFolder,
    DataIdentity,
    Marker,
    SavedState,
    TrainState,
    step_folder,
    step_of,
)
from trainer.config.run_config import RunConfig
from trainer.follow import client, follower
from trainer.follow.notes import read_notes

ROOT = Path(__file__).resolve().parents[2]
SUITE = """
name: own
tasks:
  order: {function: minimal_pairs, files: {pairs: pairs.jsonl}, metrics: [accuracy]}
"""
JOB = """
import ctypes, json, os, signal, sys, time
from pathlib import Path

ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # ends with the follower
folder, name = Path(sys.argv[1]), "score" if "evaluat" in sys.argv[2] else "register"

def end(*_):
    (folder / "ended").touch()
    sys.exit(1)

signal.signal(signal.SIGTERM, signal.SIG_IGN if (folder / "deaf").exists() else end)
request = json.load(sys.stdin)
with open(folder / "asked", "a") as file:
    file.write(json.dumps([name, request, os.getpid()]) + "\\n")
while (folder / f"hold-{name}").exists():
    time.sleep(0.02)
step = int(request["checkpoint"][-8:])
if (folder / f"fail-{name}").exists():
    print(f"error: the data is gone from {request.get('tracking_uri')}. Fix: get it. [gone]", file=sys.stderr)
    sys.exit(1)
answers = {
    "score": {"metrics": {"suite/own/average": step / 100}, "facts": {"suite.own": "d"}},
    "register": {"name": "birds", "version": str(step), "promotion": ""},
}
print("a line")
print((folder / "answer").read_text() if (folder / "answer").exists() else json.dumps(answers[name]))
"""
FOLLOWER = """
import sys
from trainer.follow import follower

folder, parent = sys.argv[1:3]
follower.job_command = lambda module: [sys.executable, folder + "/job.py", folder, module]
follower._POLL_SECONDS = 0.02
sys.argv[1:] = [parent]
follower.run_command(follower.main)
"""


class Jobs:
    """A folder with the program, a suite and what was asked."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        (folder / "job.py").write_text(JOB)
        (folder / "suite.yaml").write_text(SUITE)
        monkeypatch.setattr(follower, "job_command", lambda module: [sys.executable, folder / "job.py", folder, module])
        monkeypatch.setattr(follower, "_POLL_SECONDS", 0.02)
        monkeypatch.setattr(client, "_POLL_SECONDS", 0.05)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        command = client.follower_command
        code = [sys.executable, "-c", FOLLOWER, str(folder)]
        monkeypatch.setattr(client, "follower_command", lambda: [*code, command()[-1]])

    @property
    def asked(self) -> list[tuple[str, dict[str, Any]]]:
        """The requests, in order."""
        return [(name, request) for name, request, _ in self._lines]

    @property
    def _lines(self) -> list[tuple[str, dict[str, Any], int]]:
        path = self.folder / "asked"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def steps(self) -> list[tuple[str, int | None]]:
        """The jobs that were asked for, and their steps."""
        return [(name, step_of(Path(request["checkpoint"]).name)) for name, request in self.asked]

    def hold(self, name: str) -> None:
        (self.folder / f"hold-{name}").touch()

    def release(self, name: str) -> None:
        (self.folder / f"hold-{name}").unlink()

    def fail(self, name: str, fails: bool = True) -> None:
        path = self.folder / f"fail-{name}"
        path.touch() if fails else path.unlink()

    def process_of(self, name: str, after: int = 0) -> int:
        """The process id of a job, once it is under way, and `after` jobs were asked for before it."""
        wait_for(lambda: len(self._lines) > after)
        found, _, pid = self._lines[after]
        assert found == name
        return pid

    def config(self, scores: bool = True, registers: bool = True, **sections: Any) -> RunConfig:
        """A run that scores its checkpoints at steps 10 and 20, and registers them."""
        evaluation = {"suite": str(self.folder / "suite.yaml"), "suite_every_steps": 10} if scores else {}
        return tiny_config(
            self.folder / "run",
            checkpoint={"every_steps": 5, "keep_every_steps": 10, **sections.pop("checkpoint", {})},
            evaluation={**evaluation, **sections.pop("evaluation", {})},
            registry={**({"name": "birds", "when": "kept"} if registers else {}), **sections.pop("registry", {})},
            **sections,
        )


def complete(config: RunConfig, *steps: int) -> None:
    """Write directories that look like whole checkpoints of the run."""
    for step in steps:
        folder = step_folder(config.output_dir, step)
        folder.mkdir(parents=True, exist_ok=True)
        saved = SavedState(
            format_version=1,
            state=TrainState(step=step),
            config=config.model_dump(mode="json"),
            data=DataIdentity(manifest_digests=("d" * 64,), tokenizer_fingerprint="t"),
            world_size=1,
            zero_stage=0,
            shapes={},
            optimizer_steps=step,
            loss_scaler=None,
            versions={},
        )
        record = CheckpointFolder(folder).write_state(saved)
        CheckpointFolder(folder).write_marker(Marker(format_version=1, step=step, files=(record,)))


def states(config: RunConfig) -> dict[tuple[str, int], str]:
    """The state of each job by its step."""
    return {key: note.state for key, note in read_notes(Path(config.output_dir)).items()}


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


assert CONFIG.max_steps == 20, "the last checkpoint of the toy run"
