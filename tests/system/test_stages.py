"""A run of three stages with other data, lengths, masks, rates and RoPE bases, on several ranks and across borders."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.base.errors import UserError
from launch import pretrain, status
from tests.support import launch_command, plain_ranks
from tests.support.error_codes import coded
from tests.system.conftest import Training
from trainer.checkpoint.format import CheckpointFolder, step_folder
from trainer.checkpoint.tensors import read_fragments, read_weights
from trainer.hf_export.export import export_checkpoint
from trainer.tracking.status import read_status

pytestmark = pytest.mark.spawn
LAST = 8
BASES = {"global_rope_theta": 2000.0, "local_rope_theta": 500.0}


def overrides(shards: Path) -> tuple[str, ...]:
    mixture = {"shards": [{"url": str(shards), "weight": 1}, {"url": f"{shards}-copy", "weight": 3}]}
    short: dict[str, Any] = {"sequence_length": 32, "data": mixture, **BASES}
    law = {"masking_law": {"name": "uniform", "from": 0.1, "to": 0.5}}
    decay = {"name": "one_minus_sqrt", "final_ratio": 0.1}
    stages: list[dict[str, Any]] = [
        {"name": "stable", "steps": 3},
        {"name": "extension", "steps": 2, "mlm_probability": 0.3, "final_mlm_probability": 0.1, **short}
        | {"gradient_clipping": 0.05, "evaluation": {"every_steps": 2}},
        {"name": "decay", "steps": 3, "learning_rate": 1e-3, "schedule": decay, "mask_unit": "word", **short, **law},
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


@pytest.mark.parametrize("step", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5, 6, 7))])
def test_a_run_whose_ranks_are_killed_in_a_step_at_a_border_or_beside_it_resumes_bitwise(
    straight, step, tmp_path
) -> None:
    """The batch of the next step is read by then, and its counts are being summed; step 4 begins a stage and an epoch.

    The checkpoint before it was written when this batch was read already.
    """
    killed = Training(tmp_path, straight.shards, straight.overrides)
    ranks = plain_ranks.start(killed, 2, trouble={"kill": {"step": step}})
    assert plain_ranks.finish(ranks) == [-signal.SIGKILL] * 2, "".join(rank.output for rank in ranks)
    assert f"resuming after step {step - 1} of {LAST}" in plain_ranks.run(killed, 2)
    assert plain_ranks.losses(killed) == plain_ranks.losses(straight)
    assert plain_ranks.final_tensors(killed) == plain_ranks.final_tensors(straight)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on the CPU needs a C++ compiler")
def test_a_compiled_run_that_was_killed_at_a_border_resumes_bitwise(straight, tmp_path) -> None:
    compiled = Training(tmp_path / "whole", straight.shards, (*straight.overrides, "training.compile=true"))
    compiled.folder.mkdir()
    plain_ranks.run(compiled, 2)
    resumed = killed_after(compiled, 3, tmp_path / "killed")
    assert f"resuming after step 3 of {LAST}" in plain_ranks.run(resumed, 2)
    found, expected = plain_ranks.losses(resumed), plain_ranks.losses(compiled)
    assert found == {number: expected[number] for number in range(4, LAST + 1)}
    assert plain_ranks.final_tensors(resumed) == plain_ranks.final_tensors(compiled)
    assert expected == pytest.approx(plain_ranks.losses(straight), rel=1e-4), "the kernels differ by rounding alone"


@pytest.mark.slow
def test_three_ranks_go_on_across_a_border(straight, tmp_path) -> None:
    resumed = killed_after(straight, 4, tmp_path)
    plain_ranks.run(resumed, 3)
    expected = plain_ranks.losses(straight)
    found = plain_ranks.losses(resumed)
    # float32 sums in another order, as in test_ranks.py.
    assert found == pytest.approx({number: expected[number] for number in range(5, LAST + 1)}, rel=2e-5)


def test_status_history_and_checkpoints_follow_the_stages(straight) -> None:
    written = read_status(straight.output_dir)
    assert written is not None and written.stage == "stage 2 (decay)"
    positions = [CheckpointFolder(step_folder(straight.output_dir, step)).read_state().state for step in (3, 5, 8)]
    assert [(position.stage, position.epoch) for position in positions] == [(0, 0), (1, 1), (2, 1)]
    assert positions[2].next_sample > positions[1].next_sample, "the decay goes on with samples that were not read"
    history = [json.loads(line) for line in (straight.output_dir / "history.jsonl").read_text().splitlines()]
    assert [event["step"] for event in history if event["event"] == "evaluated"] == [4, 8]
    points = [json.loads(line) for line in (straight.output_dir / "tracking" / "points.jsonl").open()]
    rates = {point["s"]: point["m"]["train/learning_rate"] for point in points if "train/loss" in point["m"]}
    expected = [1e-3, 2e-3, 2e-3, 2e-3, 2e-3, *(1e-3 * (0.1 + 0.9 * (1 - (n / 3) ** 0.5)) for n in range(3))]
    assert list(rates.values()) == pytest.approx(expected)
    # Of 1,024 tokens (less the special ones) 15%, then 30% and 10%, then from 10% to 50% in whole words.
    shares = [state.predictions_seen["masked_lm"] / state.tokens_seen for state in _states(straight)]
    assert shares == pytest.approx([0.15] * 3 + [0.3, 0.1] + [0.29] * 3, rel=0.12)


def _states(run: Training) -> list[Any]:
    """The tokens and predictions of each step alone."""
    states = [CheckpointFolder(step_folder(run.output_dir, step)).read_state().state for step in range(1, LAST + 1)]
    before = [states[0].model_copy(update={"predictions_seen": {"masked_lm": 0}, "tokens_seen": 0}), *states]
    return [
        new.model_copy(
            update={
                "predictions_seen": {n: seen - old.predictions_seen[n] for n, seen in new.predictions_seen.items()},
                "tokens_seen": new.tokens_seen - old.tokens_seen,
            }
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
    fragments = [fragment for file in sorted(folder.glob("rank-*.safetensors")) for fragment in read_fragments(file)]
    return {(each.name, each.start): each.read(each.start, each.stop) for each in fragments if each.kind == "exp_avg"}


def branch_of(straight: Training, step: int, folder: Path, name: str) -> tuple[Training, tuple[str, ...]]:
    branch = Training(folder / name, straight.shards, straight.overrides)
    branch.folder.mkdir()
    command = ("--branch-from", f"{straight.output_dir}:{step}", "--stage", "decay")
    return branch, (*command, f"tracking.uri={straight.tracking_uri}")


def test_decays_branch_from_one_run_which_stays_as_it_is(straight, tmp_path, monkeypatch, capsys) -> None:
    from mlflow import MlflowClient

    before = {path: path.read_bytes() for path in straight.output_dir.rglob("*") if path.is_file()}
    branch, command = branch_of(straight, 2, tmp_path, "first")
    output = plain_ranks.run(branch, 2, *command)
    assert f"branching from step 2 of {straight.output_dir}: stage 0 (decay)" in output
    states = [CheckpointFolder(step_folder(branch.output_dir, step)).read_state() for step in (2, 3, 5)]
    assert [(each.state.stage, each.state.epoch, each.optimizer_steps) for each in states] == [
        *((0, 1, 2), (0, 1, 3), (0, 1, 5))
    ]
    left = CheckpointFolder(step_folder(straight.output_dir, 2)).read_state()
    assert states[0].state.tokens_seen == left.state.tokens_seen
    weights = [read_weights(step_folder(run.output_dir, 2)) for run in (straight, branch)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert list(plain_ranks.losses(branch)) == [3, 4, 5]
    assert {path: path.read_bytes() for path in before} == before

    assert "is finished: step 5/5" in plain_ranks.run(branch, 1, *command), "the branch starts once"
    client = MlflowClient(straight.tracking_uri)
    (experiment,) = [found for found in client.search_experiments() if found.name == "clozeworks"]
    younger, older = client.search_runs([experiment.experiment_id])
    assert younger.data.tags["mlflow.parentRunId"] == older.info.run_id
    assert younger.data.tags["clozeworks.branch.at_step"] == "2"
    assert younger.data.tags["clozeworks.branch.from"] == str(straight.output_dir)

    for run in (straight, branch):
        launch_command.run(monkeypatch, status, run.output_dir, "--json")
        tree = json.loads(capsys.readouterr().out)["tree"]
        assert [(each["depth"], each["from_step"], each["stage"], each["step"]) for each in tree] == [
            (0, None, None, LAST),
            (1, 2, "decay", 5),
        ]
        assert [each["is_this"] for each in tree] == [run is straight, run is branch]


@pytest.mark.slow
def test_a_killed_branch_resumes_bitwise(straight, tmp_path) -> None:
    branch, command = branch_of(straight, 3, tmp_path, "whole")
    plain_ranks.run(branch, 2, *command)
    other, command = branch_of(straight, 3, tmp_path, "killed")
    killed = plain_ranks.start(other, 2, *command, trouble={"kill": {"rank": 0, "step": 5}})
    plain_ranks.finish(killed)
    plain_ranks.run(other, 2, *command)
    assert plain_ranks.final_tensors(other) == plain_ranks.final_tensors(branch)


def test_an_export_has_the_bases_of_its_step(straight, tmp_path) -> None:
    bases = []
    for step in (3, LAST):
        export = export_checkpoint(step_folder(straight.output_dir, step), tmp_path / str(step)).output
        config = json.loads((export / "config.json").read_text())
        bases.append((config["global_rope_theta"], config["local_rope_theta"]))
    assert bases == [(160_000.0, 10_000.0), tuple(BASES.values())]


def test_a_run_in_epochs_ends_with_its_last_batch_on_any_ranks_and_is_finished_then(training) -> None:
    run = training("training.duration=1 epoch", "data.sentence_pairs=none", "schedule.warmup=10%")
    output = plain_ranks.run(run, 2)
    recorded = read_status(run.output_dir)
    assert recorded is not None and recorded.state == "finished" and recorded.max_steps > 3
    steps = recorded.max_steps
    assert f"training.duration=1 epoch: {steps:,} steps with these data" in output
    saved = CheckpointFolder(step_folder(run.output_dir, steps)).read_state()
    assert (saved.config["training"]["duration"], saved.state.epoch) == (f"{steps} steps", 0)
    assert f"is finished: step {steps}/{steps}" in plain_ranks.run(run, 1)


@pytest.mark.long
def test_a_rehearsal_runs_every_stage_and_leaves_the_run_as_it_was(training, small_shards) -> None:
    run = training()
    shutil.copytree(small_shards, run.folder / "shards")
    shutil.copytree(small_shards, run.folder / "shards-copy")
    run.shards, run.overrides = run.folder / "shards", overrides(run.folder / "shards")
    output = plain_ranks.run(run, 2, "--rehearse")
    assert "step 15/15" in output and "stage 2 (decay)" in output
    table = output.partition("stage  name")[2].splitlines()
    assert [row.split()[1] for row in table[1:4]] == ["stable", "extension", "decay"]
    assert table[4].startswith("(the whole run: 0:00:")
    left = {path.name for path in run.folder.iterdir() if not path.name.endswith(".log")}
    assert left == {"shards", "shards-copy", "tiny.yaml", "mlflow.db"}  # the fixture made the database


@pytest.mark.parametrize("other", ["--dry-run", "--resume-from=3", "--allow-change", "--print-config"])
def test_a_rehearsal_is_no_other_kind_of_start(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, check=coded("contradicting-arguments")):
        launch_command.run(monkeypatch, pretrain, "--config", "tiny_cpu", "--rehearse", other)
