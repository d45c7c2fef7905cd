"""A rehearsal of a run: a few steps of every stage at their real sizes, and how long the whole run would take.

It meets what a dry run can only estimate: memory, compilation, the speed of the data, the size of a checkpoint. The
rehearsal has an output directory of its own, keeps its metrics there, and registers and uploads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from data_prep.base.table import Column, Table
from data_prep.base.terminal import long_duration
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.run_config import RunConfig
from trainer.config.stages import epochs_of
from trainer.tracking.journal import Journal, Point

STEPS = 5
"""Optimizer steps of each stage; the first two are not timed, since they compile and fill caches."""
_UNTIMED = 2
_EVALUATED_MICRO_BATCHES = 4
_MOST_POINTS = 1 << 20
_NEVER = 1_000_000_000
"""Steps until the next checkpoint or evaluation: the last step alone has them."""


def rehearsal_of(config: RunConfig, name: str) -> RunConfig:
    """Return the rehearsal of a run, in the directory OUTPUT_DIR-rehearsal-NAME.

    Stages have their lengths, full batches, data, objectives and masks. A learning rate rises to its peak.
    """
    output_dir = f"{config.output_dir.rstrip('/')}-rehearsal-{name}"
    values = config.model_dump(mode="json")
    length = f"{STEPS} steps"
    for stage in values["training"]["stages"]:
        stage |= {"duration": length, "batch_warmup": None, "schedule": None, "evaluation": None}
    values["training"] |= {"duration": None if values["training"]["stages"] else length, "batch_warmup": None}
    sizes = [config.training.micro_batch_tokens, *(each.micro_batch_tokens for each in config.training.stages)]
    tokens = max(size or 0 for size in sizes) * _EVALUATED_MICRO_BATCHES
    rows = {name: value for name, value in values["evaluation"].items() if not name.startswith(("minimal", "suite"))}
    sections = {
        "schedule": {"name": "linear", "warmup": "90%"},
        "evaluation": rows | {"every_steps": _NEVER, "max_tokens": tokens},
        "checkpoint": {"every_steps": _NEVER, "keep_last": 1},
        "tracking": {"uri": f"sqlite:///{Path(output_dir).absolute()}/mlflow.db"},
        "logging": values["logging"] | {"every_steps": 1, "every_seconds": None},
        "registry": {},
    }
    return RunConfig.model_validate(values | sections | {"output_dir": output_dir})


def report(config: RunConfig, rehearsal: RunConfig, world_size: int) -> Table:
    """Return what the steps of a finished rehearsal took, and the hours of the whole run at that speed."""
    points, _ = Journal.read_only(Path(rehearsal.output_dir) / "tracking").read(0, _MOST_POINTS)
    measured = _by_step(points)
    counts_epochs = bool(epochs_of(config.training))
    rows, total = [], 0.0
    for number, stage in enumerate(rehearsal.stages):
        steps = range(stage.first_step + 1 + _UNTIMED, stage.last_step + 1)
        timed = [measured[step] for step in steps if "train/seconds_per_step" in measured.get(step, {})]
        seconds = median(each["train/seconds_per_step"] for each in timed)
        memory = max((each.get("train/peak_memory_bytes", 0.0) for each in timed), default=0.0)
        hours = "-"
        if not counts_epochs:
            total += (left := config.stages[number].taken_steps * seconds)
            hours = long_duration(left)
        rows.append(
            (
                str(number),
                stage.name or "-",
                f"{stage.sequence_length:,}",
                f"{stage.global_batch_tokens:,}",
                f"{batch_arithmetic(stage, world_size).accumulation_steps}",
                f"{seconds:.3f}",
                f"{stage.global_batch_tokens / seconds:,.0f}",
                f"{memory / (1 << 30):.2f}",
                hours,
            )
        )
    names = ("length", "tokens a step", "accumulation", "s a step", "tokens/s", "GiB a rank", "whole stage")
    note = "at this speed; a batch-size ramp-up has smaller steps, and evaluations and saves come on top"
    if total:
        note = f"the whole run: {long_duration(total)} {note}"
    note = f"{note}; {rehearsal.output_dir} is removed, with its metrics"
    columns = (Column("stage"), Column("name", is_number=False), *map(Column, names))
    return Table("rehearsal", columns, tuple(rows), note)


def _by_step(points: Sequence[Point]) -> Mapping[int, Mapping[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for point in points:
        found.setdefault(point.step, {})[point.key] = point.value
    return found
