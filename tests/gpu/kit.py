"""Steps with a budget each, and the commands that they run: what one of them loses costs no other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wheels

MAX_FILES, MAX_FILE_BYTES = 8, 14 << 20
NEEDS_GPU = "needs a GPU"
TOY_TIMES = 8
"""What a step may take without a GPU, in its budgets: a guard against hanging, however busy the machine."""


class StepFailed(Exception):
    """A step's command failed, ran out of its time, or gave something else than it should."""


@dataclass
class Kit:
    """Where the kit works, how long it may, and what came out so far."""

    part: str
    out: Path
    work: Path
    shards: Path
    environment: dict[str, str]
    ends_at: float
    toy: bool
    long_steps: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    step_ends_at: float = 0.0
    stopped: str = ""
    """Why the steps that are left are skipped; empty where they are run."""

    def call(
        self, command: Sequence[str | Path], seconds: float | None = None, until: Callable[[], bool] | None = None
    ) -> str:
        """Run a command within the step's time; its output. Where `until()` comes true it is killed with SIGKILL.

        Raises:
            StepFailed: its status is not 0, it outlasts its time, or it ends before `until()` came true.
        """
        deadline = min(self.step_ends_at, time.time() + (seconds or float("inf")))
        path, killed = self.work / "output.txt", False
        with path.open("wb") as sink:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=wheels.REPOSITORY,
                env=self.environment,
                start_new_session=True,
            )
            while process.poll() is None and not killed and time.time() < deadline:
                time.sleep(0.2)
                killed = until is not None and until()
            timed_out = process.poll() is None and not killed
            if killed or timed_out:
                os.killpg(process.pid, signal.SIGKILL)  # the session that was started here, and no other process
                process.wait()
        text = path.read_text(errors="replace")
        with (self.out / "log.txt").open("a") as log:
            if log.tell() < MAX_FILE_BYTES:
                log.write(f"\n===== {' '.join(map(str, command))}\n{text[-200_000:]}\n")
        if timed_out:
            raise StepFailed(f"still running at the end of its time: {' '.join(map(str, command))[-200:]}")
        if until is not None and not killed:
            raise StepFailed(f"ended before it was to be killed, status {process.returncode}: {text.strip()[-300:]}")
        if until is None and process.returncode != 0:
            raise StepFailed(f"status {process.returncode}: {text.strip()[-500:]}")
        return text

    def try_call(self, command: Sequence[str | Path]) -> dict[str, Any]:
        """As `call`, for a command that writes each figure when it has it: status and reason, as in a step's row."""
        try:
            self.call(command)
        except StepFailed as error:
            return {"status": "failed", "why": str(error)}
        return {"status": "ok"}

    @contextlib.contextmanager
    def variables(self, **values: str) -> Iterator[None]:
        """Other variables of the environment, within the block."""
        before, self.environment = self.environment, self.environment | values
        try:
            yield
        finally:
            self.environment = before

    def python(self, *words: str | Path) -> list[str | Path]:
        return [sys.executable, *words]


@dataclass(frozen=True)
class Step:
    """One thing to find out."""

    name: str
    seconds: float
    """Its budget. It is skipped where less than half of it is left."""
    run: Callable[[Kit], dict[str, Any]]
    """Returns what the summary tells."""
    needs_gpu: bool = False
    needs: tuple[str, str] | None = None
    """The step before it, and the files (a pattern in the kit's working folder) which that one leaves for it."""


def reason_to_skip(kit: Kit, step: Step) -> str | None:
    """Why a step cannot be run now; None if it can."""
    left = kit.ends_at - time.time()
    if kit.stopped:
        return kit.stopped
    if kit.toy and step.needs_gpu:
        return NEEDS_GPU
    if step.needs is not None and not any(kit.work.glob(step.needs[1])):
        return f"needs {step.needs[1]}, which the step {step.needs[0]!r} has not left"
    if left < step.seconds / 2:
        return f"{left:.0f} s left of the {step.seconds:.0f} s it may take"
    return None


def run_steps(kit: Kit, steps: Sequence[Step], only: Sequence[str] = ()) -> None:
    """Run the steps one after another, each whatever befell those before it; write the summary after each."""
    for step in steps:
        if only and not step.name.startswith(tuple(only)):
            continue
        started_at = time.time()
        kit.step_ends_at = min(started_at + step.seconds * (TOY_TIMES if kit.toy else 1), kit.ends_at)
        row: dict[str, Any]
        if why := reason_to_skip(kit, step):
            row = {"status": "skipped", "why": why}
        else:
            try:
                row = {"status": "ok"} | step.run(kit)
            except StepFailed as error:
                row = {"status": "failed", "why": str(error)}
            except Exception as error:  # noqa: BLE001 - a mistake of the kit's in one step costs no other
                row = {"status": "failed", "why": f"{type(error).__name__}: {error}"}
        kit.rows.append({"name": step.name, "seconds": round(time.time() - started_at, 1)} | row)
        print(json.dumps(kit.rows[-1])[:600], flush=True)
        summary = {"part": kit.part, "toy": kit.toy, "steps": kit.rows}
        (kit.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    files = [path for path in kit.out.iterdir() if path.is_file()]
    assert len(files) <= MAX_FILES, "more files than may come back"
