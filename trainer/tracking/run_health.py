"""The health of a run from its status, without any I/O: the rules of `status --check`."""

from __future__ import annotations

from typing import Literal, NamedTuple

from data_prep.base.terminal import long_duration
from trainer.tracking.status import DEAD_AFTER_SECONDS, Status

STALLED_SECONDS, STALLED_STEPS = 600.0, 10
"""A run is stalled whose main thread has begun no operation for these seconds, and for the time of so many steps."""
UNKNOWN_SPEED_SECONDS = 1800.0
"""The same for a run that recorded neither operations nor a speed: the default of health.step_timeout_seconds."""
STALLED_INTERVALS = 10
"""The same in log intervals for a run of an older version, which recorded no operations."""


class RunHealth(NamedTuple):
    """Whether a run trains or is finished, in one word, and why."""

    state: Literal["healthy", "finished", "stopped", "failed", "dead", "silent", "stalled"]
    reason: str

    @property
    def is_good(self) -> bool:
        return self.state in ("healthy", "finished")


def assess(status: Status, now: float, is_alive: bool | None, is_suspended: bool, disk_is_full: bool) -> RunHealth:
    """Return the health of a run at the time `now` (seconds since 1970).

    Args:
        is_alive: whether the process that writes the status runs, if that is visible from this host.
        is_suspended: whether a signal holds that process.
        disk_is_full: whether the disk of the output directory has no space left.
    """
    if status.state == "finished":
        return RunHealth("finished", f"all {status.max_steps:,} steps are done")
    if status.state != "running":
        step = "before its first step" if status.step is None else f"at step {status.step:,}"
        return RunHealth(status.state, f"{status.state} {step}: {status.cause or 'no cause was recorded'}")
    if (death := cause_of_death(status, now, is_alive)) is not None:
        return RunHealth("dead", death)
    process = f"process {status.pid} on host {status.host}"
    if is_suspended:
        return RunHealth("stalled", f"{process} is suspended by a signal such as SIGSTOP; resume it with SIGCONT")
    beat = now - (status.heartbeat_at or status.written_at)
    if status.heartbeat_at is not None and beat > DEAD_AFTER_SECONDS:
        cause = "the disk of output_dir is full" if disk_is_full else "it hangs, or output_dir cannot be written"
        return RunHealth("silent", f"{process} runs and has written no heartbeat for {long_duration(beat)}: {cause}")
    idle, limit = now - (status.moved_at or status.written_at), _limit(status)
    if idle > limit:
        doing = f" ({status.doing})" if status.doing else ""
        return RunHealth("stalled", f"{process} has made no progress for {long_duration(idle)}{doing}")
    return RunHealth("healthy", f"step {status.step or 0:,} of {status.max_steps:,}")


def _limit(status: Status) -> float:
    """Return after how many seconds without progress a run is stalled."""
    speed = status.seconds_per_step
    if status.moved_at is not None:
        return max(STALLED_SECONDS, STALLED_STEPS * (speed or 0.0), status.patience_seconds)
    return UNKNOWN_SPEED_SECONDS if speed is None else STALLED_SECONDS + STALLED_INTERVALS * log_seconds(status)


def cause_of_death(status: Status, now: float, is_alive: bool | None) -> str | None:
    """Return why a run without a recorded end is dead; None if it has an end, is alive, or its state is unknown.

    `is_alive`: whether its process runs, if that is visible from this host; otherwise the heartbeat decides.
    """
    if status.state != "running" or is_alive:
        return None
    if is_alive is False:
        problem = "is gone"
    else:
        heartbeat = status.heartbeat_at
        if heartbeat is None or now - heartbeat <= DEAD_AFTER_SECONDS:
            return None
        problem = f"has had no heartbeat for {long_duration(now - heartbeat)}"
    return f"process {status.pid} on host {status.host} {problem} and did not record why; rerun the command to resume"


def log_seconds(status: Status) -> float:
    """Return the seconds between two log lines of a training run; 0 if unknown."""
    return (status.seconds_per_step or 0.0) * status.log_every_steps
