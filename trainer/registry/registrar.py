"""Registering checkpoints while the training goes on: rank 0 alone, one at a time, each in a process of its own.

What was registered is noted in `output_dir/registered.jsonl`, so that a run that was stopped before its last checkpoint
was registered does it at its next start, and none is registered twice.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.tracking.mlflow_server import redact

REGISTERED_NAME = "registered.jsonl"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Registrar:
    """The queue of checkpoints to register, and the thread that works it off."""

    def __init__(self, config: RunConfig, warn: Callable[[str], None], say: Callable[[str], None]) -> None:
        assert config.registry.name is not None
        self._config, self._warn, self._say = config, warn, say
        self._failed: list[int] = []
        self._submitted = set(registered_steps(Path(config.output_dir)))
        self._queue: queue.Queue[tuple[int, Path] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="registrar", daemon=True)
        self._thread.start()

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step is one to register."""
        config = self._config
        every = config.checkpoint.keep_every_steps
        is_kept = config.registry.when == "kept" and every is not None and step % every == 0
        return is_kept or step == config.max_steps

    def submit(self, step: int, folder: Path) -> None:
        """Have a complete checkpoint registered if it is due and was not before; returns at once."""
        if self.is_due(step) and step not in self._submitted:
            self._submitted.add(step)
            self._queue.put((step, folder))

    def close(self) -> bool:
        """Wait for what is under way; whether all of it was registered."""
        self._queue.put(None)
        self._thread.join()
        return not self._failed

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            step, folder = item
            if not self._register(step, folder):
                self._failed.append(step)

    def _register(self, step: int, folder: Path) -> bool:
        answer = self._run(folder)
        if answer.returncode:
            reason = redact(answer.stderr.strip().removeprefix("error: ")) or _ending(answer.returncode)
            self._warn(
                f"the checkpoint of step {step:,} was not registered as {self._config.registry.name}: {reason}. It "
                f"is in {folder}; launch/register.py --checkpoint registers it, or the same command started again"
            )
            return False
        value: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        promotion = f"; {value['promotion']}" if value["promotion"] else ""
        self._say(f"registered step {step:,} as {value['name']} version {value['version']}{promotion}")
        try:
            with open(Path(self._config.output_dir) / REGISTERED_NAME, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **value}) + "\n")
        except OSError as error:
            self._warn(f"{REGISTERED_NAME} cannot be written ({error.strerror}); a restart may register it once more")
        return True

    def _run(self, folder: Path) -> subprocess.CompletedProcess[str]:
        from trainer.registry.register_checkpoint import Request

        settings = self._config.registry
        assert settings.name is not None
        uri = self._config.tracking.uri
        request = Request(str(folder), settings.name, settings.alias, settings.promote_to, settings.only_if, uri)
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}  # the GPU belongs to the training
        command = [sys.executable, "-m", "trainer.registry.register_checkpoint"]
        return subprocess.run(
            command, input=json.dumps(asdict(request)), env=environment, capture_output=True, text=True
        )


def _ending(returncode: int) -> str:
    """How a process ended that said nothing."""
    if returncode >= 0:
        return f"its process ended with status {returncode}"
    name = next((each.name for each in signal.Signals if each == -returncode), f"signal {-returncode}")
    return f"its process was ended by {name}"


def registered_steps(output_dir: Path) -> list[int]:
    """The steps whose checkpoints were registered."""
    try:
        lines = (output_dir / REGISTERED_NAME).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    steps = []
    for line in lines:
        try:
            steps.append(int(json.loads(line)["step"]))
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill: it is registered once more
    return steps
