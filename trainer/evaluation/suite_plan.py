"""The plan of a suite on a model: a job for each task and seed, after the job whose model it starts from.

The digest of a job covers everything that the result depends on: the model, the function, settings and files of the
task, the seed, and the job whose model it starts from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.base.errors import UserError
from data_prep.storage import storage
from trainer.evaluation.suite_settings import Suite
from trainer.evaluation.suite_tasks import EvaluationTask, find_task
from trainer.model.model_folder import CARD_FILE, folder_digest

RESULT_FORMAT = 1
_DIGITS = 12
_NOT_THE_MODEL = (CARD_FILE, "provenance.json", "training_config.yaml")
"""Files of an export that may differ between two exports of the same weights."""


@dataclass(frozen=True)
class Job:
    """One task with one seed."""

    task: str
    seed: int
    digest: str
    start: Job | None = None
    """The job that fits the model which this job starts from."""

    @property
    def name(self) -> str:
        return f"{self.task}-seed{self.seed}-{self.digest[:_DIGITS]}"


@dataclass(frozen=True)
class Plan:
    """All jobs of a suite on a model, in the order in which they run."""

    suite: Suite
    tasks: Mapping[str, EvaluationTask]
    jobs: tuple[Job, ...]
    digest: str = ""
    """Digest of everything but the model that the scores depend on; scores of two models compare if it is equal."""

    def of(self, task: str) -> list[Job]:
        """Return the jobs of a task, one per seed."""
        return [job for job in self.jobs if job.task == task]

    @property
    def starts(self) -> set[Job]:
        """Jobs whose fitted models other jobs start from."""
        return {job.start for job in self.jobs if job.start is not None}


def check_suite(suite: Suite) -> dict[str, EvaluationTask]:
    """Find the function of every task, check settings and files, and return the tasks by name."""
    tasks = {}
    for name, entry in suite.tasks.items():
        tasks[name] = find_task(entry.function)
        try:
            settings = {**entry.settings, "files": suite.files_of(name), "seed": suite.seeds_of(name)[0]}
            tasks[name].check(settings, entry.metrics)
        except UserError as error:
            problem = f"task {name} of the suite {suite.name}: {error.problem}"
            raise type(error)(problem, fix=error.fix, code=error.code) from None
    return tasks


def make_plan(suite: Suite, tasks: Mapping[str, EvaluationTask], model_digest: str) -> Plan:
    """Return the jobs of a suite on a model, in an order in which each follows the job that it starts from."""
    jobs: dict[tuple[str, int], Job] = {}
    identities: list[dict[str, Any]] = []
    digests: dict[Path, str] = {}
    for name in suite.in_order():
        entry = suite.tasks[name]
        for path in suite.files_of(name).values():
            if path not in digests:
                digests[path] = folder_digest(path) if path.is_dir() else storage.sha256_of(path)
        seeds = suite.seeds_of(name) if tasks[name].needs_seeds else suite.seeds_of(name)[:1]
        for seed in seeds:
            start = None
            if entry.starts_from is not None:  # a task with fewer seeds lends its first model
                start = jobs.get((entry.starts_from, seed)) or next(
                    job for (task, _), job in jobs.items() if task == entry.starts_from
                )
            identity = {
                "format": RESULT_FORMAT,
                "model": model_digest if start is None else start.digest,
                "task": tasks[name].identity,
                "settings": entry.settings,
                "files": {key: digests[path] for key, path in suite.files_of(name).items()},
                "seed": seed,
            }
            jobs[name, seed] = Job(name, seed, _digest(identity), start)
            own = {"name": name, "metrics": entry.metrics, "starts_from": entry.starts_from}
            identities.append({**identity, **own, "model": None})
    return Plan(suite, tasks, tuple(jobs.values()), _digest(identities))


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def digest_of_model(folder: Path) -> str:
    """Return the sha256 over weights, configuration and tokenizer of a Hugging Face directory."""
    return folder_digest(folder, without=_NOT_THE_MODEL)
