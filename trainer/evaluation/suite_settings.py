"""Settings of an evaluation suite: the tasks, with their files, settings and metrics.

A task is a function that gets the Hugging Face directory of a model and the settings, and returns metrics by name:
`finetune`, `minimal_pairs` (`suite_tasks.py`), `retrieval` and `sts` (`vector_tasks.py`), an entry point of the group
`clozeworks.evaluation_tasks`, or `module:function`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from data_prep.base.errors import UsageError
from data_prep.base.load_settings import load_settings
from data_prep.base.settings import PathText, SettingError, Settings

RESERVED = ("files", "seed", "save_model_to")
"""Settings that the suite adds to those of a task."""
BASELINE = "baseline/"
"""Prefix of the name of a metric: the same metric of a yardstick."""
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
Name = Annotated[str, Field(pattern=_NAME, max_length=60)]


class TaskSettings(Settings):
    """One task of a suite."""

    function: str = Field(
        "finetune", description="finetune, minimal_pairs, retrieval, sts, an installed task, or module:function"
    )
    files: dict[str, PathText] = Field({}, description="files and directories that the task reads, relative to `data`")
    settings: dict[str, Any] = Field({}, description="settings that the function gets")
    metrics: tuple[str, ...] = Field(
        min_length=1, description="metrics of the function to report; their mean is the task's score"
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="seeds of this task; by default those of the suite"
    )
    starts_from: str | None = Field(
        None, description="task whose fitted model this task starts from, without its head, instead of the model"
    )

    @classmethod
    def type_of(cls, name: str, section: Mapping[str, Any]) -> Any:
        """Return the type of a setting; `settings` of a built-in function have a schema of their own."""
        function = section.get("function", "finetune")
        if name == "settings":
            with suppress(ModuleNotFoundError):  # a library of fine-tuning, which running the task reports
                from trainer.evaluation.suite_tasks import SCHEMAS

                return SCHEMAS.get(getattr(function, "text", function)) or super().type_of(name, section)
        return super().type_of(name, section)


class Suite(Settings):
    """Tasks that are reported in one table, with the mean of their scores."""

    name: Name = Field(description="name of the suite, which its metrics begin with")
    source: str = Field("", description="where the settings were published")
    data: PathText = Field(".", min_length=1, description="directory of the files")
    download: str = Field("", description="how to get the files, for the error about a missing one")
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 1, 2), min_length=1, description="seeds of every task that names none"
    )
    tasks: dict[Name, TaskSettings] = Field(min_length=1, description="tasks by name, in the order of the table")

    @model_validator(mode="after")
    def _check_tasks(self) -> Suite:
        for name, task in self.tasks.items():
            if reserved := [key for key in RESERVED if key in task.settings]:
                raise SettingError(
                    f"tasks.{name}.settings contains {reserved[0]!r}, which the suite sets",
                    fix="rename it",
                    code="reserved-task-setting",
                )
            seeds = task.seeds if task.seeds is not None else self.seeds
            if not seeds or len(set(seeds)) < len(seeds):
                raise SettingError(
                    f"the seeds {list(seeds)} of tasks.{name} are empty or repeated",
                    fix="give each seed once",
                    code="repeated-seeds",
                )
            chain = [name]
            while (start := self.tasks[chain[-1]].starts_from) is not None:
                if start not in self.tasks or start in chain:
                    problem = "is not a task of the suite" if start not in self.tasks else "starts from itself"
                    raise SettingError(
                        f"tasks.{chain[-1]}.starts_from={start} {problem}",
                        fix="name a task that does not start from this one",
                        code="invalid-starts-from",
                    )
                chain.append(start)
        return self

    def seeds_of(self, name: str) -> tuple[int, ...]:
        seeds = self.tasks[name].seeds
        return self.seeds if seeds is None else seeds

    def files_of(self, name: str) -> dict[str, Path]:
        """Return the paths of the files of a task by their names."""
        return {key: Path(self.data) / path for key, path in self.tasks[name].files.items()}

    def selected(self, names: Sequence[str]) -> Suite:
        """Return the suite with these tasks and those that they start from; without names, all tasks."""
        if unknown := [name for name in names if name not in self.tasks]:
            raise UsageError(
                f"--tasks names {unknown[0]!r}, which the suite {self.name} does not have",
                fix=f"give some of {', '.join(self.tasks)}",
                code="unknown-task",
            )
        kept = set(names or self.tasks)
        while more := {start for name in kept if (start := self.tasks[name].starts_from) is not None} - kept:
            kept |= more
        tasks = {name: task for name, task in self.tasks.items() if name in kept}
        return self.model_copy(update={"tasks": tasks})

    def in_order(self) -> list[str]:
        """Return the names of the tasks in an order in which each follows the one that it starts from."""
        ordered: list[str] = []

        def add(name: str) -> None:
            start = self.tasks[name].starts_from
            if start is not None:
                add(start)
            if name not in ordered:
                ordered.append(name)

        for name in self.tasks:
            add(name)
        return ordered


def own_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task without those that the suite adds."""
    return {name: value for name, value in settings.items() if name not in RESERVED}


@dataclass(frozen=True)
class SuiteRequest:
    """A request to a process to evaluate a checkpoint on a suite, with results in the directory `output`."""

    checkpoint: str
    suite: str
    overrides: tuple[str, ...]
    output: str


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite from a YAML file, or the preset of that name, with overrides such as `data=glue`."""
    return load_settings(Suite, path, overrides)


def check_files(suite: Suite) -> None:
    """Refuse a suite of which a file is missing."""
    missing = [(name, path) for name in suite.tasks for path in suite.files_of(name).values() if not path.exists()]
    if missing:
        name, path = missing[0]
        others = f" (and {len(missing) - 1:,} more files)" if len(missing) > 1 else ""
        first = next(iter(suite.tasks[name].files.values()))
        advice = f"set data=DIR to the directory that contains {first}, or choose tasks with --tasks"
        raise UsageError(
            f"task {name} of the suite {suite.name} needs {path}, which does not exist{others}",
            fix=f"{suite.download.rstrip('. ')}; {advice}" if suite.download else advice,
            code="missing-task-file",
        )
