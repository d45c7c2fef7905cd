"""What is reported of steps whose sums are known, and of a run that ends or whose disk is full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.toy_run import tiny_config
from trainer.checkpoint.format import TrainState
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.data.sample_range import SampleRange
from trainer.distributed.process_group import Ranks
from trainer.loop import reporter as module
from trainer.loop.reporter import Reporter
from trainer.loop.step import GlobalCounts, Recorder, StepResult
from trainer.metrics.health import Health
from trainer.objectives.build import build_objectives
from trainer.tracking.status import RunStatus, read_history, read_status
from trainer.tracking.tracker import NullTracker

SIZES = ModelSettings(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16)
OBJECTIVES = build_objectives(objectives_of("next_sentence"), SIZES)
SAMPLES = SampleRange(stage=0, epoch=0, first=0, stop=4)


def result(sums: list[float], masked: int, pairs: int, weights: dict[str, float], unreadable: int = 0) -> StepResult:
    counts = GlobalCounts({"masked_lm": masked, "sentence_pairs": pairs}, tokens=100, unreadable_rows=unreadable)
    return StepResult(counts, torch.tensor(sums, dtype=torch.float64), weights, 0.5, applied=True)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(Ranks(0, 1, 0, torch.device("cpu")), OBJECTIVES, 6)


def test_a_step_has_the_means_of_what_it_predicted_and_their_weighted_sum(recorder: Recorder) -> None:
    both = {"masked_lm": 2.0, "sentence_pairs": 0.5}
    recorder.add(7, SAMPLES, 0.25, result([12.0, 3.0, 1.0], 4, 2, both, unreadable=3))
    recorder.add(8, SAMPLES, 0.25, result([12.0, 0.0, 0.0], 4, 0, {"masked_lm": 2.0}))
    recorder.add(9, SAMPLES, 0.25, result([0.0, 0.0, 0.0], 0, 0, both))
    lines, interval = recorder.flush()
    assert [line.step for line in lines] == [7, 8, 9] and recorder.last_step == 9
    common = {"train/learning_rate": 0.25}
    assert lines[0].metrics == common | {
        "train/unreadable_rows": 3.0,
        "train/loss": 2.0 * 3.0 + 0.5 * 1.5,
        "train/grad_norm": 0.5,
        "train/mlm_loss": 3.0,
        "train/pair_loss": 1.5,
        "train/pair_accuracy": 0.5,
    }
    assert lines[1].metrics == common | {"train/loss": 6.0, "train/grad_norm": 0.5, "train/mlm_loss": 3.0}
    assert lines[2].metrics == common, "no loss, rather than 0"
    assert (interval.num_steps, interval.tokens) == (3, 300)


def test_the_losses_of_a_step_are_one_for_each_objective_that_predicted_anything(recorder: Recorder) -> None:
    both = {"masked_lm": 2.0, "sentence_pairs": 0.5}
    assert recorder.global_losses(result([12.0, 3.0, 1.0], 4, 2, both)) == (3.0, 1.5)
    assert recorder.global_losses(result([12.0, 0.0, 0.0], 4, 0, both)) == (3.0,)


class Logged(NullTracker):
    """Keeps what a tracker gets."""

    def __init__(self) -> None:
        self.did: list[Any] = []

    def log(self, step: int, metrics: Any) -> None:
        self.did.append((step, dict(metrics)))

    def close(self, status: str) -> None:
        self.did.append(status)


def make_reporter(folder: Path, rank: int = 0, status: RunStatus | None = None) -> Reporter:
    config = tiny_config(folder)
    stop: Any = SimpleNamespace(request=None)
    engine: Any = SimpleNamespace(ranks=Ranks(rank, 1, rank, torch.device("cpu")), module=None)
    return Reporter(
        config,
        engine,
        OBJECTIVES,
        6,
        health=Health(config.health, None, OBJECTIVES.values()),
        facts_of=lambda stage: {},
        tracker=Logged(),
        status=status,
        stop_signal=stop,
        mark=lambda doing: None,
    )


@pytest.fixture
def status(tmp_path: Path) -> Iterator[RunStatus]:
    status = RunStatus(tmp_path, lambda error: None)
    yield status
    status.end("finished", None, 0)


def test_the_last_lines_of_a_rank_do_not_grow_with_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gib = 1 << 30
    peaks, requests = [gib] * 300 + [2 * gib] + [gib] * 211, [f"rank {rank}" for rank in range(512)]
    monkeypatch.setattr(module, "gather_objects", lambda own, ranks: peaks if isinstance(own, int) else requests)
    with caplog.at_level("INFO"):
        for rank in (0, 1):
            reporter = make_reporter(tmp_path, rank)
            reporter.log_peak_memory()
            reporter.stopped("saved")
    assert [record.getMessage() for record in caplog.records] == [
        "peak memory per rank: 1.00 to 2.00 GiB, most on rank 300 (resident set)",
        "stopped by rank 0, rank 1, rank 2 and 509 more ranks; saved; rerun the same command to resume",
    ]


def test_steps_and_scores_go_to_mlflow_and_their_newest_values_to_the_status(tmp_path: Path, status: RunStatus) -> None:
    reporter = make_reporter(tmp_path, status=status)
    reporter.add_step(7, SAMPLES, 0.25, result([12.0, 3.0, 1.0], 4, 2, {"masked_lm": 1.0, "sentence_pairs": 1.0}))
    state = reporter.log(TrainState(step=7), 0.5, lambda tracker: {"suite/own/average": 0.5})
    assert state.last_logged_step == 7 and state.train_seconds > 0
    reporter.add_scores(state, {"valid/mlm_loss": 2.5})
    reporter.end("finished")
    reporter.close("finished")
    written = read_status(tmp_path)
    assert written is not None and (written.state, written.step) == ("finished", 7)
    expected = {"train/mlm_loss": 3.0, "valid/mlm_loss": 2.5, "suite/own/average": 0.5}
    assert written.metrics.items() >= expected.items() and written.seconds_per_step is not None
    assert isinstance(reporter.tracker, Logged)
    steps, health, scores, end = reporter.tracker.did
    assert steps[0] == 7 and steps[1]["train/mlm_loss"] == 3.0 and "health/skipped_steps" in health[1]
    assert (scores, end) == ((7, {"valid/mlm_loss": 2.5}), "FINISHED")


def test_a_full_disk_takes_no_event_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    reporter = make_reporter(tmp_path)
    reporter.note("saved", {"step": 6})
    monkeypatch.setattr(module, "append_history", full)
    reporter.note("saved", {"step": 7})
    assert [event.step for event in read_history(tmp_path)] == [6]
    assert "No space left on device" in caplog.text
