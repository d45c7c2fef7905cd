"""Samples: which corpora without a labeled pair are refused, and which epochs a mixture's samples come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data_prep.base.errors import UserError
from data_prep.dataset.shards import ShardIndex
from tests.support.error_codes import coded
from trainer.config.data_settings import DataSettings
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.config.training_settings import StageSettings, TrainingSettings
from trainer.data.evaluation_batches import evaluation_batches
from trainer.data.packing import RowSettings
from trainer.data.randomness import Purpose
from trainer.data.samples import SampleSpace, check_enough_data, training_samples
from trainer.data.shard_set import open_shard_set

IndexMaker = Callable[..., ShardIndex]


def shard_of(index: ShardIndex) -> Any:
    """What a pass asks of a shard."""
    tokens, documents = int(index.document_lengths.sum()), len(index.document_lengths)
    return SimpleNamespace(
        record=SimpleNamespace(tokens=tokens, documents=documents),
        read_index=lambda: index,
        itemsize=4,
        prefetch=lambda: None,
        shard_set=SimpleNamespace(url="shards"),
    )


def space_of(components: list[list[Any]], usage: Purpose, task: Any = "next_sentence") -> SampleSpace:
    weights = [1.0] * len(components)
    return SampleSpace(components, weights, RowSettings(16, task, 0.0), seed=1, usage=usage)


def test_training_does_not_start_without_a_labeled_pair(index_of: IndexMaker) -> None:
    singles = shard_of(index_of([[4]] * 5, documents_a_record=5))
    pairs = shard_of(index_of([[4, 4]] * 6, documents_a_record=6))
    with pytest.raises(UserError, check=coded("no-sentence-pairs")):
        space_of([[singles]], Purpose.TRAINING).open_epoch(0)
    assert space_of([[singles]], Purpose.TRAINING).open_epoch(1).num_rows > 0, "a later epoch happens to have none"
    assert space_of([[singles]], Purpose.EVALUATION).open_epoch(0).num_rows > 0
    assert space_of([[singles], [pairs]], Purpose.TRAINING).open_epoch(0, component=0).num_rows > 0
    assert space_of([[singles]], Purpose.TRAINING, None).open_epoch(0).num_rows > 0
    assert space_of([[pairs]], Purpose.TRAINING).open_epoch(0).num_rows > 0


@pytest.mark.parametrize("task", [None, "next_sentence"])
def test_a_mixture_takes_every_row_of_a_components_epoch_before_the_next(index_of: IndexMaker, task: Any) -> None:
    components = [[shard_of(index_of([[4, 4]] * count, documents_a_record=count))] for count in (6, 15)]
    space = space_of(components, Purpose.TRAINING, task)
    assert space.num_samples(0) is None
    segments, shards = space.segments_of_samples(0, np.arange(400))
    assert set(segments.rows.tolist()) == set(range(400)), "no sample is empty"
    assert (np.diff(segments.rows) >= 0).all()
    for number, component in enumerate(components):
        mine = np.array([shard is component[0] for shard in shards])[segments.shards]
        rows = len(set(segments.rows[mine].tolist()))
        assert 150 < rows < 250, "half of the samples are of each"
        first_epoch = space.open_epoch(0, number, 0).num_rows
        samples = np.unique(segments.rows[mine])[:first_epoch]
        in_epoch = mine & np.isin(segments.rows, samples)
        whole, _ = space.open_epoch(0, number, 0).segments_of_epoch(np.arange(first_epoch))
        assert sorted(segments.starts[in_epoch].tolist()) == sorted(whole.starts.tolist())


def stages_of(data: DataSettings, *rows: int) -> tuple[Stage, ...]:
    """One stage per size of the global batch."""
    stages = tuple(StageSettings(steps=1, global_batch_tokens=each * 32) for each in rows)
    training = TrainingSettings(stages=stages, micro_batch_tokens=32)
    data = data.model_copy(update={"sequence_length": 32})
    return RunConfig(output_dir="runs/x", data=data, training=training).stages


@pytest.mark.parametrize("mode", ["none", "next_sentence", "sentence_order"])
def test_data_for_less_than_a_global_batch_is_refused_before_anything_is_built(corpus, mode: str) -> None:
    data = DataSettings(shards=corpus.shard_set.url, sentence_pairs=mode)
    rows = training_samples([corpus.shard_set], stages_of(data, 1)[0], 0).num_samples(0)
    assert rows is not None
    check_enough_data([corpus.shard_set], stages_of(data, 1, rows), 0)
    with pytest.raises(UserError, check=coded("less-than-one-batch"), match=f" {rows} .*{rows + 1} .*={rows * 32} "):
        check_enough_data([corpus.shard_set], stages_of(data, 1, rows + 1), 0)


@pytest.mark.parametrize("task", ["next_sentence", "sentence_order"])
def test_pairs_need_sentences_in_every_data_set_of_a_mixture(
    task: str, small_shards: Path, shards_without_sentences: Path
) -> None:
    sets = [open_shard_set(str(url)) for url in (small_shards, shards_without_sentences)]
    shards = [{"url": shard_set.url} for shard_set in sets]
    check_enough_data(sets, stages_of(DataSettings(shards=shards), 1), 0)
    stages = stages_of(DataSettings(shards=shards, sentence_pairs=task), 1)
    with pytest.raises(UserError, match=shards_without_sentences.name, check=coded("no-sentences")):
        check_enough_data(sets, stages, 0)
    with pytest.raises(UserError, match=shards_without_sentences.name, check=coded("no-sentences")):
        training_samples(sets, stages[0], 0)
    with pytest.raises(UserError, match=shards_without_sentences.name, check=coded("no-sentences")):
        next(evaluation_batches(sets, stages[0].data, stages[0], 0, 0, 1, None))


def test_a_large_data_set_is_not_planned_for_it(corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*arguments: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("trainer.data.samples.training_samples", plan)
    data = DataSettings(shards=corpus.shard_set.url, sentence_pairs="next_sentence")
    check_enough_data([corpus.shard_set], stages_of(data, 1), 0)


def test_a_mixture_runs_through_its_components_again_and_again(tmp_path, corpus_at: Callable) -> None:
    sets = [corpus_at(tmp_path / name, [[[50]]]).shard_set for name in "ab"]
    data = DataSettings(shards=[{"url": shard_set.url} for shard_set in sets])
    check_enough_data(sets, stages_of(data, 1000), 0)
