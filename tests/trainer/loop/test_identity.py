"""What a rank runs, compared by three real ranks that differ in one thing at a time."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support.living_data_sets import records_of, remove
from tests.support.settings import names_of
from tests.support.toy_processes import finish, start_ranks
from trainer.checkpoint.data_version import open_data
from trainer.config.run_config import RunConfig
from trainer.loop.identity import LIBRARIES, PER_HOST, facts_of, may_differ

SCRIPT = Path(__file__).with_name("toy_identity.py")
REPOSITORY = SCRIPT.parents[3]
GOLDEN = REPOSITORY / "tests" / "golden" / "v1" / "shards"
HOST = socket.gethostname()
CONFIG = """\
output_dir: run
model: {vocab_size: 800, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, intermediate_size: 64,
        max_position_embeddings: 64}
data: {shards: SHARDS, sequence_length: 64, num_workers: 0}
training: {max_steps: 6, seed: 7, global_batch_tokens: 1024, micro_batch_tokens: 256, precision: fp32}
optimizer: {learning_rate: 2.0e-3}
"""

DIFFERENT: dict[str, tuple[dict[str, Any], str, str]] = {
    "seed": ({"overrides": ["training.seed=8"]}, "training.seed is 7", "8"),
    "learning rate": ({"overrides": ["optimizer.learning_rate=1e-3"]}, "optimizer.learning_rate is 0.002", "0.001"),
    "global batch": (
        {"overrides": ["training.global_batch_tokens=2048"]},
        "training.global_batch_tokens is 1024",
        "2048",
    ),
    "steps": ({"overrides": ["training.max_steps=7"]}, 'training.duration is "6 steps"', '"7 steps"'),
    "stage": ({"overrides": ["zero.stage=2"]}, "zero.stage is 1", "2"),
    "precision": ({"overrides": ["training.precision=bf16"]}, 'training.precision is "fp32"', '"bf16"'),
    "fp16": ({"overrides": ["training.precision=fp16"]}, 'training.precision is "fp32"', '"fp16"'),
    "output_dir": ({"overrides": ["output_dir=runs/two"]}, 'output_dir is "run"', '"runs/two"'),
    "stages": (
        {"all": ["training.stages=[{steps: 6, sequence_length: 64, micro_batch_tokens: 256, global_batch_tokens: 512}]"]
         + [f"training.{name}=null" for name in ("global_batch_tokens", "micro_batch_tokens")],
         "overrides": ["training.stages=[{steps: 9, sequence_length: 64, micro_batch_tokens: 256, "
                       "global_batch_tokens: 512}]"]},
        'training.stages.0.duration is "6 steps"',
        '"9 steps"',
    ),
    "deepspeed": ({"overrides": ["deepspeed.prescale_gradients=true"]}, "deepspeed is null", "not set"),
    "a contradiction on one host": (
        {"overrides": ["deepspeed.gradient_clipping=3.0"]},
        "deepspeed.gradient_clipping is not set",
        "3.0",
    ),
    "weight of a component": (
        {"all": ["data.shards=[{url: SHARDS, weight: 1}, {url: NEWER, weight: 1}]"],
         "overrides": ["data.shards=[{url: SHARDS, weight: 1}, {url: NEWER, weight: 3}]"]},
        "data.shards.1.weight is 1.0",
        "3.0",
    ),
    "data set": ({"overrides": ["data.shards=NEWER"]}, "the manifest of data.shards.0 is ", "(NEWER)"),
    "second component": (
        {"all": ["data.shards=[{url: SHARDS}, {url: NEWER}]"],
         "overrides": ["data.shards=[{url: SHARDS}, {url: SHARDS}]"]},
        "the manifest of data.shards.1 is ",
        "(SHARDS)",
    ),
    "tokenizer": ({"overrides": ["data.shards=GOLDEN"]}, "the tokenizer's fingerprint is ", ""),
    "torch": ({"versions": {"torch": "1.0"}}, "version of torch is ", '"1.0"'),
    "deepspeed's version": ({"versions": {"deepspeed": None}}, "version of deepspeed is ", "null"),
    "--allow-change": ({"flags": {"allow_change": True}}, "--allow-change is false", "true"),
    "--resume-from": ({"flags": {"step": 4}}, "--resume-from is null", "4"),
    "--skip-samples": (
        {"flags": {"step": 4, "skip": [[3, 9]], "epoch": 1}}, "--skip-samples is []", '["3:9"]'
    ),
}  # fmt: skip
"""What the ranks but the first do otherwise, what the message says of it, and its end there."""
OTHER: dict[str, dict[str, Any]] = {
    "nothing": {},
    "per host": {
        "overrides": ["data.num_workers=3", "data.cache_dir=elsewhere", "data.cache_bytes=77", "data.shards=COPY"]
        + ["storage_options={'s3://x': {key: hunter2}}", "logging.gpu_hour_price=3"]
    },
    "passwords": {
        "all": ["tracking.uri=http://me:hunter2@host/"],
        "overrides": ["tracking.uri=http://me:hunter3@host/", "storage_options={'s3://x': {secret: hunter3}}"],
    },
    "a secret of the environment": {
        "all": ["tracking.run_name=of-hunter2-and-more"],
        "overrides": ["tracking.run_name=of-hunter3-and-more"],
        "environment": {"SOME_PASSWORD": "hunter3", "OTHER_PASSWORD": "http://me:hunter2@host"},
    },
    "data that one host lacks": {"overrides": ["data.shards=NOWHERE"]},
    "data that no host has": {"all": ["data.shards=NOWHERE"]},
    "a file that the first rank cannot write": {
        "all": ["deepspeed={flops_profiler: {enabled: true, output_file: /proc/logs}}"]
    },
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, small_shards: Path) -> dict[str, str]:
    """The data sets of the cases by the word that stands for them."""
    folder = tmp_path_factory.mktemp("identity")
    newer = Path(shutil.copytree(small_shards, folder / "newer"))
    record, *_ = records_of(newer / "train-000000.tar")
    remove(newer, ids=record.document_ids[:3])
    copy = shutil.copytree(small_shards, folder / "copy")
    return {
        "SHARDS": str(small_shards),
        "NEWER": str(newer),
        "COPY": str(copy),
        "GOLDEN": str(GOLDEN),
        "NOWHERE": str(folder / "nowhere"),
    }


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, places: dict[str, str]) -> list[dict[str, list[Any]]]:
    """Of each rank, what became of every case: one start for all of them."""
    folder = tmp_path_factory.mktemp("outcomes")
    cases = {name: case for name, (case, _, _) in DIFFERENT.items()} | OTHER
    text = json.dumps({"config": str(folder / "run.yaml"), "cases": cases})
    (folder / "run.yaml").write_text(filled_in(CONFIG, places))
    (folder / "cases.json").write_text(filled_in(text, places))
    for status, stdout, stderr in finish(start_ranks([str(SCRIPT), str(folder / "cases.json")], 3), timeout=500):
        assert status == 0, stdout + stderr
    return [json.loads((folder / f"outcomes-{rank}.json").read_text()) for rank in range(3)]


def filled_in(text: str, places: dict[str, str]) -> str:
    for word, place in places.items():
        text = text.replace(word, place)
    return text


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize("name", DIFFERENT)
def test_ranks_that_differ_in_one_thing_are_all_refused_with_both_values(name, outcomes, places):
    _, said, value = DIFFERENT[name]
    (kind, text, status, _) = outcomes[0][name]
    assert kind == "RanksDiffer" and status == 2 and [each[name][:3] for each in outcomes] == [[kind, text, 2]] * 3
    assert said in text and text.startswith("the ranks do not run the same job: ")
    mine = text[text.index(said) :].partition("; ")[0].partition(". Fix")[0]
    assert f" on rank 0 ({HOST}) and " in mine and mine.endswith(
        f"{filled_in(value, places)} on rank 1 ({HOST}) and 1 more rank"
    )


@pytest.mark.spawn
def test_ranks_that_run_the_same_continue(outcomes):
    assert [each["nothing"] for each in outcomes] == [["", "", 0, []]] * 3


@pytest.mark.spawn
def test_settings_of_a_host_are_a_warning_of_the_first_rank_and_data_may_lie_elsewhere(outcomes):
    (*went_on, (warning,)), *others = (each["per host"] for each in outcomes)
    assert went_on == ["", "", 0] and others == [["", "", 0, []]] * 2
    for name in ("data.num_workers is 0", "data.cache_dir is null", "data.cache_bytes is", "data.shards.0.url is"):
        assert name in warning
    assert "storage_options" in warning and "hunter2" not in warning


@pytest.mark.spawn
def test_passwords_that_differ_are_no_difference_and_in_no_message(outcomes):
    assert [each["passwords"][:3] for each in outcomes] == [["", "", 0]] * 3
    assert "hunter" not in json.dumps([each["passwords"] for each in outcomes])
    (kind, text, _, _) = outcomes[1]["a secret of the environment"]
    assert kind == "RanksDiffer" and "tracking.run_name is" in text and "hunter" not in text
    assert [each["a secret of the environment"][1] for each in outcomes] == [text] * 3


@pytest.mark.spawn
def test_a_failure_of_one_host_ends_all_at_once_and_names_it(outcomes, places):
    kind, text, status, _ = outcomes[0]["data that one host lacks"]
    assert (kind, status) == ("RankCannotRun", 2)
    assert text.startswith(f"rank 1 ({HOST}) and 1 more rank: data.shards={places['NOWHERE']} does not exist")
    assert [each["data that one host lacks"][1] for each in outcomes] == [text] * 3
    kind, text, status, _ = outcomes[0]["data that no host has"]
    assert (kind, status) == ("UsageError", 2) and places["NOWHERE"] in text


@pytest.mark.spawn
def test_a_failed_write_of_the_first_rank_ends_all(outcomes):
    (found, *others) = (each["a file that the first rank cannot write"] for each in outcomes)
    assert [found[0], found[2]] == ["RankCannotRun", 2] and others == [found] * 2
    assert found[1].startswith(f"rank 0 ({HOST}): ") and "flops_profiler.output_file='/proc/logs' cannot" in found[1]


def test_every_setting_that_may_differ_is_one_of_the_schema_and_has_a_reason():
    assert set(PER_HOST) <= set(names_of(RunConfig)) and all(PER_HOST.values())


@pytest.mark.parametrize(
    ("name", "may"),
    [
        ("data.shards.0.url", True),
        ("data.shards.12.weight", False),
        ("storage_options.s3://shards.profile", True),
        ("data.cache_dir", True),
        ("data.cache_directory", False),
        ("training.seed", False),
        ("output_dir", False),
    ],
)
def test_names_of_settings_are_looked_up_without_places_in_lists(name, may):
    assert may_differ(name) is may


def test_torch_and_deepspeed_must_have_one_version():
    assert {"torch", "deepspeed"} <= set(LIBRARIES)


def test_the_data_of_every_stage_is_compared_and_may_lie_elsewhere(small_shards: Path, tmp_path: Path) -> None:
    shutil.copytree(small_shards, tmp_path / "copy")
    stages = [{"steps": 1}, {"steps": 1, "data": {"shards": str(tmp_path / "copy")}}]
    sizes = {"micro_batch_tokens": 64, "global_batch_tokens": 64}
    values = {"output_dir": "x", "data": {"shards": str(small_shards), "sequence_length": 64}}
    config = RunConfig.model_validate(values | {"training": {"stages": stages, **sizes}})
    facts = facts_of(config, False, None, open_data(config))
    assert {f"the manifest of data.shards.{number}" for number in (0, 1)} <= facts.equal.keys()
    assert "training.stages.1.data.shards.0.weight" in facts.equal
    assert "training.stages.1.data.shards.0.url" in facts.per_host
