"""Rows 48 and 67 of the fault list: names full of what a shell, a pattern or a URL reads, from text file to run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep import open_dataset
from tests.support import plain_ranks
from tests.support.data_prep_command import Command, files_of
from tests.support.s3_server import S3Bucket, make_client
from tests.system.conftest import REPOSITORY, Training
from trainer.tracking.mlflow_server import connect

STRANGE = "it's; touch broken & $(touch broken) `touch broken` | tee broken > broken %h -rf"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row="48",
    fault="shell metacharacters in the names of input, folders, experiment and run of a preparation and a training",
    required="passed as data: the names are what they are, and nothing of them is run",
)
def test_row_48_files_and_experiments_keep_their_names(
    small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    folder = tmp_path / STRANGE
    folder.mkdir()
    corpus, shards = folder / f"{STRANGE}.jsonl", folder / f"shards {STRANGE}"
    corpus.write_bytes(small_corpus.read_bytes())
    words = ["-m", "data_prep", "shards", "--input", str(corpus), "--tokenizer", str(small_tokenizer)]
    made = run(folder, *words, "--output", str(shards), "--workers", "2", "shards.min_shards=2")
    assert made.returncode == 0, made.stderr
    assert STRANGE in json.dumps(open_dataset(shards).manifest.model_dump(mode="json"), ensure_ascii=False)
    names = (f"tracking.experiment={STRANGE}", f"tracking.run_name={STRANGE}", "training.max_steps=6")
    training = Training(folder, shards, names)
    plain_ranks.run(training, 2)
    client = connect(training.tracking_uri)
    (tracked,) = client.search_runs([client.get_experiment_by_name(STRANGE).experiment_id])
    assert tracked.info.run_name == STRANGE
    assert list(plain_ranks.losses(training)) == [1, 2, 3, 4, 5, 6]
    assert not [path for path in tmp_path.rglob("*") if path.name == "broken"]


@pytest.mark.fault(
    row="48",
    fault="shell metacharacters and options of ssh as host names of a hostfile",
    required="refused with the line, and nothing of them is run",
)
@pytest.mark.parametrize("name", ["$(touch${IFS}broken)", "a;touch${IFS}broken", "-oProxyCommand=touch${IFS}broken"])
def test_row_48_a_host_name_is_no_command(name: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"one slots=1\n{name} slots=1\n")
    script = str(REPOSITORY / "launch" / "nodes.py")
    answer = run(tmp_path, script, "--hostfile", "hosts", "--", "--config", "tiny_cpu")
    assert answer.returncode == 2 and "line 2" in answer.stderr, answer.stderr
    assert answer.stderr.startswith("error: ") and "Traceback" not in answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hosts"]


SETTINGS = ["--workers", "1", "shards.min_shards=1", "shards.valid_fraction=0.1"]
SIBLINGS = ("sets/run1", "sets/run[1]x", "sets/{a,b} #1", "sets/run", "sets/a")


@pytest.mark.fault(
    row="67",
    fault="input and data set on S3 have names with [ ] { } # % and ::; the set is prepared, changed and purged",
    required="the same files as in a local folder; no object of a sibling is touched",
)
def test_row_67_a_data_set_in_a_store_never_touches_its_siblings(
    command: Command, small_corpus: Path, small_tokenizer: Path, tmp_path: Path, s3_bucket: S3Bucket
) -> None:
    name = "sets/run[1] {a,b}#1 100% x::y"
    for sibling in (*SIBLINGS, "sets/run1 a#1 100% x::y"):
        for file in ("manifest.json", "train-000000.tar", ".work/plan", ".lock"):
            put(s3_bucket, f"{sibling}/{file}", sibling.encode())
    put(s3_bucket, f"{name}.in/[1]{{a}}.jsonl", small_corpus.read_bytes())
    before = s3_bucket.objects()
    output, local = f"{s3_bucket.url}/{name}", tmp_path / name
    words = ("shards", "--tokenizer", small_tokenizer, *SETTINGS, "--input")
    assert command(*words, small_corpus, "--output", local) == 0, command.errors
    assert command(*words, f"{output}.in/*.jsonl", "--output", output) == 0, command.errors
    made = {key.removeprefix(f"{name}/"): data for key, data in s3_bucket.objects(f"{name}/").items()}
    local_files = files_of(local)
    assert made.keys() == local_files.keys()
    shards = [key for key in made if key.endswith(".tar")]
    assert shards and all(made[key] == local_files[key] for key in shards)
    (tmp_path / "documents.txt").write_text(f"{inspected_document(command, output)}\n")
    assert command("remove", output, "--documents", tmp_path / "documents.txt", "--purge") == 0, command.errors
    assert command("verify", output) == 0, command.errors
    assert command("verify", local) == 0, command.errors
    after = s3_bucket.objects()
    assert {key: after[key] for key in before} == before
    assert not [key for key in after if ".work" in key and key not in before]


def put(bucket: S3Bucket, key: str, data: bytes) -> None:
    make_client(bucket.endpoint).put_object(Bucket=bucket.name, Key=key, Body=data)


def inspected_document(command: Command, folder: object) -> str:
    """Return the id of a document of the train split."""
    assert command("inspect", folder, "--documents", "1") == 0, command.errors
    found = re.search(r"\b[0-9a-f]{16}\b", command.output)
    assert found, command.output
    return found.group()


@pytest.mark.fault(
    row="67", fault="an output on a store whose name is a pattern", required="refused before any work, nothing touched"
)
@pytest.mark.parametrize("name", ["*", "run?", "a*/run"])
def test_row_67_an_output_that_is_a_pattern_is_refused(
    name: str, command: Command, small_corpus: Path, small_tokenizer: Path, s3_bucket: S3Bucket
) -> None:
    put(s3_bucket, "run1/.work/unit", b"")
    for output in (f"{s3_bucket.url}/{name}", f"memory://sets/{name}"):
        inputs = ("--input", small_corpus, "--output", output)
        for words in (("shards", *inputs, "--tokenizer", small_tokenizer, *SETTINGS), ("tokenizer", *inputs)):
            assert command(*words) == 2 and "[pattern-in-output]" in command.errors
        assert command("remove", output, "--purge") != 0
    assert list(s3_bucket.objects()) == ["run1/.work/unit"]
