"""What nodes with disks of their own make of a step of which they hold different saves."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.support.threaded_ranks import ThreadedRanks
from tests.trainer.checkpoint.test_writer import StillEngine, save
from trainer.checkpoint import fetch
from trainer.checkpoint.format import MARKER_NAME

STEP = 10


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """The step's folder on two disks: a save, and an older one of the same step."""
    return [save(tmp_path / f"node-{node}", STEP, StillEngine(learning_rate=0.1 * (node + 1))) for node in (0, 1)]


def bring(nodes: list[Path], store: Path, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    group = ThreadedRanks(len(nodes), (fetch,), monkeypatch)
    return group.run(lambda ranks: fetch.fetch_checkpoint(str(store), nodes[ranks.rank], STEP, 0, ranks))


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


def test_a_checkpoint_that_was_renamed_on_the_disk_or_in_the_store_is_none(nodes, tmp_path, monkeypatch):
    renamed = nodes[0].rename(nodes[0].with_name("step-00000040"))
    shutil.copytree(renamed, tmp_path / "store" / renamed.name)
    (problem,) = ThreadedRanks(1, (fetch,), monkeypatch).run(
        lambda ranks: fetch.fetch_checkpoint(str(tmp_path / "store"), renamed, 40, 0, ranks)
    )
    for folder in (renamed, tmp_path / "store" / renamed.name):
        assert re.search(f"{re.escape(str(folder))} .* step 40 .* step 10", problem)


def test_a_newer_format_in_the_store_is_named(nodes, tmp_path, monkeypatch):
    stored = Path(shutil.move(nodes[0], tmp_path / "store" / nodes[0].name))
    marker = (stored / MARKER_NAME).read_text().replace('"format_version": 1', '"format_version": 9')
    (stored / MARKER_NAME).write_text(marker)
    (problem,) = ThreadedRanks(1, (fetch,), monkeypatch).run(
        lambda ranks: fetch.fetch_checkpoint(str(tmp_path / "store"), nodes[0], STEP, 0, ranks)
    )
    assert "version 9" in problem and "version 1" in problem
