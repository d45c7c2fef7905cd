from __future__ import annotations

from collections.abc import Callable

import pytest

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.config.data_settings import DataSettings
from trainer.config.training_settings import Stage
from trainer.data.sample_settings import check_enough_data, training_samples


def stage_of(rows: int) -> Stage:
    return Stage(steps=1, sequence_length=32, micro_batch_tokens=32, global_batch_tokens=rows * 32)


@pytest.mark.parametrize("mode", ["none", "next_sentence", "sentence_order"])
def test_data_for_less_than_a_global_batch_is_refused_before_anything_is_built(corpus, mode: str) -> None:
    data = DataSettings(shards=corpus.shard_set.url, sentence_pairs=mode)
    rows = training_samples([corpus.shard_set], data, stage_of(1), 0).num_samples(0)
    assert rows is not None
    check_enough_data([corpus.shard_set], data, [stage_of(1), stage_of(rows)], 0)
    with pytest.raises(UserError, check=coded("less-than-one-batch"), match=f" {rows} .*{rows + 1} .*={rows * 32} "):
        check_enough_data([corpus.shard_set], data, [stage_of(1), stage_of(rows + 1)], 0)


def test_a_large_data_set_is_not_planned_for_it(corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*arguments: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("trainer.data.sample_settings.training_samples", plan)
    data = DataSettings(shards=corpus.shard_set.url, sentence_pairs="next_sentence")
    check_enough_data([corpus.shard_set], data, [stage_of(1)], 0)


def test_a_mixture_runs_through_its_components_again_and_again(tmp_path, corpus_at: Callable) -> None:
    sets = [corpus_at(tmp_path / name, [[[50]]]).shard_set for name in "ab"]
    data = DataSettings(shards=[{"url": shard_set.url} for shard_set in sets])
    check_enough_data(sets, data, [stage_of(1000)], 0)
