"""Promotions at once are judged one after another, and one that died holds up nobody for long."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.support import fork_server
from trainer.config.comparability import facts_of_metric
from trainer.registry import model_versions as module
from trainer.registry.model_versions import lock_prefix, promotion_lock
from trainer.tracking.mlflow_server import connect

REPOSITORY = Path(__file__).resolve().parents[3]
PROMOTION = """
import sys
from trainer.registry import model_versions
from trainer.config.promotion import judge, parse_conditions
from trainer.tracking.mlflow_server import connect

version, uri = sys.argv[1:]

def judge_and_wait(*values):
    decision = judge(*values)
    print("judged", flush=True)
    sys.stdin.readline()
    return decision

def tell_and_wait(*values, wait=model_versions._wait):
    print("held up", flush=True)
    wait(*values)

model_versions.judge, model_versions._wait = judge_and_wait, tell_and_wait
connect(uri).get_registered_model("birds")  # which imports all that a promotion needs
print("ready", flush=True)
sys.stdin.readline()
model_versions.promote("birds", version, "champion", parse_conditions("valid/mlm_loss < champion"), uri)
"""


def promotion(version: int, uri: str, folder: Path) -> subprocess.Popen[str]:
    """A process that says when it is ready, when another holds it up and when it has judged, and waits for `go`."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    command = [str(fork_server.stand_in(folder)), "-c", PROMOTION, str(version), uri]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None and process.stderr is not None
    return process.stdout.readline().strip() or process.stderr.read()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.long
@pytest.mark.spawn
def test_the_better_of_two_promotions_at_once_stays(database: str, tmp_path: Path) -> None:
    client = connect(database)
    client.create_registered_model("birds")
    for loss in (3.0, 2.0, 2.5):
        tags = {"clozeworks.scores.valid/mlm_loss": str(loss)}
        tags |= {f"clozeworks.evaluation.{name}": "same" for name in facts_of_metric("valid/mlm_loss")}
        client.create_model_version("birds", f"file://{tmp_path}/nothing", tags=tags)
    client.set_registered_model_alias("birds", "champion", "1")
    worse, better = promotion(3, database, tmp_path), promotion(2, database, tmp_path)
    assert (next_line(worse), next_line(better)) == ("ready", "ready")
    go(worse)
    assert next_line(worse) == "judged"
    go(better)  # in the time between the other's decision and its move
    go(better)
    if next_line(better) != "held up":  # then it ends, and the other moves the alias after it
        better.wait(120)
    go(worse)
    assert (worse.wait(120), better.wait(120)) == (0, 0), (worse.communicate(), better.communicate())
    aliases = {alias: int(number) for alias, number in client.get_registered_model("birds").aliases.items()}
    assert aliases == {"champion": 2, "previous": 3}
    assert [model.name for model in client.search_registered_models()] == ["birds"]


def tags_of(client: MlflowClient) -> list[str]:
    return list(client.get_registered_model("birds").tags)


@pytest.mark.long
def test_a_promotion_at_work_is_a_tag_of_its_model_and_no_other_model(database: str) -> None:
    client = connect(database)
    client.create_registered_model("birds", tags={"of": "the user"})
    with pytest.raises(ZeroDivisionError), promotion_lock(client, "birds", "a" * 255):
        (own,) = [tag for tag in tags_of(client) if tag.startswith(lock_prefix("a" * 255))]
        assert sorted(tags_of(client)) == sorted(["of", own])
        assert [model.name for model in client.search_registered_models()] == ["birds"]
        raise ZeroDivisionError
    assert tags_of(client) == ["of"]


def test_a_lock_whose_holder_died_is_taken_away(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect(database)
    client.create_registered_model("birds")
    client.set_registered_model_tag("birds", f"{lock_prefix('champion')}of-one-that-was-killed", "")
    monkeypatch.setattr(module, "STALE_SECONDS", 0.5)
    began_at = time.monotonic()
    with promotion_lock(client, "birds", "champion"):
        assert 0.5 <= time.monotonic() - began_at < 30
        with promotion_lock(client, "birds", "other"):  # another alias is another lock
            assert len(tags_of(client)) == 2
    assert tags_of(client) == []


def test_one_that_was_taken_for_dead_leaves_the_lock_of_the_next(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(database)
    client.create_registered_model("birds")
    monkeypatch.setattr(module, "STALE_SECONDS", 0.5)
    slow, next_one = promotion_lock(client, "birds", "champion"), promotion_lock(client, "birds", "champion")
    slow.__enter__()
    (of_slow,) = tags_of(client)
    next_one.__enter__()
    (of_next,) = tags_of(client)
    slow.__exit__(None, None, None)
    assert tags_of(client) == [of_next] and of_next != of_slow
    next_one.__exit__(None, None, None)
    assert tags_of(client) == []


@pytest.mark.long
def test_many_at_once_are_in_the_block_one_after_another(database: str) -> None:
    connect(database).create_registered_model("birds")
    inside: list[int] = []
    most: list[int] = []

    def promote(number: int) -> None:
        with promotion_lock(connect(database), "birds", "champion"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.05)
            inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(promote, range(4)))
    assert most == [1] * 4 and tags_of(connect(database)) == []
