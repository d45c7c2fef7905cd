"""What a launcher says of a rank: read once, and refused in one paragraph where it is wrong."""

from __future__ import annotations

import os
import resource
from typing import NoReturn

import pytest
import torch.distributed.run

from data_prep.base.errors import UsageError
from launch.ranks import run_torchrun
from tests.support import fork_server
from tests.support.error_codes import coded
from trainer.distributed import process_group
from trainer.distributed import rank_environment as environment
from trainer.distributed.rank_environment import RANK_VARIABLES, check_rank_environment, raise_descriptor_limit

GOOD = dict(zip(RANK_VARIABLES, ("0", "2", "0", "127.0.0.1", "29500"), strict=True))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK_VARIABLES, "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)


def set_variables(monkeypatch: pytest.MonkeyPatch, **changed: str) -> None:
    for name, value in (GOOD | changed).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, value)
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
            for value in ("", " ", "abc", "-1", "1.0", "\u00b2", "9" * 5_000)
        ),
        ("WORLD_SIZE", "0"),
        ("RANK", "2"),
        ("MASTER_ADDR", ""),
        ("MASTER_ADDR", " "),
        ("MASTER_PORT", ""),
        ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"),
    ],
)
def test_a_variable_that_is_wrong_is_named_with_its_value(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, **{name: value})
    with pytest.raises(UsageError, check=coded("invalid-rank-environment")) as raised:
        check_rank_environment()
    assert f"{name}={value[:40]}" in raised.value.problem
    numbers = environment.rank(), environment.world_size(), environment.local_rank()
    assert all(isinstance(number, int) for number in numbers), "the reporter of the error can still speak"


def test_a_launcher_and_none_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    check_rank_environment()
    assert (environment.rank(), environment.world_size(), environment.local_world_size()) == (0, 1, None)
    set_variables(monkeypatch, RANK="1", LOCAL_RANK="1")
    check_rank_environment()
    assert (environment.rank(), environment.world_size(), environment.local_rank()) == (1, 2, 1)


@pytest.mark.parametrize(
    ("variables", "number"),
    [({"LOCAL_SIZE": "4"}, 4), ({"LOCAL_WORLD_SIZE": "", "LOCAL_SIZE": "abc"}, None), ({"LOCAL_WORLD_SIZE": "8"}, 8)],
)
def test_the_ranks_of_a_host_are_known_where_a_launcher_counts_them(
    variables: dict[str, str], number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert environment.local_world_size() == number


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize("variable", ["RANK=", "RANK=abc", "WORLD_SIZE=", "LOCAL_RANK="])
@pytest.mark.parametrize("start", ["launch/pretrain.py", "clozeworks"])
def test_a_start_with_a_wrong_variable_is_one_paragraph(variable: str, start: str, tmp_path) -> None:
    name, _, value = variable.partition("=")
    words = ["-m", "launch", "pretrain"] if start == "clozeworks" else [str(fork_server.ROOT / start)]
    variables = {key: each for key, each in os.environ.items() if key not in RANK_VARIABLES}
    variables |= GOOD | {"WORLD_SIZE": "1", name: value, "PYTHONPATH": str(fork_server.ROOT)}
    done = fork_server.run([*words, "--config", "tiny_cpu"], tmp_path, variables)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("error: ") == 1 and "[invalid-rank-environment]" in done.stderr


def test_ranks_and_their_starter_may_open_what_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    set_variables(monkeypatch)
    monkeypatch.setattr(torch.distributed.run, "main", lambda arguments: None)
    for start in (process_group._complete_environment, lambda: run_torchrun([])):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        try:
            start()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_system_that_grants_less_than_its_hard_limit_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_descriptor_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[1]
