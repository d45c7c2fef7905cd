from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

from data_prep.base.errors import UsageError
from tests.support import fork_server
from tests.support.error_codes import coded
from tests.support.toy_processes import ROOT, finish, start_ranks
from trainer.config.training_settings import DistributedSettings
from trainer.distributed.exit import reports_lost_peer
from trainer.distributed.process_group import Ranks, begin_sum_on_hosts, initialize_distributed
from trainer.distributed.rank_environment import can_be_made, compiled_folder, set_caches_of_compilation
from trainer.distributed.rendezvous import LOST_RANK_EXIT_STATUS

SCRIPT = Path(__file__).with_name("toy_ranks.py")
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run_ranks(mode: str, world_size: int = 2) -> list[tuple[int, str, str]]:
    return finish(start_ranks([str(SCRIPT), mode], world_size), timeout=500)


def test_half_an_environment_is_a_usage_error(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UsageError, match="not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        initialize_distributed(DistributedSettings())


def test_an_environment_of_no_numbers_is_a_usage_error(monkeypatch):
    for name, value in zip(LAUNCHER_VARIABLES, ("0", "two", "0", "127.0.0.1", ""), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, check=coded("invalid-rank-environment"), match="WORLD_SIZE=two, MASTER_PORT= "):
        initialize_distributed(DistributedSettings())


@pytest.mark.spawn
def test_a_user_error_of_another_host_before_the_group_is_reported_by_that_host():
    """As where the shards lie on the first host alone; the first rank of every host speaks."""
    first, second = start_ranks([str(SCRIPT), "user error before the group"], world_size=2, local_ranks=(0, 0))
    results = finish([first, second], timeout=500)
    assert [status for status, _, _ in results] == [1, 1]
    assert results[1][2].strip() == "rank 1: error: the file is missing"


@pytest.mark.spawn
def test_ranks_reduce_agree_gather_and_leave_with_the_status_requested():
    for status, stdout, stderr in run_ranks("collectives"):
        assert status == 75, stdout + stderr


@pytest.mark.spawn
def test_plain_python_is_a_world_of_one():
    environment = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    environment |= {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = fork_server.run([str(SCRIPT), "collectives"], Path.cwd(), environment)
    assert done.returncode == 75, done.stderr


@pytest.mark.spawn
def test_a_user_error_before_the_group_is_reported_once():
    (first, second) = run_ranks("user error before the group")
    assert first[0] == second[0] == 1
    assert first[2].strip() == "error: the file is missing" and second[2].strip() == ""


@pytest.mark.spawn
def test_a_user_error_on_all_ranks_is_reported_once():
    (first, second) = run_ranks("user error on all")
    assert first[0] == second[0] == 1
    assert first[2].strip() == "error: the shard is damaged"
    assert second[2].strip() in ("", "rank 1: error: the shard is damaged"), "rank 0 tells it, unless it is in a hurry"


@pytest.mark.spawn
@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("user error on one", "rank 1: error: this host's disk is gone"),
        pytest.param("our mistake on one", "ZeroDivisionError: a mistake of ours", marks=pytest.mark.slow),
        pytest.param("killed", "", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_ends_all_without_waiting(mode, told):
    started_at = time.monotonic()
    (first, second) = run_ranks(mode)
    assert time.monotonic() - started_at < 300, "a rank waited for its timeout"
    assert first[0] == LOST_RANK_EXIT_STATUS and second[0] != 0
    assert told in second[2]
    assert "[rank-lost]" in first[2] and "Traceback" not in first[2]


@pytest.mark.long
@pytest.mark.spawn
def test_a_process_outlives_the_reader_of_its_output(tmp_path):
    program = (
        "import sys, time, pathlib; from trainer.distributed.exit import ignore_broken_pipe; ignore_broken_pipe(); "
        "print('ready'); done = pathlib.Path(sys.argv[1]); print('to stderr', file=sys.stderr); "
        "[(time.sleep(0.01), print('x' * 999), print('y', file=sys.stderr)) for _ in range(50)]; done.touch()"
    )
    words = ["-c", program, str(tmp_path / "done")]
    process = fork_server.start(words, tmp_path, os.environ | fork_server.FIXED)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=300) == 0 and (tmp_path / "done").exists()


@pytest.mark.long
@pytest.mark.spawn
def test_a_process_outlives_a_full_disk_under_its_output():
    program = (
        "import sys; print('in the buffer'); from trainer.distributed.exit import end_process, ignore_broken_pipe; "
        "ignore_broken_pipe(); print('x' * 99_999); print('y', file=sys.stderr); end_process(75)"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}  # else the first line would be lost before
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", program], env=env, stdout=full, stderr=full)
    assert done.returncode == 75


@pytest.mark.long
@pytest.mark.spawn
def test_a_rank_reports_nothing_to_mlflow_and_tries_no_op_of_deepspeed(tmp_path):
    program = (
        "from trainer.distributed.process_group import initialize_distributed; "
        "from trainer.config.training_settings import DistributedSettings; "
        "initialize_distributed(DistributedSettings()); "
        "import deepspeed; assert {*vars(deepspeed.ops)['__compatible_ops__']} == {'deepspeed_shm_comm'}"
    )
    # Nothing else, for MLflow takes the variables of a test and of any CI for a no.
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    assert not (tmp_path / ".config" / "mlflow").exists(), "an installation id"


def test_compiled_graphs_are_kept_by_build_and_instruction_set(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiled_folder()
    assert folder.is_relative_to(tmp_path / "clozeworks") and torch.__version__ in folder.name
    monkeypatch.setattr(Path, "read_text", lambda path, **options: "flags : another processor\n")
    assert compiled_folder() != folder and compiled_folder().parent == folder.parent
    assert not folder.exists(), "torch makes it where it needs it"


@pytest.fixture
def own_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this user on the disk of a host that eight ranks share."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    return tmp_path / "tmp" / f"clozeworks-{os.geteuid()}"


def test_ranks_that_share_a_host_keep_compiled_graphs_on_its_disk(own_disk: Path, monkeypatch) -> None:
    assert compiled_folder().is_relative_to(own_disk) and stat.S_IMODE(own_disk.stat().st_mode) == 0o700
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert not compiled_folder().is_relative_to(own_disk)


@pytest.mark.parametrize("unsafe", ["open to others", "a link", "of another user", "without execution", "a file"])
def test_compiled_graphs_are_not_kept_where_others_can_write(unsafe: str, own_disk: Path, monkeypatch) -> None:
    if unsafe == "a file":
        own_disk.touch()
    elif unsafe == "a link":
        own_disk.symlink_to(own_disk.parent.parent)
    elif unsafe == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: own_disk.parent.stat().st_uid + 1)
    elif unsafe == "without execution":
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    else:
        own_disk.mkdir()
        own_disk.chmod(0o770)
    assert compiled_folder().is_relative_to(own_disk.parent.parent / "home")


@pytest.mark.parametrize(
    ("variables", "threads"),
    [({}, None), ({"LOCAL_WORLD_SIZE": "8"}, "2"), ({"LOCAL_SIZE": "32"}, "1")]
    + [({"LOCAL_WORLD_SIZE": "8", "TORCHINDUCTOR_COMPILE_THREADS": "7"}, "7")],
)
def test_ranks_of_a_host_share_its_cores_for_compilation(
    variables: dict[str, str], threads: str | None, own_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"HOME": str(own_disk)} | variables)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    set_caches_of_compilation()
    assert os.environ.get("TORCHINDUCTOR_COMPILE_THREADS") == threads


def test_a_folder_whose_nearest_parent_is_closed_cannot_be_made(tmp_path, monkeypatch):
    assert can_be_made(tmp_path / "a" / "b")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert not can_be_made(tmp_path / "a" / "b")


PATIENCE = timedelta(seconds=30)


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """Call a function on so many ranks, which wait so long for each other, and return what each returns."""

    def call(world_size: int, function: Callable[[Ranks], Any], patience: timedelta = PATIENCE) -> list[Any]:
        store = HashStore()

        def run(rank: int) -> Any:
            options = ProcessGroupGloo._Options()
            options._timeout, options._devices = PATIENCE, [ProcessGroupGloo.create_device(interface="lo")]
            group: Any = ProcessGroupGloo(store, rank, world_size, options)
            group._set_default_timeout(patience)
            return function(Ranks(rank, world_size, 0, torch.device("cpu"), group))

        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(run, range(world_size)))

    return call


@pytest.mark.parametrize("world_size", [2, 3, 11])
def test_each_rank_gets_the_sum_of_all(world_size: int, on_ranks: Callable[..., list[Any]]) -> None:
    large = (1 << 53) + 1  # which floating point would round

    def sum_up(ranks: Ranks) -> list[int]:
        own = torch.tensor([ranks.rank, 1, large])
        found = begin_sum_on_hosts(own, ranks)().tolist()
        assert own.tolist() == [ranks.rank, 1, large]
        return found

    expected = [world_size * (world_size - 1) // 2, world_size, world_size * large]
    assert on_ranks(world_size, sum_up) == [expected] * world_size


def test_sums_under_way_are_kept_apart_and_may_be_awaited_in_any_order(on_ranks: Callable[..., list[Any]]) -> None:
    def sum_up(ranks: Ranks) -> list[list[int]]:
        waits = [begin_sum_on_hosts(torch.tensor([number, ranks.rank][: number % 2 + 1]), ranks) for number in range(9)]
        order = range(9) if ranks.rank == 1 else range(8, -1, -1)
        found = {number: waits[number]().tolist() for number in order}
        return [found[number] for number in range(9)]

    assert on_ranks(3, sum_up) == [[[3 * number, 3][: number % 2 + 1] for number in range(9)]] * 3


@pytest.mark.parametrize("lost", [0, 1, 10])
def test_a_rank_that_does_not_come_is_reported_by_all_within_the_limit(
    lost: int, on_ranks: Callable[..., list[Any]]
) -> None:
    """The one that adds, one that passes the sum on, and one that does not."""

    def sum_up(ranks: Ranks) -> str:
        begun_at = time.monotonic()
        if ranks.rank == lost:
            time.sleep(0.8)
            return "timed out"
        with pytest.raises(RuntimeError) as caught:
            begin_sum_on_hosts(torch.tensor([1]), ranks)()
        assert time.monotonic() - begun_at < 20 and reports_lost_peer(str(caught.value)), caught.value
        return "timed out"

    assert on_ranks(11, sum_up, patience=timedelta(seconds=0.5)) == ["timed out"] * 11
