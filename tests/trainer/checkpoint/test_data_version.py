"""A run keeps the version of its data that it began with, whatever is added or removed meanwhile."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from data_prep import open_dataset
from data_prep.base.errors import UserError
from data_prep.dataset.manifest_records import FileRecord
from data_prep.dataset.versions import delete_older_versions
from tests.support.error_codes import coded
from tests.support.living_data_sets import records_of, remove
from tests.support.toy_run import tiny_config
from trainer.checkpoint.data_version import describe_versions, open_data, run_digests, with_epochs_counted
from trainer.checkpoint.format import MARKER_NAME, STATE_NAME, DataIdentity, Marker, SavedState, TrainState, step_folder
from trainer.config.run_config import RunConfig
from trainer.config.training_settings import BranchSettings, ScheduleSettings
from trainer.data.loader import Loader, Position
from trainer.data.pair_counts import PAIR_COUNTS, KeptPairCounts, PairPlanner
from trainer.data.samples import ReadEpoch, training_samples


@pytest.fixture
def shards(small_shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_shards, tmp_path / "shards"))


@pytest.fixture
def config(shards: Path, tmp_path: Path) -> RunConfig:
    return tiny_config(
        tmp_path / "run",
        model={"vocab_size": 800, "max_position_embeddings": 512},
        data={"shards": str(shards), "sequence_length": 64, "num_workers": 0},
        training={"max_steps": 10, "micro_batch_tokens": 256, "global_batch_tokens": 512},
    )


def save_checkpoint(config: RunConfig, step: int, digests: tuple[str, ...]) -> Path:
    """A checkpoint of no tensors."""
    folder = step_folder(config.output_dir, step)
    folder.mkdir(parents=True)
    saved = SavedState(
        format_version=1,
        state=TrainState(step=step),
        config=config.model_dump(mode="json"),
        data=DataIdentity(manifest_digests=digests, tokenizer_fingerprint="f"),
        world_size=1,
        zero_stage=0,
        shapes={},
        optimizer_steps=step,
        loss_scaler=None,
        versions={},
    )
    data = saved.model_dump_json().encode()
    (folder / STATE_NAME).write_bytes(data)
    record = FileRecord(name=STATE_NAME, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    marker = Marker(format_version=1, step=step, files=(record,))
    (folder / MARKER_NAME).write_text(marker.model_dump_json())
    return folder


def remove_some(shards: Path) -> None:
    record, *_ = records_of(shards / "train-000000.tar")
    remove(shards, ids=record.document_ids[:3])


def rows(config: RunConfig) -> list[np.ndarray]:
    """What the loader gives out in an epoch, global batch by global batch."""
    loader = Loader(open_data(config), config.stages[0], Position(0, 0, 0), 0)
    batches = []
    for batch in loader:
        if batch.position.epoch:
            return batches
        batches.append(np.concatenate([micro.input_ids.numpy() for micro in batch.micro_batches]))
    return batches


@pytest.mark.long
def test_a_new_run_takes_the_current_version_and_a_resumed_one_its_own(config: RunConfig, shards: Path) -> None:
    first = open_dataset(shards).manifest
    assert run_digests(config.output_dir) == ()
    before = rows(config)
    save_checkpoint(config, 3, (first.digest,))
    remove_some(shards)
    second = open_dataset(shards).manifest
    assert second.version == 2
    assert [shard_set.manifest for shard_set in open_data(config)] == [first]
    after = rows(config)
    assert len(before) == len(after) > 3 and all(map(np.array_equal, before, after)), "the same rows as if nothing was"
    new_run = config.model_copy(update={"output_dir": config.output_dir + "-new"})
    assert [shard_set.manifest for shard_set in open_data(new_run)] == [second]
    assert [shard_set.manifest for shard_set in open_data(config, allow_change=True)] == [second]


def test_the_version_is_reported(config: RunConfig, shards: Path) -> None:
    first = open_dataset(shards).manifest
    expected = f"data {shards}: version 1 ({first.digest[:16]})"
    assert list(describe_versions(open_data(config))) == [expected]
    save_checkpoint(config, 3, (first.digest,))
    remove_some(shards)
    told = list(describe_versions(open_data(config)))
    assert told == [f"{expected} (the newest is 2; a run keeps its own)"]


def test_a_version_that_was_purged_is_a_clear_error(config: RunConfig, shards: Path) -> None:
    save_checkpoint(config, 3, (open_dataset(shards).manifest.digest,))
    remove_some(shards)
    delete_older_versions(str(shards))
    with pytest.raises(UserError, check=coded("missing-data-version"), match="(?s)only 2 .*--allow-change"):
        open_data(config)
    assert open_data(config, allow_change=True)[0].manifest.version == 2


def test_a_damaged_newest_checkpoint_leaves_it_to_the_one_before(config: RunConfig, shards: Path) -> None:
    digest = open_dataset(shards).manifest.digest
    save_checkpoint(config, 3, (digest,))
    (save_checkpoint(config, 6, ("e" * 64,)) / STATE_NAME).write_text("{}")
    assert run_digests(config.output_dir) == (digest,)


def test_on_an_empty_disk_the_stored_checkpoint_says_which_version(
    config: RunConfig, shards: Path, tmp_path: Path
) -> None:
    first = open_dataset(shards).manifest
    store = tmp_path / "store"
    settings = config.checkpoint.model_copy(update={"upload_to": str(store)})
    config = config.model_copy(update={"checkpoint": settings})
    for step in (3, 6):
        folder = save_checkpoint(config, step, (first.digest,))
        shutil.copytree(folder, store / folder.name)
    shutil.rmtree(config.output_dir)
    remove_some(shards)
    assert open_dataset(shards).manifest.version == 2
    assert [shard_set.manifest for shard_set in open_data(config)] == [first]
    (store / "step-00000006" / STATE_NAME).write_text("{}")
    assert run_digests(config.output_dir, str(store)) == (first.digest,), "a damaged one leaves it to the one before"
    shutil.rmtree(store)
    assert run_digests(config.output_dir, str(store)) == ()


def test_a_store_that_cannot_be_read_leaves_it_to_the_search_for_a_checkpoint(
    config: RunConfig, tmp_path: Path
) -> None:
    (tmp_path / "store").write_text("a file where the folder should be")
    assert run_digests(config.output_dir, str(tmp_path / "store")) == ()


def test_another_mixture_is_left_to_the_check_of_the_checkpoint(config: RunConfig, shards: Path) -> None:
    save_checkpoint(config, 3, ("a" * 64, "b" * 64))
    assert [shard_set.manifest for shard_set in open_data(config)] == [open_dataset(shards).manifest]


def in_epochs(shards: Path, run: Path, duration: str | None, pairs: str = "none", **training: object) -> RunConfig:
    return tiny_config(
        run,
        model={"vocab_size": 800, "max_position_embeddings": 512, "type_vocab_size": 2},
        data={"shards": str(shards), "sequence_length": 64, "num_workers": 0, "sentence_pairs": pairs},
        training={"duration": duration, "micro_batch_tokens": 256, "global_batch_tokens": 512} | training,
        schedule={"name": "warmup_stable_decay", "warmup": "10%", "decay_duration": "20%"},
    )


@pytest.mark.parametrize("pairs", ["none", "next_sentence"])
@pytest.mark.parametrize("ramp", [None, {"initial_tokens": 256, "duration": 5}])
def test_whole_epochs_end_where_the_loader_begins_the_next_one(
    pairs: str, ramp: dict[str, int] | None, small_shards: Path, tmp_path: Path
) -> None:
    config = in_epochs(small_shards, tmp_path / "run", "2 epochs", pairs, batch_warmup=ramp)
    counted = with_epochs_counted(config)
    (stage,) = counted.stages
    loader = Loader(open_data(config), stage, Position(0, 0, 0), config.training.seed)
    epochs = [batch.position.epoch for batch in itertools.islice(loader.planned(), counted.max_steps + 1)]
    assert counted.max_steps > 20 and epochs[-1] == 2, "the step after the last one"
    # Every epoch of sentence pairs has its own number of sequences.
    assert epochs[-2] == 1 if pairs == "none" else 1 in epochs[-5:]
    assert counted.training.duration is not None and str(counted.training.duration) == f"{counted.max_steps} steps"
    assert stage.schedule.warmup.steps == round(0.1 * counted.max_steps)


def test_sentence_pairs_that_an_earlier_start_counted_are_not_counted_again(
    small_shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = in_epochs(small_shards, tmp_path / "run", "1 epoch", "next_sentence")
    counted = with_epochs_counted(config)
    samples = training_samples(open_data(config), counted.stages[0], config.training.seed)
    planner = samples.planner(ReadEpoch(0, 0))
    counts = np.array([astuple(planner.plan(number).counts) for number in range(len(planner.shards))])
    KeptPairCounts(tmp_path / "run" / PAIR_COUNTS).keep(planner, counts, writes=True)
    monkeypatch.setattr(PairPlanner, "plan", lambda *_: pytest.fail("a shard is planned"))
    assert with_epochs_counted(config) == counted


def test_part_of_an_epoch_has_its_part_of_the_steps(small_shards: Path, tmp_path: Path) -> None:
    half, one, more = (
        with_epochs_counted(in_epochs(small_shards, tmp_path, f"{n} epochs")).max_steps for n in ("0.5", "1", "1.5")
    )
    assert abs(2 * half - one) <= 1 and more == one + half
    with pytest.raises(UserError, check=coded("less-than-one-step")):
        with_epochs_counted(in_epochs(small_shards, tmp_path, "0.001 epochs"))


def test_an_epoch_of_a_mixture_has_the_sequences_of_all_its_data_sets(small_shards: Path, tmp_path: Path) -> None:
    alone = in_epochs(small_shards, tmp_path, "1 epoch")
    (shard_set,) = open_data(alone)
    num_rows = training_samples([shard_set], with_epochs_counted(alone).stages[0], 0).num_samples(0)
    assert num_rows is not None
    twice = [{"url": str(small_shards), "weight": 1}, {"url": str(small_shards), "weight": 3}]
    stages = [{"duration": "2 epochs", "data": {"shards": twice}}, {"duration": "1 epoch"}, {"steps": 5}]
    mixed = with_epochs_counted(in_epochs(small_shards, tmp_path, None, stages=stages))
    assert [stage.taken_steps for stage in mixed.stages] == [-(-2 * 2 * num_rows // 8), num_rows // 8, 5]


def test_epochs_are_counted_in_the_data_version_of_the_run(shards: Path, tmp_path: Path) -> None:
    config = in_epochs(shards, tmp_path / "run", "1 epoch", global_batch_tokens=256)
    counted = with_epochs_counted(config)
    save_checkpoint(counted, 3, (open_dataset(shards).manifest.digest,))
    for number in range(4):
        record, *_ = records_of(shards / f"train-{number:06}.tar")
        remove(shards, ids=record.document_ids)
    assert with_epochs_counted(config) == counted
    assert with_epochs_counted(config, allow_change=True).max_steps < counted.max_steps


def test_a_branch_of_a_recipe_in_epochs_counts_all_its_stages(small_shards: Path, tmp_path: Path) -> None:
    decay = {"name": "decay", "duration": "1 epoch", "sequence_length": 32}
    stages = [{"name": "stable", "duration": "2 epochs"}, decay]
    recipe = in_epochs(small_shards, tmp_path / "run", None, stages=stages)
    whole = with_epochs_counted(recipe)
    branch = BranchSettings(run="runs/stable", step=7, stage="decay")
    (stage,) = with_epochs_counted(recipe.model_copy(update={"branch": branch})).stages
    assert (stage.first_step, stage.steps) == (7, whole.stages[1].steps)
    assert whole.stages[0].steps > 20


def test_epochs_without_data_say_what_is_missing_and_rules_hold_for_their_steps(shards: Path, tmp_path: Path) -> None:
    config = in_epochs(tmp_path / "nothing", tmp_path / "run", "3 epochs")
    assert config.data_sets == (str(tmp_path / "nothing"),)
    with pytest.raises(UserError, check=coded("missing-path"), match="training.duration=3 epochs cannot be counted"):
        with_epochs_counted(config)
    with pytest.raises(UserError, check=coded("epochs-not-counted")):
        config.max_steps  # noqa: B018
    too_short = in_epochs(shards, tmp_path / "run", "1 epoch")
    too_short = too_short.model_copy(update={"schedule": ScheduleSettings(warmup="1000000 steps")})
    with pytest.raises(UserError, check=coded("schedule-longer-than-run")):
        with_epochs_counted(too_short)
    with pytest.raises(UserError, check=coded("epochs-of-all-stages")):
        in_epochs(shards, tmp_path / "run", "1 epoch", stages=[{"steps": 5}])
