"""The results of a suite: metrics by job, as a table for people, for programs and for MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from data_prep.base.errors import UserError
from data_prep.base.table import aligned
from trainer.evaluation.suite_plan import Job, Plan
from trainer.evaluation.suite_settings import BASELINE
from trainer.finetuning.scores import figure, figure_of_seeds


class SuiteFailed(UserError):
    """Some tasks of a suite failed; the others were run and reported."""


@dataclass(frozen=True)
class SuiteResult:
    """Metrics by job; a job that failed or has not run is missing."""

    plan: Plan
    metrics: Mapping[Job, Mapping[str, float]]
    failures: Mapping[Job, str] = field(default_factory=dict)

    def scores(self, task: str) -> dict[int, float]:
        """Return the score of each seed: the mean of the metrics that the suite reports."""
        names = self.plan.suite.tasks[task].metrics
        done = {job.seed: self.metrics[job] for job in self.plan.of(task) if job in self.metrics}
        return {seed: fmean(values[name] for name in names) for seed, values in done.items()}

    @property
    def is_complete(self) -> bool:
        return all(job in self.metrics for job in self.plan.jobs)

    @property
    def average(self) -> float | None:
        """The mean of the mean scores of the tasks; None while a job has no result."""
        return fmean(fmean(self.scores(task).values()) for task in self.plan.suite.tasks) if self.is_complete else None

    @property
    def summary(self) -> dict[str, float]:
        """Scores by metric name, for MLflow and the registry: `suite/NAME/TASK` and `suite/NAME/average`."""
        prefix = f"suite/{self.plan.suite.name}"
        figures = {
            f"{prefix}/{task}": fmean(scores.values())
            for task in self.plan.suite.tasks
            if (scores := self.scores(task))
        }
        average = self.average
        return figures if average is None else {**figures, f"{prefix}/average": average}

    @property
    def facts(self) -> dict[str, str]:
        """Everything but the model that the scores depend on (`trainer/config/comparability.py`)."""
        return {f"suite.{self.plan.suite.name}": self.plan.digest}


def report_lines(result: SuiteResult) -> Iterator[str]:
    """Yield the table: a row per task with mean and standard deviation over seeds of the score and the metrics."""
    suite = result.plan.suite
    rows = [("task", "seeds", "score", "metrics")]
    for task, entry in suite.tasks.items():
        jobs = result.plan.of(task)
        done = [result.metrics[job] for job in jobs if job in result.metrics]
        seeds = str(len(jobs)) if len(done) == len(jobs) else f"{len(done)} of {len(jobs)}"
        score = metrics = "missing"
        if done:
            score = figure_of_seeds([*result.scores(task).values()])
            by_name = {name: figure_of_seeds([values[name] for values in done]) for name in entry.metrics}
            metrics = ", ".join(f"{name} {text}{_yardstick(done, name)}" for name, text in by_name.items())
        rows.append((task, seeds, score, metrics))
    average = result.average
    if len(suite.tasks) > 1:
        rows.append(
            ("average", "", "missing" if average is None else f"{average:.4f}", f"mean of {len(suite.tasks)} tasks")
        )
    yield f"suite {suite.name}: mean ± standard deviation over seeds; a task's score is the mean of its metrics"
    if any("(baseline " in metrics for *_, metrics in rows):
        yield "baseline: the metric of the most frequent label, the mean, chance, or of words in common (tf-idf)"
    if suite.source:
        yield f"settings: {suite.source}"
    yield from aligned(rows)


def as_json(result: SuiteResult) -> dict[str, Any]:
    """Return the average, and by task the scores and metrics of every seed, for programs."""
    suite = result.plan.suite
    return {
        "suite": suite.name,
        "source": suite.source,
        "average": result.average,
        "tasks": {
            task: {
                "score": fmean(scores.values()) if scores else None,
                "spread": stdev(scores.values()) if len(scores) > 1 else None,
                "seeds": {str(job.seed): result.metrics[job] for job in result.plan.of(task) if job in result.metrics},
                "failures": {
                    str(job.seed): result.failures[job] for job in result.plan.of(task) if job in result.failures
                },
            }
            for task in suite.tasks
            for scores in [result.scores(task)]
        },
    }


def check_complete(result: SuiteResult) -> None:
    """Raise SuiteFailed if a job failed."""
    if result.failures:
        listed = "; ".join(f"{job.task}, seed {job.seed}: {why.rstrip('. ')}" for job, why in result.failures.items())
        raise SuiteFailed(
            f"{len(result.failures)} of {len(result.plan.jobs)} evaluations of the suite {result.plan.suite.name} "
            f"failed ({listed})",
            fix="correct the cause and rerun the same command, which repeats the failed ones only",
            code="suite-incomplete",
        )


def _yardstick(done: Sequence[Mapping[str, float]], name: str) -> str:
    """Return the baseline of a metric in parentheses, if the task's function has one."""
    values = [each[f"{BASELINE}{name}"] for each in done if f"{BASELINE}{name}" in each]
    return f" (baseline {figure(fmean(values))})" if values else ""
