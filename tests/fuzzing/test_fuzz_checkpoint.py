"""A checkpoint's folder after damage to its files or its structure, and one that somebody made with own checksums."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_prep.base.errors import UserError
from tests.fuzzing.mutations import damage, fuzz, mutated_document
from tests.fuzzing.sealed import damaged_tensors
from tests.fuzzing.watching import read_or_refuse
from tests.support.data_prep_command import files_of
from tests.support.settings import validated
from tests.support.toy_run import make_weights, write_checkpoint
from trainer.checkpoint.format import MARKER_NAME, STATE_NAME, CheckpointFolder, SavedState, step_folder
from trainer.checkpoint.restore import find_latest
from trainer.checkpoint.tensors import read_weights
from trainer.config.run_config import RunConfig

TENSORS = "rank-00000-of-00002.safetensors"
SECRET = "open-sesame"
_FILE_NAMES = (MARKER_NAME, STATE_NAME, TENSORS, "rank-00002-of-00003.safetensors", ".hidden", "x\n\x1b[31m")
_FOLDER_NAMES = (
    *("step-00000010", "step-00000020", "step-00000020.replaced", "step-00000030", "step-" + "9" * 30, "x\n\x1b[31m"),
)
_CHANGES = ("rename", "copy", "move out", "link", "pipe", "folder", "empty", "remove", "add")
_FACTORS = {10: 2.0, 20: 1.0}  # of the weights after each step of the longer run


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


def read_checkpoint(output_dir: Path) -> tuple[SavedState, dict[str, torch.Tensor]]:
    """As `read`, of a run that has a checkpoint, whole or damaged, and must not start from nothing."""
    found = read(output_dir)
    assert found is not None, "a run that has checkpoints would silently start from nothing"
    return found


@fuzz(80)
@given(data=st.data())
def test_a_changed_file_of_a_checkpoint_is_never_taken_and_the_one_before_it_is_found(
    data: st.DataObject, longer_run: Path, weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    output_dir = copied(longer_run, tmp_path_factory)
    name = data.draw(st.sampled_from((MARKER_NAME, MARKER_NAME, STATE_NAME, TENSORS)))
    is_changed = damage(data, step_folder(output_dir, 20) / name)
    found = read_or_refuse(lambda: read_checkpoint(output_dir), output_dir)
    assert found is not None, "what was left whole is found"
    saved, values = found
    step = saved.state.step
    assert step == 10 or name == MARKER_NAME or not is_changed, f"{name} was changed and the checkpoint is taken"
    assert step == 20 or is_changed
    assert saved == CheckpointFolder(step_folder(longer_run, step)).read_state()
    assert are_of_step(values, step, weights)


def sign(folder: Path, name: str, content: bytes) -> None:
    """Put `content` in place of a file, and its size and sha256 into the marker."""
    (folder / name).write_bytes(content)
    marker: dict[str, Any] = json.loads((folder / MARKER_NAME).read_bytes())
    for record in marker["files"]:
        if record["name"] == name:
            record.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (folder / MARKER_NAME).write_text(json.dumps(marker))


@fuzz(80)
@given(data=st.data())
def test_a_state_with_a_checksum_of_its_own_is_refused_or_read(
    data: st.DataObject, run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    output_dir = copied(run, tmp_path_factory)
    folder = step_folder(output_dir, 10)
    sign(folder, STATE_NAME, data.draw(mutated_document(json.loads((folder / STATE_NAME).read_bytes()))))
    found = read_or_refuse(lambda: read_checkpoint(output_dir), output_dir)
    if found is not None:
        saved, values = found
        assert {key: tuple(weight.shape) for key, weight in values.items()} == saved.shapes
        read_or_refuse(lambda: validated(RunConfig, saved.config), output_dir)


@fuzz(80)
@given(data=st.data())
def test_tensors_with_a_checksum_of_their_own_are_refused_or_cover_every_weight(
    data: st.DataObject, run: Path, weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    output_dir = copied(run, tmp_path_factory)
    folder = step_folder(output_dir, 10)
    sign(folder, TENSORS, data.draw(damaged_tensors((folder / TENSORS).read_bytes())))
    found = read_or_refuse(lambda: read_checkpoint(output_dir), output_dir)
    if found is not None:
        assert {key: weight.shape for key, weight in found[1].items()} == {k: w.shape for k, w in weights.items()}


@pytest.fixture(scope="module")
def longer_run(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, torch.Tensor]) -> Path:
    """A run with a checkpoint after each step of `_FACTORS`."""
    output_dir = tmp_path_factory.mktemp("longer")
    for step, factor in _FACTORS.items():
        write_checkpoint(output_dir, step, "f" * 64, {name: weight * factor for name, weight in weights.items()})
    return output_dir


def are_of_step(values: dict[str, torch.Tensor], step: int, weights: dict[str, torch.Tensor]) -> bool:
    expected = {name: weight * _FACTORS[step] for name, weight in weights.items()}
    return values.keys() == expected.keys() and all(torch.equal(values[name], expected[name]) for name in expected)


def rearrange(data: st.DataObject, output_dir: Path, outside: Path) -> None:
    """Do something to one file or folder of a run, whatever it is now; links lead to `outside`."""
    paths = sorted(output_dir.rglob("*")) or [output_dir / "checkpoints"]
    folders = [path for path in paths if path.is_dir() and not path.is_symlink()] or paths
    path = data.draw(st.sampled_from(folders) | st.sampled_from(paths))
    name = data.draw(st.sampled_from(_FOLDER_NAMES if path in folders else _FILE_NAMES))
    match data.draw(st.sampled_from(_CHANGES)):
        case "remove":
            remove(path)
        case "empty":
            remove(path)
            path.touch()
        case "folder":
            remove(path)
            path.mkdir()
        case "pipe":
            remove(path)
            os.mkfifo(path)
        case "link":
            remove(path)
            targets = [outside / "secret", outside / "step-00000020", outside / "nothing", path, output_dir]
            path.symlink_to(data.draw(st.sampled_from(targets)))
        case "move out" if os.path.lexists(path):
            target = outside / f"moved-{len(list(outside.iterdir()))}"
            path.rename(target)
            path.symlink_to(target)
        case "rename" if os.path.lexists(path):
            target = path.with_name(name)
            if target != path:
                remove(target)
                path.rename(target)
        case "copy" if path.is_dir() and not path.is_symlink():
            target = path.with_name(name)
            if target != path:
                remove(target)
                shutil.copytree(path, target, symlinks=True, ignore=ignore_pipes)
        case _:
            target = (path if path.is_dir() and not path.is_symlink() else path.parent) / name
            if not os.path.lexists(target):
                target.write_bytes(data.draw(st.sampled_from((b"", b"{}", bytes(600)))))


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that it holds, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def ignore_pipes(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if Path(folder, name).is_fifo()]


@fuzz(150, slow=True)
@given(data=st.data())
def test_a_rearranged_folder_is_refused_or_gives_a_whole_checkpoint_of_the_run(
    data: st.DataObject, longer_run: Path, weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> None:
    output_dir = copied(longer_run, tmp_path_factory)
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text(SECRET)
    shutil.copytree(step_folder(longer_run, 20), outside / "step-00000020")
    for _ in range(data.draw(st.integers(1, 3))):
        rearrange(data, output_dir, outside)
    before = files_of(outside)
    markers = [step for step in _FACTORS if (step_folder(output_dir, step) / MARKER_NAME).exists()]
    refusals: list[str] = []

    def read_and_keep_the_refusal() -> tuple[SavedState, dict[str, torch.Tensor]] | None:
        try:
            return read(output_dir)
        except UserError as error:
            refusals.append(str(error))
            raise

    found = read_or_refuse(read_and_keep_the_refusal, output_dir, outside)
    assert found is not None or refusals or not markers, "a run that has checkpoints would silently start from nothing"
    assert not any(SECRET in refusal for refusal in refusals)
    if found is not None:
        step = found[0].state.step
        assert found[0] == CheckpointFolder(step_folder(longer_run, step)).read_state()
        assert are_of_step(found[1], step, weights)
    for step in _FACTORS:
        values = read_or_refuse(lambda step=step: read_weights(step_folder(output_dir, step)), output_dir, outside)
        assert values is None or are_of_step(values, step, weights)
    if not (output_dir / "checkpoints").is_symlink():  # where it is one, that folder is the run's own
        assert files_of(outside) == before, "what lies outside is another's"
