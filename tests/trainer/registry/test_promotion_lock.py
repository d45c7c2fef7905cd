"""Promotions at once are judged one after another, and one that died holds up nobody for long."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer.registry import promotion_lock as module
from trainer.registry.promotion_lock import lock_name, promotion_lock
from trainer.tracking.mlflow_server import connect

REPOSITORY = Path(__file__).resolve().parents[3]
SLOW_PROMOTION = """
import sys, time
from trainer.registry import versions
from trainer.registry.promotion import judge, parse_conditions

version, seconds, uri = sys.argv[1:]

def slow(*values):
    verdict = judge(*values)
    print("judged", flush=True)
    time.sleep(float(seconds))
    return verdict

versions.judge = slow
versions.promote("birds", version, "champion", parse_conditions("valid/mlm_loss < champion"), uri)
"""


def promotion(version: int, seconds: float, uri: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_PROMOTION, str(version), str(seconds), uri]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.mark.spawn
def test_the_better_of_two_promotions_at_once_stays(database: str, tmp_path: Path) -> None:
    client = connect(database)
    client.create_registered_model("birds")
    for loss in (3.0, 2.0, 2.5):
        tags = {"clozeworks.scores.valid/mlm_loss": str(loss)}
        client.create_model_version("birds", f"file://{tmp_path}/nothing", tags=tags)
    client.set_registered_model_alias("birds", "champion", "1")
    worse = promotion(3, 3.0, database)
    assert worse.stdout is not None and worse.stdout.readline() == "judged\n"
    better = promotion(2, 0.0, database)  # in the time between the other's verdict and its move
    assert (worse.wait(120), better.wait(120)) == (0, 0), (worse.communicate(), better.communicate())
    aliases = {alias: int(number) for alias, number in client.get_registered_model("birds").aliases.items()}
    assert aliases == {"champion": 2, "previous": 3}
    assert [model.name for model in client.search_registered_models()] == ["birds"]


def test_a_lock_whose_holder_died_is_taken_away(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = connect(database)
    client.create_registered_model(lock_name("birds", "champion"), description="of one that was killed")
    monkeypatch.setattr(module, "STALE_SECONDS", 0.5)
    began_at = time.monotonic()
    with promotion_lock(client, "birds", "champion"):
        assert 0.5 <= time.monotonic() - began_at < 30
        with promotion_lock(client, "birds", "other"):  # another alias is another lock
            assert len(client.search_registered_models()) == 2
    assert client.search_registered_models() == []


def test_one_that_was_taken_for_dead_leaves_the_lock_of_the_next(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(database)
    monkeypatch.setattr(module, "STALE_SECONDS", 0.5)
    slow, next_one = promotion_lock(client, "birds", "champion"), promotion_lock(client, "birds", "champion")
    slow.__enter__()
    next_one.__enter__()
    slow.__exit__(None, None, None)
    assert [model.name for model in client.search_registered_models()] == [lock_name("birds", "champion")]
    next_one.__exit__(None, None, None)
    assert client.search_registered_models() == []


def test_a_lock_is_gone_after_an_error_and_fits_mlflows_names(database: str) -> None:
    client, name = connect(database), "b" * 250
    with pytest.raises(ZeroDivisionError), promotion_lock(client, name, "a" * 255):
        assert [model.name for model in client.search_registered_models()] == [lock_name(name, "a" * 255)]
        raise ZeroDivisionError
    assert client.search_registered_models() == []
