"""Versions side by side, the data that they saw, and an alias that moves past its gate.

Promotions at once are judged one after another, and one that died holds up nobody for long.
"""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from data_prep.base.errors import UsageError, UserError
from tests.support import fork_server
from tests.support.error_codes import coded
from trainer.config.comparability import facts_of_metric
from trainer.config.promotion import parse_conditions
from trainer.registry import model_versions as module
from trainer.registry.model_versions import (
    NotPromoted,
    list_model_versions,
    lock_prefix,
    promote,
    promotion_lock,
    trained_on,
    version_lines,
)
from trainer.registry.registration import lineage_tags
from trainer.tracking.mlflow_server import connect

FIRST, SECOND, OTHER = "a" * 64, "b" * 64, "c" * 64
FACTS = {
    f"clozeworks.evaluation.{name}": value
    for name, value in {
        "mlm_probability": "0.15",
        "mask_unit": "token",
        "seed": "0",
        "sequence_length": "128",
        "rows": "40",
        "valid_split": "a" * 64,
        "tokenizer": "b" * 64,
        "words": "c" * 64,
    }.items()
}
BETTER = parse_conditions("valid/mlm_loss < champion")


@pytest.fixture
def store(database: str, tmp_path: Path) -> str:
    """Three versions: one of the first data, one of data that grew from it, one of other data."""
    client = connect(database)
    client.create_registered_model("birds")
    for loss, digest, lineage in ((2.5, FIRST, FIRST), (2.0, SECOND, f"{SECOND},{FIRST}"), (3.0, OTHER, OTHER)):
        tags = {
            "clozeworks.scores.valid/mlm_loss": str(loss),
            "clozeworks.data_digests": f'{{"shards": "{digest}"}}',
            "clozeworks.data_lineage": lineage,
            "clozeworks.tokens_seen": "1234567",
            "clozeworks.git_revision": "0123456789abcdef-dirty",
            **FACTS,
        }
        client.create_model_version("birds", f"file://{tmp_path}/nothing", tags=tags)
    return database


def aliases(store: str) -> dict[str, int]:
    return {alias: int(number) for alias, number in connect(store).get_registered_model("birds").aliases.items()}


@pytest.mark.long
def test_an_alias_moves_past_its_gate_and_the_one_before_is_kept(store: str) -> None:
    promote("birds", "1", "champion", BETTER, store)
    assert aliases(store) == {"champion": 1}
    with pytest.raises(NotPromoted, match="mlm_loss 3 is not < 2.5 of champion", check=coded("condition-not-met")):
        promote("birds", "3", "champion", BETTER, store)
    assert aliases(store) == {"champion": 1}
    promote("birds", "2", "champion", BETTER, store)
    promote("birds", "2", "champion", (), store)  # once more: the one before is still the one before
    assert aliases(store) == {"champion": 2, "previous": 1}
    promote("birds", "1", "champion", (), store)  # back again
    assert aliases(store) == {"champion": 1, "previous": 2}


@pytest.mark.long
def test_a_follower_moves_an_alias_to_no_earlier_step_of_the_same_run(store: str) -> None:
    for version, run, step in (("1", "r1", "9"), ("2", "r1", "10"), ("3", "r2", "5")):
        for name, value in (("mlflow_run_id", run), ("step", step)):
            connect(store).set_model_version_tag("birds", version, f"clozeworks.{name}", value)
    promote("birds", "1", "champion", (), store, forward=True)
    promote("birds", "2", "champion", (), store, forward=True)
    with pytest.raises(NotPromoted, check=coded("later-step-promoted"), match="version 2 of a later step"):
        promote("birds", "1", "champion", (), store, forward=True)
    assert aliases(store) == {"champion": 2, "previous": 1}
    promote("birds", "3", "champion", (), store, forward=True)  # of another run
    promote("birds", "1", "champion", (), store, forward=True)
    assert aliases(store) == {"champion": 1, "previous": 3}


def test_the_models_description_is_that_of_the_promoted_version(database: str, tmp_path: Path) -> None:
    client = connect(database)
    client.create_registered_model("birds", description="of the newest")
    for card in ("the first card", None):
        client.create_model_version("birds", f"file://{tmp_path}/nothing", description=card)
    promote("birds", "1", "champion", (), database)
    assert client.get_registered_model("birds").description == "the first card"
    promote("birds", "2", "champion", (), database)  # of somebody else's, without a card
    assert client.get_registered_model("birds").description == "the first card"


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"mlm_probability": "0.3"}, "evaluation.mlm_probability 0.3 and 0.15"),
        ({"mask_unit": "word"}, "evaluation.mask_unit word and token"),
        ({"seed": "1"}, "evaluation.seed 1 and 0"),
        ({"sequence_length": "64"}, "evaluation.sequence_length 64 and 128"),
        ({"rows": "4"}, "evaluation.rows 4 and 40"),
        ({"valid_split": "d" * 64}, "evaluation.valid_split dddddddddddd and aaaaaaaaaaaa"),
        ({"tokenizer": "d" * 64}, "evaluation.tokenizer dddddddddddd and bbbbbbbbbbbb"),
        ({"seed": None}, "evaluation.seed not recorded and 0"),
        (dict.fromkeys(name.rpartition(".")[2] for name in FACTS), "how the former was measured is not recorded"),
    ],
)
def test_versions_that_were_evaluated_differently_are_not_compared(
    store: str, changed: dict[str, str | None], named: str
) -> None:
    promote("birds", "1", "champion", BETTER, store)
    for name, value in changed.items():
        tag = f"clozeworks.evaluation.{name}"
        if value is None:
            connect(store).delete_model_version_tag("birds", "2", tag)
        else:
            connect(store).set_model_version_tag("birds", "2", tag, value)
    with pytest.raises(NotPromoted, check=coded("evaluations-differ")) as refused:
        promote("birds", "2", "champion", BETTER, store)
    assert named in refused.value.problem and refused.value.exit_status == 3
    assert aliases(store) == {"champion": 1}, "no alias moves"
    decision = promote("birds", "2", "champion", BETTER, store, allow_different_evaluation=True)
    assert aliases(store)["champion"] == 2 and named in " ".join(decision.reasons)


@pytest.mark.long
def test_bits_per_byte_of_the_same_words_compare_across_tokenizers(store: str) -> None:
    client, better = connect(store), parse_conditions("valid/word_bits_per_byte < champion")
    for version, bits in (("1", "2.5"), ("2", "2.0"), ("3", "1.5")):
        client.set_model_version_tag("birds", version, "clozeworks.scores.valid/word_bits_per_byte", bits)
    client.set_model_version_tag("birds", "2", "clozeworks.evaluation.tokenizer", "d" * 64)
    client.set_model_version_tag("birds", "2", "clozeworks.evaluation.valid_split", "d" * 64)
    client.set_model_version_tag("birds", "3", "clozeworks.evaluation.words", "d" * 64)
    promote("birds", "1", "champion", better, store)
    promote("birds", "2", "champion", better, store)
    with pytest.raises(NotPromoted, match="evaluation.words", check=coded("evaluations-differ")):
        promote("birds", "3", "champion", better, store)


@pytest.mark.long
def test_a_number_is_compared_with_any_version(store: str) -> None:
    connect(store).delete_model_version_tag("birds", "2", "clozeworks.evaluation.seed")
    promote("birds", "2", "champion", parse_conditions("valid/mlm_loss < 2.2"), store)
    promote("birds", "2", "champion", parse_conditions("valid/mlm_loss <= champion"), store)  # with itself
    assert aliases(store) == {"champion": 2}


@pytest.mark.long
def test_a_slip_in_the_alias_of_a_condition_moves_nothing(store: str) -> None:
    promote("birds", "2", "champion", (), store)
    with pytest.raises(NotPromoted, match="champio", check=coded("condition-not-met")):
        promote("birds", "3", "champion", parse_conditions("valid/mlm_loss < champio"), store)
    assert aliases(store) == {"champion": 2}


def test_a_missing_version_or_model_is_reported(store: str) -> None:
    with pytest.raises(UserError, match="9, only 1, 2, 3", check=coded("unknown-model-version")):
        promote("birds", "9", "champion", (), store)
    with pytest.raises(UserError, match="fish", check=coded("unknown-model")):
        list_model_versions("fish", store)
    with pytest.raises(UsageError, match="previous"):
        promote("birds", "1", "previous", (), store)


def test_versions_are_found_by_their_data_and_by_what_it_grew_from(store: str) -> None:
    versions = list_model_versions("birds", store)
    assert [each.version for each in trained_on(versions, FIRST)] == [1, 2]
    assert [each.version for each in trained_on(versions, SECOND[:12])] == [2]
    assert trained_on(versions, "d" * 64) == []
    with pytest.raises(UsageError, check=coded("digest-too-short")):
        trained_on(versions, "aaa")


def test_no_digest_of_a_long_lineage_is_left_out(database: str, tmp_path: Path) -> None:
    lineage = [f"{number:064x}" for number in range(200)]
    client = connect(database)
    client.create_registered_model("birds")
    client.create_model_version("birds", f"file://{tmp_path}/nothing", tags=lineage_tags(lineage))
    versions = list_model_versions("birds", database)
    assert sorted(versions[0].data_lineage) == lineage
    assert all(trained_on(versions, digest) == versions for digest in (lineage[0], lineage[76], lineage[-1]))


def test_without_a_name_all_registered_models_are_searched_and_named(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(store)
    client.create_registered_model("moods")
    client.create_model_version("moods", f"file://{tmp_path}/nothing", tags={"clozeworks.data_lineage": FIRST})
    for search in ("search_registered_models", "search_model_versions"):  # a page an answer
        short = partialmethod(getattr(MlflowClient, search), max_results=1)
        monkeypatch.setattr(MlflowClient, search, short)
    promote("birds", "2", "champion", (), store)
    versions = list_model_versions(None, store)
    assert [(each.name, each.version) for each in versions] == [("birds", 1), ("birds", 2), ("birds", 3), ("moods", 1)]
    lines = list(version_lines(trained_on(versions, FIRST), with_names=True))
    assert lines[0].split()[:3] == ["model", "version", "aliases"]
    assert [line.split()[:3] for line in lines[1:]] == [
        ["birds", "1", "-"],
        ["birds", "2", "champion"],
        ["moods", "1", "-"],
    ]


def test_the_table_shows_what_versions_are_compared_by(store: str) -> None:
    promote("birds", "2", "champion", (), store)
    lines = list(version_lines(list_model_versions("birds", store)))
    assert len(lines) == 4 and lines[0].split()[:2] == ["version", "aliases"]
    cells: list[Any] = lines[2].split()
    assert cells[:2] == ["2", "champion"] and "1,234,567" in cells and "2.0000" in cells
    assert SECOND[:12] in cells and "0123456789-dirty" in cells


@pytest.mark.long
def test_the_table_of_fitted_models_shows_their_scores(database: str, tmp_path: Path) -> None:
    client = connect(database)
    client.create_registered_model("moods")
    for accuracy in (0.8, 0.9):
        tags = {"clozeworks.scores.test/accuracy": str(accuracy), "clozeworks.scores.test/mcc": "0.5"}
        tags |= {"clozeworks.evaluation.task": "classification", "clozeworks.evaluation.examples.test": "e" * 64}
        client.create_model_version("moods", f"file://{tmp_path}/nothing", tags=tags)
    lines = list(version_lines(list_model_versions("moods", database)))
    assert "test/accuracy  test/mcc" in lines[0] and "0.9000" in lines[2].split() and "0.8000" in lines[1].split()
    promote("moods", "1", "champion", (), database)
    better = parse_conditions("test/accuracy > champion")
    client.set_model_version_tag("moods", "2", "clozeworks.evaluation.examples.test", "f" * 64)
    with pytest.raises(NotPromoted, match="evaluation.examples.test", check=coded("evaluations-differ")):
        promote("moods", "2", "champion", better, database)
    client.set_model_version_tag("moods", "2", "clozeworks.evaluation.examples.test", "e" * 64)
    promote("moods", "2", "champion", better, database)
    assert client.get_model_version_by_alias("moods", "champion").version == 2


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
