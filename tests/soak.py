"""The whole way over and over, with faults: prepare, train on two ranks, stop, resume, register; then what it left.

A round carries each command out by starting the same one again until it ended well. A fault that is due strikes the
command of its phase in a moment that the seed chose. A command that fails without one fails the soak.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.free_ports import free_port
from tests.support.mlflow_servers import Server
from tests.support.soak_faults import Fault
from tests.support.soak_rank_faults import FAULTS
from tests.support.soak_report import Incident, SoakReport
from tests.system.conftest import PRETRAIN, REPOSITORY, Training
from trainer.tracking.status import read_status

MAX_STEPS = 60
MODEL_NAME, ALIAS = "soak", "champion"
SETTINGS = (
    f"training.max_steps={MAX_STEPS}",
    "checkpoint.every_steps=6",
    "checkpoint.keep_last=3",
    "evaluation.every_steps=20",
    "health.heartbeat_timeout_seconds=15",
    "tracking.experiment=soak",
)
MAX_ATTEMPTS = 12
COMMAND_SECONDS = 600.0
MAX_ROUNDS_WAITING = 10
"""A fault that finds no moment in so many rounds finds none at all, and the soak would prove nothing of it."""
MORE_MINUTES = 6.0
"""For faults that are drawn and found no moment yet; rounds that nothing is drawn in."""


@dataclass
class Soak:
    """What the rounds work with."""

    folder: Path
    """Of the logs; the rounds lie in `disk`."""
    disk: Path
    corpus: Path
    tokenizer: Path
    server: Server
    report: SoakReport
    chance: random.Random
    fault_seconds: float = 60.0
    kinds: tuple[type[Fault], ...] = FAULTS
    pending: list[Fault] = field(default_factory=list)
    seconds_of: dict[str, float] = field(default_factory=dict)
    """What the last start of each command took that nothing disturbed, by its phase."""
    _deck: list[type[Fault]] = field(default_factory=list)
    _drawn: int = 0

    def run_for(self, minutes: float, check: Callable[[Round], None]) -> None:
        """Rounds until the time is over and no fault waits for its moment; each is checked and its folder removed."""
        self.report.started_at = time.monotonic()
        while self.report.minute < minutes or (self.pending and self.report.minute < minutes + MORE_MINUTES):
            self.report.rounds += 1
            round_ = Round(self, self.report.rounds, draws_until=minutes)
            round_.go()
            check(round_)
            shutil.rmtree(round_.folder)
            self.report.write()
            for fault in self.pending:
                fault.rounds_waiting += 1
                assert fault.rounds_waiting < MAX_ROUNDS_WAITING, f"{fault.name} finds no moment"
        self.report.left_out += [f"{fault.name}: the time was over" for fault in self.pending]

    def draw(self, until: float) -> None:
        """A fault where one is due, from a pack with every kind once, which is shuffled again when it is empty."""
        while self._drawn < min(self.report.minute, until) * 60 / self.fault_seconds:
            if not self._deck:
                self._deck = self.chance.sample(self.kinds, len(self.kinds))
            self.pending.append(self._deck.pop()(self.chance, MAX_STEPS))
            self._drawn += 1


class Round:
    """One time the whole way, in a folder of its own; undisturbed, unless there is a last minute to draw faults in."""

    def __init__(self, soak: Soak, number: int, draws_until: float = 0.0) -> None:
        self.soak, self.number, self._draws_until = soak, number, draws_until
        self.folder = soak.disk / f"round-{number:03d}"
        self.folder.mkdir()
        settings = (*SETTINGS, f"tracking.uri={soak.server.uri}")
        self.training = Training(self.folder, self.folder / "shards", settings)
        self._stop_at = soak.chance.randrange(2, MAX_STEPS - 1) if draws_until else None
        """The step after which the training is asked to stop, once."""
        self.process: subprocess.Popen[bytes]
        self._log = soak.folder / f"round-{number:03d}.log"

    def go(self) -> None:
        self.carry_out("prepare", self.prepare_command, lambda: self.process.returncode == 0)
        self.carry_out("train", self.train_command, self.has_finished)
        self.carry_out("register", self.register_command, lambda: self.process.returncode == 0)

    def prepare_command(self) -> list[str]:
        words = ["--input", str(self.soak.corpus), "--tokenizer", str(self.soak.tokenizer), "--workers", "2"]
        settings = ["shards.min_shards=4", "shards.valid_fraction=0.1", "shards.record_tokens=2000"]
        output = ["--output", str(self.training.shards), "shards.unit_bytes=2000"]
        return [sys.executable, "-m", "data_prep", "shards", *words, *settings, *output]

    def train_command(self) -> list[str]:
        launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port"]
        return [*launcher, str(free_port()), PRETRAIN, *self.training.arguments()]

    def register_command(self) -> list[str]:
        script = [sys.executable, str(REPOSITORY / "launch" / "register.py"), "--checkpoint"]
        name = ["--name", MODEL_NAME, "--alias", ALIAS, "--tracking-uri", self.soak.server.uri]
        return [*script, str(self.training.output_dir), *name]

    def has_finished(self) -> bool:
        status = read_status(self.training.output_dir)
        return status is not None and (status.state, status.step) == ("finished", MAX_STEPS)

    def is_training(self) -> bool:
        """Whether this start of the training has come to its steps, and says so in its status."""
        status = read_status(self.training.output_dir)
        return " parameters | " in self.read() and status is not None and status.state == "running"

    def carry_out(self, phase: str, command: Callable[[], list[str]], is_done: Callable[[], bool]) -> None:
        """Start the command until it ended well; the report names whoever disturbs it."""
        told: list[Incident] = []
        unseen: list[Fault] = []
        for attempt in range(1, MAX_ATTEMPTS + 1):
            fault = self._strike(f"before {phase}", told)
            self._start(command())
            stopped = False
            try:
                deadline = time.monotonic() + COMMAND_SECONDS
                while self.process.poll() is None or (phase == "train" and self.training.processes()):
                    assert time.monotonic() < deadline, f"round {self.number}: {phase} does not end\n{self.read()}"
                    if fault is None and not stopped and self.process.poll() is None:
                        fault = self._strike(phase, told)
                        stopped = fault is None and phase == "train" and self._stop_when_asked()
                    time.sleep(0.05)
            finally:
                self.end_everything()
            output = self.read()
            if fault is not None:
                if phase != "train" or not is_done():
                    fault.check(self, output)
                fault.fix(self)
            unseen = [each for each in unseen if not each.check_next(self, output)]
            unseen += [fault] if fault is not None else []
            assert "Traceback (most recent call last)" not in output, f"round {self.number}: {phase}\n{output}"
            if is_done():
                if fault is None:
                    self.soak.seconds_of[phase] = time.monotonic() - self.started_at
                for incident in told:
                    incident.overcome += f"; start {attempt} of the same command ended well"
                return
            assert fault is not None or stopped, f"round {self.number}: {phase} failed with no fault\n{output}"
        raise AssertionError(f"round {self.number}: {phase} did not end well in {MAX_ATTEMPTS} starts\n{self.read()}")

    def read(self) -> str:
        """What the command that ran last has said so far."""
        return self._log.read_bytes()[self._begun_at :].decode("utf-8", errors="replace")

    def ranks(self) -> list[psutil.Process]:
        """The processes of both ranks, the first one first, without the workers of their loaders."""
        found: dict[str, list[psutil.Process]] = {"--local_rank=0": [], "--local_rank=1": []}
        for process in self.training.processes():
            for word in found.keys() & set(words_of(process)):
                found[word].append(process)
        return [min(group, key=lambda one: (one.create_time(), one.pid)) for group in found.values() if group]

    def launcher(self, module: str) -> list[psutil.Process]:
        return [process for process in self.training.processes() if module in words_of(process)]

    def end_everything(self) -> None:
        """SIGKILL for the command, and for ranks that it may have left."""
        self.training.kill()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _start(self, command: list[str]) -> None:
        env = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        with open(self._log, "ab") as log:
            self._begun_at = log.tell()
            self.process = subprocess.Popen(
                command, cwd=self.soak.folder, env=env, stdout=log, stderr=log, start_new_session=True
            )
        self.started_at = time.monotonic()

    def _strike(self, phase: str, told: list[Incident]) -> Fault | None:
        """Let the first fault strike that is due in this phase and finds what it needs."""
        self.soak.draw(self._draws_until)
        for fault in self.soak.pending:
            if fault.phase == phase and (happened := fault.strike(self)):
                self.soak.pending.remove(fault)
                incident = self.soak.report.add(self.number, phase, fault.name, happened)
                incident.overcome = fault.overcome
                told.append(incident)
                return fault
        return None

    def _stop_when_asked(self) -> bool:
        """Ask the training to stop by a signal to one of its ranks, in each round once."""
        if self._stop_at is None or self.training.last_logged_step() < self._stop_at or not self.is_training():
            return False
        if len(ranks := self.ranks()) < 2:
            return False
        ranks[self.soak.chance.randrange(2)].send_signal(signal.SIGUSR1)
        self._stop_at = None
        return True


def words_of(process: psutil.Process) -> list[str]:
    """The command line; nothing of a process that is gone."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
