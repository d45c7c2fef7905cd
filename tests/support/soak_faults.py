"""What a fault of a soak is, and those of preparation, disk, server and registration.

Each strikes the command of its phase, knows what has to follow, and fixes what people fix before they start it again.
`soak_rank_faults.py` has those of ranks, launchers and checkpoints.
"""

from __future__ import annotations

import abc
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tests.soak import Round

NOTICED_SECONDS = 180.0


class Fault(abc.ABC):
    """One fault, drawn; `strike` is asked again and again while a command of its phase runs."""

    name: str
    phase: str
    overcome: str = "nothing to be done"
    """By whom it was overcome, before the same command was started again."""

    def __init__(self, chance: random.Random, max_steps: int) -> None:
        self.chance = chance
        self.step = chance.randrange(1, max_steps - 1)
        """Of a training: the step after which it strikes."""
        self.share = chance.uniform(0.1, 0.9)
        """Of another command: after which share of its usual time it strikes."""
        self.rounds_waiting = 0
        """Since it was drawn."""

    @abc.abstractmethod
    def strike(self, at: Round) -> str | None:
        """Strike if the moment is right; what was done, or None where the moment was not right."""

    def check(self, at: Round, output: str) -> None:  # noqa: B027 - not every fault shows in its own command
        """Assert what the command, which has ended, had to say or do. Not asked of a training that was done before."""

    def check_next(self, at: Round, output: str) -> bool:
        """Assert the same of the next start of the command; False where that did not come so far."""
        return True

    def fix(self, at: Round) -> None:  # noqa: B027 - most leave nothing for people to do
        """Do what people do before they start the same command again."""

    def is_time(self, at: Round) -> bool:
        if self.phase == "train":
            return at.training.last_logged_step() >= self.step and at.is_training()
        return time.monotonic() - at.started_at >= self.share * at.soak.seconds_of[self.phase]


class PreparationKilled(Fault):
    name, phase = "SIGKILL of the preparing command", "prepare"
    overcome = "finished units are taken over"

    def strike(self, at: Round) -> str | None:
        if not self.is_time(at):
            return None
        os.killpg(at.process.pid, signal.SIGKILL)
        return f"killed with its workers after {time.monotonic() - at.started_at:.1f} s"


class WorkerKilled(Fault):
    name, phase = "SIGKILL of a worker of the preparation", "prepare"
    overcome = "the command gives its units to another"

    def strike(self, at: Round) -> str | None:
        workers = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(at.process.pid).children():
                if "forkserver" in " ".join(child.cmdline()):
                    workers += child.children()
        if not workers:
            return None
        victim = self.chance.choice(workers)
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
            return f"one of {len(workers)} workers killed"
        return None

    def check(self, at: Round, output: str) -> None:
        assert at.process.returncode == 0, output


class FullDisk(Fault):
    """The disk of the round: shards, checkpoints, status and points. A small tmpfs."""

    overcome = "space made"

    def fill(self, at: Round) -> None:
        with contextlib.suppress(OSError), open(self._filler(at), "wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

    def fix(self, at: Round) -> None:
        self._filler(at).unlink(missing_ok=True)

    def _filler(self, at: Round) -> Path:
        return at.soak.disk / "filler"


class FullDiskInPreparation(FullDisk):
    name, phase = "full disk in the preparation", "prepare"

    def strike(self, at: Round) -> str | None:
        if not (at.training.shards / ".work").exists():
            return None
        self.fill(at)
        return "the disk is full from the first work files on"

    def check(self, at: Round, output: str) -> None:
        if at.process.returncode != 0:
            assert at.process.returncode == 1 and "No space left on device" in output, output
            assert not (at.training.shards / "manifest.json").exists()


class FullDiskInTraining(FullDisk):
    name, phase = "full disk in the training", "train"

    def strike(self, at: Round) -> str | None:
        if not self.is_time(at):
            return None
        self.fill(at)
        wait(lambda: at.process.poll() is not None or "WAS NOT SAVED" in at.read())
        self.fix(at)
        what = "a save failed, the training went on" if at.process.poll() is None else "the training ended"
        return f"full after step {self.step}: {what}"

    def check(self, at: Round, output: str) -> None:
        assert "No space left on device" in output, output


class ServerKilled(Fault):
    """The MLflow server is killed, and started again some seconds later."""

    overcome = "the server started again"

    def strike(self, at: Round) -> str | None:
        if not self.is_time(at):
            return None
        at.soak.server.kill()
        away = self.chance.uniform(1.0, 8.0)
        time.sleep(away)
        at.soak.server.start()
        return f"the server was away for over {away:.0f} s"


class ServerKilledInTraining(ServerKilled):
    name, phase = "MLflow server killed in the training", "train"

    def check(self, at: Round, output: str) -> None:
        raise AssertionError(f"the training did not go on\n{output}")


class ServerKilledInRegistering(ServerKilled):
    name, phase = "MLflow server killed in the registration", "register"

    def check(self, at: Round, output: str) -> None:
        assert at.process.returncode in (0, 1), output


class RegistrationKilled(Fault):
    name, phase = "SIGKILL of the registration", "register"
    overcome = "no half version was left"

    def strike(self, at: Round) -> str | None:
        if not self.is_time(at):
            return None
        os.killpg(at.process.pid, signal.SIGKILL)
        return f"killed after {time.monotonic() - at.started_at:.1f} s"


class ShardCut(Fault):
    """A shard's copy was cut short before the training starts; people copy it again."""

    name, phase = "a shard's copy cut short", "before train"
    overcome = "the shard copied again"

    def strike(self, at: Round) -> str | None:
        self.path = self.chance.choice(sorted(at.training.shards.glob("train-*.tar")))
        self.whole = self.path.read_bytes()
        os.truncate(self.path, self.chance.randrange(len(self.whole)))
        return f"{self.path.name} has {self.path.stat().st_size:,} of {len(self.whole):,} bytes"

    def check(self, at: Round, output: str) -> None:
        assert at.process.returncode != 0 and self.path.name in output, output

    def fix(self, at: Round) -> None:
        self.path.write_bytes(self.whole)


def wait(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + NOTICED_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, "nobody noticed in time"
        time.sleep(0.1)
