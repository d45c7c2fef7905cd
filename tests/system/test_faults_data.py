"""Rows 17 to 22 of the fault list: shards, manifests and stores that are not as they were, met by a training."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from data_prep import open_dataset
from data_prep.base.errors import UserError
from data_prep.storage import storage
from tests.support import plain_ranks
from tests.support.fault_proxy import Fault, FaultProxy, run_store_proxy
from tests.support.living_data_sets import forge_shard, make_data_set
from tests.support.preparations import read_texts, trained
from tests.support.s3_server import S3Bucket
from tests.system.conftest import Training
from trainer import load_config
from trainer.api import EXTENSIONS
from trainer.loop import train as train_module

SHORT = ("training.max_steps=12", "checkpoint.every_steps=100", "evaluation.every_steps=100")
SHARD = "train-000001.tar"


@pytest.fixture
def shards(small_shards: Path, tmp_path: Path) -> Path:
    """A copy of the small shards that a test may damage."""
    return Path(shutil.copytree(small_shards, tmp_path / "shards"))


@pytest.fixture
def refused(training: Callable[..., Training], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Start the training in this process: what it is refused with, before any process group is there."""
    monkeypatch.setattr(train_module, "initialize_distributed", lambda *_: pytest.fail("a process group was started"))

    def start(shards: Path | str, *overrides: str) -> str:
        one = training(*overrides)
        one.shards = shards  # type: ignore[assignment]
        arguments = one.arguments()
        with pytest.raises(UserError) as caught:
            train_module.train(load_config(arguments[1], arguments[2:]), EXTENSIONS)
        assert caught.value.exit_status != 0 and not one.output_dir.exists()
        return str(caught.value)

    return start


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def damage(folder: Path, kind: str) -> None:
    path = folder / SHARD
    data = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "another's content":
        shutil.copy(folder / "train-000002.tar", path)
    else:
        path.write_bytes(flip(data) if kind == "one flipped bit" else data[: len(data) // 2])


DAMAGES = ["missing", "truncated", "one flipped bit", "another's content"]


def check_error_on_every_rank(kind: str, shards: Path, training: Callable[..., Training]) -> None:
    damage(shards, kind)
    run = training(*SHORT)
    run.shards = shards
    output = plain_ranks.run(run, 2, status=1)
    assert SHARD in output and re.search("is missing|is damaged|has \\d+ bytes", output), output
    assert "Traceback" not in output


@pytest.mark.spawn
@pytest.mark.fault(
    row=17,
    fault="a shard with one flipped bit, in a training on 2 ranks",
    required="named before or when read; error by default, no hang on any rank",
)
@pytest.mark.slow
def test_row_17_a_flipped_bit_ends_every_rank(shards: Path, training: Callable[..., Training]) -> None:
    check_error_on_every_rank("one flipped bit", shards, training)


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row=17,
    fault="a shard missing, truncated, with another shard's content, in a training on 2 ranks",
    required="named before or when read; error by default, no hang on any rank",
)
@pytest.mark.parametrize("kind", [kind for kind in DAMAGES if kind != "one flipped bit"])
def test_row_17_a_damaged_shard_ends_every_rank(kind: str, shards: Path, training: Callable[..., Training]) -> None:
    check_error_on_every_rank(kind, shards, training)


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row=17,
    fault="a shard missing, truncated, flipped, with another's content, on 2 ranks with data.on_corrupt_shard=skip",
    required="counted skip by policy, no hang on any rank",
)
@pytest.mark.parametrize("kind", DAMAGES)
def test_row_17_a_damaged_shard_is_skipped_and_counted(
    kind: str, shards: Path, training: Callable[..., Training], observed: Callable[..., None]
) -> None:
    damage(shards, kind)
    run = training(*SHORT, "data.on_corrupt_shard=skip")
    run.shards = shards
    output = plain_ranks.run(run, 2)
    assert SHARD in output
    points = [json.loads(line) for line in (run.output_dir / "tracking" / "points.jsonl").read_text().splitlines()]
    num_rows = sum(point["m"].get("train/unreadable_rows", 0) for point in points)
    assert num_rows > 0
    assert len(plain_ranks.losses(run)) == 12
    observed(
        f"{kind}: {num_rows:.0f} rows of 12 steps left out and counted",
        lost="with data.on_corrupt_shard=skip the rows of the damaged shard",
    )


@pytest.mark.fault(
    row=18,
    fault="manifest of a newer format version; not JSON; with an unknown key; gone",
    required="clear error",
)
def test_row_18_a_manifest_that_is_not_as_written(shards: Path, refused: Callable[..., str]) -> None:
    manifest = shards / "manifest.json"
    whole = manifest.read_bytes()
    values = json.loads(whole)
    edits = {
        "newer": (json.dumps(values | {"format_version": 99}).encode(), "format"),
        "no number": (whole.replace(b'"format_version": 2', b'"format_version": "x"'), "manifest.json"),
        "cut": (whole[: len(whole) // 2], "manifest.json"),
        "unknown key": (json.dumps(values | {"color": "red"}).encode(), "color"),
    }
    for name, (data, message) in edits.items():
        assert data != whole, name
        manifest.write_bytes(data)
        assert message in refused(shards), name
    manifest.unlink()
    assert "manifest.json" in refused(shards)


def _index_gone(shards: Path) -> str:
    (shards / "train-000001.index.safetensors").unlink()
    return "train-000001.index.safetensors"


def _index_flipped(shards: Path) -> str:
    path = shards / "train-000001.index.safetensors"
    path.write_bytes(flip(path.read_bytes()))
    return path.name


def _count_edited(shards: Path) -> str:
    values = json.loads((shards / "manifest.json").read_text())
    values["train"]["shards"][1]["documents"] += 1
    values["train"]["documents"] += 1
    (shards / "manifest.json").write_text(json.dumps(values))
    return "train-000001"


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row=18,
    fault="an index missing or with a flipped bit; a count of the manifest edited by hand; in a training on 2 ranks",
    required="clear error on every rank",
)
@pytest.mark.parametrize("damage_data", [_index_gone, _index_flipped, _count_edited])
def test_row_18_an_index_that_is_not_the_manifests_is_named(
    damage_data: Callable[[Path], str], shards: Path, training: Callable[..., Training]
) -> None:
    named = damage_data(shards)
    run = training(*SHORT)
    run.shards = shards
    output = plain_ranks.run(run, 2, status=1)
    assert named in output and "error: " in output and "Traceback" not in output


@pytest.mark.fault(
    row=19,
    fault="tokenizer other than the shards' (same size, other pieces)",
    required="refused at start, both fingerprints shown",
)
def test_row_19_a_tokenizer_of_the_same_size_and_other_pieces(
    shards: Path, refused: Callable[..., str], small_corpus: Path, tmp_path: Path
) -> None:
    texts = [text.upper() for text in read_texts(small_corpus)]
    other = tmp_path / "other"
    theirs = trained(texts, other, vocab_size=800).fingerprint
    mine = open_dataset(shards).manifest.tokenizer
    assert mine.vocab_size == 800 and mine.fingerprint != theirs
    for said in (refused(shards, f"data.tokenizer={other}"), _with_tokenizer(shards, other, refused)):
        assert mine.fingerprint in said and theirs in said


def _with_tokenizer(shards: Path, other: Path, refused: Callable[..., str]) -> str:
    shutil.rmtree(shards / "tokenizer")
    shutil.copytree(other, shards / "tokenizer")
    return refused(shards)


@pytest.mark.fault(
    row=20,
    fault="token ids beyond the model's vocabulary",
    required="refused at start from the manifest, never a device-side assert",
)
def test_row_20_token_ids_beyond_the_models_vocabulary(shards: Path, refused: Callable[..., str]) -> None:
    assert "model.vocab_size=700 is less than the 800 tokens" in refused(shards, "model.vocab_size=700")


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row=20,
    fault="a forged shard whose ids its own manifest's vocabulary does not hold",
    required="refused when read, never a device-side assert",
)
def test_row_20_a_forged_shard_of_foreign_ids(shards: Path, training: Callable[..., Training]) -> None:
    assert open_dataset(shards).manifest.train.shards[1].name == SHARD
    forge_shard(shards, 1, lambda record: dataclasses.replace(record, tokens=record.tokens + np.uint16(60_000)))
    run = training(*SHORT)
    run.shards = shards
    output = plain_ranks.run(run, 1, status=1)
    assert SHARD in output and "Traceback" not in output


@pytest.mark.fault(row=21, fault="a data set smaller than one global batch", required="clear error")
def test_row_21_a_data_set_smaller_than_a_global_batch(shards: Path, refused: Callable[..., str]) -> None:
    assert re.search("smaller|fewer|less", refused(shards, "training.global_batch_tokens=4096000"))


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(row=21, fault="one shard for 2 ranks x 2 workers", required="works")
def test_row_21_fewer_shards_than_readers(
    training: Callable[..., Training], small_corpus: Path, small_tokenizer: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "one" / "shards"
    make_data_set(folder, {"one": read_texts(small_corpus)}, small_tokenizer, shards={"min_shards": 1})
    assert len(open_dataset(folder).manifest.train.shards) == 1
    run = training(*SHORT, "data.num_workers=2")
    run.shards = folder
    plain_ranks.run(run, 2)
    assert len(plain_ranks.losses(run)) == 12


@pytest.fixture
def proxy(s3_bucket: S3Bucket) -> Iterator[FaultProxy]:
    with run_store_proxy(s3_bucket.endpoint) as proxy:
        yield proxy


def check_store_outage(
    seconds: float, shards: Path, training: Callable[..., Training], bucket: S3Bucket, proxy: FaultProxy, cache: Path
) -> int:
    """A training whose store is gone for so long after its first steps ends with the losses of a local one.

    Returns how many requests failed.
    """
    for path in shards.rglob("*"):
        if path.is_file():
            storage.write_bytes(f"{bucket.url}/data/{path.relative_to(shards)}", path.read_bytes())
    largest = max(shard.bytes for shard in open_dataset(shards).manifest.train.shards)
    local = training(*SHORT)
    plain_ranks.run(local, 1)
    cached = (f"data.cache_dir={cache}", f"data.cache_bytes={largest * 3 // 2}")
    run = training(*SHORT, *cached)
    run.env = bucket.environment | {"AWS_ENDPOINT_URL": proxy.endpoint}
    run.shards = f"{bucket.url}/data"  # type: ignore[assignment]
    proxy.faults = [Fault("refuse", times=3), Fault("reset", times=3)]
    ranks = plain_ranks.start(run, 1)
    plain_ranks.wait_until(lambda: any(request.method == "GET" for request in proxy.requests), ranks)
    proxy.faults = [gone := Fault("refuse", status=500, code="InternalError")]
    time.sleep(seconds)
    proxy.faults = []
    assert plain_ranks.finish(ranks) == [0], ranks[0].output
    assert gone.happened and "retrying in" in ranks[0].output
    assert plain_ranks.losses(run) == plain_ranks.losses(local)
    held = sum(path.stat().st_size for path in cache.rglob("*.tar"))
    assert held <= largest * 3 // 2, "a cache too small for all shards has evicted"
    return gone.happened


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row=22,
    fault="the store of remote shards goes away for some seconds, and for a minute; the cache holds one shard of four",
    required="waits and retries; a full cache evicts; the losses are those of local shards",
)
@pytest.mark.parametrize("seconds", [3.0, 60.0])
def test_row_22_a_store_that_goes_away_and_a_small_cache(
    seconds: float,
    small_shards: Path,
    training: Callable[..., Training],
    s3_bucket: S3Bucket,
    proxy: FaultProxy,
    tmp_path: Path,
    observed: Callable[..., None],
) -> None:
    failed = check_store_outage(seconds, small_shards, training, s3_bucket, proxy, tmp_path / "cache")
    observed(
        f"{seconds:.0f} s without the store: {failed} requests failed and were made again, the losses are those of "
        "local shards"
    )


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.fault(
    row=22,
    fault="the cache disk is full of older copies; too small for the shards that are read at once",
    required="a full cache evicts; too small: clear error",
)
def test_row_22_a_full_cache_disk_evicts(
    small_shards: Path, training: Callable[..., Training], s3_bucket: S3Bucket, tmp_path: Path
) -> None:
    for path in small_shards.rglob("*"):
        if path.is_file():
            storage.write_bytes(f"{s3_bucket.url}/data/{path.relative_to(small_shards)}", path.read_bytes())
    sizes = [shard.bytes for shard in open_dataset(small_shards).manifest.shards]
    disk = tmp_path / "disk"
    disk.mkdir()
    size = f"size={(sum(sizes) >> 10) + 200}k"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        run = training(*SHORT, f"data.cache_dir={disk / 'cache'}")
        run.env, run.shards = s3_bucket.environment, f"{s3_bucket.url}/data"  # type: ignore[assignment]
        (disk / "cache").mkdir()
        with contextlib.suppress(OSError):
            for number in range(1000):
                (disk / "cache" / f"{number:032d}-train-{number:06d}.tar").write_bytes(bytes(50_000))
        plain_ranks.run(run, 1)
        assert len(plain_ranks.losses(run)) == 12
        shutil.rmtree(disk / "cache")
        status = os.statvfs(disk)
        (disk / "filler").write_bytes(bytes(status.f_bavail * status.f_frsize - min(sizes) // 2))
        output = plain_ranks.run(training_of(run, tmp_path / "again"), 1, status=1)
        assert f"the cache {disk / 'cache'} cannot be written: No space left on device" in output
        assert "data.cache_dir" in output and "Traceback" not in output
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def training_of(run: Training, folder: Path) -> Training:
    """The same settings, started again in another folder."""
    folder.mkdir()
    return dataclasses.replace(run, folder=folder)
