"""Runs with a masking and metrics of the user's own: on two ranks, resumed, and with a file that changed."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.plain_ranks import final_tensors, losses, newest_checkpoint, run
from tests.system.conftest import REPOSITORY
from trainer.tracking.status import read_status

pytestmark = pytest.mark.spawn

STEPS = ("training.max_steps=6", "checkpoint.every_steps=3", "schedule.warmup_steps=1", "evaluation.every_steps=6")
MASKING = "data.masking=tests.support.toy_masking:four_letters"


def metrics_of(*names: str) -> str:
    return "logging.metrics=[" + ", ".join(f"tests.support.toy_metrics:{name}" for name in names) + "]"


def test_a_masking_of_ones_own_trains_on_any_number_of_ranks_and_resumes_bitwise(training) -> None:
    two = training(*STEPS, MASKING, "model.hidden_dropout_prob=0.0")
    output = run(two, 2)
    assert "as it trains" in output  # valid/own_mlm_loss, beside the masking that every run is measured with
    before, newest = final_tensors(two), newest_checkpoint(two)
    assert newest.name == "step-00000006"
    shutil.rmtree(newest)
    assert "resuming after step 3 of 6" in run(two, 2)
    assert final_tensors(two) == before
    one = training(*STEPS, MASKING, "model.hidden_dropout_prob=0.0")
    run(one, 1)
    assert losses(one) == pytest.approx(losses(two), rel=1e-5)


def test_another_version_of_its_file_is_another_run(training, tmp_path) -> None:
    file = tmp_path / "own_masking.py"
    # Predicts token 9 wherever it stands, unmasked.
    file.write_text(
        "import numpy as np\n\n"
        "def mask(rows, keys, rates, settings):\n"
        "    return rows, np.where(rows == 9, rows, -100)\n"
    )
    edited = training(
        "training.max_steps=2", "schedule.warmup_steps=1", "data.masking=own_masking:mask", "data.mlm_probability=0.8",
        PYTHONPATH=f"{REPOSITORY}:{tmp_path}",
    )  # fmt: skip
    run(edited, 1)
    file.write_text(file.read_text() + "# edited\n")
    refused = run(edited, 1, "training.max_steps=4", status=2)
    assert "version of masking own_masking:mask was" in refused and "[incompatible-change]" in refused
    output = run(edited, 1, "training.max_steps=4", "--allow-change")
    assert "changed since the checkpoint: version of masking own_masking:mask was" in output
    assert list(losses(edited)) == [1, 2, 3, 4]


def test_metrics_of_ones_own_are_reported_and_change_no_bit(training) -> None:
    plain, measured = training(*STEPS), training(*STEPS, metrics_of("perplexity", "noisy"))
    run(plain, 2)
    output = run(measured, 2)
    assert losses(measured) == losses(plain) and final_tensors(measured) == final_tensors(plain)
    assert output.count("| toy/perplexity ") == 6 and "| toy/draw " in output
    points = [json.loads(line) for line in (measured.output_dir / "tracking/points.jsonl").read_text().splitlines()]
    logged = {point["s"]: point["m"]["toy/perplexity"] for point in points if "toy/perplexity" in point["m"]}
    assert sorted(logged) == [1, 2, 3, 4, 5, 6]
    assert read_status(measured.output_dir).metrics["toy/perplexity"] == logged[6]


def test_a_metric_that_fails_on_one_rank_ends_all_with_its_name(training) -> None:
    output = run(training(*STEPS, metrics_of("fails_on_rank_1")), 2, status=1)
    assert "rank 1 ended the run: logging.metrics=tests.support.toy_metrics:fails_on_rank_1 failed at" in output
    assert output.count("[metric-failed]") == 2 and "Traceback" not in output
