"""Health and figures of a run, from its status and history: starts, costs, losses and branches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar

from data_prep.base.terminal import long_duration
from trainer.config.comparability import digest_for
from trainer.tracking.process_identity import is_alive
from trainer.tracking.status import (
    DEAD_AFTER_SECONDS,
    BranchRecord,
    Ended,
    Evaluated,
    Event,
    Saved,
    Scored,
    Started,
    Status,
    read_branches,
    read_status,
)

STALLED_SECONDS, STALLED_STEPS = 600.0, 10
"""A run is stalled if its main thread began no operation for these seconds, and for the time of so many steps."""
UNKNOWN_SPEED_SECONDS = 1800.0
"""The limit for a run that recorded neither operations nor a speed: the default of health.step_timeout_seconds."""
STALLED_INTERVALS = 10
"""The limit in log intervals for a run of an older version, which recorded no operations."""
PATIENCE_SECONDS, PATIENCE_INTERVALS = 60.0, 10.0
"""A run that has not written its status for these seconds plus so many log intervals may have been killed."""

_FULL = "the disk of output_dir is full"
NO_END = "killed, or its host was lost (no end was recorded)"

EventT = TypeVar("EventT", bound=Event)


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
        is_suspended: whether a signal suspended that process.
        disk_is_full: whether the disk of the output directory has no space left.
    """
    if status.state == "finished":
        return RunHealth("finished", f"all {status.max_steps:,} steps are done")
    if status.state != "running":
        step = "before its first step" if status.step is None else f"at step {status.step:,}"
        again = "; the same command resumes it" if status.state == "stopped" else ""
        return RunHealth(status.state, f"{step}: {status.cause or 'no cause was recorded'}{again}")
    if (death := cause_of_death(status, now, is_alive)) is not None:
        return RunHealth("dead", f"{death} ({_FULL})" if disk_is_full else death)
    process = f"process {status.pid} on host {status.host}"
    if is_suspended:
        return RunHealth("stalled", f"{process} is suspended by a signal such as SIGSTOP; resume it with SIGCONT")
    beat = now - (status.heartbeat_at or status.written_at)
    if status.heartbeat_at is not None and beat > DEAD_AFTER_SECONDS:
        cause = _FULL if disk_is_full else "it hangs, or output_dir cannot be written"
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


@dataclass(frozen=True)
class Session:
    """One start of the run until its end or its last sign of life; times in seconds since 1970."""

    started_at: float
    ended_at: float
    world_size: int
    first_step: int
    state: str
    cause: str | None
    last_step: int | None
    """Step of the end; None if no end was recorded."""

    @property
    def rank_hours(self) -> float:
        return self.world_size * max(0.0, self.ended_at - self.started_at) / 3600


def tokens_per_second(status: Status) -> float | None:
    """Return the throughput of all ranks between the last two log lines."""
    return status.metrics.get("train/tokens_per_second")


def tree(output_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs that branched from each other, the first one before its branches.

    `depth` counts from the first run; `is_this` marks `output_dir`. A run that was removed or moved is left out with
    all its branches.
    """
    root, seen = output_dir, {output_dir.resolve()}
    while (status := read_status(root)) is not None and status.branch is not None:
        parent = Path(str(status.branch["run"]))
        if parent.resolve() in seen or read_status(parent) is None:
            break
        root = parent
        seen.add(root.resolve())
    yield from _subtree(root, output_dir.resolve(), 0, None, set())


def _subtree(
    run: Path, this: Path, depth: int, branch: BranchRecord | None, shown: set[Path]
) -> Iterator[dict[str, Any]]:
    status = read_status(run)
    if status is None or run.resolve() in shown:
        return
    shown.add(run.resolve())
    yield {
        "depth": depth,
        "output_dir": str(run),
        "is_this": run.resolve() == this,
        "from_step": branch.step if branch is not None else None,
        "stage": branch.stage if branch is not None else None,
        "state": "dead" if status.state == "running" and is_alive(status) is False else status.state,
        "step": status.step,
        "max_steps": status.max_steps or None,
        "valid_mlm_loss": status.metrics.get("valid/mlm_loss"),
        "valid_evaluation": digest_for("valid/mlm_loss", status.evaluation),
    }
    for child in sorted(read_branches(run), key=lambda each: (each.step, each.output_dir)):
        yield from _subtree(Path(child.output_dir), this, depth + 1, child, shown)


def sessions(status: Status, history: Sequence[Event]) -> list[Session]:
    """Return the starts of a run in their order."""
    return [
        _session(begun, history[number:], status)
        for number, begun in enumerate(history, start=1)
        if isinstance(begun, Started)
    ]


def _session(begun: Started, later: Sequence[Event], status: Status) -> Session:
    """Return the session of a start; `later` are all events after it."""
    following = next((event for event in later if _is_of_later_start(event, begun)), None)
    events = later if following is None else later[: later.index(following)]
    end = next((event for event in events if isinstance(event, Ended)), None)
    state: str
    if end is not None:
        ended_at, state, cause = end.at, end.state, end.cause
    elif following is None:
        ended_at, state, cause = max(status.last_sign, begun.at), status.state, status.cause
    else:
        # For a session without a recorded end, the next start recorded the time of the last status.
        ended_at = max(begun.at, following.last_written_at or 0.0, *(event.at for event in events))
        state, cause = "lost", NO_END
    started_at, last_step = begun.launched_at or begun.at, end.step if end is not None else None
    return Session(started_at, ended_at, begun.world_size, begun.step, state, cause, last_step)


def _is_of_later_start(event: Event, begun: Started) -> TypeGuard[Started | Ended]:
    """Return whether the event is a later start, or the end of one that did not record its own start."""
    return isinstance(event, Started) or (isinstance(event, Ended) and event.launched_at > begun.at)


def why_again(before: Session, part: Session) -> str:
    """Return why the session `part` followed the session `before`."""
    if before.state != "finished" or before.last_step is None:
        return before.cause or before.state
    went_back = part.first_step < before.last_step
    return f"finished at step {before.last_step:,}, then " + (
        "resumed from an earlier step" if went_back else "restarted"
    )


def summarize(status: Status, history: Sequence[Event], now: float, is_alive: bool | None = None) -> dict[str, Any]:
    """Return the figures of a run at the time `now` (seconds since 1970); None for unknown values.

    `is_alive`: whether the process that writes the status runs, if that is visible from this host.
    """
    death = cause_of_death(status, now, is_alive)
    parts = sessions(status, history)
    begun, saved = _newest(Started, history), _newest(Saved, history)
    valid, suite = _newest(Evaluated, history), _newest(Scored, history)
    running = status.state == "running" and death is None
    seconds_per_step, left = status.seconds_per_step, status.max_steps - (status.step or 0)
    # The run's own estimate knows how batches grow; older runs wrote none.
    by_speed = left * seconds_per_step if seconds_per_step is not None else None
    seconds_left = (status.seconds_left if status.seconds_left is not None else by_speed) if left else 0.0
    price = begun.gpu_hour_price if begun is not None else None
    hours = sum(part.rank_hours for part in parts)
    hours_left = seconds_left * status.world_size / 3600 if seconds_left is not None else None
    wall_seconds = sum(part.ended_at - part.started_at for part in parts)
    since_written = now - status.written_at if running else None
    return {
        "state": status.state if death is None else "dead",
        "cause": status.cause if death is None else death,
        "host": status.host,
        "seconds_since_heartbeat": now - status.heartbeat_at if running and status.heartbeat_at else None,
        "seconds_since_word": since_written,
        "is_silent": since_written is not None
        and since_written > PATIENCE_SECONDS + PATIENCE_INTERVALS * log_seconds(status),
        "step": status.step,
        "written_at": status.written_at,
        "max_steps": status.max_steps,
        "stage": status.stage,
        "tokens_per_second": tokens_per_second(status),
        "seconds_per_step": seconds_per_step,
        "seconds_left": seconds_left,
        "tokens": status.tokens_seen,
        "skipped_steps": status.skipped_steps,
        "ranks": status.world_size,
        "device": begun.device if begun is not None else "cpu",
        "rank_hours": hours,
        "rank_hours_left": hours_left,
        "cost": hours * price if price is not None else None,
        "cost_left": hours_left * price if price is not None and hours_left is not None else None,
        "training_share": min(1.0, status.train_seconds / wall_seconds) if wall_seconds > 0 else None,
        "restarts": [
            {"at": part.started_at, "step": part.first_step, "cause": why_again(before, part)}
            for before, part in zip(parts, parts[1:], strict=False)
        ],
        "last_checkpoint": saved and saved.step,
        "last_checkpoint_at": saved and saved.at,
        "valid_step": valid and valid.step,
        "valid_mlm_loss": valid and valid.metrics.get("valid/mlm_loss"),
        "average_mlm_loss": status.metrics.get("average/mlm_loss"),
        "suite_step": suite and suite.step,
        "suite_scores": suite and suite.metrics,
        "train_loss": status.metrics.get("train/loss"),
    }


def _newest(kind: type[EventT], history: Sequence[Event]) -> EventT | None:
    return next((event for event in reversed(history) if isinstance(event, kind)), None)
