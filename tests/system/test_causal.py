"""A run that begins with next tokens under a causal mask and ends with masked ones, on several ranks and across the
border."""

from __future__ import annotations

import json
import shutil
import signal
from typing import Any

import pytest
import torch

from data_prep.base.errors import UserError
from tests.support import plain_ranks
from tests.support.error_codes import coded
from tests.system.conftest import Training
from trainer.checkpoint.format import CheckpointFolder, step_folder
from trainer.hf_export.export import export_checkpoint

pytestmark = pytest.mark.spawn
BORDER, LAST = 4, 8
STAGES: list[dict[str, Any]] = [
    {"name": "decoder", "steps": BORDER, "objectives": [{"name": "causal"}]},
    {"name": "encoder", "steps": LAST - BORDER},
]
LONG = ("data.sequence_length=128", "model.max_position_embeddings=128", "data.sentence_pairs=none")
FAMILY = ("model.family=eurobert", "model.num_key_value_heads=1", "model.hidden_dropout_prob=0", *LONG)
SETTINGS = (
    *FAMILY,
    f"training.stages={json.dumps(STAGES)}",
    "training.max_steps=null",
    "checkpoint={every_steps: 1, keep_last: 9}",
    "evaluation={every_steps: 4, max_tokens: 2048}",
)


@pytest.fixture(scope="module")
def straight(training) -> Training:
    """The run on two ranks, never interrupted, with the checkpoint of every step."""
    run = training(*SETTINGS)
    output = plain_ranks.run(run, 2)
    assert "stage 1 (encoder)" in output and "continuing the epoch" in output, "the order of the rows is the same"
    assert "causal loss" in output and "mlm loss" in output
    return run


def points_of(run: Training) -> list[dict[str, float]]:
    return [json.loads(line)["m"] for line in (run.output_dir / "tracking" / "points.jsonl").open()]


def test_each_stage_trains_its_own_loss_and_every_evaluation_measures_both(straight) -> None:
    trained = [point for point in points_of(straight) if "train/loss" in point]
    assert ["train/causal_loss" in point for point in trained] == [True] * BORDER + [False] * (LAST - BORDER)
    assert ["train/mlm_loss" in point for point in trained] == [False] * BORDER + [True] * (LAST - BORDER)
    assert all(point["train/loss"] == point.get("train/causal_loss", point.get("train/mlm_loss")) for point in trained)
    valid = [point for point in points_of(straight) if "valid/mlm_loss" in point]
    names = {f"valid/{name}_{value}" for name in ("mlm", "causal") for value in ("loss", "accuracy", "perplexity")}
    assert len(valid) == 2 and all(names <= {*point} for point in valid)
    assert valid[0]["valid/causal_loss"] < trained[0]["train/causal_loss"]
    saved = CheckpointFolder(step_folder(straight.output_dir, LAST)).read_state()
    seen = saved.state.predictions_seen
    # All tokens but the [CLS] of each document, then 15% of the words.
    assert 0.9 * BORDER * 1024 < seen["causal"] <= BORDER * 1024 * 127 / 128
    assert 0.12 * (LAST - BORDER) * 1024 < seen["masked_lm"] < 0.17 * (LAST - BORDER) * 1024
    assert [*saved.shapes].count("mlm_head.decoder.weight") == 1


@pytest.mark.parametrize("step", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 6))])
def test_a_run_that_is_killed_at_the_border_or_beside_it_resumes_bitwise(straight, step, tmp_path) -> None:
    killed = Training(tmp_path, straight.shards, straight.overrides)
    ranks = plain_ranks.start(killed, 2, trouble={"kill": {"step": step}})
    assert plain_ranks.finish(ranks) == [-signal.SIGKILL] * 2, "".join(rank.output for rank in ranks)
    assert f"resuming after step {step - 1} of {LAST}" in plain_ranks.run(killed, 2)
    assert plain_ranks.losses(killed) == plain_ranks.losses(straight)
    assert plain_ranks.final_tensors(killed) == plain_ranks.final_tensors(straight)


@pytest.mark.parametrize(
    ("ranks", "zero"), [(1, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 0), (2, 2), (2, 3)))]
)
def test_ranks_and_zero_stages_take_the_same_steps(training, straight, ranks: int, zero: int) -> None:
    other = training(*SETTINGS, f"zero.stage={zero}")
    plain_ranks.run(other, ranks)
    assert plain_ranks.losses(other) == pytest.approx(plain_ranks.losses(straight), rel=2e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
def test_a_compiled_run_takes_the_same_steps(training, straight) -> None:
    compiled = training(*SETTINGS, "training.compile=true")
    plain_ranks.run(compiled, 2)
    assert plain_ranks.losses(compiled) == pytest.approx(plain_ranks.losses(straight), rel=1e-4)


def test_both_stages_are_exported_as_one_encoder_and_a_decoder_alone_is_refused(straight, training, tmp_path) -> None:
    from transformers import EuroBertForMaskedLM

    cards = []
    for step in (BORDER, LAST):
        export = export_checkpoint(step_folder(straight.output_dir, step), tmp_path / str(step)).output
        model = EuroBertForMaskedLM.from_pretrained(export)
        assert model.lm_head.weight.shape[1] == 32 and torch.isfinite(model.lm_head.weight).all()
        cards.append((export / "README.md").read_text())
    assert all("causal language modeling" in card and "masking rate: none (causal), 0.15" in card for card in cards)
    assert ["are of a causal stage" in card for card in cards] == [True, False]
    alone = training(*FAMILY, "objectives=[{name: causal}]", "training.max_steps=4", "evaluation.every_steps=4")
    output = plain_ranks.run(alone, 1)
    assert "causal loss" in output and "mlm loss" not in output
    with pytest.raises(UserError, check=coded("export-without-masked-lm"), match="causal"):
        export_checkpoint(plain_ranks.newest_checkpoint(alone), tmp_path / "alone")
