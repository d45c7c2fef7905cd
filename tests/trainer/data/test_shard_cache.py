from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.data import shard_cache
from trainer.data.shard_cache import CachedFile, DamagedFile, Prefetcher, ShardCache, is_sound

SIZE = 1000


class Store:
    """A folder that stands for a remote store, and counts what is fetched from it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def put(self, number: int) -> CachedFile:
        data = np.random.default_rng(number).bytes(SIZE)
        (self.folder / f"train-{number:06d}.tar").write_bytes(data)
        return CachedFile(f"store://here/train-{number:06d}.tar", SIZE, hashlib.sha256(data).hexdigest())

    def download(self, url: str, path: Path) -> None:
        name = url.rpartition("/")[2]
        with open(self.folder / "log", "a") as log:
            log.write(name + "\n")
        path.write_bytes((self.folder / name).read_bytes())

    @property
    def fetched(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().split() if log.exists() else []


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def names(cache: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[2] for path in cache.iterdir() if not path.name.startswith("."))


def test_a_file_is_fetched_once_and_unchanged(store: Store, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 10 * SIZE, store.download)
    file = store.put(0)
    for _ in range(3):
        assert cache.map(file, np.dtype(np.uint8)).tobytes() == np.random.default_rng(0).bytes(SIZE)
    assert store.fetched == ["train-000000.tar"]


def test_the_least_recently_used_file_is_evicted(store: Store, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 3 * SIZE, store.download)
    files = [store.put(number) for number in range(4)]
    for age, file in enumerate(files[:3]):
        cache.fetch(file)
        os.utime(tmp_path / "cache" / file.name, (age, age))
    first = cache.map(files[0], np.dtype(np.uint8))  # used now
    cache.fetch(files[3])
    assert names(tmp_path / "cache") == ["000000.tar", "000002.tar", "000003.tar"]
    for number in (1, 2, 1, 2):
        cache.fetch(files[number])
    assert len(names(tmp_path / "cache")) == 3
    assert first.tobytes() == np.random.default_rng(0).bytes(SIZE), "a map outlives the file"


def test_files_that_are_not_the_caches_own_stay(store: Store, tmp_path: Path) -> None:
    """`data.cache_dir` may be a folder with files of the user's."""
    folder = tmp_path / "cache"
    folder.mkdir()
    own = {"thesis.tar", "0123-results.csv", ".hidden.partial"}
    for name in own:
        (folder / name).write_bytes(bytes(10 * SIZE))
        os.utime(folder / name, (1, 1))
    cache, files = ShardCache(folder, 2 * SIZE, store.download), [store.put(number) for number in range(3)]
    for age, file in enumerate(files, start=2):
        cache.fetch(file)
        os.utime(folder / file.name, (age, age))
    assert set(os.listdir(folder)) == {*own, ".locks", files[1].name, files[2].name}


def test_partial_files_of_killed_processes_are_removed_and_those_of_others_stay(store: Store, tmp_path: Path) -> None:
    cache, files = ShardCache(tmp_path / "cache", 9 * SIZE, store.download), [store.put(n) for n in range(3)]
    partials = [tmp_path / "cache" / f".{file.name}.partial" for file in files[:2]]
    with cache._locked(files[0].name, wait=True):
        for partial in partials:
            partial.write_bytes(b"half")
        cache.fetch(files[2])
        assert [partial.exists() for partial in partials] == [True, False]
    cache.fetch(files[0])
    assert len(names(tmp_path / "cache")) == 2 and not partials[0].exists()


@pytest.mark.spawn
def test_a_process_forked_in_the_middle_of_a_fetch_does_not_keep_its_lock(
    store: Store, tmp_path: Path, fork: Callable
) -> None:
    cache, file = ShardCache(tmp_path / "cache", 9 * SIZE, store.download), store.put(0)
    end = multiprocessing.get_context("fork").Event()
    with cache._locked(file.name, wait=True):
        process = fork(end.wait, 20)
    with cache._locked(file.name, wait=False) as mine:
        assert mine
    end.set()
    process.join(20)


def test_another_content_is_refused_and_leaves_nothing(store: Store, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 10 * SIZE, store.download)
    file = store.put(0)
    data = bytearray((store.folder / "train-000000.tar").read_bytes())
    data[500] ^= 1
    (store.folder / "train-000000.tar").write_bytes(data)
    with pytest.raises(DamagedFile, check=coded("damaged-shard"), match="sha256"):
        cache.map(file, np.dtype(np.uint8))
    (store.folder / "train-000000.tar").write_bytes(data[:-1])
    with pytest.raises(DamagedFile, check=coded("damaged-shard"), match="999 bytes"):
        cache.map(file, np.dtype(np.uint8))
    assert names(tmp_path / "cache") == []


def test_a_full_disk_empties_the_cache_before_it_gives_up(store: Store, tmp_path: Path) -> None:
    files = [store.put(number) for number in range(3)]
    cache = ShardCache(tmp_path / "cache", 10 * SIZE, store.download)
    for file in files[:2]:
        cache.fetch(file)

    def download(url: str, path: Path) -> None:
        if len(names(tmp_path / "cache")) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        store.download(url, path)

    full = ShardCache(tmp_path / "cache", 10 * SIZE, download)
    full.fetch(files[2])
    assert names(tmp_path / "cache") == ["000001.tar", "000002.tar"]

    def fail(url: str, path: Path) -> None:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise UserError("the disk is full") from None

    with pytest.raises(UserError, match="the disk is full"):
        ShardCache(tmp_path / "cache", 10 * SIZE, fail).fetch(store.put(9))
    assert names(tmp_path / "cache") == []


def test_a_folder_that_cannot_be_written_is_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match="set data.cache_dir"):
        ShardCache(tmp_path / "cache", SIZE, store.download).fetch(store.put(0))


def _use(folder: Path, cache: Path, files: list[CachedFile], seed: int, begin: object) -> None:
    store = object.__new__(Store)
    store.folder = folder

    def slowly(url: str, path: Path) -> None:
        time.sleep(0.02)
        store.download(url, path)

    shared = ShardCache(cache, 4 * SIZE, slowly)
    begin.wait()  # type: ignore[attr-defined]
    for number in np.random.default_rng(seed).permutation(len(files)).tolist():
        found = shared.map(files[number], np.dtype(np.uint8)).tobytes()
        assert hashlib.sha256(found).hexdigest() == files[number].sha256


@pytest.mark.spawn
def test_processes_share_a_cache_too_small_for_all(store: Store, tmp_path: Path, fork: Callable) -> None:
    files = [store.put(number) for number in range(8)]
    begin = multiprocessing.get_context("fork").Event()
    processes = [fork(_use, store.folder, tmp_path / "cache", files, seed, begin) for seed in range(4)]
    begin.set()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(names(tmp_path / "cache")) <= 4 and len(store.fetched) >= 8


@pytest.mark.spawn
def test_a_file_that_several_want_at_once_is_fetched_once(store: Store, tmp_path: Path, fork: Callable) -> None:
    files = [store.put(0)]
    begin = multiprocessing.get_context("fork").Event()
    processes = [fork(_use, store.folder, tmp_path / "cache", files, seed, begin) for seed in range(4)]
    begin.set()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert store.fetched == ["train-000000.tar"]


def test_a_file_that_another_process_fetches_need_not_be_waited_for(store: Store, tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 10 * SIZE, store.download)
    file = store.put(0)
    with cache._locked(file.name, wait=True):
        assert not ShardCache(tmp_path / "cache", 10 * SIZE, store.download).fetch(file, wait=False)
    assert cache.fetch(file, wait=False) and store.fetched == ["train-000000.tar"]


@pytest.fixture
def hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a line for every file that a process reads to verify it, which takes a moment."""
    log, original = tmp_path / "hashed", shard_cache.storage.sha256_of

    def slowly(path: Path) -> str:
        with open(log, "a") as file:
            file.write(f"{path.name}\n")
        time.sleep(0.05)
        return original(path)

    monkeypatch.setattr(shard_cache.storage, "sha256_of", slowly)
    return log


def _verify(folder: Path, files: list[CachedFile], begin: Any, kill_at: int | None) -> None:
    begin.wait()
    for number, file in enumerate(files):
        if number == kill_at:
            shard_cache.storage.sha256_of = lambda path: os.kill(os.getpid(), 9)  # type: ignore[assignment]
        assert is_sound(folder / file.url.rpartition("/")[2], file.sha256, folder / "marks")


@pytest.mark.spawn
@pytest.mark.parametrize("killed", [0, 2])
def test_one_process_of_a_machine_verifies_a_file_also_after_others_were_killed_in_it(
    killed: int, store: Store, hashed: Path, fork: Callable
) -> None:
    files = [store.put(number) for number in range(4)]
    begin = multiprocessing.get_context("fork").Event()
    ends = [0] * killed + [None] * (4 - killed)
    processes = [fork(_verify, store.folder, files, begin, end) for end in ends]
    begin.set()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes[killed:]] == [0] * (4 - killed)
    names = [file.url.rpartition("/")[2] for file in files]
    assert sorted(hashed.read_text().split()) == names
    assert len([*(store.folder / "marks").glob("[!.]*")]) == len(files)


def test_a_file_that_another_process_verifies_need_not_be_waited_for(store: Store, tmp_path: Path) -> None:
    file, path = store.put(0), store.folder / "train-000000.tar"
    mark = shard_cache._name(path, file.sha256)
    with shard_cache._lock(tmp_path / mark, wait=True):
        assert not is_sound(path, file.sha256, tmp_path, wait=False)
    assert is_sound(path, file.sha256, tmp_path, wait=False)


def test_a_mark_that_this_host_does_not_see_yet_is_found_by_its_lock(
    store: Store, hashed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where NFS still says that a file which another host made does not exist."""
    file, path, stat = store.put(0), store.folder / "train-000000.tar", Path.stat

    def hidden(self: Path, **options: Any) -> os.stat_result:
        if self.parent == tmp_path:
            raise FileNotFoundError(self)
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", hidden)
    for _ in range(2):
        assert is_sound(path, file.sha256, tmp_path)
    assert len(hashed.read_text().split()) == 1


def test_a_file_that_was_damaged_is_read_again(store: Store, hashed: Path, tmp_path: Path) -> None:
    file, path = store.put(0), store.folder / "train-000000.tar"
    for _ in range(2):
        assert not is_sound(path, "0" * 64, tmp_path)
    assert is_sound(path, file.sha256, tmp_path) and len(hashed.read_text().split()) == 3


def test_a_machine_without_a_folder_for_marks_verifies_each_time(store: Store, hashed: Path, tmp_path: Path) -> None:
    file, path = store.put(0), store.folder / "train-000000.tar"
    (tmp_path / "marks").touch()  # no folder can be made there, by root neither
    for _ in range(2):
        assert is_sound(path, file.sha256, tmp_path / "marks") and not is_sound(path, "0" * 64, tmp_path / "marks")
    assert len(hashed.read_text().split()) == 4


@pytest.fixture
def fork() -> Callable:
    def start(*arguments: object) -> multiprocessing.Process:
        function, *rest = arguments
        process = multiprocessing.get_context("fork").Process(target=function, args=rest)  # type: ignore[arg-type]
        process.start()
        return process  # type: ignore[return-value]

    return start


class MarkingCache:
    """Leaves a mark for each file that it was to fetch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fetch(self, file: CachedFile, wait: bool = True) -> bool:
        (self.folder / file.name).touch()
        return True

    def wait_for(self, file: CachedFile) -> None:
        deadline = time.monotonic() + 60
        while not (self.folder / file.name).exists():
            assert time.monotonic() < deadline, f"{file.name} was not fetched"
            time.sleep(0.005)


def file_of(number: int) -> CachedFile:
    return CachedFile(f"store://here/{number}.tar", 1, f"{number:064x}")


def test_a_file_is_fetched_ahead_whether_the_thread_works_ends_or_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_IDLE_SECONDS", 0.0005)
    cache: Any = MarkingCache(tmp_path)
    prefetcher = Prefetcher(cache.fetch)
    for number in range(300):
        prefetcher.ask(file_of(number))
        cache.wait_for(file_of(number))
        time.sleep(number % 5 * 0.0003)
    deadline = time.monotonic() + 60
    while any(thread.name == "prefetch" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "an idle thread stays"


def _ask(prefetcher: Prefetcher, cache: MarkingCache) -> None:
    prefetcher.ask(file_of(1))
    cache.wait_for(file_of(1))


@pytest.mark.spawn
def test_a_worker_fetches_ahead_though_its_rank_did_before_it_was_forked(tmp_path: Path) -> None:
    """As the warmup step does before DataLoader forks its workers."""
    cache: Any = MarkingCache(tmp_path)
    prefetcher = Prefetcher(cache.fetch)
    prefetcher.ask(file_of(0))
    cache.wait_for(file_of(0))
    worker = multiprocessing.get_context("fork").Process(target=_ask, args=(prefetcher, cache))
    worker.start()
    worker.join(90)
    assert worker.exitcode == 0
