"""One folder for all ranks, seen by a file that rank 0 writes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from tests.support.threaded_ranks import ThreadedRanks
from trainer.checkpoint.writer import ALONE
from trainer.distributed import agreement, output_dir
from trainer.distributed.exit import PrintedByEveryRank
from trainer.distributed.output_dir import refuse_unshared
from trainer.distributed.process_group import Ranks


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch):
    """Each rank's message where rank N has folder N under the name of the output directory; "" where it goes on."""

    def run(*folders: Path, patience: float = 0.3) -> list[tuple[str, int]]:
        monkeypatch.setattr(output_dir, "PATIENCE_SECONDS", patience)

        def one(ranks: Ranks) -> tuple[str, int]:
            try:
                refuse_unshared(str(folders[ranks.rank]), ranks)
            except UserError as error:
                assert isinstance(error, PrintedByEveryRank) or "cannot be written" in str(error)
                return str(error).replace(str(folders[ranks.rank]), "HERE", 1), error.exit_status
            return "", 0

        return ThreadedRanks(len(folders), (agreement, output_dir), monkeypatch).run(one)

    return run


def test_one_folder_is_seen_by_all_and_nothing_is_left_in_it(refusals, tmp_path):
    assert refusals(tmp_path, tmp_path, tmp_path) == [("", 0)] * 3
    assert os.listdir(tmp_path) == []


def test_folders_of_their_own_are_refused_on_all_ranks_with_host_and_path_and_nothing_is_left(
    refusals, tmp_path, monkeypatch
):
    monkeypatch.setattr("socket.gethostname", lambda: f"host-of-{threading.current_thread().name[-1]}")
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    told = refusals(mine, mine, other, other)
    assert len(set(told)) == 1 and told[0][1] == 2
    text = told[0][0]
    assert text.startswith("output_dir=HERE is not a directory that all hosts share: rank 0 (host-of-")
    assert f"wrote a file into {mine}, and rank 2 (host-of-" in text and "rank 3 (host-of-" in text
    assert f"cannot access it in {other} (No such file or directory)" in text and "rank 1" not in text
    assert "Fix: mount one directory" in text and "checkpoint.upload_to" in text
    assert os.listdir(mine) == os.listdir(other) == []


def test_the_one_of_many_hosts_that_does_not_see_it_is_found(refusals, tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: threading.current_thread().name)
    (tmp_path / "shared").mkdir()
    told = refusals(*[tmp_path / "shared"] * 11, tmp_path / "missing")
    assert {status for _, status in told} == {2} and "and rank 11 (" in told[0][0]


def test_a_file_that_another_host_sees_late_is_waited_for(refusals, tmp_path):
    shared, late = tmp_path / "shared", tmp_path / "late"
    shared.mkdir()
    timer = threading.Timer(0.6, lambda: late.symlink_to(shared))
    timer.start()
    assert refusals(shared, late, patience=60) == [("", 0)] * 2
    timer.join()


def test_files_of_a_killed_start_are_removed_and_do_not_count(refusals, tmp_path):
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir()
        (folder / f"{output_dir.PREFIX}abc").write_text("abc")
    assert [status for _, status in refusals(mine, other)] == [2, 2]
    assert os.listdir(mine) == [] and os.listdir(other) == [f"{output_dir.PREFIX}abc"]


def test_a_folder_that_the_first_rank_cannot_write_is_reported_on_all_at_once(refusals, tmp_path):
    (tmp_path / "file").touch()
    told = refusals(tmp_path / "file", tmp_path, patience=600)
    assert [status for _, status in told] == [1, 1] and "cannot be written (Not a directory)" in told[0][0]
    assert "cannot be written (Not a directory)" in told[1][0]


def test_a_rank_alone_writes_nothing(tmp_path):
    refuse_unshared(str(tmp_path / "missing"), ALONE)
    assert os.listdir(tmp_path) == []
