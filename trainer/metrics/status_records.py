"""What stands in `status.json` and in a line of `history.jsonl`, so that damaged ones are known from whole ones.

Named here is what is read of them; anything else may stand beside it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

State = Literal["running", "finished", "stopped", "failed"]
Event = Literal["started", "saved", "evaluated", "ended"]

_Time = Annotated[float, Field(ge=0, lt=253_402_300_800)]
"""Seconds since 1970, before the year 10,000."""
_Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
_Metrics = dict[str, float | None]


def is_status(value: Any) -> bool:
    """Whether it is a status; only `state` and `written_at` are in every one."""
    return _is(_STATUS, value)


def is_event(value: Any) -> bool:
    """Whether it is a whole line of the history."""
    return _is(_EVENT, value)


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _Status(_Record):
    state: State
    written_at: _Time
    step: _Count | None = None
    max_steps: _Count = 0
    tokens_seen: _Count = 0
    skipped_steps: _Count = 0
    world_size: _Count = 0
    log_every_steps: _Count = 0
    train_seconds: float = 0.0
    seconds_per_step: float | None = None
    seconds_left: float | None = None
    flops_per_device: float | None = None
    metrics: _Metrics = {}
    cause: str | None = None
    host: str | None = None
    boot_id: str | None = None
    pid: _Count | None = None
    pid_namespace: str | None = None
    process_start_ticks: _Count | None = None
    heartbeat_at: _Time | None = None


class _Started(_Record):
    event: Literal["started"]
    at: _Time
    step: _Count
    world_size: _Count
    device: str = "cpu"
    gpu_hour_price: float | None = None
    launched_at: _Time = 0.0
    last_written_at: _Time | None = None


class _Saved(_Record):
    event: Literal["saved"]
    at: _Time
    step: _Count


class _Evaluated(_Record):
    event: Literal["evaluated"]
    at: _Time
    step: _Count
    metrics: _Metrics


class _Ended(_Record):
    event: Literal["ended"]
    at: _Time
    state: State
    step: _Count | None
    cause: str | None
    launched_at: _Time = 0.0


_STATUS: TypeAdapter[Any] = TypeAdapter(_Status)
_EVENT: TypeAdapter[Any] = TypeAdapter(Annotated[_Started | _Saved | _Evaluated | _Ended, Field(discriminator="event")])


def _is(kind: TypeAdapter[Any], value: Any) -> bool:
    try:
        kind.validate_python(value)
    except ValidationError:
        return False
    return True
