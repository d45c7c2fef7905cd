"""`checkpoint.average_last`: the mean of the newest checkpoints' weights, evaluated beside the last weights.

It follows an evaluation, after the checkpoint of this step where one was due, and takes the newest checkpoints that are
complete then, so it is a mean of saved weights alone. Nothing is evaluated until there are enough of them, nor twice
where no checkpoint was saved since. The run goes on with its own weights, bit by bit.
"""

from __future__ import annotations

from dataclasses import replace

from trainer.checkpoint.format import TrainState, list_steps, step_folder
from trainer.checkpoint.merging import averaged_weights
from trainer.distributed.process_group import broadcast_object
from trainer.loop.console import evaluation_line
from trainer.loop.reporting import report_status, validation_metrics
from trainer.loop.run import Progress, Run


def log_average(run: Run, state: TrainState, progress: Progress) -> Progress:
    """Evaluate the mean where it is due; report `average/mlm_loss` and so on to MLflow, console and status."""
    number = run.config.checkpoint.average_last
    if number is None:
        return progress
    steps = broadcast_object(_newest_steps(run, state, number) if run.ranks.is_first else None, run.ranks)
    if len(steps) < number or steps[-1] == progress.averaged_step:
        return progress
    run.watchdog.mark(f"averaging checkpoints after step {state.step}")
    with averaged_weights(run.engine, [step_folder(run.config.output_dir, step) for step in steps]) as problem:
        found = validation_metrics(run, state) if problem is None else {}
    if problem is not None:
        run.warn(f"the mean of the checkpoints {_listed(steps)} is not evaluated: {problem}")
        return progress
    overall = {name: value for name, value in found.items() if name.count("/") == 1}
    metrics = {name.replace("valid/", "average/"): value for name, value in overall.items()}
    run.tracker.log(state.step, metrics)
    run.log(f"mean of the checkpoints {_listed(steps)}: {evaluation_line(state.step, overall, None, run.pair_task)}")
    progress = replace(progress, metrics={**progress.metrics, **metrics}, averaged_step=steps[-1])
    report_status(run, state, progress)
    return progress


def _newest_steps(run: Run, state: TrainState, number: int) -> list[int]:
    """Steps of the newest complete checkpoints on rank 0's disk, oldest first."""
    complete, _ = list_steps(run.output_dir)
    return sorted(step for step in complete if step <= state.step)[-number:]


def _listed(steps: list[int]) -> str:
    return ", ".join(f"{step:,}" for step in steps)
