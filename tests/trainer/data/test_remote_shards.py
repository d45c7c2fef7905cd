"""Shards in an object store, read through real requests, with a store that fails now and then."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from data_prep.storage import storage
from tests.support.fault_proxy import Fault, FaultProxy, run_store_proxy
from tests.support.s3_server import S3Bucket
from tests.support.toy_run import stage_of
from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.data.loader import Loader, Position
from trainer.data.shard_set import open_shard_set

STAGE = StageShape(steps=1, sequence_length=32, micro_batch_tokens=5 * 32, global_batch_tokens=15 * 32)
STEPS = 12


@pytest.fixture
def proxy(s3_bucket: S3Bucket) -> Iterator[FaultProxy]:
    with run_store_proxy(s3_bucket.endpoint) as proxy:
        storage.configure({s3_bucket.url: {"endpoint_url": proxy.endpoint}})
        yield proxy
        proxy.faults = []
        for thread in threading.enumerate():
            if thread.name == "prefetch":
                thread.join()  # while the store still answers
    storage.configure({})


@pytest.fixture
def url(corpus, s3_bucket: S3Bucket, proxy: FaultProxy) -> str:
    """The corpus in the store."""
    for path in Path(corpus.shard_set.url).iterdir():
        storage.write_bytes(f"{s3_bucket.url}/data/{path.name}", path.read_bytes())
    return f"{s3_bucket.url}/data"


def batches(url: str, cache: Path, num_workers: int = 0, **options: object) -> list[list]:
    data = DataSettings(shards=url, num_workers=num_workers, **options)
    shard_set = open_shard_set(url, cache)
    loader = Loader([shard_set], stage_of(STAGE, data), Position(0, 0, 0), 0)
    return [[part.input_ids.tolist() for part in batch.micro_batches] for batch in itertools.islice(loader, STEPS)]


@pytest.mark.long
@pytest.mark.spawn
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_store_that_fails_now_and_then_gives_the_same_batches(
    corpus, url: str, proxy: FaultProxy, tmp_path: Path, num_workers: int
) -> None:
    proxy.faults = [Fault("refuse", times=3), Fault("reset", times=4), Fault("cut", times=2)]
    found = batches(url, tmp_path / "cache", num_workers)
    assert found == batches(corpus.shard_set.url, tmp_path / "none")
    assert sum(fault.happened for fault in proxy.faults) >= 9


@pytest.mark.long
def test_a_store_that_is_away_for_a_while_is_waited_for(corpus, url: str, proxy: FaultProxy, tmp_path: Path) -> None:
    proxy.faults = [Fault("refuse", status=500, code="InternalError")]
    threading.Timer(1.5, proxy.faults.clear).start()
    assert batches(url, tmp_path / "cache") == batches(corpus.shard_set.url, tmp_path / "none")


def test_a_store_that_stays_away_is_named(
    url: str, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_set = open_shard_set(url, tmp_path / "cache")
    proxy.faults = [Fault("refuse")]
    monkeypatch.setenv("CLOZEWORKS_RETRY_SECONDS", "1")
    with pytest.raises(UserError, match=r"s3://.* cannot be read: .*503"):
        shard_set.shards("train")[0].read_tokens()


@pytest.mark.long
def test_an_object_that_was_replaced_is_not_taken_for_the_shard(url: str, tmp_path: Path) -> None:
    data = bytearray(storage.read_bytes(f"{url}/train-000002.tar"))
    data[len(data) // 2] ^= 1
    storage.write_bytes(f"{url}/train-000002.tar", bytes(data))
    storage.remove(f"{url}/train-000005.tar")
    with pytest.raises(UserError, match=r"train-00000[25]\.tar is (damaged|missing)"):
        batches(url, tmp_path / "cache")
    assert len(batches(url, tmp_path / "cache", on_corrupt_shard="skip")) == STEPS
    assert not list((tmp_path / "cache").glob("*train-000002.tar"))
