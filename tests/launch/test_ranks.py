from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from launch.ranks import status_of
from tests.support import fork_server

REPOSITORY = Path(__file__).resolve().parents[2]


def failure(rank: int, exitcode: int, timestamp: int) -> ProcessFailure:
    made = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exitcode, error_file="none")
    made.timestamp = timestamp
    return made


def test_the_rank_that_ended_badly_first_decides():
    assert status_of([failure(0, 1, 30), failure(1, 75, 20), failure(2, -15, 25)]) == 75
    assert status_of([failure(0, -9, 10), failure(1, 76, 20)]) == 137


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize(("program", "status"), [("pass", 0), ("raise SystemExit(75)", 75)])
def test_torchrun_ends_with_the_status_of_its_ranks(program, status, tmp_path):
    (tmp_path / "rank.py").write_text(program)
    command = [
        str(REPOSITORY / "launch" / "ranks.py"),
        "--standalone",
        "--nproc_per_node",
        "2",
        "rank.py",
    ]
    done = fork_server.run(command, tmp_path, os.environ | fork_server.FIXED, timeout=200)
    assert done.returncode == status, done.stderr
