from __future__ import annotations

from collections.abc import Callable

import pytest

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.config.data_settings import DataSettings
from trainer.config.run_config import RunConfig
from trainer.config.stages import Stage
from trainer.config.training_settings import StageSettings, TrainingSettings
from trainer.data.sample_settings import check_enough_data, training_samples


def stages_of(data: DataSettings, *rows: int) -> tuple[Stage, ...]:
    """One stage per size of the global batch."""
    stages = tuple(StageSettings(steps=1, global_batch_tokens=each * 32) for each in rows)
    training = TrainingSettings(stages=stages, micro_batch_tokens=32)
    data = data.model_copy(update={"sequence_length": 32})
    return RunConfig(output_dir="runs/x", data=data, training=training).stages


@pytest.mark.parametrize("mode", ["none", "next_sentence", "sentence_order"])
def test_data_for_less_than_a_global_batch_is_refused_before_anything_is_built(corpus, mode: str) -> None:
    data = DataSettings(shards=corpus.shard_set.url, sentence_pairs=mode)
    rows = training_samples([corpus.shard_set], data, stages_of(data, 1)[0], 0).num_samples(0)
    assert rows is not None
    check_enough_data([corpus.shard_set], stages_of(data, 1, rows), 0)
    with pytest.raises(UserError, check=coded("less-than-one-batch"), match=f" {rows} .*{rows + 1} .*={rows * 32} "):
        check_enough_data([corpus.shard_set], stages_of(data, 1, rows + 1), 0)


def test_a_large_data_set_is_not_planned_for_it(corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*arguments: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("trainer.data.sample_settings.training_samples", plan)
    data = DataSettings(shards=corpus.shard_set.url, sentence_pairs="next_sentence")
    check_enough_data([corpus.shard_set], stages_of(data, 1), 0)


def test_a_mixture_runs_through_its_components_again_and_again(tmp_path, corpus_at: Callable) -> None:
    sets = [corpus_at(tmp_path / name, [[[50]]]).shard_set for name in "ab"]
    data = DataSettings(shards=[{"url": shard_set.url} for shard_set in sets])
    check_enough_data(sets, stages_of(data, 1000), 0)
