"""A soak: the whole way for half an hour with a fault each minute, and in the end nothing that a run without has not.

    bash tests/run.sh -m slow tests/system/test_soak.py

CLOZEWORKS_SOAK_MINUTES   how long (default 30); the round that is on its way is ended
CLOZEWORKS_SOAK_SECONDS   between two faults (default 60)
CLOZEWORKS_SOAK_SEED      of the faults and their moments (default: by chance; the report tells it)
CLOZEWORKS_SOAK_REPORT    the report's file, JSON, with the table beside it as .txt; written from the first fault on
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from data_prep import open_dataset
from data_prep.storage import storage
from tests.soak import ALIAS, MAX_STEPS, MODEL_NAME, Round, Soak
from tests.support import plain_ranks
from tests.support.data_prep_command import files_of
from tests.support.mlflow_servers import Server
from tests.support.soak_faults import FullDisk
from tests.support.soak_rank_faults import FAULTS
from tests.support.soak_report import SoakReport
from tests.system.conftest import Training
from trainer.inference.pulled_model import pull
from trainer.registry.model_versions import list_model_versions
from trainer.tracking.mlflow_server import connect
from trainer.tracking.sync import sync

MINUTES = float(os.environ.get("CLOZEWORKS_SOAK_MINUTES", "30"))
FAULT_SECONDS = float(os.environ.get("CLOZEWORKS_SOAK_SECONDS", "60"))
DISK_BYTES = 48 << 20
"""A round needs about 8 MB of it."""
BITWISE = ("train/loss", "train/mlm_loss", "train/pair_loss", "train/grad_norm", "train/learning_rate", "valid/")

pytestmark = [pytest.mark.slow, pytest.mark.spawn, pytest.mark.timeout(MINUTES * 120 + 1800)]


@dataclass(frozen=True)
class Left:
    """What a round leaves that has to be the same in every one."""

    manifest_digest: str
    shards: dict[str, bytes]
    curve: dict[str, dict[int, float]]
    weights: dict[str, str]
    """sha256 of both ranks' files of the last checkpoint: weights and optimizer state."""


def left_by(training: Training) -> Left:
    shards = files_of(training.shards)
    for shard in open_dataset(training.shards).manifest.shards:
        assert storage.sha256_of(training.shards / shard.name) == shard.sha256
    digest = open_dataset(training.shards).manifest.digest
    return Left(digest, shards, curve_on_disk(training), plain_ranks.final_tensors(training))


def curve_on_disk(training: Training) -> dict[str, dict[int, float]]:
    """Every value by key and step; each was logged once."""
    curve: dict[str, dict[int, float]] = {}
    for line in (training.output_dir / "tracking" / "points.jsonl").read_text().splitlines():
        point = json.loads(line)
        for key, value in point["m"].items():
            if key.startswith(BITWISE):
                assert point["s"] not in curve.setdefault(key, {}), f"{key} of step {point['s']} was logged twice"
                curve[key][point["s"]] = value
    return curve


def curve_on_server(uri: str, run_id: str, keys: list[str]) -> dict[str, dict[int, float]]:
    client = connect(uri)
    curve = {}
    for key in keys:
        points = client.get_metric_history(run_id, key)
        curve[key] = {point.step: point.value for point in points}
        assert len(points) == len(curve[key]), f"{key} has a step twice"
    return curve


@pytest.fixture
def soak(tmp_path: Path, small_corpus: Path, small_tokenizer: Path, server: Server) -> Iterator[Soak]:
    seed = int(os.environ.get("CLOZEWORKS_SOAK_SEED") or random.SystemRandom().randrange(1 << 32))
    path = Path(os.environ.get("CLOZEWORKS_SOAK_REPORT") or tmp_path / "soak.json")
    report = SoakReport(path.absolute(), seed, MINUTES)
    print(f"\nsoak: CLOZEWORKS_SOAK_SEED={seed}, its report: {report.path}")
    disk, kinds = tmp_path / "disk", FAULTS
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    is_mounted = subprocess.run(mount, capture_output=True).returncode == 0
    if not is_mounted:
        kinds = tuple(kind for kind in FAULTS if not issubclass(kind, FullDisk))
        report.left_out = ["full disk: mounting a small file system is not permitted here"]
    try:
        yield Soak(
            tmp_path, disk, small_corpus, small_tokenizer, server, report, random.Random(seed), FAULT_SECONDS, kinds
        )
    finally:
        print(report.as_text())
        if is_mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)


def test_in_the_end_data_curve_and_registry_are_those_of_a_run_without_faults(soak: Soak) -> None:
    undisturbed = Round(soak, 0)
    undisturbed.go()
    expected = left_by(undisturbed.training)
    assert set(expected.curve["train/loss"]) == set(range(1, MAX_STEPS + 1))
    runs: list[str] = []

    def check(round_: Round) -> None:
        assert left_by(round_.training) == expected, f"round {round_.number}"
        (sent,) = sync(round_.training.output_dir, soak.server.uri, pytest.fail)  # what a server came back too late for
        assert sent.status == "FINISHED"
        assert curve_on_server(soak.server.uri, sent.run_id, list(expected.curve)) == expected.curve
        (bearer,) = [each for each in list_model_versions(MODEL_NAME, soak.server.uri) if ALIAS in each.aliases]
        assert bearer.run_id == sent.run_id, "the alias is this round's"
        runs.append(sent.run_id)

    soak.run_for(MINUTES, check)

    versions = list_model_versions(MODEL_NAME, soak.server.uri)
    assert len({version.run_id for version in versions}) == len(runs) + 1 <= len(versions)
    assert [version.aliases for version in versions[:-1]] == [()] * (len(versions) - 1)
    assert (versions[-1].aliases, versions[-1].run_id) == ((ALIAS,), runs[-1])
    weights = set()
    for version in versions:
        uri, folder = f"models:/{MODEL_NAME}/{version.version}", soak.folder / f"version-{version.version}"
        weights.add(storage.sha256_of(pull(uri, folder, soak.server.uri) / "model.safetensors"))
        shutil.rmtree(folder)
    assert len(weights) == 1, "every version is whole, and has the weights of the first, which nothing disturbed"
    soak.report.end = {
        "data": f"manifest {expected.manifest_digest[:12]} and all bytes of the shards are as without faults",
        "curve": f"{len(expected.curve)} metrics of {MAX_STEPS} steps, each once, and the weights are bitwise the same",
        "registry": f"{len(versions)} versions, all whole; {ALIAS} is version {versions[-1].version}, the last round's",
    }
    soak.report.write()
