"""What nodes with disks of their own make of a step of which they hold different saves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.trainer.checkpoints.test_checkpoint import StillEngine, save
from tests.trainer.threaded_ranks import ThreadedRanks
from trainer.checkpoints import fetch
from trainer.checkpoints.format import MARKER_NAME

STEP = 10


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """The step's folder on two disks: a save, and an older one of the same step."""
    return [save(tmp_path / f"node-{node}", STEP, StillEngine(learning_rate=0.1 * (node + 1))) for node in (0, 1)]


def bring(nodes: list[Path], store: Path, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    group = ThreadedRanks(len(nodes), (fetch,), monkeypatch)
    return group.run(lambda ranks: fetch.bring(str(store), nodes[ranks.rank], STEP, 0, ranks))


@pytest.mark.parametrize("stored", [0, 1])
def test_nodes_that_hold_different_saves_of_a_step_take_the_stores(stored, nodes, tmp_path, monkeypatch):
    shutil.copytree(nodes[stored], tmp_path / "store" / nodes[stored].name)
    expected = files_of(nodes[stored])
    assert files_of(nodes[0]) != files_of(nodes[1])
    assert bring(nodes, tmp_path / "store", monkeypatch) == [None, None]
    assert files_of(nodes[0]) == files_of(nodes[1]) == expected


def test_different_saves_of_a_step_that_the_store_lacks_are_no_checkpoint(nodes, tmp_path, monkeypatch):
    before = [files_of(node) for node in nodes]
    problems = bring(nodes, tmp_path / "store", monkeypatch)
    assert all(problem is not None and MARKER_NAME in problem for problem in problems)
    assert [files_of(node) for node in nodes] == before


def test_nodes_that_hold_the_same_save_do_not_ask_the_store(nodes, tmp_path, monkeypatch):
    shutil.rmtree(nodes[1])
    shutil.copytree(nodes[0], nodes[1])
    monkeypatch.setattr(fetch, "stored_marker", None)
    assert bring(nodes, tmp_path / "store", monkeypatch) == [None, None]
