"""What is reported of an evaluation, and what of it goes into the checkpoint."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.toy_run import CONFIG
from trainer.checkpoint.format import TrainState
from trainer.distributed.process_group import Ranks
from trainer.loop import reporting
from trainer.loop.run import Progress
from trainer.metrics.health import NonFiniteSteps


def test_a_long_evaluation_is_announced_and_a_short_one_is_not():
    def text(speed: float, max_tokens: int | None = None) -> str | None:
        evaluation = CONFIG.evaluation.model_copy(update={"max_tokens": max_tokens})
        valid = SimpleNamespace(valid=SimpleNamespace(tokens=3_000_000))
        run = SimpleNamespace(
            config=CONFIG.model_copy(update={"evaluation": evaluation}), shard_sets=[SimpleNamespace(manifest=valid)]
        )
        metrics = {"train/tokens_per_second": speed} if speed else {}
        return reporting.long_evaluation(run, TrainState(), Progress(NonFiniteSteps(20), metrics=metrics))

    assert text(10_000.0) == "evaluating 3,000,000 tokens, about 1:40"
    assert text(10_000.0, max_tokens=30_000) is None
    assert text(1e6) is None and text(0.0) is None


def test_a_state_with_an_evaluation_that_is_not_finite_can_be_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = {"valid/mlm_loss": 800.0, "valid/mlm_perplexity": math.inf, "valid/length/0-127/mlm_loss": math.nan}
    metrics |= {"valid/mlm_accuracy": 0.0, "valid/mlm_accuracy_top5": 0.5}
    told: dict[str, float] = {}
    run = SimpleNamespace(
        config=CONFIG,
        ranks=Ranks(0, 1, 0, torch.device("cpu")),
        output_dir=tmp_path,
        shard_sets=[],
        engine=None,
        status=None,
        minimal_pairs=None,
        watchdog=SimpleNamespace(mark=lambda doing: None),
        tracker=SimpleNamespace(log=lambda step, metrics: told.update(metrics)),
        log=lambda text: None,
        pair_task="pairs",
    )
    monkeypatch.setattr(reporting, "evaluate", lambda *arguments: metrics)
    state, progress = reporting.log_evaluation(run, TrainState(step=2), Progress(NonFiniteSteps(20)))
    assert progress.metrics == metrics
    assert state.evaluation == {
        "valid/mlm_loss": 800.0,
        "valid/mlm_accuracy": 0.0,
        "valid/mlm_accuracy_top5": 0.5,
    }
    assert TrainState.model_validate_json(state.model_dump_json()) == state
    assert told == metrics, "MLflow gets all of it"
