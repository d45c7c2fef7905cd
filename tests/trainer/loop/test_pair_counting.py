"""Sentence pairs that all ranks count together: each shard once, kept for the next start, never trusted wrongly."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.support.kill_points import before_writing
from tests.support.threaded_ranks import ThreadedRanks
from tests.support.toy_run import preset_config
from tests.trainer.data.conftest import draw_documents, write_corpus
from trainer.checkpoint.format import TrainState
from trainer.config.run_config import RunConfig
from trainer.data import pair_counts
from trainer.data.loader import Loader, Position
from trainer.data.pair_counts import KeptPairCounts, PairPlanner
from trainer.data.samples import ReadEpoch, training_samples
from trainer.data.shard_set import open_shard_set
from trainer.data.workers import ReadingStopped
from trainer.distributed import agreement, process_group
from trainer.loop import pair_counting
from trainer.loop.global_batches import count_first_epoch
from trainer.loop.pair_counting import PairCounting

NUM_SHARDS = 20
EPOCH_ROWS = 12
"""Fewer than half of the rows of an epoch."""
START = Position(0, 0, 0)
TOGETHER = (pair_counting, agreement, process_group)
"""Modules that call what ranks do together."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two data sets of 20 small shards (two windows)."""
    generator, folders = np.random.default_rng(3), [tmp_path_factory.mktemp(name) for name in "ab"]
    for folder in folders:
        shards = [draw_documents(generator, int(generator.integers(4, 9)), 90.0) for _ in range(NUM_SHARDS)]
        write_corpus(folder, shards, vocab_size=100_000)
    return folders


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(key of the epoch, number of the shard) of everything that is planned in this process."""
    found: list[tuple[int, int]] = []
    plan = PairPlanner.plan

    def noted(self: PairPlanner, number: int) -> Any:
        found.append((int(self.key), number))
        return plan(self, number)

    monkeypatch.setattr(PairPlanner, "plan", noted)
    return found


def config_of(folders: list[Path], *overrides: str) -> RunConfig:
    shards = "[" + ", ".join(f"{{url: {folder}, weight: 1}}" for folder in folders) + "]"
    sizes = ["data.sequence_length=64", "training.micro_batch_tokens=64", "training.global_batch_tokens=64"]
    model = ["model.vocab_size=100000", "model.max_position_embeddings=64", "training.max_steps=1000"]
    pairs = ["data.sentence_pairs=next_sentence", "data.num_workers=0"]
    return preset_config(*sizes, *model, *pairs, *overrides, shards=shards)


def stop_signal(asked: bool = False) -> Any:
    return SimpleNamespace(is_requested=asked)


def counting_of(config: RunConfig, kept: KeptPairCounts, ranks: Any, signal: Any = None) -> PairCounting:
    sets = [open_shard_set(url) for url in config.data_sets]
    signal = signal or stop_signal()
    return PairCounting(config, config.stages[0], sets, kept, ranks, lambda doing, seconds: None, signal)


def opened(
    config: RunConfig, folder: Path, monkeypatch: pytest.MonkeyPatch, world_size: int = 1, position: Position = START
) -> list[tuple[PairCounting, KeptPairCounts]]:
    """What each rank has once all have opened the samples at a position."""

    def open_on(ranks: Any) -> tuple[PairCounting, KeptPairCounts]:
        kept = KeptPairCounts(folder)
        counting = counting_of(config, kept, ranks)
        counting.open(position)
        return counting, kept

    return ThreadedRanks(world_size, TOGETHER, monkeypatch).run(open_on)


def planner_of(config: RunConfig, epoch: int = 0) -> PairPlanner:
    sets = [open_shard_set(url) for url in config.data_sets]
    return training_samples(sets, config.stages[0], config.training.seed).planner(ReadEpoch(epoch, 0))


def rows_of(config: RunConfig, kept: KeptPairCounts | None, steps: int, position: Position = START) -> list[bytes]:
    """The tokens, labels and pairs of each global batch."""
    sets = [open_shard_set(url) for url in config.data_sets]
    loader = Loader(sets, config.stages[0], position, config.training.seed, pair_counts=kept)
    return [
        b"".join(batch.pack().numpy().tobytes() for batch in step.micro_batches)
        for step in itertools.islice(loader, steps)
    ]


@pytest.mark.parametrize("task", ["next_sentence", "sentence_order"])
@pytest.mark.parametrize("world_size", [1, 3, NUM_SHARDS + 1])
def test_each_shard_is_planned_on_one_rank_and_all_read_the_rows_that_each_would_have_counted(
    world_size: int, task: str, data: list[Path], tmp_path: Path, planned: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(data[:1], f"data.sentence_pairs={task}")
    expected = rows_of(config, None, 5)
    planned.clear()
    results = opened(config, tmp_path, monkeypatch, world_size)
    assert sorted(number for _, number in planned) == list(range(NUM_SHARDS))
    for _, kept in (results[0], results[-1]):
        planned.clear()
        assert rows_of(config, kept, 5) == expected
        assert len(planned) <= 16, "a window"


def test_the_next_start_on_any_number_of_ranks_plans_nothing(
    data: list[Path], tmp_path: Path, planned: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(data[:1])
    opened(config, tmp_path, monkeypatch, 2)
    planned.clear()
    opened(config, tmp_path, monkeypatch, 5)
    assert planned == []


@pytest.mark.parametrize(
    "other",
    [
        "training.seed=7",
        "data.sequence_length=32",
        "data.sentence_pairs=sentence_order",
        "data.short_seq_probability=0.5",
        "epoch",
        "shards",
        "source",
    ],
)
def test_counts_of_other_samples_are_not_used(
    other: str, data: list[Path], tmp_path: Path, planned: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(config_of(data[:1]), tmp_path, monkeypatch)
    planned.clear()
    if other == "source":
        monkeypatch.setattr("trainer.data.pair_counts._digest_of_source", lambda: "of another version")
    position = Position(0, 1, 0) if other == "epoch" else START
    config = config_of(data[1:] if other == "shards" else data[:1], *([other] if "=" in other else []))
    opened(config, tmp_path, monkeypatch, position=position)
    assert len(planned) == NUM_SHARDS and len(list(tmp_path.glob("*.json"))) == 2


def _damage(path: Path, how: str) -> None:
    text = path.read_text()
    content = json.loads(text)
    if how == "cut":
        path.write_text(text[: len(text) // 2])
    elif how == "empty":
        path.write_text("")
    elif how == "a list":
        path.write_text("[]")
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    else:
        {
            "another number": lambda: content["counts"][3].__setitem__(6, content["counts"][3][6] + 1),
            "a huge number": lambda: content["counts"][3].__setitem__(6, 1 << 70),
            "a shard less": content["counts"].pop,
            "a count less": lambda: content["counts"][3].pop(),
            "of another epoch": lambda: content["identity"].update(task="sentence_order"),
            "no checksum": lambda: content.pop("sha256"),
        }[how]()
        path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "how",
    ["cut", "empty", "a list", "a folder", "another number", "a huge number", "a shard less", "a count less"]
    + ["of another epoch", "no checksum"],
)
def test_a_damaged_file_is_warned_of_and_counts_for_nothing(
    how: str, data: list[Path], tmp_path: Path, planned: list, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    config = config_of(data[:1])
    opened(config, tmp_path, monkeypatch)
    (path,) = tmp_path.glob("*.json")
    whole = path.read_bytes()
    _damage(path, how)
    planned.clear()
    opened(config, tmp_path, monkeypatch, 2)
    assert len(planned) == NUM_SHARDS and "is damaged" in caplog.text
    assert how == "a folder" or path.read_bytes() == whole


def test_wrong_counts_that_look_right_are_noticed_when_their_shard_is_read(
    data: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, planner, wrong = config_of(data[:1]), planner_of(config_of(data[:1])), KeptPairCounts(tmp_path)
    ((_, kept),) = opened(config, tmp_path, monkeypatch)
    counts = kept.find(planner)
    assert counts is not None
    counts[:, 6] += 1
    wrong.keep(planner, counts, writes=True)
    with pytest.raises(UserError, check=coded("wrong-pair-counts"), match=r"train-0000\d\d\.tar has \d+ rows"):
        rows_of(config, KeptPairCounts(tmp_path), 1)


@pytest.mark.spawn
@pytest.mark.parametrize("where", ["counting", "writing"])
def test_a_killed_count_leaves_nothing_that_the_next_start_trusts(
    where: str, data: list[Path], tmp_path: Path, planned: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(data[:1])

    def count_and_die() -> None:
        if where == "counting":
            plan = PairPlanner.plan
            PairPlanner.plan = lambda self, n: plan(self, n) if n < 9 else os.kill(os.getpid(), 9)  # type: ignore[method-assign,assignment]
        with before_writing("*.json", lambda: os.kill(os.getpid(), 9)):
            opened(config, tmp_path, monkeypatch)

    process = multiprocessing.get_context("fork").Process(target=count_and_die)
    process.start()
    process.join(60)
    assert process.exitcode == -9
    opened(config, tmp_path, monkeypatch)
    assert len(planned) == NUM_SHARDS
    assert rows_of(config, KeptPairCounts(tmp_path), 3) == rows_of(config, None, 3)


def test_counts_that_could_not_be_written_are_warned_of_once_and_written_later(
    data: list[Path], tmp_path: Path, planned: list, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    (tmp_path / "file").touch()
    config, clock = config_of(data[:1]), [1000.0]
    monkeypatch.setattr(pair_counts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ((counting, kept),) = opened(config, tmp_path / "file" / "folder", monkeypatch)
    assert rows_of(config, kept, 3) == rows_of(config, None, 3)
    for seconds, is_repaired, is_written in ((61, False, False), (30, True, False), (31, True, True)):
        if is_repaired:
            (tmp_path / "file").unlink(missing_ok=True)
        clock[0] += seconds
        counting.advance(START, num_steps=1)
        assert (KeptPairCounts(tmp_path / "file" / "folder").find(planner_of(config)) is not None) is is_written
    assert caplog.text.count("tries again every minute") == 1


def test_an_error_in_the_share_of_one_rank_is_the_error_of_all(
    data: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan = config_of(data[:1]), PairPlanner.plan

    def plan_all_but_one(self: PairPlanner, number: int) -> Any:
        if number == 4:
            raise UserError("index 4 is damaged", fix="restore it", code="damaged-index")
        return plan(self, number)

    monkeypatch.setattr(PairPlanner, "plan", plan_all_but_one)

    def fails(ranks: Any) -> str:
        with pytest.raises(UserError, check=coded("damaged-index"), match="index 4 is damaged"):
            counting_of(config, KeptPairCounts(tmp_path), ranks).open(START)
        return "failed"

    assert ThreadedRanks(3, TOGETHER, monkeypatch).run(fails) == ["failed"] * 3
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_stop_of_one_rank_ends_the_count_on_all(
    world_size: int, hangs: bool, data: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the shard that the rank plans is in a store that does not answer."""
    config, plan, answered = config_of(data[:1]), PairPlanner.plan, threading.Event()
    signals = [stop_signal() for _ in range(world_size)]

    def plan_and_ask(self: PairPlanner, number: int) -> Any:
        if number == 10:
            signals[number % world_size].is_requested = True
            assert not hangs or answered.wait(20)
        return plan(self, number)

    monkeypatch.setattr(PairPlanner, "plan", plan_and_ask)

    def stops(ranks: Any) -> str:
        with pytest.raises(ReadingStopped):
            counting_of(config, KeptPairCounts(tmp_path), ranks, signals[ranks.rank]).open(START)
        return "stopped"

    assert ThreadedRanks(world_size, TOGETHER, monkeypatch).run(stops) == ["stopped"] * world_size
    assert not list(tmp_path.glob("*.json")) and not answered.is_set()
    answered.set()


def test_a_stop_before_the_first_step_ends_the_count_and_not_the_set_up(
    data: list[Path], tmp_path: Path, planned: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop, which needs the counts, then finds the request and ends the run."""
    config = config_of(data[:1]).model_copy(update={"output_dir": str(tmp_path)})
    sets = [open_shard_set(url) for url in config.data_sets]
    watchdog: Any = SimpleNamespace(mark=print, end_run=print)

    def count(ranks: Any) -> KeptPairCounts:
        return count_first_epoch(config, sets, TrainState(), ranks, watchdog, stop_signal(asked=True))

    (kept,) = ThreadedRanks(1, TOGETHER, monkeypatch).run(count)
    assert kept.find(planner_of(config)) is None and len(planned) < NUM_SHARDS


def test_ranks_plan_no_shard_alone_to_know_what_they_count_together(
    data: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epochs of the first data set are short: each reader plans them, and may fail there while others do not."""
    few_rows = {0: 1 << 30, 1: 1}
    monkeypatch.setattr(PairCounting, "_few_rows", lambda self, component: few_rows[component])
    config, plan, group = config_of(data), PairPlanner.plan, ThreadedRanks(2, TOGETHER, monkeypatch)
    sets = [open_shard_set(url) for url in config.data_sets]
    samples = training_samples(sets, config.stages[0], config.training.seed)
    counted = [samples.planner(ReadEpoch(0, 1, number)) for number in range(9)]
    keys = {int(planner.key) for planner in counted}
    failed = threading.Lock()

    def plan_what_is_counted(self: PairPlanner, number: int) -> Any:
        if int(self.key) not in keys and failed.acquire(blocking=False):  # one rank alone
            raise UserError("its index is damaged", fix="restore it", code="damaged-index")
        return plan(self, number)

    def read_on(ranks: Any) -> bool:
        kept = KeptPairCounts(tmp_path)
        counting = counting_of(config, kept, ranks)
        counting.open(START)
        group.barrier(ranks)
        monkeypatch.setattr(PairPlanner, "plan", plan_what_is_counted)
        for sample in range(0, 700, 5):  # an epoch of each has about 175 rows
            counting.advance(Position(0, 0, sample), num_steps=1000)
        return kept.find(counted[2]) is not None

    assert group.run(read_on) == [True, True] and not failed.locked()


def test_the_rows_of_an_epoch_are_counted_once(data: list[Path], planned: list) -> None:
    config = config_of(data[:1])
    sets = [open_shard_set(url) for url in config.data_sets]
    samples = training_samples(sets, config.stages[0], config.training.seed)
    found = [samples.num_samples(epoch) for epoch in (0, 1, 2, 3, 0, 1)]
    assert found[4:] == found[:2] and len(planned) == len(set(planned)) == 4 * NUM_SHARDS


@pytest.mark.spawn
@pytest.mark.parametrize(("num_workers", "world_size"), [(0, 3), (1, 1)])
def test_the_next_epoch_is_counted_before_the_present_one_ends(
    num_workers: int,
    world_size: int,
    data: list[Path],
    tmp_path: Path,
    planned: list,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pair_counting, "_SHORTEST_EPOCH", 1)
    config = config_of(data[:1], f"data.num_workers={num_workers}")
    sets = [open_shard_set(config.data_sets[0])]
    rows = training_samples(sets, config.stages[0], config.training.seed).num_samples(0)
    assert rows is not None
    following, group = planner_of(config, epoch=1), ThreadedRanks(world_size, TOGETHER, monkeypatch)

    def read_on(ranks: Any) -> None:
        kept = KeptPairCounts(tmp_path)
        counting = counting_of(config, kept, ranks)
        counting.open(START)
        for sample in range(rows):
            counting.advance(Position(0, 0, sample), num_steps=1000)
            if ranks.is_first:
                assert (kept.find(following) is not None) is (rows - sample <= rows // 2)
        counting.advance(Position(0, 1, 0), num_steps=1000)
        assert kept.find(planner_of(config, epoch=2)) is None

    group.run(read_on)
    expected = 0 if num_workers else NUM_SHARDS
    assert sum(key == int(following.key) for key, _ in planned) == expected, "a process of its own plans"
    late = rows_of(config, KeptPairCounts(tmp_path), 6, Position(0, 0, rows - 3))
    assert late == rows_of(config, None, 6, Position(0, 0, rows - 3))


@pytest.mark.parametrize(("shortest", "counted_at"), [(1, 6), (20, 12)])
def test_a_start_late_in_an_epoch_does_not_wait_for_the_next_ones_count_unless_little_is_left(
    shortest: int, counted_at: int, data: list[Path], tmp_path: Path, planned: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_counting, "_SHORTEST_EPOCH", shortest)
    config = config_of(data[:1])
    rows = training_samples([open_shard_set(config.data_sets[0])], config.stages[0], 1).num_samples(0)
    assert rows is not None and rows > 20
    ((counting, kept),) = opened(config, tmp_path, monkeypatch, position=Position(0, 0, rows - 13))
    for left in range(12, 0, -1):
        counting.advance(Position(0, 0, rows - left), num_steps=1000)
        assert (kept.find(planner_of(config, epoch=1)) is not None) is (left <= counted_at)


def test_an_epoch_that_the_stage_does_not_reach_is_not_counted(
    data: list[Path], tmp_path: Path, planned: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_counting, "_SHORTEST_EPOCH", 1)
    config = config_of(data[:1])
    ((counting, _),) = opened(config, tmp_path, monkeypatch)
    planned.clear()
    sample = EPOCH_ROWS
    for steps in (3, 0):
        counting.advance(Position(0, 0, sample), num_steps=steps)
    assert planned == []


@pytest.mark.long
@pytest.mark.parametrize("sample", [3000, 6000])
def test_a_mixture_reads_the_same_samples_from_any_position(
    data: list[Path], tmp_path: Path, planned: list, monkeypatch: pytest.MonkeyPatch, sample: int
) -> None:
    """At sample 3,000 both data sets have been read several times over; 6,000 is in the second table of the mixture."""
    config = config_of(data, "training.global_batch_tokens=640", "training.micro_batch_tokens=640")
    position = Position(0, 0, sample)
    expected = rows_of(config, None, 3, position)
    results = opened(config, tmp_path, monkeypatch, 3, position)
    assert len(planned) == len(set(planned)) * 2 or len(set(planned)) % NUM_SHARDS == 0
    planned.clear()
    assert rows_of(config, results[1][1], 3, position) == expected
    assert len(planned) <= 4 * 16, "two windows of each"
    planned.clear()
    opened(config, tmp_path, monkeypatch, 2, position)
    assert planned == []
