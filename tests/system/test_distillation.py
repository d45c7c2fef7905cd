"""Runs whose first stage learns from a teacher: several ranks, ZeRO stages, across the border, and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import plain_ranks
from tests.system.conftest import Training
from trainer import load_config
from trainer.checkpoint.format import CheckpointFolder, step_folder
from trainer.checkpoint.teacher import digest_of
from trainer.hf_export.export import export_checkpoint, export_model
from trainer.objectives.pretraining import PretrainingModel

pytestmark = pytest.mark.spawn
BORDER, LAST, WIDTH = 4, 8, 48
TAUGHT: list[dict[str, Any]] = [
    {"name": "masked_lm", "weight": 0.3},
    {"name": "sentence_pairs"},
    {"name": "distillation", "weight": 0.7},
    {"name": "hidden_states", "weight": 0.1, "settings": {"teacher_hidden_size": WIDTH}},
]
STAGES = [{"name": "taught", "steps": BORDER, "objectives": TAUGHT}, {"name": "alone", "steps": LAST - BORDER}]
SETTINGS = (
    *("model.hidden_dropout_prob=0", "training.max_steps=null", f"training.stages={json.dumps(STAGES)}"),
    *("checkpoint={every_steps: 1, keep_last: 9}", "evaluation={every_steps: 4, max_tokens: 2048}"),
)


def make_teacher(folder: Path, tokenizer: Path, *settings: str, seed: int = 5) -> Path:
    """An untrained ModernBERT with that tokenizer, as an export."""
    sizes = f"{{family: modernbert, vocab_size: 832, hidden_size: {WIDTH}, num_hidden_layers: 3, num_attention_heads: 2"
    sizes += ", intermediate_size: 64, max_position_embeddings: 64, local_attention: 16, initializer_range: 0.1}"
    config = load_config("tiny_cpu", ["output_dir=none", "data.sentence_pairs=none", f"model={sizes}", *settings])
    model = PretrainingModel(config.model)
    model.initialize(seed)
    return export_model(config, model.state_dict(), tokenizer, folder).output


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, small_tokenizer) -> Path:
    """Not to be changed."""
    return make_teacher(tmp_path_factory.mktemp("teacher") / "model", small_tokenizer)


@pytest.fixture(scope="module")
def straight(training, teacher) -> Training:
    """The run on two ranks, never interrupted, with the checkpoint of every step."""
    run: Training = training(*SETTINGS, f"teacher={teacher}")
    output = plain_ranks.run(run, 2)
    assert "distillation" in output and "hidden_states" in output and "stage 1 (alone)" in output
    assert f"teacher: {teacher}, a modernbert of" in output
    return run


def points_of(run: Training) -> list[dict[str, float]]:
    return [json.loads(line)["m"] for line in (run.output_dir / "tracking" / "points.jsonl").open()]


def test_each_part_is_logged_where_it_is_trained_and_valid_metrics_are_those_of_any_run(straight, teacher) -> None:
    trained = [point for point in points_of(straight) if "train/loss" in point]
    for name in ("distillation", "hidden_states"):
        assert [f"train/{name}_loss" in point for point in trained] == [True] * BORDER + [False] * (LAST - BORDER)
    first = trained[0]
    parts = {"mlm": 0.3, "pair": 1.0, "distillation": 0.7, "hidden_states": 0.1}
    assert first["train/loss"] == pytest.approx(
        sum(weight * first[f"train/{each}_loss"] for each, weight in parts.items())
    )
    assert first["train/distillation_loss"] > trained[BORDER - 1]["train/distillation_loss"] > 0
    valid = [point for point in points_of(straight) if "valid/mlm_loss" in point]
    assert len(valid) == 2 and not any("distill" in name or "hidden" in name for name in valid[0])
    saved = CheckpointFolder(step_folder(straight.output_dir, LAST)).read_state()
    assert saved.data.teacher == digest_of(teacher)
    assert [name for name in saved.shapes if "projection" in name] == ["projections.0.weight", "projections.1.weight"]
    seen = saved.state.predictions_seen
    assert 0 < seen["distillation"] == seen["hidden_states"] < seen["masked_lm"]


@pytest.mark.parametrize("step", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5))])
def test_a_killed_run_resumes_bitwise(straight, step, tmp_path) -> None:
    killed = Training(tmp_path, straight.shards, straight.overrides)
    ranks = plain_ranks.start(killed, 2, trouble={"kill": {"step": step}})
    assert plain_ranks.finish(ranks) == [-signal.SIGKILL] * 2, "".join(rank.output for rank in ranks)
    assert f"resuming after step {step - 1} of {LAST}" in plain_ranks.run(killed, 2)
    assert plain_ranks.losses(killed) == plain_ranks.losses(straight)
    assert plain_ranks.final_tensors(killed) == plain_ranks.final_tensors(straight)


@pytest.mark.parametrize(
    ("ranks", "zero"), [(1, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 0), (2, 2), (2, 3)))]
)
def test_ranks_and_zero_stages_take_the_same_steps(training, straight, teacher, ranks: int, zero: int) -> None:
    other = training(*SETTINGS, f"teacher={teacher}", f"zero.stage={zero}")
    plain_ranks.run(other, ranks)
    assert plain_ranks.losses(other) == pytest.approx(plain_ranks.losses(straight), rel=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("training.precision=bf16",),
        ("training.precision=bf16", "zero.stage=3", "training.activation_checkpointing=true"),
        pytest.param(
            ("training.compile=true",),
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
        ),
    ],
)
def test_other_precisions_and_compiled_code_take_about_the_same_steps(training, straight, teacher, settings) -> None:
    other = training(*SETTINGS, f"teacher={teacher}", *settings)
    plain_ranks.run(other, 2)
    tolerance = 1e-4 if "compile" in settings[0] else 2e-2
    assert plain_ranks.losses(other) == pytest.approx(plain_ranks.losses(straight), rel=tolerance)


def test_the_export_has_the_student_alone_and_says_who_taught_it(straight, teacher, tmp_path) -> None:
    export = export_checkpoint(step_folder(straight.output_dir, LAST), tmp_path / "export").output
    assert not [name for name in load_file(export / "model.safetensors") if "projection" in name]
    provenance = json.loads((export / "provenance.json").read_text())
    assert provenance["teacher"] == {"address": str(teacher), "sha256": digest_of(teacher)}
    card = (export / "README.md").read_text()
    assert "distillation of a teacher's predictions" in card and digest_of(teacher) in card


def test_a_teacher_that_changed_since_the_checkpoint_is_refused_and_listed_if_allowed(
    straight, teacher, tmp_path, small_tokenizer
) -> None:
    """As where an alias was moved: the address is the same, the sha256 is not."""
    address = tmp_path / "alias"
    shutil.copytree(teacher, address)
    run = Training(tmp_path, straight.shards, (*straight.overrides, f"teacher={address}"))
    ranks = plain_ranks.start(run, 1, trouble={"kill": {"step": 3}})
    plain_ranks.finish(ranks)
    shutil.rmtree(address)
    other = make_teacher(address, small_tokenizer, seed=6)
    before = tree_of(run)
    said = plain_ranks.run(run, 1, status=2)
    assert "sha256 of the teacher" in said and digest_of(teacher) in said and digest_of(other) in said
    assert "Traceback" not in said and tree_of(run) == before
    said = plain_ranks.run(run, 1, "--allow-change")
    assert f"changed since the checkpoint: sha256 of the teacher was '{digest_of(teacher)}'" in said
    saved = CheckpointFolder(step_folder(run.output_dir, LAST)).read_state()
    assert saved.data.teacher == digest_of(other) and saved.teachers == (digest_of(teacher), digest_of(other))


def test_a_teacher_may_move_and_may_go_once_its_stage_is_over(straight, teacher, tmp_path) -> None:
    address = tmp_path / "first"
    shutil.copytree(teacher, address)
    run = Training(tmp_path, straight.shards, (*straight.overrides, f"teacher={address}"))
    plain_ranks.finish(plain_ranks.start(run, 1, trouble={"kill": {"step": 3}}))
    address.rename(tmp_path / "second")
    before = tree_of(run)
    said = plain_ranks.run(run, 2, status=2)
    assert f"{address} does not exist" in said and "Traceback" not in said and tree_of(run) == before
    ranks = plain_ranks.start(run, 1, f"teacher={tmp_path / 'second'}", trouble={"kill": {"step": 7}})
    plain_ranks.finish(ranks)
    assert "changed since the checkpoint: teacher was" in ranks[0].output
    shutil.rmtree(tmp_path / "second")
    assert "teacher:" not in plain_ranks.run(run, 1)
    saved = CheckpointFolder(step_folder(run.output_dir, LAST)).read_state()
    assert saved.data.teacher == digest_of(teacher)


def tree_of(run: Training) -> set[tuple[str, int]]:
    files = (path for path in run.output_dir.rglob("*") if path.is_file() and path.name != ".lock")
    return {(str(path), path.stat().st_mtime_ns) for path in files}


def without_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file(
        {n: w for n, w in weights.items() if not n.startswith("head.")}, folder / "model.safetensors", {"format": "pt"}
    )


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def with_config(**values: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def without_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_info.json"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_head, "lacks head.dense.weight"),
        pytest.param(as_pickle, "has no .safetensors weights (only pytorch_model.bin", marks=pytest.mark.slow),
        pytest.param(without_tokenizer, "has no tokenizer.json", marks=pytest.mark.slow),
        pytest.param(with_config(model_type="gpt2"), "is a gpt2", marks=pytest.mark.slow),
        pytest.param(with_config(max_position_embeddings=32), "has 32 positions", marks=pytest.mark.slow),
        pytest.param(with_config(hidden_size=32), "hidden_size", marks=pytest.mark.slow),
        pytest.param(shutil.rmtree, "does not exist", marks=pytest.mark.slow),
    ],
)
def test_a_folder_that_is_no_teacher_is_refused_in_one_paragraph_and_nothing_is_written(
    training, teacher, tmp_path, damage, message
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(teacher, folder)
    damage(folder)
    run = training(*SETTINGS, f"teacher={folder}")
    said = plain_ranks.run(run, 2, status=2 if damage is shutil.rmtree else 1)
    assert message in said and "Traceback" not in said and "Fix: " in said
    assert not (run.output_dir / "checkpoints").exists() and not (run.output_dir / "tokenizer").exists()


def test_a_teacher_of_another_tokenizer_is_refused(training, tokenizer_folder, tmp_path) -> None:
    run = training(*SETTINGS, f"teacher={make_teacher(tmp_path / 'other', tokenizer_folder)}")
    said = plain_ranks.run(run, 1, status=1)
    assert "the same ids are other tokens" in said and not (run.output_dir / "checkpoints").exists()


def test_a_run_begins_from_trained_weights_and_has_a_teacher_too(training, straight, teacher, tmp_path) -> None:
    export = export_checkpoint(step_folder(straight.output_dir, LAST), tmp_path / "export").output
    run = training(
        *SETTINGS, f"teacher={teacher}", f"init_from={export}", "training.duration=2 steps", "schedule.warmup_steps=1"
    )
    said = plain_ranks.run(run, 1)
    assert "newly initialized (missing there): projections.0.weight, projections.1.weight" in said
    first, second = points_of(straight)[0]["train/mlm_loss"], points_of(run)[0]["train/mlm_loss"]
    assert second < first
