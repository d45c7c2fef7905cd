"""What is evaluated between two steps, what a stop leaves of it, what is reported, and what the checkpoint gets.

The weights of a mean: test_average.py.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.threaded_ranks import ThreadedRanks
from tests.support.toy_run import CONFIG
from trainer.checkpoint.format import MARKER_NAME, TrainState, step_folder
from trainer.checkpoint.late_scores import (
    EVALUATION_NAME,
    LateScores,
    evaluation_of,
    is_pending,
    read_late_scores,
    write_late_scores,
)
from trainer.config.run_settings import CheckpointSettings
from trainer.distributed import process_group
from trainer.distributed.process_group import Ranks
from trainer.distributed.stop_signal import StopPoll
from trainer.loop import evaluating
from trainer.loop.checkpoints import Checkpoints, Progress
from trainer.loop.evaluating import evaluate_if_due, log_average, long_evaluation
from trainer.metrics.health import NonFiniteSteps

ALONE = Ranks(0, 1, 0, torch.device("cpu"))

FACTS = {"seed": str(CONFIG.stage_of(20).last_step)}
METRICS = {
    "valid/mlm_loss": 3.0,
    "valid/mlm_accuracy": 0.5,
    "valid/mlm_accuracy_top5": 0.6,
    "valid/mlm_perplexity": 20.1,
    "valid/length/0-127/mlm_loss": 2.0,
}


def never() -> StopPoll:
    return StopPoll(SimpleNamespace(is_requested=False), ALONE)  # type: ignore[arg-type]


def checkpoints_of(run: Any, **parts: Any) -> Checkpoints:
    data: Any = None
    return Checkpoints(run.config, run.engine, data, run.reporter, lambda doing: None, **parts)


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
            ranks=ALONE,
            engine=SimpleNamespace(ranks=ALONE),
            watchdog=SimpleNamespace(mark=lambda doing: None),
            reporter=SimpleNamespace(
                add_scores=self.add_scores, warn=self.warnings.append, labels={"mlm": "mlm", "pair": "nsp"}
            ),
        )
        self.run.checkpoints = checkpoints_of(self.run)

        @contextlib.contextmanager
        def averaged_weights(engine: object, folders: list[Path], should_stop: Callable[[], bool]) -> Any:
            self.means.append([each.name for each in folders])
            yield problem

        monkeypatch.setattr(evaluating, "averaged_weights", averaged_weights)
        monkeypatch.setattr(evaluating, "validation_metrics", lambda run, state, poll: METRICS)

    def add_scores(self, state: TrainState, metrics: dict[str, float], line: str) -> None:
        self.metrics.append((state.step, metrics))
        self.lines.append(line)

    def save(self, step: int) -> None:
        folder = step_folder(self.run.config.output_dir, step)
        folder.mkdir(parents=True)
        (folder / MARKER_NAME).touch()


def test_the_newest_checkpoints_are_averaged_once_for_each_that_is_new(tmp_path, monkeypatch):
    averaged, progress = Averaged(tmp_path, monkeypatch), Progress(NonFiniteSteps(3))
    for step in (10, 20, 25, 30):
        if step % 10 == 0:
            averaged.save(step)
        progress, _ = log_average(averaged.run, TrainState(step=step), progress, never())
    averaged.save(90)  # of a branch that the run has left
    progress, _ = log_average(averaged.run, TrainState(step=31), progress, never())
    assert averaged.means == [["step-00000010", "step-00000020"], ["step-00000020", "step-00000030"]]
    assert [step for step, _ in averaged.metrics] == [20, 30]
    names = ["mlm_loss", "mlm_accuracy", "mlm_accuracy_top5", "mlm_perplexity"]
    assert averaged.metrics[0][1] == {f"average/{name}": METRICS[f"valid/{name}"] for name in names}
    assert "10, 20" in averaged.lines[0] and "3.000" in averaged.lines[0] and not averaged.warnings


def test_a_mean_that_cannot_be_made_is_a_warning(tmp_path, monkeypatch):
    averaged, progress = Averaged(tmp_path, monkeypatch, problem="the disk is gone"), Progress(NonFiniteSteps(3))
    for step in (1, 2):
        averaged.save(step)
    assert log_average(averaged.run, TrainState(step=2), progress, never()) == (progress, {})
    assert not averaged.metrics and "the disk is gone" in averaged.warnings[0]


def test_without_the_setting_nothing_happens(tmp_path, monkeypatch):
    averaged, progress = Averaged(tmp_path, monkeypatch), Progress(NonFiniteSteps(3))
    run = SimpleNamespace(config=CONFIG)
    assert log_average(run, TrainState(step=2), progress, never()) == (progress, {}) and not averaged.means


def test_a_long_evaluation_is_announced_and_a_short_one_is_not():
    def text(speed: float, max_tokens: int | None = None) -> str | None:
        evaluation = CONFIG.evaluation.model_copy(update={"max_tokens": max_tokens})
        valid = SimpleNamespace(valid=SimpleNamespace(tokens=3_000_000))
        run = SimpleNamespace(
            config=CONFIG.model_copy(update={"evaluation": evaluation}),
            data=SimpleNamespace(shard_sets=[SimpleNamespace(manifest=valid)], hidden_words=None),
            reporter=SimpleNamespace(metrics={"train/tokens_per_second": speed} if speed else {}),
        )
        return long_evaluation(run, TrainState())

    assert text(10_000.0) == "evaluating 3,000,000 tokens, about 1:40"
    assert text(10_000.0, max_tokens=30_000) is None
    assert text(1e6) is None and text(0.0) is None


class Evaluated:
    """A run whose step 20 is saved and evaluated; `steps` are what is done, and a stop comes in one of them."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, stop_in: str = "", metrics: Any = METRICS
    ) -> None:
        self.did: list[str] = []
        signal = SimpleNamespace(is_requested=False)

        def does(name: str, result: Any) -> Callable[..., Any]:
            def do(run: Any, state: TrainState, *rest: Any) -> Any:
                signal.is_requested |= name == stop_in
                rest[-1]()  # the poll
                self.did.append(name)
                return result(*rest) if callable(result) else dict(result)

            return do

        monkeypatch.setattr(evaluating, "evaluation_metrics", does("evaluate", metrics))
        average = does("average", lambda progress, poll: (progress, {"average/mlm_loss": 2.5}))
        monkeypatch.setattr(evaluating, "log_average", average)
        self.folder = step_folder(folder, 20)
        self.folder.mkdir(parents=True)
        (self.folder / MARKER_NAME).touch()
        write_late_scores(self.folder, LateScores(state="pending"), EVALUATION_NAME)
        self.logged: dict[str, float] = {}
        self.run: Any = SimpleNamespace(
            config=CONFIG.model_copy(update={"output_dir": str(folder), "checkpoint": CheckpointSettings()}),
            ranks=ALONE,
            engine=SimpleNamespace(ranks=ALONE),
            data=SimpleNamespace(shard_sets=[], facts_of=lambda stage: {"seed": str(stage.last_step)}),
            stop_signal=signal,
            reporter=SimpleNamespace(
                add_scores=lambda state, metrics, *lines: self.logged.update(metrics),
                note=lambda event, values: None,
                labels={"mlm": "mlm", "pair": "nsp"},
            ),
        )
        follower: Any = SimpleNamespace(submit=lambda: self.did.append("follow"))
        self.run.checkpoints = checkpoints_of(self.run, follower=follower)
        self.due = Progress(NonFiniteSteps(3), saved_step=20, evaluation_is_due=True, average_is_due=True)

    def evaluate(self, progress: Progress | None = None) -> tuple[Progress, bool]:
        return evaluate_if_due(self.run, TrainState(step=20), progress or self.due)


@pytest.mark.parametrize("stuck_at", [0, 3, 9])
def test_a_rank_that_waits_for_a_store_leaves_with_the_others(stuck_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, together = threading.Event(), ThreadedRanks(2, (), monkeypatch)
    monkeypatch.setattr(process_group, "begin_sum_on_hosts", together.begin_sum_on_hosts)

    def evaluated(ranks: Ranks) -> tuple[bool, int]:
        def batches() -> Iterator[Any]:
            for number in range(10):
                if ranks.rank == 1 and number == stuck_at:
                    signal.is_requested = True
                    ended.wait(60)
                yield number

        signal, store = SimpleNamespace(is_requested=False), [SimpleNamespace(url="s3://bucket/data")]
        poll = StopPoll(signal, ranks)  # type: ignore[arg-type]
        data = SimpleNamespace(shard_sets=store)
        run: Any = SimpleNamespace(data=data, watchdog=SimpleNamespace(mark=lambda doing: None))
        taken = list(evaluating._until_stop(batches(), run, TrainState(step=1), poll))
        return poll.is_agreed, len(taken)

    (first, _), (stuck, taken) = together.run(evaluated)
    ended.set()
    assert first and stuck and taken <= stuck_at


def test_a_complete_evaluation_is_attached_and_then_its_checkpoint_is_registered(tmp_path, monkeypatch):
    evaluated = Evaluated(tmp_path, monkeypatch)
    progress, is_stopping = evaluated.evaluate()
    assert not is_stopping and not progress.is_scored_later
    assert evaluated.did == ["evaluate", "average", "follow"]
    assert evaluation_of(evaluated.folder).metrics == {**METRICS, "average/mlm_loss": 2.5}
    assert evaluation_of(evaluated.folder).facts == FACTS, "how they were measured"
    assert not is_pending(evaluated.folder) and evaluated.logged == METRICS


@pytest.mark.parametrize(
    ("stop_in", "did", "attached"),
    [("evaluate", ["evaluate"], {}), ("average", ["evaluate", "average"], METRICS)],
)
def test_a_stop_drops_what_is_incomplete_and_leaves_it_pending(stop_in, did, attached, tmp_path, monkeypatch):
    evaluated = Evaluated(tmp_path, monkeypatch, stop_in)
    progress, is_stopping = evaluated.evaluate()
    assert is_stopping and progress.is_scored_later
    assert evaluated.did == did and evaluated.logged == attached, "nothing is registered without its scores"
    facts = FACTS if attached else {}
    left = LateScores(state="pending", metrics=attached, facts=facts)
    assert read_late_scores(evaluated.folder, EVALUATION_NAME) == left


def test_nothing_is_attached_where_the_step_was_not_saved(tmp_path, monkeypatch):
    evaluated = Evaluated(tmp_path, monkeypatch)
    progress = Progress(NonFiniteSteps(3), saved_step=10, evaluation_is_due=True, average_is_due=True)
    assert evaluated.evaluate(progress)[1] is False
    assert evaluation_of(evaluated.folder).metrics == {} and evaluated.did == ["evaluate", "average"]


def test_nothing_is_evaluated_where_nothing_is_due(tmp_path, monkeypatch):
    evaluated, progress = Evaluated(tmp_path, monkeypatch), Progress(NonFiniteSteps(3), saved_step=20)
    assert evaluated.evaluate(progress) == (progress, False) and not evaluated.did


def test_metrics_that_are_not_finite_go_to_mlflow_and_not_into_the_checkpoint(tmp_path, monkeypatch):
    metrics = METRICS | {"valid/mlm_perplexity": math.inf, "valid/length/0-127/mlm_loss": math.nan}
    evaluated = Evaluated(tmp_path, monkeypatch, metrics=metrics)
    evaluated.evaluate()
    assert evaluated.logged == metrics
    kept = {"valid/mlm_loss", "valid/mlm_accuracy", "valid/mlm_accuracy_top5", "average/mlm_loss"}
    assert set(evaluation_of(evaluated.folder).metrics) == kept
