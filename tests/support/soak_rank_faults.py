"""Faults of a soak that strike ranks, launchers and checkpoints of the training; and the list of all faults."""

from __future__ import annotations

import abc
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.soak_faults import (
    Fault,
    FullDiskInPreparation,
    FullDiskInTraining,
    PreparationKilled,
    RegistrationKilled,
    ServerKilledInRegistering,
    ServerKilledInTraining,
    ShardCut,
    WorkerKilled,
    wait,
)
from trainer.tracking.status import read_status

if TYPE_CHECKING:
    from tests.soak import Round


class RankKilled(Fault):
    name, phase = "SIGKILL of one rank", "train"
    overcome = "the other rank named it and left"

    def strike(self, at: Round) -> str | None:
        if not self.is_time(at) or len(ranks := at.ranks()) < 2:
            return None
        self.rank = self.chance.randrange(2)
        ranks[self.rank].kill()
        return f"rank {self.rank} killed after step {self.step}"

    def check(self, at: Round, output: str) -> None:
        assert f"rank {self.rank} (" in output, output
        assert at.process.returncode != 0


class AllRanksKilled(Fault):
    name, phase = "SIGKILL of all ranks", "train"

    def strike(self, at: Round) -> str | None:
        if not self.is_time(at) or len(ranks := at.ranks()) < 2:
            return None
        for rank in ranks:
            rank.kill()
        return f"both ranks killed after step {self.step}"

    def check(self, at: Round, output: str) -> None:
        assert at.process.returncode != 0, output


class LauncherGone(Fault):
    """A signal to a process between the person and the ranks: those save and leave."""

    phase = "train"
    overcome = "the ranks saved and left"
    module: str
    number: signal.Signals

    def strike(self, at: Round) -> str | None:
        if not self.is_time(at) or not (launchers := at.launcher(self.module)):
            return None
        launchers[0].send_signal(self.number)
        return f"{self.number.name} to {self.module.rpartition('.')[2]} after step {self.step}"

    def check(self, at: Round, output: str) -> None:
        status = read_status(at.training.output_dir)
        assert status is not None and status.state in ("stopped", "finished"), (status, output)


class LauncherTold(LauncherGone):
    name, module, number = "SIGTERM of the launcher", "deepspeed.launcher.runner", signal.SIGTERM


class LauncherKilled(LauncherGone):
    name, module, number = "SIGKILL of the launcher", "deepspeed.launcher.runner", signal.SIGKILL


class NodeLauncherKilled(LauncherGone):
    name, module, number = "SIGKILL of the node's launch.py", "deepspeed.launcher.launch", signal.SIGKILL


class RankTold(Fault):
    name, phase = "SIGTERM of one rank", "train"
    overcome = "both ranks saved and left"

    def strike(self, at: Round) -> str | None:
        if not self.is_time(at) or len(ranks := at.ranks()) < 2:
            return None
        rank = self.chance.randrange(2)
        ranks[rank].terminate()
        return f"SIGTERM to rank {rank} after step {self.step}"

    def check(self, at: Round, output: str) -> None:
        status = read_status(at.training.output_dir)
        assert status is not None and status.state in ("stopped", "finished"), (status, output)


class RankStopped(Fault):
    name, phase = "SIGSTOP of one rank", "train"
    overcome = "the other rank named it and left"

    def strike(self, at: Round) -> str | None:
        if not self.is_time(at) or len(ranks := at.ranks()) < 2:
            return None
        rank, output_dir = self.chance.randrange(2), at.training.output_dir
        ranks[rank].suspend()
        began = time.monotonic()
        try:
            wait(lambda: (status := read_status(output_dir)) is None or status.state != "running")
        finally:
            ranks[rank].kill()  # the launcher waits 30 s for a rank that cannot hear it
        if at.has_finished():
            return f"rank {rank} stopped when all was done"
        status = read_status(output_dir)
        assert status is not None and (status.state, f"rank {rank} (" in status.cause) == ("failed", True), status
        return f"rank {rank} stopped after step {self.step}, named {time.monotonic() - began:.0f} s later"


class NewestCheckpointDamaged(Fault):
    """Everybody is killed, and the newest checkpoint is not what was saved when the command starts again."""

    phase = "train"
    overcome = "the one before was taken"

    def strike(self, at: Round) -> str | None:
        if not self.is_time(at) or len(list((at.training.output_dir / "checkpoints").glob("*/checkpoint.json"))) < 2:
            return None
        at.end_everything()
        checkpoints = sorted((at.training.output_dir / "checkpoints").glob("step-*/checkpoint.json"))
        self.newest = checkpoints[-1].parent
        path = self.chance.choice(sorted(self.newest.iterdir()))
        self.damage(path)
        return f"all killed, and {path.parent.name}/{path.name} {self.what}"

    @abc.abstractmethod
    def damage(self, path: Path) -> None:
        """Make the file another than was saved."""

    what: str

    def check_next(self, at: Round, output: str) -> bool:
        if "resuming after step" not in output:
            return False
        assert self.newest.name in output and ("is damaged and skipped" in output or "is left out" in output), output
        return True


class CheckpointTruncated(NewestCheckpointDamaged):
    name, what = "newest checkpoint truncated", "cut short"

    def damage(self, path: Path) -> None:
        os.truncate(path, self.chance.randrange(path.stat().st_size))


class CheckpointFlipped(NewestCheckpointDamaged):
    name, what = "newest checkpoint with 64 flipped bytes", "with 64 bytes flipped"

    def damage(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        start = self.chance.randrange(max(1, len(data) - 64))
        data[start : start + 64] = bytes(byte ^ 0xFF for byte in data[start : start + 64])
        path.write_bytes(data)


FAULTS: tuple[type[Fault], ...] = (
    PreparationKilled,
    WorkerKilled,
    FullDiskInPreparation,
    FullDiskInTraining,
    RankKilled,
    AllRanksKilled,
    LauncherTold,
    LauncherKilled,
    NodeLauncherKilled,
    RankTold,
    RankStopped,
    CheckpointTruncated,
    CheckpointFlipped,
    ServerKilledInTraining,
    ServerKilledInRegistering,
    RegistrationKilled,
    ShardCut,
)
