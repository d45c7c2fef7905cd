"""Going on from a checkpoint with several nodes, also where they hold different saves of a step."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
import torch

from data_prep.base.errors import UserError
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.threaded_ranks import ThreadedRanks
from tests.trainer.checkpoint.test_writer import StillEngine, flip_bytes, refuse, save
from trainer.checkpoint import restore, writer
from trainer.checkpoint.format import MARKER_NAME, CheckpointFolder
from trainer.checkpoint.tensors import read_weights
from trainer.distributed import agreement
from trainer.distributed.process_group import Ranks


def test_nodes_that_share_a_folder_restore_a_replaced_checkpoint_in_turn(tmp_path, monkeypatch):
    engine = StillEngine()
    folder = save(tmp_path / "run", 1, engine)
    folder.rename(folder.with_name(f"{folder.name}.replaced"))
    bring_back, at_it, seen = restore.bring_back_replaced, list[int](), list[int]()

    def slowly(output_dir: Path) -> None:
        at_it.append(1)
        time.sleep(0.1)
        seen.append(len(at_it))
        bring_back(output_dir)
        at_it.pop()

    monkeypatch.setattr(restore, "bring_back_replaced", slowly)
    group = ThreadedRanks(2, (writer, restore), monkeypatch)
    store = str(tmp_path / "store")
    found = group.run(lambda ranks: restore.find_latest(tmp_path / "run", ranks, refuse, remote=store, zero_stage=0))
    assert seen == [1, 1]
    assert [each.step for each in found] == [1, 1]
    assert torch.equal(read_weights(folder)["norm.weight"], engine.module.norm.weight)


def test_a_damaged_step_that_was_requested_is_named_with_those_beside_it(tmp_path):
    for step in (3, 7, 9):
        folder = save(tmp_path / "run", step)
    flip_bytes(folder / "rank-00000-of-00001.safetensors")
    with pytest.raises(UserError, match=r"step-00000009 .*\(.*\).*: 7, 3\. Fix: ", check=coded("damaged-checkpoint")):
        restore.find_latest(tmp_path / "run", warn=refuse, step=9)
    assert restore.find_latest(tmp_path / "run", warn=refuse, step=7).step == 7


def test_a_file_that_one_rank_cannot_read_when_it_loads_ends_all_ranks_with_that_error(tmp_path, monkeypatch):
    """Each rank reads its own file there; the others would wait for a lost one."""
    save(tmp_path / "run", 1)
    checkpoint, engines = restore.find_latest(tmp_path / "run"), [StillEngine(), StillEngine()]
    read = restore.read_alone

    def read_own(folder, names, wanted, ranks):
        if ranks.rank == 1:
            raise UserError("its file is gone", fix="use another checkpoint", code="damaged-checkpoint")
        yield from read(folder, names, wanted, lambda: True)

    monkeypatch.setattr(restore, "read_shared", read_own)

    def load(ranks: Ranks) -> str:
        engines[ranks.rank].ranks = ranks
        with pytest.raises(UserError, match="its file is gone", check=coded("damaged-checkpoint")) as raised:
            restore.load(engines[ranks.rank], checkpoint)
        return raised.value.problem

    told = ThreadedRanks(2, (agreement,), monkeypatch).run(load)
    assert told == ["rank 1 ended the run: its file is gone", "its file is gone"]


STEP = 10


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """The step's folder on two disks: a save, and an older one of the same step."""
    return [save(tmp_path / f"node-{node}", STEP, StillEngine(learning_rate=0.1 * (node + 1))) for node in (0, 1)]


def fetch(store: Path, folder: Path, step: int, ranks: Ranks) -> str | None:
    stored = CheckpointFolder.of_step(store, step)
    return restore.fetch_checkpoint(stored, CheckpointFolder(folder), 0, ranks)


def bring(nodes: list[Path], store: Path, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    group = ThreadedRanks(len(nodes), (restore,), monkeypatch)
    return group.run(lambda ranks: fetch(store, nodes[ranks.rank], STEP, ranks))


@pytest.mark.parametrize("stored", [0, 1])
def test_nodes_that_hold_different_saves_of_a_step_take_the_stores(stored, nodes, tmp_path, monkeypatch):
    shutil.copytree(nodes[stored], tmp_path / "store" / nodes[stored].name)
    expected = files_of(nodes[stored])
    assert files_of(nodes[0]) != files_of(nodes[1])
    assert bring(nodes, tmp_path / "store", monkeypatch) == [None, None]
    assert files_of(nodes[0]) == files_of(nodes[1]) == expected


def test_different_saves_of_a_step_that_the_store_does_not_have_are_no_checkpoint(nodes, tmp_path, monkeypatch):
    before = [files_of(node) for node in nodes]
    problems = bring(nodes, tmp_path / "store", monkeypatch)
    assert all(problem is not None and MARKER_NAME in problem for problem in problems)
    assert [files_of(node) for node in nodes] == before


def test_nodes_that_hold_the_same_save_do_not_ask_the_store(nodes, tmp_path, monkeypatch):
    shutil.rmtree(nodes[1])
    shutil.copytree(nodes[0], nodes[1])
    assert not (tmp_path / "store").exists()
    assert bring(nodes, tmp_path / "store", monkeypatch) == [None, None]


def test_a_checkpoint_that_was_renamed_on_the_disk_or_in_the_store_is_none(nodes, tmp_path, monkeypatch):
    renamed = nodes[0].rename(nodes[0].with_name("step-00000040"))
    shutil.copytree(renamed, tmp_path / "store" / renamed.name)
    (problem,) = ThreadedRanks(1, (restore,), monkeypatch).run(
        lambda ranks: fetch(tmp_path / "store", renamed, 40, ranks)
    )
    for folder in (renamed, tmp_path / "store" / renamed.name):
        assert re.search(f"{re.escape(str(folder))} .* step 40 .* step 10", problem)


def test_a_newer_format_in_the_store_is_named(nodes, tmp_path, monkeypatch):
    stored = Path(shutil.move(nodes[0], tmp_path / "store" / nodes[0].name))
    marker = (stored / MARKER_NAME).read_text().replace('"format_version": 1', '"format_version": 9')
    (stored / MARKER_NAME).write_text(marker)
    (problem,) = ThreadedRanks(1, (restore,), monkeypatch).run(
        lambda ranks: fetch(tmp_path / "store", nodes[0], STEP, ranks)
    )
    assert "version 9" in problem and "version 1" in problem
