"""Going on from a checkpoint with several nodes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.support.threaded_ranks import ThreadedRanks
from tests.trainer.checkpoint.test_writer import StillEngine, flip_bytes, refuse, save
from trainer.checkpoint import fetch, restore, writer
from trainer.checkpoint.pieces import read_weights


def test_nodes_that_share_a_folder_bring_back_what_a_killed_save_set_aside_one_after_the_other(tmp_path, monkeypatch):
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
    group = ThreadedRanks(2, (writer, fetch, restore), monkeypatch)
    store = str(tmp_path / "store")
    found = group.run(lambda ranks: restore.find_latest(tmp_path / "run", ranks, refuse, remote=store, stage=0))
    assert seen == [1, 1]
    assert [each.step for each in found] == [1, 1]
    assert torch.equal(read_weights(folder)["norm.weight"], engine.module.norm.weight)


def test_a_damaged_step_that_was_asked_for_is_named_with_those_beside_it(tmp_path):
    for step in (3, 7, 9):
        folder = save(tmp_path / "run", step)
    flip_bytes(folder / "rank-00000-of-00001.safetensors")
    with pytest.raises(UserError, match=r"step-00000009 .*\(.*\).*: 7, 3\. Fix: ", check=coded("damaged-checkpoint")):
        restore.find_latest(tmp_path / "run", warn=refuse, step=9)
    assert restore.find_latest(tmp_path / "run", warn=refuse, step=7).step == 7
