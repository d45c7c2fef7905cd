from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from data_prep.base.errors import UserError
from data_prep.storage import storage
from tests.support.error_codes import coded
from tests.support.kill_points import before_writing
from tests.support.toy_processes import OPTIMIZERS, precisions_of, run_jobs, trained
from tests.support.toy_reference import train_plainly
from tests.support.toy_training import ToyModel, make_config
from trainer.checkpoint import writer as checkpoints
from trainer.checkpoint.format import MARKER_NAME, CheckpointFolder, DataIdentity, TrainState
from trainer.checkpoint.late_scores import EVALUATION_NAME, LateScores, is_pending
from trainer.checkpoint.restore import find_latest, load
from trainer.checkpoint.tensors import read_weights
from trainer.checkpoint.writer import ALONE
from trainer.engine import fragments

IDENTITY = DataIdentity(manifest_digests=("digest",), tokenizer_fingerprint="fingerprint")


class StillEngine:
    """What save and load ask of an engine, at stage 0 on one rank, without DeepSpeed; makes one step at the start."""

    zero_stage = 0
    ranks = ALONE

    def __init__(self, learning_rate: float = 0.1) -> None:
        self.module = ToyModel()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=learning_rate)
        self.module(torch.arange(8).view(2, 4)).backward()
        self.optimizer.step()

    def fragments(self) -> list[fragments.Fragment]:
        return list(fragments.fragments(self.module, self.optimizer, 0, 0, 1))

    optimizer_steps = 1

    def refresh_weights(self) -> None:
        """The forward uses the weights themselves."""

    def finish_setting(self, steps: int) -> None:
        self.optimizer_steps = steps
        fragments.set_optimizer_steps(self.optimizer, 0, steps)

    def loss_scaler_state(self) -> None:
        return None

    def set_loss_scaler_state(self, state: None) -> None:
        assert state is None


def save(folder: Path, step: int, engine: StillEngine | None = None, keep_last: int = 10, **settings) -> Path:
    config = make_config(str(folder), 0, keep_last=keep_last)
    state = TrainState(step=step, tokens_seen=step * 128, next_sample=step * 8, mlflow_run_id="run")
    saved = checkpoints.save(folder, engine or StillEngine(), state, config, IDENTITY, **settings)
    assert saved is not None and saved.step == step
    return saved.folder


def refuse(message: str) -> None:
    raise AssertionError(f"warned: {message}")


def test_a_checkpoint_gives_back_state_weights_and_moments(tmp_path):
    engine = StillEngine()
    folder = save(tmp_path, 100, engine)
    assert folder == tmp_path / "checkpoints" / "step-00000100"
    found = find_latest(tmp_path, warn=refuse)
    assert found.saved.state == TrainState(step=100, tokens_seen=12800, next_sample=800, mlflow_run_id="run")
    assert found.saved.optimizer_steps == 1 and found.saved.data == IDENTITY
    assert found.saved.config == make_config(str(tmp_path), 0).model_dump(mode="json")
    weights = read_weights(folder)
    assert all(torch.equal(weights[name], weight) for name, weight in engine.module.named_parameters())
    assert "decoder.weight" not in weights, "a tied weight is held once"
    other = StillEngine(learning_rate=0.7)
    load(other, found)
    for mine, theirs in zip(other.fragments(), engine.fragments(), strict=True):
        assert all(torch.equal(mine.read_owned(kind), theirs.read_owned(kind)) for kind in theirs.kinds)


def test_a_checkpoint_that_is_to_be_evaluated_is_complete_only_with_its_note(tmp_path, monkeypatch):
    written, write_bytes = [], storage.write_bytes
    note = lambda url: written.append(Path(url).name)  # noqa: E731
    monkeypatch.setattr(storage, "write_bytes", lambda url, data: (note(url), write_bytes(url, data)))
    config = make_config(str(tmp_path), 0)
    pending = LateScores(state="pending")
    saved = checkpoints.save(tmp_path, StillEngine(), TrainState(step=3), config, IDENTITY, evaluation=pending)
    assert written == [EVALUATION_NAME, "state.json", MARKER_NAME] and is_pending(saved.folder)
    assert EVALUATION_NAME not in {record.name for record in CheckpointFolder(saved.folder).read_marker().files}


def test_a_checkpoint_contains_no_secret_of_the_configuration(tmp_path):
    config = make_config(str(tmp_path), 0)
    data = config.data.model_copy(update={"shards": "https://user:hunter2@host/shards?sig=hunter2"})
    config = config.model_copy(update={"data": data})
    saved = checkpoints.save(tmp_path, StillEngine(), TrainState(step=1), config, IDENTITY)
    state = (saved.folder / "state.json").read_text()
    assert "https://host/shards" in state and "hunter2" not in state


def test_the_tensor_file_is_what_safetensors_would_read(tmp_path):
    from safetensors.torch import load_file

    engine = StillEngine()
    tensors = load_file(save(tmp_path, 1, engine) / "rank-00000-of-00001.safetensors")
    assert len(tensors) == 3 * len(list(engine.module.parameters()))
    torch.testing.assert_close(tensors["weight:0:norm.weight"], engine.module.norm.weight.detach(), rtol=0, atol=0)


def test_without_any_checkpoint_there_is_none(tmp_path):
    assert find_latest(tmp_path / "missing", warn=refuse) is None
    assert find_latest(tmp_path, warn=refuse) is None


def flip_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 2, len(data) // 2 + 64):
        data[place] ^= 0xFF
    path.write_bytes(data)


TENSORS = "rank-00000-of-00001.safetensors"
DAMAGES = {
    "tensors missing": lambda folder: (folder / TENSORS).unlink(),
    "tensors truncated": lambda folder: os.truncate(folder / TENSORS, 5000),
    "tensors empty": lambda folder: os.truncate(folder / TENSORS, 0),
    "64 flipped bytes": lambda folder: flip_bytes(folder / TENSORS),
    "state missing": lambda folder: (folder / "state.json").unlink(),
    "state empty": lambda folder: os.truncate(folder / "state.json", 0),
    "state of another": lambda folder: (folder / "state.json").write_text("{}"),
    "marker missing": lambda folder: (folder / "checkpoint.json").unlink(),
    "marker empty": lambda folder: os.truncate(folder / "checkpoint.json", 0),
    "marker truncated": lambda folder: os.truncate(folder / "checkpoint.json", 100),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_torn_checkpoint_is_skipped_with_a_warning_for_the_one_before(damage, tmp_path):
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    warnings: list[str] = []
    assert find_latest(tmp_path, warn=warnings.append).step == 1
    assert len(warnings) == 1 and "step-00000002" in warnings[0]


@pytest.mark.spawn
@pytest.mark.fault(
    row="24",
    fault="one rank's file missing, truncated, empty, with 64 flipped bytes; a damaged state or marker; no `latest`",
    required="two ranks agree on the checkpoint before, with one warning",
)
@pytest.mark.slow
def test_two_ranks_agree_on_the_one_before_whatever_is_torn_and_whoever_sees_it(tmp_path):
    folder, _ = trained(1)
    jobs = []
    for number, (damage, file) in enumerate(
        (damage, file)
        for damage in ("missing", "truncated", "empty", "flipped")
        for file in ("rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors", "state.json", MARKER_NAME)
        if (damage, file) != ("flipped", MARKER_NAME)  # no sum stands over it; what JSON forgives is harmless
    ):
        run = Path(shutil.copytree(folder / "adamw-fp32-halves", tmp_path / f"run-{number}"))
        assert sorted(os.listdir(run / "checkpoints")) == ["step-00000002", "step-00000004"]
        tear(run / "checkpoints" / "step-00000004" / file, damage)
        jobs.append({"stage": 1, "accumulation": 1, "output_dir": str(run), "find_only": True})
    for job, report in zip(jobs, run_jobs(tmp_path, 2, jobs), strict=True):
        assert report["found"] == [2, 2], job
        assert len(report["warnings"]) == 1 and "step-00000004" in report["warnings"][0], report


def tear(path: Path, damage: str) -> None:
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        flip_bytes(path)
    else:
        os.truncate(path, 0 if damage == "empty" else path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [d for name, d in DAMAGES.items() if name != "marker missing"])
def test_a_run_with_only_damaged_checkpoints_does_not_start_from_the_beginning(damage, tmp_path):
    damage(save(tmp_path, 1))
    with pytest.raises(UserError, match="all 1 checkpoints", check=coded("no-intact-checkpoint")):
        find_latest(tmp_path, warn=lambda message: None)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_weights_of_a_torn_checkpoint_are_refused(damage, tmp_path):
    folder = save(tmp_path, 1)
    damage(folder)
    with pytest.raises(UserError, check=coded("damaged-checkpoint", "incomplete-checkpoint")):
        read_weights(folder)


def test_a_save_that_never_ended_is_no_checkpoint_but_is_reported(tmp_path):
    DAMAGES["marker missing"](save(tmp_path, 1))
    warnings: list[str] = []
    assert find_latest(tmp_path, warn=warnings.append) is None
    assert len(warnings) == 1 and "checkpoint.json" in warnings[0]


def test_a_folder_that_is_no_checkpoint_is_refused_and_the_newest_named(tmp_path):
    with pytest.raises(UserError, match="checkpoint.json", check=coded("incomplete-checkpoint")):
        read_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="it is an exported model already", check=coded("incomplete-checkpoint")):
        read_weights(tmp_path)
    save(tmp_path, 1)
    newest = save(tmp_path, 20)
    for folder in (tmp_path, tmp_path / "checkpoints"):
        with pytest.raises(UserError) as raised:
            CheckpointFolder(folder).read_state()
        assert str(newest) in str(raised.value)


def test_a_renamed_checkpoint_is_not_believed_by_its_name(tmp_path):
    engine = StillEngine()
    folder = save(tmp_path, 8, engine)
    save(tmp_path, 12, engine)
    folder.rename(folder.with_name("step-00000040"))
    warnings: list[str] = []
    assert find_latest(tmp_path, warn=warnings.append).step == 12
    assert len(warnings) == 1 and re.search("step-00000040 .* step 40 .* step 8", warnings[0])
    with pytest.raises(UserError, match="step-00000040.*step-00000008", check=coded("renamed-checkpoint")):
        read_weights(folder.with_name("step-00000040"))


def test_a_copy_may_have_any_name_that_is_no_other_step(tmp_path):
    copy = shutil.copytree(save(tmp_path, 8), tmp_path / "copies" / "the-best")
    assert CheckpointFolder(copy).read_state().state.step == 8 and read_weights(copy)


def test_a_state_of_another_step_than_the_markers_is_damage(tmp_path):
    save(tmp_path, 1)
    marker = save(tmp_path, 2) / "checkpoint.json"
    marker.write_text(marker.read_text().replace('"step": 2', '"step": 3'))
    marker.parent.rename(marker.parent.with_name("step-00000003"))
    warnings: list[str] = []
    assert find_latest(tmp_path, warn=warnings.append).step == 1
    assert "checkpoint.json is of step 3, and state.json is of step 2" in warnings[0]


@pytest.mark.parametrize("name", ["checkpoint.json", "state.json"])
def test_json_that_is_nested_too_deeply_is_damage(name, tmp_path):
    folder = save(tmp_path, 1)
    (folder / name).write_text('{"format_version":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(UserError, check=coded("damaged-checkpoint")):
        CheckpointFolder(folder).read_state()


def test_a_newer_format_is_named(tmp_path):
    marker = save(tmp_path, 1) / "checkpoint.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format_version": 9}))
    with pytest.raises(UserError, match="version 9.*version 1", check=coded("checkpoint-of-another-release")):
        CheckpointFolder(marker.parent).read_state()
    with pytest.raises(UserError, match="version 9.*version 1", check=coded("no-intact-checkpoint")):
        find_latest(tmp_path, warn=lambda message: None)
    DAMAGES["tensors empty"](save(tmp_path, 2))
    with pytest.raises(UserError, match="the newest one: .* 0 bytes", check=coded("no-intact-checkpoint")):
        find_latest(tmp_path, warn=lambda message: None)


def test_only_the_newest_are_kept(tmp_path):
    engine = StillEngine()
    for step in (1, 2, 3, 4):
        save(tmp_path, step, engine, keep_last=2)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000003", "step-00000004"]


def test_the_next_complete_save_removes_damaged_and_unfinished_ones(tmp_path):
    engine = StillEngine()
    save(tmp_path, 1, engine)
    DAMAGES["marker missing"](save(tmp_path, 2, engine))
    DAMAGES["tensors empty"](save(tmp_path, 5, engine))
    save(tmp_path, 3, engine)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-00000001", "step-00000003"]
    assert find_latest(tmp_path, warn=refuse).step == 3


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 1, StillEngine(learning_rate=0.1))
    engine = StillEngine(learning_rate=0.7)
    folder = save(tmp_path, 1, engine)
    assert torch.equal(read_weights(folder)["norm.weight"], engine.module.norm.weight)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


@pytest.mark.parametrize("failing", [".safetensors", "state.json", "checkpoint.json"])
def test_a_checkpoint_whose_replacement_was_killed_is_there_again(failing, tmp_path):
    """As `--resume-from` saves the step that it goes back to once more."""
    weight = read_weights(save(tmp_path, 1))["norm.weight"]

    class Killed(BaseException):
        """The process ends here: nothing is tidied."""

    def kill():
        raise Killed

    with pytest.raises(Killed), before_writing(f"*{failing}", kill):
        save(tmp_path, 1, StillEngine(learning_rate=0.7))
    found = find_latest(tmp_path, warn=refuse)
    assert found is not None and found.step == 1
    assert torch.equal(read_weights(found.folder)["norm.weight"], weight)
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_what_a_save_set_aside_never_comes_back_once_its_step_is_removed(tmp_path):
    """A process was killed between the marker of the second save of step 1 and the removal of the first."""
    engine = StillEngine()
    folder = save(tmp_path, 1, engine)
    shutil.copytree(folder, folder.with_name(f"{folder.name}.replaced"))
    save(tmp_path, 2, engine, keep_last=1)
    assert find_latest(tmp_path, warn=refuse).step == 2
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000002"]


@pytest.mark.parametrize("failing", [".safetensors", "state.json", "checkpoint.json"])
@pytest.mark.parametrize("step", [1, 2], ids=["the same step again", "the next step"])
def test_a_full_disk_leaves_the_last_good_checkpoint(failing, step, tmp_path):
    save(tmp_path, 1)

    def full_disk():
        raise UserError(f"{failing} cannot be written: {os.strerror(errno.ENOSPC)}")

    warnings: list[str] = []
    state = TrainState(step=step)
    config = make_config(str(tmp_path), 0, keep_last=1)
    with before_writing(f"*{failing}", full_disk):
        assert checkpoints.save(tmp_path, StillEngine(), state, config, IDENTITY, warn=warnings.append) is None
    assert len(warnings) == 1 and "No space left" in warnings[0] and "NOT SAVED" in warnings[0]
    assert find_latest(tmp_path, warn=refuse).step == 1
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000001"]


def test_a_system_that_takes_no_more_bytes_makes_no_checkpoint(tmp_path):
    """For real: the system refuses to let any file of this process grow beyond 4,096 bytes."""
    save(tmp_path, 1)
    warnings: list[str] = []
    config, state = make_config(str(tmp_path), 0), TrainState(step=2)
    engine = StillEngine()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        saved = checkpoints.save(tmp_path, engine, state, config, IDENTITY, warn=warnings.append)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saved is None and "File too large" in warnings[0]
    assert find_latest(tmp_path, warn=refuse).step == 1


def test_a_disk_that_is_full_for_real_leaves_the_last_good_checkpoint(tmp_path):
    """A file system in memory that holds one checkpoint of the toy and a half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a file system may not be mounted here")
    try:
        save(disk, 1)
        warnings: list[str] = []
        config, engine = make_config(str(disk), 0), StillEngine()
        assert checkpoints.save(disk, engine, TrainState(step=2), config, IDENTITY, warn=warnings.append) is None
        assert len(warnings) == 1 and "No space left on device" in warnings[0] and "the last complete" in warnings[0]
        assert os.listdir(disk / "checkpoints") == ["step-00000001"]
        assert find_latest(disk, warn=refuse).step == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_another_model_is_refused_with_the_parameter_that_differs(tmp_path):
    save(tmp_path, 1)
    engine = StillEngine()
    engine.module.norm = torch.nn.LayerNorm(14)
    with pytest.raises(
        UserError,
        match=r"norm\.bias has shape \(13,\) there and \(14,\) here",
        check=coded("checkpoint-of-another-model"),
    ):
        load(engine, find_latest(tmp_path))


def test_fragments_that_do_not_cover_the_parameters_are_refused(tmp_path):
    from trainer.checkpoint.tensors import write_tensors

    folder = save(tmp_path, 1)
    record = write_tensors(folder / TENSORS, [("weight:0:norm.weight", 5, lambda: torch.zeros(5))])
    marker = json.loads((folder / "checkpoint.json").read_text())
    marker["files"] = [record.model_dump(), *(file for file in marker["files"] if file["name"] != TENSORS)]
    (folder / "checkpoint.json").write_text(json.dumps(marker))
    with pytest.raises(UserError, match="elements of ", check=coded("damaged-checkpoint")):
        read_weights(folder)


@pytest.mark.long
def test_weights_are_read_without_deepspeed(tmp_path):
    import sys

    folder = save(tmp_path, 1)
    code = f"""
import sys
sys.modules["deepspeed"] = None
from trainer.checkpoint.format import CheckpointFolder
from trainer.checkpoint.tensors import read_weights
from trainer.checkpoint.restore import find_latest
print(len(read_weights({str(folder)!r})), CheckpointFolder({str(folder)!r}).read_state().state.step)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["8", "1"]


def sets_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights, moments and Adam's count of a checkpoint, whole, by name."""
    from trainer.checkpoint.format import open_checkpoint
    from trainer.checkpoint.tensors import read_fragments

    checkpoint = open_checkpoint(folder / "checkpoints" / f"step-{step:08d}")
    shapes = checkpoint.saved.shapes
    whole: dict[str, torch.Tensor] = {}
    for file in checkpoint.tensor_files:
        for fragment in read_fragments(checkpoint.folder / file):
            held = whole.setdefault(f"{fragment.kind} {fragment.name}", torch.full(shapes[fragment.name], torch.nan))
            target = held.view(-1)[fragment.start : fragment.stop]
            assert target.isnan().all(), "held twice"
            target.copy_(fragment.read(fragment.start, fragment.stop))
    assert not any(tensor.isnan().any() for tensor in whole.values())
    with_momentum = {key.removeprefix("momentum ") for key in whole if key.startswith("momentum ")}
    assert with_momentum in (set(), {"gated.weight", "dense.weight"}, set(shapes)), "AdamW, Muon or Lion"
    assert len(whole) == 3 * len(shapes) - len(with_momentum)
    return whole | {"steps": torch.tensor(checkpoint.saved.optimizer_steps)}


def assert_same_course(report: dict, resumed: dict, folder: Path, other: Path) -> None:
    assert resumed["first"] == 2
    assert resumed["losses"] == report["losses"][2:] and resumed["norms"] == report["norms"][2:]
    mine, theirs = sets_of(folder, 4), sets_of(other, 4)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine | theirs)


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("zero_stage", "optimizer", "precision"),
    [
        (zero_stage, optimizer, precision)
        for zero_stage in range(4)
        for optimizer in OPTIMIZERS
        for precision in precisions_of(zero_stage, optimizer)
    ],
)
def test_a_stopped_and_resumed_run_is_bitwise_the_run_never_stopped(zero_stage, optimizer, precision):
    folder, reports = trained(zero_stage)
    name = f"{optimizer}-{precision}"
    whole, resumed = reports[f"{name}-whole"], reports[f"{name}-second-half"]
    assert len(set(whole["losses"])) == 4
    assert_same_course(whole, resumed, folder / f"{name}-whole", folder / f"{name}-halves")


@pytest.mark.spawn
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_resuming_in_new_processes_is_bitwise_too(zero_stage, world_size, optimizer, tmp_path):
    common = {
        "stage": zero_stage,
        "accumulation": 2,
        "precision": "bf16" if zero_stage else "fp32",
        "optimizer": optimizer,
    }
    whole = common | {"output_dir": str(tmp_path / "whole"), "steps": 4}
    half = common | {"output_dir": str(tmp_path / "halves"), "steps": 2}
    (report,) = run_jobs(tmp_path, world_size, [whole])
    run_jobs(tmp_path, world_size, [half])
    (resumed,) = run_jobs(tmp_path, world_size, [half])
    assert_same_course(report, resumed, tmp_path / "whole", tmp_path / "halves")


SLOW = pytest.mark.slow


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("from_stage", "zero_stage", "world_size", "optimizer"),
    [
        (1, 3, 3, "muon"),
        (3, 1, 1, "stable_adamw"),
        *(
            pytest.param(a, b, world, optimizer, marks=SLOW)
            for optimizer in OPTIMIZERS
            for a in range(4)
            for b in range(4)
            for world in (1, 2, 3)
        ),
    ],
)
def test_another_stage_and_number_of_ranks_continues_within_rounding(
    from_stage, zero_stage, world_size, optimizer, tmp_path
):
    """From 2 ranks, to 3 that divide neither the rows of the batch nor the parameters; against plain PyTorch."""
    folder, _ = trained(from_stage)
    shutil.copytree(folder / f"{optimizer}-plain", tmp_path / "run")
    go_on_as_plain_pytorch(tmp_path, zero_stage, world_size, optimizer)


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize(
    ("from_stage", "zero_stage"), [pytest.param(0, 1, marks=SLOW), (1, 2), pytest.param(3, 0, marks=SLOW)]
)
def test_one_rank_continues_as_two_within_rounding(from_stage, zero_stage, tmp_path):
    job = {"stage": from_stage, "accumulation": 4, "output_dir": str(tmp_path / "run"), "steps": 2, "dropout": False}
    run_jobs(tmp_path, 1, [job])
    go_on_as_plain_pytorch(tmp_path, zero_stage, 2)


@pytest.mark.spawn
@pytest.mark.parametrize(("from_stage", "zero_stage"), [pytest.param(1, 1, marks=SLOW), pytest.param(3, 2, marks=SLOW)])
def test_four_ranks_continue_as_three_that_divide_no_batch_within_rounding(from_stage, zero_stage, tmp_path):
    job = {"stage": from_stage, "accumulation": 1, "output_dir": str(tmp_path / "run"), "steps": 2, "dropout": False}
    run_jobs(tmp_path, 4, [job])
    go_on_as_plain_pytorch(tmp_path, zero_stage, 3)


def go_on_as_plain_pytorch(folder: Path, zero_stage: int, world_size: int, optimizer: str = "adamw") -> None:
    """Resume the run at step 2 for 2 more steps; compare with plain PyTorch, within fp32's rounding."""
    job = {"stage": zero_stage, "accumulation": 2, "output_dir": str(folder / "run"), "steps": 2, "dropout": False}
    job["optimizer"] = optimizer
    (report,) = run_jobs(folder, world_size, [job])
    assert report["first"] == 2
    losses, norms, weights = train_plainly(4, optimizer)
    tolerance = {"rtol": 2e-5, "atol": 2e-6}
    torch.testing.assert_close(torch.tensor(report["losses"]), torch.tensor(losses[2:]), **tolerance)
    torch.testing.assert_close(torch.tensor(report["norms"]), torch.tensor(norms[2:]), **tolerance)
    saved = read_weights(folder / "run" / "checkpoints" / "step-00000004")
    for name, weight in weights.items():
        torch.testing.assert_close(saved[name], weight, **tolerance)


@pytest.mark.spawn
def test_one_rank_of_two_that_cannot_write_makes_no_checkpoint(tmp_path):
    """The second rank's disk is full; both ranks agree, and the run goes on and ends well."""
    job = {"stage": 0, "accumulation": 1, "output_dir": str(tmp_path / "run"), "steps": 1, "blocked_rank": 1}
    (report,) = run_jobs(tmp_path, 2, [job])
    assert report["saved"] is False
    assert find_latest(tmp_path / "run", warn=refuse) is None
