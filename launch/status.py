"""Report the state of a run.

    clozeworks status OUTPUT_DIR [OUTPUT_DIR ...]
    clozeworks status --check OUTPUT_DIR

The command reads status.json, history.jsonl and logs/rank-0.log in the run's output_dir, also while it trains, and
needs no GPU. Several runs are printed as a table. A run whose status says "running" is reported dead if its process
does not exist on this host or, seen from another host, if its last heartbeat is older than 120 s.

With --check it prints one line per run and its exit status is the answer: 0 if every run trains or is finished, 1 if
one is dead, failed, stopped, silent (no heartbeat for 120 s) or stalled (no progress, or suspended), or if there is no
run. Exit status without --check: 0 reported, 1 no run or a damaged status, 2 wrong usage.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError, UserError, run_command
from data_prep.base.log_file import warnings_of
from data_prep.base.table import Column, Table
from data_prep.base.terminal import counted, long_duration, paragraph, printable
from launch.options import command_parser
from trainer.tracking.process_identity import is_alive, is_suspended
from trainer.tracking.run_summary import RunHealth, assess, summarize, tokens_per_second, tree
from trainer.tracking.status import (
    STATUS_NAME,
    Status,
    log_path,
    read_history,
    read_status,
)

REQUIRED = ("step", "max_steps", "tokens_seen", "skipped_steps", "world_size")
"""Fields in the status of every run that has completed a step."""

FULL_BYTES = 1 << 20
"""A disk with less space than this is full."""
SHOWN_WARNINGS = 3


def main() -> None:
    parser = command_parser("status.py", __doc__)
    parser.add_argument("output_dir", type=Path, nargs="+", metavar="OUTPUT_DIR", help="output_dir of a run")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object, or a list of them for several runs")
    form.add_argument("--check", action="store_true", help="print one line per run; exit with 1 if one is not healthy")
    arguments = parser.parse_args()
    runs: list[Path] = arguments.output_dir
    if arguments.check:
        are_good = [_print_health(run, is_one=len(runs) == 1) for run in runs]
        sys.exit(0 if all(are_good) else 1)
    if len(runs) == 1:
        figures = figures_of(runs[0])
        print(json.dumps(figures, indent=1) if arguments.json else "\n".join(describe(figures)))
        return
    rows = [_figures_or_error(run) for run in runs]
    print(json.dumps(rows, indent=1) if arguments.json else table(rows).text())
    sys.exit(1 if any("error" in row for row in rows) else 0)


def _print_health(run: Path, is_one: bool) -> bool:
    """Print whether a run is healthy, and why; returns the former.

    Raises:
        UserError: there is no run, and it is the only one; of several, the line says so.
    """
    try:
        health = check(run)
    except UserError as error:
        if is_one:
            raise
        print(printable(f"{run}: no run: {error.problem}"))
        return False
    print(("" if is_one else f"{run}: ") + printable(f"{health.state}: {health.reason}"))
    return health.is_good


def read_run(output_dir: Path) -> Status:
    """Return the status of a run.

    Raises:
        UsageError: there is no such directory.
        UserError: there is no run, or its status is damaged.
    """
    if output_dir.is_file():
        raise UsageError(
            f"{output_dir} is a file",
            fix=f"name the run's output_dir, such as {output_dir.absolute().parent}",
            code="not-a-folder",
        )
    if not output_dir.is_dir():
        raise UsageError(f"{output_dir} does not exist", fix="give the output_dir of a run", code="missing-path")
    status = read_status(output_dir)
    if status is None:
        is_missing = not (output_dir / STATUS_NAME).exists()
        raise UserError(
            f"{output_dir} has no {STATUS_NAME}, so no run has begun to train there"
            if is_missing
            else f"{output_dir}/{STATUS_NAME} is damaged",
            fix="give the output_dir of a run"
            if is_missing
            else "rerun the command of the run, which rewrites the file",
            code="unreadable-status",
        )
    given = status.model_dump(exclude_unset=True, exclude_none=True)
    if status.step is None and status.cause is not None:
        return status
    if missing := [name for name in REQUIRED if name not in given]:
        raise UserError(
            f"{output_dir}/{STATUS_NAME} is damaged: it lacks {', '.join(missing)}",
            fix="rerun the command of the run, which rewrites the file",
            code="unreadable-status",
        )
    return status


def check(output_dir: Path) -> RunHealth:
    """Return the health of a run.

    Raises:
        UserError: there is no run (`read_run`).
    """
    status = read_run(output_dir)
    disk = os.statvfs(output_dir)
    is_full = disk.f_bavail * disk.f_frsize < FULL_BYTES
    health = assess(status, time.time(), is_alive(status), is_suspended(status), is_full)
    if health.state != "healthy":
        return health
    speed = display(tokens_per_second(status), lambda value: f", {value:,.0f} tokens/s")
    warnings = warnings_of(log_path(output_dir))
    noted = f", {counted(len(warnings), 'warning')} since its start" if warnings else ""
    return health._replace(reason=f"{health.reason} at {at(status.written_at)}{speed}{noted}")


def figures_of(output_dir: Path) -> dict[str, Any]:
    """Return the figures of a run with its branches.

    Raises:
        UserError: there is no run (`read_run`), or it ended before its first step.
    """
    status = read_run(output_dir)
    if status.step is None and status.cause is not None:
        raise UserError(
            f"{output_dir}: the run {status.state} before its first step: {status.cause}",
            fix="correct the cause, then rerun the command of the run",
            code="ended-before-first-step",
        )
    branches = list(tree(output_dir))
    figures = summarize(status, read_history(output_dir), time.time(), is_alive(status))
    figures |= {"branch": status.branch, "tree": branches if len(branches) > 1 else []}
    return figures | {"warnings": warnings_of(log_path(output_dir)), "health": check(output_dir).state}


def _figures_or_error(output_dir: Path) -> dict[str, Any]:
    try:
        return {"output_dir": str(output_dir), **figures_of(output_dir)}
    except UserError as error:
        return {"output_dir": str(output_dir), "state": "no figures", "error": paragraph(error)}


def table(runs: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one row per run; `runs` are figures, or an error in their place."""
    names = ("step", "max steps", "updated (UTC)", "tokens/s", "train loss", "valid MLM loss", "time left", "warnings")
    columns = (Column("run", is_number=False), Column("health", is_number=False), *map(Column, names))
    errors = "; ".join(run["error"] for run in runs if "error" in run)
    return Table("runs", columns, tuple(_row(run) for run in runs), errors)


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    if "error" in run:
        return (run["output_dir"], "no figures", *("-",) * 8)
    return (
        run["output_dir"],
        run["health"],
        f"{run['step']:,}",
        f"{run['max_steps']:,}",
        at(run["written_at"]).removesuffix(" UTC"),
        display(run["tokens_per_second"], lambda speed: f"{speed:,.0f}", "-"),
        display(run["train_loss"], lambda loss: f"{loss:.4f}", "-"),
        display(run["valid_mlm_loss"], lambda loss: f"{loss:.4f}", "-"),
        display(run["seconds_left"], long_duration, "-"),
        f"{len(run['warnings']):,}",
    )


def describe(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the figures as lines of text."""
    unit = "GPU-hours" if figures["device"] == "cuda" else "rank-hours"
    state = figures["state"] + (f" ({figures['cause']})" if figures["cause"] else "")
    heartbeat = figures["seconds_since_heartbeat"]
    if figures["seconds_since_word"] is not None:
        state += f", last update {long_duration(figures['seconds_since_word'])} ago"
    if heartbeat is not None:
        state += f", last heartbeat {long_duration(heartbeat)} ago"
    if figures["is_silent"]:
        state += ": " + ("killed, or " if heartbeat is None else "") + "busy with a long evaluation or save"
        state += ", or hung" if heartbeat is not None else ""
    yield f"state             {state}"
    speed = display(figures["seconds_per_step"], lambda seconds: f", {seconds:.3f} s each")
    yield f"step              {figures['step']:,} of {figures['max_steps']:,}{speed}, at {at(figures['written_at'])}"
    if figures["tokens_per_second"] is not None:
        yield f"throughput        {figures['tokens_per_second']:,.0f} tokens/s"
    if figures["stage"]:
        yield f"stage             {figures['stage'].removeprefix('stage ')}"
    yield "time left         " + display(figures["seconds_left"], long_duration, "unknown")
    yield f"tokens            {figures['tokens']:,}"
    yield (
        f"loss              {display(figures['train_loss'], lambda loss: f'{loss:.4f}', 'none')} (train)"
        + display(figures["valid_mlm_loss"], lambda loss: f", {loss:.4f} (valid MLM, step {figures['valid_step']:,})")
        + display(figures["average_mlm_loss"], lambda loss: f", {loss:.4f} (valid MLM, mean of checkpoints)")
    )
    if figures["suite_scores"]:
        scores = ", ".join(f"{name} {score:.4f}" for name, score in figures["suite_scores"].items())
        yield f"suite             {scores} (step {figures['suite_step']:,})"
    yield "last checkpoint   " + display(
        figures["last_checkpoint"], lambda step: f"step {step:,}, {at(figures['last_checkpoint_at'])}", "none"
    )
    yield f"{unit:<17} {figures['rank_hours']:.2f} spent" + display(
        figures["rank_hours_left"], lambda hours: f", {hours:.2f} remaining"
    )
    if figures["cost"] is not None:
        yield f"cost              {figures['cost']:,.2f} spent" + display(
            figures["cost_left"], lambda cost: f", {cost:,.2f} remaining"
        )
    yield "time training     " + display(figures["training_share"], lambda share: f"{share:.1%}", "unknown")
    yield f"skipped steps     {figures['skipped_steps']:,}"
    if warnings := figures.get("warnings"):
        yield f"warnings          {len(warnings):,} since the last start, the newest last"
        yield from (f"  {printable(warning)}" for warning in warnings[-SHOWN_WARNINGS:])
    yield f"restarts          {len(figures['restarts'])}"
    for restart in figures["restarts"]:
        yield f"  {at(restart['at'])}  from step {restart['step']:,}, after: {restart['cause']}"
    if figures.get("tree"):
        yield "branches"
    own = next((run["valid_evaluation"] for run in figures.get("tree") or () if run["is_this"]), None)
    for run in figures.get("tree") or ():
        origin = f"step {run['from_step']:,}: " if run["from_step"] is not None else ""
        stage = f" ({run['stage']})" if run["stage"] else ""
        loss = display(run["valid_mlm_loss"], lambda value: f", valid MLM loss {value:.4f}")
        loss += " (measured differently)" if loss and run["valid_evaluation"] != own else ""
        progress = f"{run['state']}, step {run['step'] or 0:,} of {run['max_steps'] or 0:,}{loss}"
        mark = "   <- this run" if run["is_this"] else ""
        yield f"  {'  ' * run['depth']}{origin}{run['output_dir']}{stage}: {progress}{mark}"


def display(value: Any, text_of: Any, if_none: str = "") -> str:
    """Return the text of a value, or `if_none`."""
    return if_none if value is None else text_of(value)


def at(seconds: float) -> str:
    """Return a time in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


if __name__ == "__main__":
    run_command(main)
