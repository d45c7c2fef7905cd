"""When the mean of checkpoints is evaluated, and what is reported; its weights: test_merging.py."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.toy_run import CONFIG
from trainer.checkpoint.format import MARKER_NAME, TrainState, step_folder
from trainer.distributed.process_group import Ranks
from trainer.loop import averaging
from trainer.loop.averaging import log_average
from trainer.loop.run import Progress
from trainer.metrics.health import NonFiniteSteps

METRICS = {
    "valid/mlm_loss": 3.0,
    "valid/mlm_accuracy": 0.5,
    "valid/mlm_accuracy_top5": 0.6,
    "valid/mlm_perplexity": 20.1,
    "valid/length/0-127/mlm_loss": 2.0,
}


class Averaged:
    """A run of which the mean is evaluated: the means that were made, and what was logged."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, problem: str | None = None) -> None:
        self.means: list[list[str]] = []
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.lines: list[str] = []
        self.warnings: list[str] = []
        checkpoint = CONFIG.checkpoint.model_copy(update={"average_last": 2})
        self.run: Any = SimpleNamespace(
            config=CONFIG.model_copy(update={"output_dir": str(folder), "checkpoint": checkpoint}),
            output_dir=folder,
            ranks=Ranks(0, 1, 0, torch.device("cpu")),
            engine=None,
            watchdog=SimpleNamespace(mark=lambda doing: None),
            tracker=SimpleNamespace(log=lambda step, metrics: self.metrics.append((step, metrics))),
            log=self.lines.append,
            warn=self.warnings.append,
            pair_task="nsp",
        )

        @contextlib.contextmanager
        def averaged_weights(engine: object, folders: list[Path]) -> Any:
            self.means.append([each.name for each in folders])
            yield problem

        monkeypatch.setattr(averaging, "averaged_weights", averaged_weights)
        monkeypatch.setattr(averaging, "validation_metrics", lambda run, state: METRICS)
        monkeypatch.setattr(averaging, "report_status", lambda *arguments: None)

    def save(self, step: int) -> None:
        folder = step_folder(self.run.output_dir, step)
        folder.mkdir(parents=True)
        (folder / MARKER_NAME).touch()


def test_the_newest_checkpoints_are_averaged_once_for_each_that_is_new(tmp_path, monkeypatch):
    averaged, progress = Averaged(tmp_path, monkeypatch), Progress(NonFiniteSteps(3), metrics={"valid/mlm_loss": 3.1})
    for step in (10, 20, 25, 30):
        if step % 10 == 0:
            averaged.save(step)
        progress = log_average(averaged.run, TrainState(step=step), progress)
    averaged.save(90)  # of a branch that the run has left
    progress = log_average(averaged.run, TrainState(step=31), progress)
    assert averaged.means == [["step-00000010", "step-00000020"], ["step-00000020", "step-00000030"]]
    assert [step for step, _ in averaged.metrics] == [20, 30]
    names = ["mlm_loss", "mlm_accuracy", "mlm_accuracy_top5", "mlm_perplexity"]
    assert averaged.metrics[0][1] == {f"average/{name}": METRICS[f"valid/{name}"] for name in names}
    assert progress.metrics["valid/mlm_loss"] == 3.1 and progress.metrics["average/mlm_loss"] == 3.0
    assert "10, 20" in averaged.lines[0] and "3.000" in averaged.lines[0] and not averaged.warnings


def test_a_mean_that_cannot_be_made_is_a_warning(tmp_path, monkeypatch):
    averaged, progress = Averaged(tmp_path, monkeypatch, problem="the disk is gone"), Progress(NonFiniteSteps(3))
    for step in (1, 2):
        averaged.save(step)
    assert log_average(averaged.run, TrainState(step=2), progress) is progress
    assert not averaged.metrics and "the disk is gone" in averaged.warnings[0]


def test_without_the_setting_nothing_happens(tmp_path, monkeypatch):
    averaged, progress = Averaged(tmp_path, monkeypatch), Progress(NonFiniteSteps(3))
    run = SimpleNamespace(config=CONFIG)
    assert log_average(run, TrainState(step=2), progress) is progress and not averaged.means
