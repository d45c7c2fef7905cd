"""Register checkpoints during training: rank 0 only, one at a time, each in a process of its own.

What is to be registered and what was is noted in `output_dir/registered.jsonl`, so that a run's next start registers
what failed or was cut short, and none is registered twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.checkpoint.format import list_steps, step_folder
from trainer.config.run_config import RunConfig
from trainer.distributed.side_process import failure_reason, side_environment

if TYPE_CHECKING:
    from trainer.registry.register_checkpoint import RegistrationRequest

REGISTERED_NAME = "registered.jsonl"
_POLL_SECONDS = 1.0
STOP_SECONDS = 10.0
"""How long a stop waits for the registration under way; a scheduler may kill the run after 30 seconds."""
KILL_SECONDS = 5.0
"""How long a registration that is ended may take to mark its model as failed."""


class Registrar:
    """The queue of checkpoints to register, and the thread that works it off."""

    def __init__(self, config: RunConfig, warn: Callable[[str], None], log: Callable[[str], None]) -> None:
        assert config.registry.name is not None
        self._config, self._warn, self._log = config, warn, log
        self._output_dir = Path(config.output_dir)
        self._registered = set(registered_steps(self._output_dir))
        self._submitted = set(self._registered)
        self._queue: queue.Queue[tuple[int, Path] | None] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None
        self._is_stopping = False
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
            self._note({"step": step})
            self._queue.put((step, folder))

    def submit_missed(self) -> None:
        """Submit again what earlier starts of the run submitted and did not register, where it is still there."""
        complete, _ = list_steps(self._output_dir)
        for step in sorted({note["step"] for note in _read_notes(self._output_dir)}):
            if step in complete:
                self.submit(step, step_folder(self._output_dir, step))

    def go_back(self, step: int) -> None:
        """Forget the registrations of later steps, which a new branch registers again; call it before any `submit`."""
        notes = _read_notes(self._output_dir)
        text = "".join(json.dumps(note) + "\n" for note in notes if note["step"] <= step)
        self._registered = {each for each in self._registered if each <= step}
        self._submitted = set(self._registered)
        try:
            storage.write_bytes(self._output_dir / REGISTERED_NAME, text.encode())
        except UserError as error:
            self._warn(f"{error.problem}; a restart may leave checkpoints of the new branch unregistered")

    def close(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait for what is under way, or until `should_stop`; whether all of it was registered."""
        self._queue.put(None)
        while self._thread.is_alive() and not should_stop():
            self._thread.join(_POLL_SECONDS)
        if self._thread.is_alive():
            self.stop_after_current(lambda doing: None)
        return self._submitted <= self._registered

    def stop_after_current(self, mark: Callable[[str], None]) -> None:
        """Wait for the registration under way alone, and end it after `STOP_SECONDS`; the next start does the rest.

        `mark` is called again and again while it waits (`trainer/distributed/watchdog.py`).
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)
        deadline = time.monotonic() + STOP_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            mark("waiting for the registration of a checkpoint")
            self._thread.join(_POLL_SECONDS)
        if not self._thread.is_alive():
            return
        self._is_stopping = True
        if (process := self._process) is not None:
            process.terminate()
            self._thread.join(KILL_SECONDS)
            process.kill()
        self._thread.join(KILL_SECONDS)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            step, folder = item
            try:
                value = self._answer(self._request(step, folder))
            except Exception as error:  # noqa: BLE001 - whatever fails, the others are tried
                if self._is_stopping:
                    self._warn(f"the checkpoint of step {step:,} is registered by the next start of the run")
                    return
                reason = storage.hide_secrets(
                    error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                )
                self._warn(
                    f"the checkpoint of step {step:,} was not registered as {self._config.registry.name}: "
                    f"{reason}. Register it with `{self._request(step, folder).command}`, or rerun the same command"
                )
            else:
                self._registered.add(step)
                self._note({"step": step, **value})
                self._report(step, value)

    def _answer(self, request: RegistrationRequest) -> dict[str, Any]:
        """What the process that registers says of the version."""
        answer = self._run(request)
        if answer.returncode:
            raise UserError(
                failure_reason(answer.returncode, answer.stderr, "registering"),
                fix=f"register the checkpoint with `{request.command}`",
                code="registration-failed",
            )
        if not answer.stdout.strip():
            raise UserError(
                "the registering process ended without an answer",
                fix=f"register the checkpoint with `{request.command}`",
                code="registration-failed",
            )
        value: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        return value

    def _report(self, step: int, value: dict[str, Any]) -> None:
        newest = max(self._registered)
        promotion = f"no alias moves back from step {newest:,}" if newest > step else value["promotion"]
        ending = f"; {promotion}" if promotion else ""
        self._log(f"registered step {step:,} as {value['name']} version {value['version']}{ending}")

    def _request(self, step: int, folder: Path) -> RegistrationRequest:
        """What to register; an alias moves only where no later step of the run was registered."""
        from trainer.registry.register_checkpoint import RegistrationRequest

        settings = self._config.registry
        assert settings.name is not None
        request = RegistrationRequest(str(folder), settings.name, tracking_uri=self._config.tracking.uri)
        if any(registered > step for registered in self._registered):
            return request
        return replace(
            request,
            alias=settings.alias,
            promote_to=settings.promote_to,
            only_if=settings.only_if,
            allow_different_evaluation=settings.allow_different_evaluation,
        )

    def _run(self, request: RegistrationRequest) -> subprocess.CompletedProcess[str]:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command_line(), stdin=pipe, stdout=pipe, stderr=pipe, env=side_environment(), text=True
        )
        stdout, stderr = self._process.communicate(json.dumps(asdict(request)))
        return subprocess.CompletedProcess(self._process.args, self._process.returncode, stdout, stderr)

    def _note(self, note: dict[str, Any]) -> None:
        try:
            with open(self._output_dir / REGISTERED_NAME, "a", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
        except OSError as error:
            self._warn(
                f"{REGISTERED_NAME} cannot be written ({error.strerror}); a restart may register step "
                f"{note['step']:,} once more, or not at all"
            )


def command_line() -> list[str]:
    """What registers a checkpoint for this process, and ends with it."""
    return [sys.executable, "-m", "trainer.registry.register_checkpoint", str(os.getpid())]


def registered_steps(output_dir: Path) -> list[int]:
    """The steps whose checkpoints were registered."""
    return [note["step"] for note in _read_notes(output_dir) if "version" in note]


def _read_notes(output_dir: Path) -> list[dict[str, Any]]:
    """A note for each time that a step was submitted, and one with its version once it was registered."""
    try:
        lines = (output_dir / REGISTERED_NAME).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    notes = []
    for line in lines:
        try:
            note = json.loads(line)
            notes.append({**note, "step": int(note["step"])})
        except (ValueError, KeyError, TypeError):
            continue  # torn by a kill: it is registered once more
    return notes
