from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.threaded_ranks import ThreadedRanks
from trainer.checkpoint import writer
from trainer.checkpoint.format import (
    CheckpointFolder,
    DataIdentity,
    Marker,
    SavedState,
    TrainState,
    checkpoints_folder,
    list_steps,
    step_folder,
)
from trainer.checkpoint.late_scores import (
    EVALUATION_NAME,
    LateScores,
    superfluous_in,
    superfluous_steps,
    write_late_scores,
)
from trainer.config.run_settings import CheckpointSettings

LOSS = "valid/mlm_loss"
STEPS = dict.fromkeys((10, 20, 30, 40, 50))


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"keep_last": 1}, {50}),
        ({"keep_last": 2}, {40, 50}),
        ({"keep_last": 1, "keep_every_steps": 20}, {20, 40, 50}),
        ({"keep_last": 9}, {10, 20, 30, 40, 50}),
    ],
)
def test_the_newest_and_every_so_many_stay(settings, left):
    assert set(STEPS) - superfluous_steps(STEPS, 50, CheckpointSettings(**settings)) == left


def test_the_best_stay_by_their_metric_and_of_equals_the_newer():
    losses = {10: 2.0, 20: 1.0, 30: 1.0, 40: 3.0, 50: None}
    by_loss = CheckpointSettings(keep_last=1, keep_best=2)
    assert superfluous_steps(losses, 50, by_loss) == {10, 40}
    assert superfluous_steps(losses, 50, by_loss.model_copy(update={"keep_best": 1})) == {10, 20, 40}
    by_accuracy = CheckpointSettings(keep_last=1, keep_best=1, best_metric="valid/mlm_accuracy")
    assert superfluous_steps(losses, 50, by_accuracy) == {10, 20, 30}


def test_scores_that_were_measured_differently_are_not_compared():
    """A run that was resumed with other evaluation settings keeps the best of before and the best of after."""
    losses, settings = {10: 2.0, 20: 1.0, 30: 4.0, 40: 3.0, 50: 3.5}, CheckpointSettings(keep_last=1, keep_best=1)
    assert superfluous_steps(losses, 50, settings) == {10, 30, 40}
    evaluations = {10: "-", 20: "-", 30: "a", 40: "a", 50: "a"}
    assert superfluous_steps(losses, 50, settings, evaluations) == {10, 30}


def write_checkpoint(output_dir: Path, step: int) -> Path:
    """A complete checkpoint without weights."""
    folder = CheckpointFolder(step_folder(output_dir, step))
    saved = SavedState(
        format_version=1,
        state=TrainState(step=step),
        config={},
        data=DataIdentity(manifest_digests=(), tokenizer_fingerprint=""),
        world_size=1,
        zero_stage=0,
        shapes={},
        optimizer_steps=step,
        loss_scaler=None,
        versions={},
    )
    Path(folder.url).mkdir(parents=True)
    folder.write_marker(Marker(format_version=1, step=step, files=(folder.write_state(saved),)))
    return Path(folder.url)


def test_nodes_with_disks_of_their_own_keep_the_best_by_a_suite_whose_scores_rank_0_has(tmp_path, monkeypatch):
    settings = CheckpointSettings(keep_last=1, keep_best=1, best_metric="suite/mine/average", upload_to="s3://b/run")
    for node, step in itertools.product("01", (10, 20, 30)):
        folder = write_checkpoint(tmp_path / node, step)
        if node == "0":
            write_late_scores(folder, LateScores(state="done", suite="mine", metrics={"suite/mine/average": 1 / step}))
    threads = ThreadedRanks(2, (writer,), monkeypatch)
    threads.run(lambda ranks: writer.remove_superfluous(tmp_path / str(ranks.rank), settings, 30, ranks))
    assert [sorted(list_steps(tmp_path / node)[0]) for node in "01"] == [[10, 30], [10, 30]]


@pytest.mark.parametrize(("facts", "left"), [({"seed": "1"}, {10, 20, 30}), ({"seed": "0"}, {10, 30})])
def test_the_best_are_found_by_scores_and_how_they_were_measured(tmp_path, facts, left):
    for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0)):
        own = {"seed": "0"} if step == 10 else facts
        scores = LateScores(state="done", metrics={LOSS: loss}, facts=own)
        write_late_scores(write_checkpoint(tmp_path, step), scores, EVALUATION_NAME)
    settings = CheckpointSettings(keep_last=1, keep_best=1)
    steps = [10, 20, 30]
    assert {*steps} - superfluous_in(checkpoints_folder(tmp_path), steps, 30, settings) == left


def test_steps_after_the_newest_checkpoint_are_superfluous():
    assert superfluous_steps(STEPS, 30, CheckpointSettings(keep_last=2, keep_every_steps=10)) == {40, 50}


@given(st.dictionaries(st.integers(0, 99), st.none() | st.floats(0, 9)), st.integers(0, 99), st.integers(1, 4))
def test_the_newest_never_goes_and_so_many_are_left(complete, newest, keep_last):
    complete |= {newest: None}
    left = set(complete) - superfluous_steps(complete, newest, CheckpointSettings(keep_last=keep_last))
    assert newest in left and max(left) == newest
    assert len(left) == min(keep_last, sum(step <= newest for step in complete))
