"""A run of three stages with other data, lengths, masks, rates and RoPE bases, on several ranks and across borders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import plain_ranks
from tests.system.conftest import Training
from trainer.checkpoint.format import read_state, step_folder
from trainer.checkpoint.pieces import read_pieces
from trainer.hf_export.export import export_checkpoint
from trainer.metrics.status import read_status

pytestmark = pytest.mark.spawn
LAST = 8
BASES = {"global_rope_theta": 2000.0, "local_rope_theta": 500.0}


def overrides(shards: Path) -> tuple[str, ...]:
    mixture = {"shards": [{"url": str(shards), "weight": 1}, {"url": f"{shards}-copy", "weight": 3}]}
    short: dict[str, Any] = {"sequence_length": 32, "data": mixture, **BASES}
    decay = {"name": "one_minus_sqrt", "final_ratio": 0.1}
    stages: list[dict[str, Any]] = [
        {"name": "stable", "steps": 3},
        {"name": "extension", "steps": 2, "mlm_probability": 0.3, "final_mlm_probability": 0.1, **short}
        | {"gradient_clipping": 0.05, "evaluation": {"every_steps": 2}},
        {"name": "decay", "steps": 3, "learning_rate": 1e-3, "schedule": decay, "mask_unit": "word", **short},
    ]
    return (
        "model.family=modernbert",
        "model.hidden_dropout_prob=0",
        "data.sentence_pairs=none",
        f"training.stages={json.dumps(stages)}",
        "training.max_steps=null",
        "schedule={name: warmup_stable_decay, warmup_steps: 2}",
        "checkpoint={every_steps: 1, keep_last: 9}",
        "evaluation={every_steps: 5, max_tokens: 2048}",
    )


@pytest.fixture(scope="module")
def straight(training, small_shards) -> Training:
    """The run on two ranks, never interrupted, with the checkpoint of every step."""
    run = training()
    shutil.copytree(small_shards, run.folder / "shards")
    shutil.copytree(small_shards, run.folder / "shards-copy")
    run.shards, run.overrides = run.folder / "shards", overrides(run.folder / "shards")
    output = plain_ranks.run(run, 2)
    assert "stage 1 (extension)" in output and "starting a new epoch" in output
    assert "stage 2 (decay)" in output and "continuing the epoch" in output
    return run


def killed_after(run: Training, step: int, folder: Path) -> Training:
    """The run as it stands where it was killed after the checkpoint of `step`."""
    copy = Training(folder, run.shards, run.overrides)
    shutil.copytree(run.output_dir, copy.output_dir)
    shutil.rmtree(copy.output_dir / "tracking")
    for later in range(step + 1, LAST + 1):
        shutil.rmtree(step_folder(copy.output_dir, later))
    return copy


@pytest.mark.parametrize("step", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5, 6))])
def test_a_run_that_was_killed_at_a_border_or_beside_it_resumes_bitwise(straight, step, tmp_path) -> None:
    resumed = killed_after(straight, step, tmp_path)
    output = plain_ranks.run(resumed, 2)
    assert f"resuming after step {step} of {LAST}" in output
    found, expected = plain_ranks.losses(resumed), plain_ranks.losses(straight)
    assert found == {number: expected[number] for number in range(step + 1, LAST + 1)}
    assert plain_ranks.final_tensors(resumed) == plain_ranks.final_tensors(straight)


@pytest.mark.slow
def test_three_ranks_go_on_across_a_border(straight, tmp_path) -> None:
    resumed = killed_after(straight, 4, tmp_path)
    plain_ranks.run(resumed, 3)
    expected = plain_ranks.losses(straight)
    found = plain_ranks.losses(resumed)
    # float32 sums in another order, as in test_ranks.py.
    assert found == pytest.approx({number: expected[number] for number in range(5, LAST + 1)}, rel=2e-5)


def test_status_history_and_checkpoints_follow_the_stages(straight) -> None:
    status = read_status(straight.output_dir)
    assert status is not None and status["stage"] == "stage 2 (decay)"
    positions = [read_state(step_folder(straight.output_dir, step)).state for step in (3, 5, 8)]
    assert [(position.stage, position.epoch) for position in positions] == [(0, 0), (1, 1), (2, 1)]
    assert positions[2].next_sample > positions[1].next_sample, "the decay goes on with samples that were not read"
    history = [json.loads(line) for line in (straight.output_dir / "history.jsonl").read_text().splitlines()]
    assert [event["step"] for event in history if event["event"] == "evaluated"] == [4, 8]
    points = [json.loads(line) for line in (straight.output_dir / "tracking" / "points.jsonl").open()]
    rates = {point["s"]: point["m"]["train/learning_rate"] for point in points if "train/loss" in point["m"]}
    expected = [1e-3, 2e-3, 2e-3, 2e-3, 2e-3, *(1e-3 * (0.1 + 0.9 * (1 - (n / 3) ** 0.5)) for n in range(3))]
    assert list(rates.values()) == pytest.approx(expected)
    # Of 1,024 tokens (less the special ones) 15%, then 30% and 10%.
    shares = [state.masked_seen / state.tokens_seen for state in _states(straight)]
    assert shares == pytest.approx([0.15] * 3 + [0.3, 0.1] + [0.15] * 3, rel=0.12)


def _states(run: Training) -> list[Any]:
    """The tokens and predictions of each step alone."""
    states = [read_state(step_folder(run.output_dir, step)).state for step in range(1, LAST + 1)]
    before = [states[0].model_copy(update={"masked_seen": 0, "tokens_seen": 0}), *states]
    return [
        new.model_copy(
            update={"masked_seen": new.masked_seen - old.masked_seen, "tokens_seen": new.tokens_seen - old.tokens_seen}
        )
        for old, new in zip(before, states, strict=False)
    ]


def test_a_stage_clips_by_its_own_bound(straight) -> None:
    """Adam's first moment m is m + 0.1 (g - m): the part of the gradient, and so its norm after clipping, shows."""
    moments = [_first_moments(step_folder(straight.output_dir, step)) for step in (2, 3, 4, 5)]
    norms = [
        torch.cat([(after[name] - 0.9 * before[name]) / 0.1 for name in after]).norm().item()
        for before, after in zip(moments, moments[1:], strict=False)
    ]
    assert norms[0] > 0.5, "the first stage clips at 1"
    assert norms[1:] == pytest.approx([0.05, 0.05], rel=1e-3)


def _first_moments(folder: Path) -> dict[tuple[str, int], torch.Tensor]:
    """Adam's first moments of a checkpoint, by parameter and start of the piece."""
    pieces = [piece for file in sorted(folder.glob("rank-*.safetensors")) for piece in read_pieces(file)]
    return {(each.name, each.start): each.read(each.start, each.stop) for each in pieces if each.kind == "exp_avg"}


def test_an_export_has_the_bases_of_its_step(straight, tmp_path) -> None:
    bases = []
    for step in (3, LAST):
        export = export_checkpoint(step_folder(straight.output_dir, step), tmp_path / str(step)).output
        config = json.loads((export / "config.json").read_text())
        bases.append((config["global_rope_theta"], config["local_rope_theta"]))
    assert bases == [(160_000.0, 10_000.0), tuple(BASES.values())]
