"""A checkpoint's folder after damage, and one that somebody made with checksums of their own."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_prep.settings import validate_settings
from tests.fuzzing.mutations import damage, fuzz, mutated_document
from tests.fuzzing.sealed import damaged_tensors
from tests.fuzzing.watching import read_or_refuse
from tests.trainer.toy_run import make_weights, write_checkpoint
from trainer.checkpoints.format import (
    MARKER_NAME,
    STATE_NAME,
    SavedState,
    read_state,
    step_folder,
)
from trainer.checkpoints.pieces import read_weights
from trainer.checkpoints.resuming import find_latest
from trainer.config import RunConfig

TENSORS = "rank-00000-of-00002.safetensors"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return make_weights()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    output_dir = tmp_path_factory.mktemp("run")
    write_checkpoint(output_dir, 10, "f" * 64, weights)
    return output_dir


def copied(run: Path, factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(run, factory.mktemp("copy") / "run"))


def read(output_dir: Path) -> tuple[SavedState, dict[str, torch.Tensor]] | None:
    found = find_latest(output_dir, warn=lambda message: None)
    return None if found is None else (found.saved, read_weights(found.folder))


@fuzz(200)
@given(data=st.data())
def test_a_changed_file_of_a_checkpoint_is_never_taken(
    data: st.DataObject, run: Path, weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    output_dir = copied(run, tmp_path_factory)
    folder = step_folder(output_dir, 10)
    name = data.draw(st.sampled_from((MARKER_NAME, MARKER_NAME, STATE_NAME, TENSORS)))
    is_changed = damage(data, folder / name)
    found = read_or_refuse(lambda: read(output_dir), output_dir)
    if found is not None:
        saved, values = found
        assert name == MARKER_NAME or not is_changed, f"{name} was changed and the checkpoint is taken"
        assert saved == read_state(step_folder(run, 10))
        assert values.keys() == weights.keys()
        assert all(torch.equal(values[key], weight) for key, weight in weights.items())


def sign(folder: Path, name: str, content: bytes) -> None:
    """Put `content` in place of a file, and its size and sha256 into the marker."""
    (folder / name).write_bytes(content)
    marker: dict[str, Any] = json.loads((folder / MARKER_NAME).read_bytes())
    for record in marker["files"]:
        if record["name"] == name:
            record.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (folder / MARKER_NAME).write_text(json.dumps(marker))


@fuzz(200)
@given(data=st.data())
def test_a_state_with_a_checksum_of_its_own_is_refused_or_read(
    data: st.DataObject, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    output_dir = copied(run, tmp_path_factory)
    folder = step_folder(output_dir, 10)
    sign(folder, STATE_NAME, data.draw(mutated_document(json.loads((folder / STATE_NAME).read_bytes()))))
    found = read_or_refuse(lambda: read(output_dir), output_dir)
    if found is not None:
        saved, values = found
        assert {key: tuple(weight.shape) for key, weight in values.items()} == saved.shapes
        read_or_refuse(lambda: validate_settings(RunConfig, saved.config, "state.json"), output_dir)


@fuzz(200)
@given(data=st.data())
def test_tensors_with_a_checksum_of_their_own_are_refused_or_cover_every_weight(
    data: st.DataObject,
    run: Path,
    weights: dict[str, torch.Tensor],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    output_dir = copied(run, tmp_path_factory)
    folder = step_folder(output_dir, 10)
    sign(folder, TENSORS, data.draw(damaged_tensors((folder / TENSORS).read_bytes())))
    found = read_or_refuse(lambda: read(output_dir), output_dir)
    if found is not None:
        assert {key: weight.shape for key, weight in found[1].items()} == {k: w.shape for k, w in weights.items()}
