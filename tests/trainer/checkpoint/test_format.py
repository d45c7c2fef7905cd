"""What is read of a checkpoint's state; where its folder is a link, only the link is removed or replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.support.data_prep_command import files_of
from tests.support.toy_training import make_config
from tests.trainer.checkpoint.test_writer import IDENTITY, StillEngine, flip_bytes, refuse, save
from trainer.checkpoint import writer as checkpoints
from trainer.checkpoint.format import MARKER_NAME, CheckpointFolder, TrainState, step_folder
from trainer.checkpoint.restore import fetch_checkpoint, find_latest
from trainer.checkpoint.upload import Uploader
from trainer.checkpoint.writer import ALONE
from trainer.config.run_settings import CheckpointSettings

STEP = 8
TENSORS = "rank-00000-of-00001.safetensors"


def test_nulls_of_nonfinite_values_are_left_out():
    state = TrainState.model_validate_json('{"step": 2, "evaluation": {"valid/mlm_loss": 7, "valid/perplexity": null}}')
    assert state == TrainState(step=2, evaluation={"valid/mlm_loss": 7.0})


@pytest.mark.parametrize("damaged", ['["valid/mlm_loss"]', '{"valid/mlm_loss": "low"}', "null"])
def test_an_evaluation_of_another_kind_is_damage(damaged):
    with pytest.raises(ValidationError, match="evaluation"):
        TrainState.model_validate_json(f'{{"step": 2, "evaluation": {damaged}}}')


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A checkpoint of another run."""
    return save(tmp_path / "other", STEP)


@pytest.fixture
def linked(target: Path, tmp_path: Path) -> Path:
    """The folder of the run whose only checkpoint is a link to it."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    step_folder(run, STEP).symlink_to(target)
    return run


def test_a_link_that_a_newer_checkpoint_makes_superfluous_goes_alone(linked, target):
    before = files_of(target)
    assert find_latest(linked, warn=refuse).step == STEP
    save(linked, 12, keep_last=1)
    assert os.listdir(linked / "checkpoints") == ["step-00000012"]
    assert files_of(target) == before


def test_saving_the_step_of_a_link_again_puts_a_folder_in_its_place(linked, target):
    before = files_of(target)
    assert not save(linked, STEP, StillEngine(learning_rate=0.7)).is_symlink()
    assert os.listdir(linked / "checkpoints") == ["step-00000008"]
    assert files_of(target) == before


def test_a_link_that_cannot_be_set_aside_is_not_written_through(linked, target, monkeypatch):
    before = files_of(target)
    monkeypatch.setattr(checkpoints, "_set_aside", lambda folder: None)
    warnings: list[str] = []
    config, state = make_config(str(linked), 0), TrainState(step=STEP, tokens_seen=1)
    assert checkpoints.save(linked, StillEngine(), state, config, IDENTITY, warn=warnings.append) is None
    assert len(warnings) == 1 and "is a link to" in warnings[0]
    assert files_of(target) == before


def test_a_link_in_a_store_that_is_a_folder_goes_alone(linked, target):
    before = files_of(target)
    CheckpointFolder.of_step(linked / "checkpoints", STEP).remove()
    assert os.listdir(linked / "checkpoints") == [] and files_of(target) == before


@pytest.mark.parametrize("damaged", [TENSORS, MARKER_NAME])
def test_missing_files_are_not_fetched_into_the_target_of_a_link(damaged, linked, target, tmp_path):
    store = save(tmp_path / "store", STEP, StillEngine(learning_rate=0.7)).parent
    if damaged == TENSORS:
        flip_bytes(target / TENSORS)
    else:
        (target / MARKER_NAME).unlink()
    before = files_of(target)
    problem = fetch_checkpoint(
        CheckpointFolder.of_step(store, STEP), CheckpointFolder(step_folder(linked, STEP)), 0, ALONE
    )
    assert problem is not None and "is a link to" in problem
    assert files_of(target) == before


def test_a_checkpoint_is_not_copied_through_a_link_in_the_store(target, tmp_path):
    before = files_of(target)
    store = tmp_path / "store"
    store.mkdir()
    (store / target.name).symlink_to(target)
    warnings: list[str] = []
    settings = CheckpointSettings(upload_to=str(store), upload_wait_seconds=20)
    uploader = Uploader(settings, ALONE, warnings.append)
    config = make_config(str(tmp_path), 0)
    saved = checkpoints.save(tmp_path / "run", StillEngine(learning_rate=0.7), TrainState(step=STEP), config, IDENTITY)
    assert saved is not None
    uploader.submit(saved)
    assert not uploader.close() and "is a link to" in warnings[0]
    assert files_of(target) == before


def test_predictions_that_an_earlier_release_counted_are_those_of_its_two_objectives():
    state = TrainState.model_validate_json('{"step": 2, "masked_seen": 70, "pairs_seen": 3}')
    assert state == TrainState(step=2, predictions_seen={"masked_lm": 70, "sentence_pairs": 3})
    assert TrainState.model_validate({"masked_seen": 70, "pairs_seen": 0}).predictions_seen == {"masked_lm": 70}
    assert TrainState.model_validate({"masked_seen": 0, "pairs_seen": 0}) == TrainState()
    assert TrainState.model_validate_json(state.model_dump_json()) == state
    with pytest.raises(ValidationError, match="masked_lm"):
        TrainState.model_validate({"masked_seen": -1, "pairs_seen": 0})
