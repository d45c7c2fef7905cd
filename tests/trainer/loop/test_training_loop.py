"""The loop over real batches with a step that trains nothing: what is read ahead, saved, and granted when."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.support.threaded_ranks import ThreadedRanks
from tests.support.toy_run import preset_config
from trainer.checkpoint.format import TrainState
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.data.loader import GlobalBatch, Loader
from trainer.data.pair_counts import KeptPairCounts
from trainer.data.samples import training_samples
from trainer.data.shard_set import open_shard_set
from trainer.data.workers import ReadingStopped
from trainer.distributed import agreement
from trainer.distributed.process_group import Ranks
from trainer.loop import pair_counting
from trainer.loop import step as step_module
from trainer.loop import training_loop as loop
from trainer.loop.checkpoints import Checkpoints, Progress
from trainer.loop.step import Recorder, StepResult
from trainer.metrics.health import NonFiniteSteps
from trainer.objectives.build import build_objectives
from trainer.objectives.objective import StageObjectives

STEPS = 8
NOTHING = torch.zeros(3, dtype=torch.float64)
SIZES = ModelSettings(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16)
OBJECTIVES = build_objectives(objectives_of("next_sentence"), SIZES)
ALONE = Ranks(0, 1, 0, torch.device("cpu"))
Hook = Callable[["Training", str], None]


class Training:
    """A run that notes the bytes of each step's batch, what is saved and what is logged.

    `hook` is called with "step 3: fetching" before the batch of step 4 is read, and with "step 3" while step 3 runs.
    """

    def __init__(self, config: RunConfig, folder: Path, hook: Hook = lambda run, doing: None, ranks: Ranks = ALONE):
        self.config, self.ranks, self.engine = config, ranks, SimpleNamespace(optimizer_steps=0)
        shard_sets = [open_shard_set(url) for url in config.data_sets]
        self.data = SimpleNamespace(shard_sets=shard_sets, pair_counts=KeptPairCounts(folder), can_evaluate=False)
        self.stop_signal = SimpleNamespace(is_requested=False)
        self.doing: list[str] = []
        self.batches: dict[int, bytes] = {}
        self.epochs: dict[int, float] = {}
        self.saved: dict[int, TrainState] = {}
        self.lines: list[str] = []
        self._hook = hook
        self.watchdog = SimpleNamespace(mark=self.note)
        self.reporter: Any = SimpleNamespace(info=self.lines.append, log=self.log, stopped=lambda checkpoint: None)
        this: Any = self
        self.checkpoints = Checkpoints(config, engine=this, data=this, reporter=self.reporter, mark=self.note)

    def note(self, doing: str, patience_seconds: int = 0) -> None:
        self.doing.append(doing)
        self._hook(self, doing)

    def objectives_of(self, stage: Stage) -> StageObjectives:
        return StageObjectives(OBJECTIVES, {each.name: each.weight for each in stage.objectives})

    def log(self, state: TrainState, epoch: float, late_scores: Any) -> TrainState:
        self.epochs[state.step] = epoch
        return state

    def train(self, state: TrainState | None = None) -> tuple[str, int]:
        """Train on from a state; how it ended, and after which step."""
        state = state or TrainState()
        self.reporter.recorder = Recorder(self.ranks, OBJECTIVES, state.step)
        self.reporter.add_step = self.reporter.recorder.add
        self.reporter.logged_at = 0.0
        run: Any = self
        ended, state, _ = loop.training_loop(run, state, Progress(NonFiniteSteps(3)))
        return ended, state.step


@pytest.fixture(autouse=True)
def nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(run: Training, fetched: Any, counts: Any, state: TrainState) -> StepResult:
        run.note(f"step {state.step + 1}")
        packed = [batch.pack().numpy().tobytes() for batch in fetched.batch.micro_batches]
        run.batches[state.step + 1] = b"".join(packed)
        return StepResult(counts, NOTHING, {"masked_lm": 1.0}, 0.0, applied=True)

    def save(checkpoints: Any, state: TrainState, progress: Progress, is_end: bool) -> Progress:
        checkpoints.engine.saved[state.step] = state
        return replace(progress, saved_step=state.step)

    monkeypatch.setattr(loop, "step", step)
    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr(pair_counting, "patient_collectives", lambda *_: contextlib.nullcontext())


@pytest.fixture
def config(small_shards: Path, request: pytest.FixtureRequest) -> RunConfig:
    """Two stages of different lengths; an epoch of the first holds two and a half global batches."""
    given = ["data.num_workers=0", getattr(request, "param", "data.sentence_pairs=none")]
    any_batch = preset_config(*given, shards=small_shards)
    sets = [open_shard_set(str(small_shards))]
    rows = training_samples(sets, any_batch.stages[0], any_batch.training.seed).num_samples(0)
    assert rows is not None
    length = any_batch.data.sequence_length
    tokens = int(rows / 2.5) * length
    stages = f"[{{steps: 5}}, {{steps: {STEPS - 5}, sequence_length: {length // 2}}}]"
    sizes = [f"training.micro_batch_tokens={tokens}", f"training.global_batch_tokens={tokens}"]
    often = ["checkpoint.every_steps=1", "logging.every_steps=1", "training.max_steps=null"]
    return preset_config(*sizes, *often, f"training.stages={stages}", *given, shards=small_shards)


@pytest.mark.parametrize("config", ["data.sentence_pairs=none", "data.sentence_pairs=next_sentence"], indirect=True)
def test_a_checkpoint_holds_the_position_of_what_was_trained_at_every_border_of_epochs_and_stages(
    config: RunConfig, tmp_path: Path
) -> None:
    whole = Training(config, tmp_path)
    assert whole.train() == ("finished", STEPS)
    steps = [doing for doing in whole.doing if doing.startswith("step")]
    assert steps[:4] == ["step 1: fetching", "step 1: fetching", "step 1", "step 2: fetching"]
    positions = [(state.stage, state.epoch) for state in whole.saved.values()]
    assert len(set(positions)) > 3 and positions[1][1] < positions[2][1], "the third step begins an epoch"
    for step, state in whole.saved.items():
        resumed = Training(config, tmp_path)
        assert resumed.train(state) == ("finished", STEPS)
        assert resumed.batches == {number: each for number, each in whole.batches.items() if number > step}
        assert resumed.epochs.items() <= whole.epochs.items()
        assert resumed.saved.items() <= whole.saved.items()


def test_a_line_about_a_stage_or_an_epoch_comes_before_its_first_step(config: RunConfig, tmp_path: Path) -> None:
    training = Training(config, tmp_path, lambda run, doing: run.lines.append(doing))
    training.train()
    news = [number for number, line in enumerate(training.lines) if not line.startswith("step ")]
    followed = [next(line for line in training.lines[number:] if line.startswith("step ")) for number in news]
    assert followed == [f"step {step}: fetching" for step in (3, 5, 6, 8)]
    assert [training.epochs[step] for step in (1, 5)] == pytest.approx([0.4, 2.4], abs=0.01)
    last, rest = training.saved[STEPS], [training.epochs[step] for step in range(6, STEPS + 1)]
    assert last.first_epoch == 3 and 0 < rest[0] < 1, "the second stage counts its own epochs"
    assert rest == sorted(rest) and last.epoch - last.first_epoch == int(rest[-1])


@pytest.mark.parametrize("config", [f"training.max_steps={steps}" for steps in (4, 5, 7)], indirect=True)
def test_nothing_is_read_beyond_the_last_step(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, batches_of = list[int](), Loader.__iter__

    def noted(loader: Loader) -> Iterator[GlobalBatch]:
        for batch in batches_of(loader):
            read.append(batch.position.stage)
            yield batch

    monkeypatch.setattr(Loader, "__iter__", noted)
    assert Training(config, tmp_path).train() == ("finished", config.max_steps)
    assert read == [int(step > 5) for step in range(1, config.max_steps + 1)]


def test_the_counts_of_the_next_batch_are_summed_while_a_step_runs(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(config, tmp_path)

    def begin(values: torch.Tensor, ranks: Ranks) -> Callable[[], torch.Tensor]:
        training.note("begin the sum")
        return lambda: training.note("wait for it") or values

    monkeypatch.setattr(step_module, "begin_sum_on_hosts", begin)
    training.train()
    happened = [doing for doing in training.doing if "fetching" not in doing]
    assert happened[:2] == ["begin the sum", "wait for it"]
    assert happened[2:] == [
        each for step in range(1, STEPS + 1) for each in ("begin the sum", f"step {step}", "wait for it")
    ]


@pytest.mark.parametrize(
    ("asked", "last"),
    [
        ("step 1: fetching", 0),
        ("step 3: fetching", 3),
        ("step 3", 4),
        (f"step {STEPS - 1}", STEPS),
        (f"step {STEPS}: fetching", STEPS),
    ],
)
def test_a_request_that_comes_before_a_step_is_granted_after_it_and_one_within_it_after_the_next(
    asked: str, last: int, config: RunConfig, tmp_path: Path
) -> None:
    def ask(run: Training, doing: str) -> None:
        run.stop_signal.is_requested = run.stop_signal.is_requested or doing == asked

    stopped = Training(config, tmp_path, ask)
    assert stopped.train() == ("stopped", last)
    assert list(stopped.batches) == list(stopped.saved) == list(range(1, last + 1))


def test_a_step_is_taken_although_the_batch_after_it_is_not_read_before_a_stop(
    config: RunConfig, tmp_path: Path
) -> None:
    def stop_reading(run: Training, doing: str) -> None:
        if doing == "step 3: fetching":
            run.stop_signal.is_requested = True
            run.reporter.recorder.clock.fetch = never_read

    def never_read(batches: object) -> None:
        raise ReadingStopped

    assert Training(config, tmp_path, stop_reading).train() == ("stopped", 3)


@pytest.mark.parametrize("config", ["data.sentence_pairs=next_sentence"], indirect=True)
@pytest.mark.parametrize(("count", "last"), [(1, 0), (2, 5)])
def test_a_request_while_sentence_pairs_are_counted_ends_the_count_and_the_run(
    count: int, last: int, config: RunConfig, tmp_path: Path
) -> None:
    """The second count is that of the second stage, which begins with step 6."""

    def ask(run: Training, doing: str) -> None:
        run.stop_signal.is_requested = run.doing.count("counting sentence pairs") == count

    stopped = Training(config, tmp_path, ask)
    assert stopped.train() == ("stopped", last)
    assert list(stopped.saved) == list(range(1, last + 1)) and len([*tmp_path.glob("*.json")]) == count - 1


@pytest.mark.parametrize("asked", [False, True])
def test_an_error_of_one_rank_in_reading_ends_all_once_the_step_before_it_is_done(
    asked: bool, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(run: Training, doing: str) -> None:
        if doing == "step 3: fetching" and run.ranks.rank == 1:
            run.stop_signal.is_requested = asked
            run.reporter.recorder.clock.fetch = fail

    def fail(batches: object) -> None:
        raise UserError("shard 7 is damaged", fix="restore it", code="damaged-shard")

    def train(ranks: Ranks) -> list[int]:
        run = Training(config, tmp_path / str(ranks.rank), damage, ranks)
        if asked:
            assert run.train() == ("stopped", 3)
        else:
            whose = "" if ranks.rank == 1 else "rank 1 ended the run: "
            with pytest.raises(UserError, check=coded("damaged-shard"), match=f"^{whose}shard 7 is damaged"):
                run.train()
        return list(run.saved)

    modules = (step_module, agreement)
    assert ThreadedRanks(2, modules, monkeypatch).run(train) == [[1, 2, 3]] * 2
