"""Preparation into an object store: the bytes of a local run, whoever is killed, and one command at a time."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep import Tokenizer
from data_prep.base.errors import UserError
from data_prep.storage import storage
from tests.support.data_prep_command import files_of
from tests.support.error_codes import coded
from tests.support.preparations import NAMING_INPUTS, Planned, planned
from tests.support.s3_server import S3Bucket

REPOSITORY = Path(__file__).resolve().parents[2]
OVERRIDES = ["shards.min_shards=2", "shards.valid_fraction=0.1", "shards.unit_bytes=9000"]

pytestmark = pytest.mark.spawn


@pytest.fixture(scope="module")
def plan(small_corpus: Path, tokenizer: Tokenizer) -> Planned:
    return planned(small_corpus, tokenizer, *OVERRIDES)


@pytest.fixture(scope="module")
def local(plan: Planned, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run into a local folder."""
    folder = tmp_path_factory.mktemp("local")
    plan.make(folder)
    return {f"out/{name}": data for name, data in files_of(folder).items()}


@pytest.mark.long
def test_a_killed_run_goes_on_and_ends_with_the_objects_of_a_local_run(
    plan: Planned, small_corpus: Path, tokenizer: Tokenizer, local: dict[str, bytes], s3_bucket: S3Bucket
) -> None:
    output = f"{s3_bucket.url}/out"
    command = [sys.executable, "-m", "data_prep", "shards", "--input", str(small_corpus), "--output", output]
    command += ["--tokenizer", str(tokenizer.folder), "--workers", "1", *OVERRIDES]
    process = subprocess.Popen(command, cwd=REPOSITORY, start_new_session=True, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(finished := units(s3_bucket)) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert 2 <= len(finished) < len(plan.plan.units) and "out/manifest.json" not in s3_bucket.objects()
    finished = units(s3_bucket)
    again = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    sizes = {f"map-{unit.name}.sections": unit.bytes for unit in plan.plan.units}
    bytes_before = sum(sizes[Path(name).name] for name in finished)
    assert f", {bytes_before / 1e6:.1f} before" in again.stderr
    assert s3_bucket.objects() == local and not s3_bucket.unfinished_uploads()


@pytest.mark.long
def test_texts_in_the_store_are_those_of_a_local_folder(
    small_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, s3_bucket: S3Bucket
) -> None:
    planned(small_corpus, tokenizer, *OVERRIDES, f"text_output={tmp_path / 'texts'}").make(tmp_path / "out")
    remote = planned(small_corpus, tokenizer, *OVERRIDES, f"text_output={s3_bucket.url}/texts")
    remote.make(f"{s3_bucket.url}/out", 2)
    local = {f"texts/{name}": data for name, data in files_of(tmp_path / "texts").items()}
    assert s3_bucket.objects("texts/") == local and len(local) > 5 and not s3_bucket.unfinished_uploads()
    planned(f"{s3_bucket.url}/texts/*.jsonl.gz", tokenizer, *OVERRIDES).make(tmp_path / "again")
    shards = [files_of(folder) for folder in (tmp_path / "out", tmp_path / "again")]
    assert len({tuple(each[name] for name in each if name.startswith(("train", "valid"))) for each in shards}) == 1


def units(bucket: S3Bucket) -> list[str]:
    """The finished units of the first phase."""
    return [name for name in bucket.keys("out/.work/") if name.endswith(".sections")]


@pytest.mark.long
def test_inputs_tokenizer_and_ranges_in_the_store_give_the_same_shards(
    small_corpus: Path, tokenizer: Tokenizer, local: dict[str, bytes], s3_bucket: S3Bucket
) -> None:
    storage.write_bytes(f"{s3_bucket.url}/in/small.jsonl", small_corpus.read_bytes())
    for path in Path(tokenizer.folder).iterdir():
        storage.write_bytes(f"{s3_bucket.url}/tok/{path.name}", path.read_bytes())
    remote = Tokenizer.load(f"{s3_bucket.url}/tok")
    plan = planned(f"{s3_bucket.url}/in/*.jsonl", remote, *OVERRIDES)
    output = f"{s3_bucket.url}/out"
    for number in (2, 1):
        plan.make_range(number, 2, output)
    plan.merge(output, 2)
    made = s3_bucket.objects("out/")
    assert made.keys() == local.keys()
    assert {name for name in made if made[name] != local[name]} == {f"out/{name}" for name in NAMING_INPUTS}


def test_two_runs_at_once_and_the_same_range_twice_are_refused(plan: Planned, s3_bucket: S3Bucket) -> None:
    output = f"{s3_bucket.url}/out"
    with storage.hold_lock(output):
        with pytest.raises(UserError, check=coded("folder-locked")):
            plan.make(output)
        with pytest.raises(UserError, check=coded("folder-locked")):
            plan.make_range(1, 2, output)
    with storage.hold_lock(output, "range-001-of-002"):
        with pytest.raises(UserError, check=coded("folder-locked")):
            plan.make_range(1, 2, output)
        assert plan.make_range(2, 2, output)
