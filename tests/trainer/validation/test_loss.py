from __future__ import annotations

import bisect
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from data_prep.dataset.counts import read_token_counts
from trainer import load_config
from trainer.checkpoint.writer import ALONE
from trainer.config.measurements import measurements_of
from trainer.config.objective_settings import objectives_of
from trainer.config.run_config import RunConfig
from trainer.data.batch import IGNORED, Batch
from trainer.data.evaluation_batches import (
    EvaluationBatch,
    Origins,
    evaluation_batches,
    measured_batches,
    origins_of,
)
from trainer.data.shard_set import open_shard_set
from trainer.distributed.process_group import Ranks
from trainer.engine.engine import Engine
from trainer.objectives.pretraining import PredictionScores, PretrainingModel
from trainer.validation.loss import add_scores, evaluate, length_names, metric_names, metrics_of, perplexity

ONE = Origins(("corpus",), (0,), ("shards",))
BOUNDS = [40, 50, 55, 58, 60]


def totals(*by_group: list[float], sources: int = 1) -> torch.Tensor:
    return torch.tensor(by_group, dtype=torch.float64).reshape(sources, -1, 12)


def test_means_are_over_all_predictions_and_pairs():
    metrics = metrics_of(
        totals([12.0, 3.0, 5.0, 6.0, 2.0, 3.0, 4.0] + [0.0] * 5, [8.0, 2.0, 3.0, 4.0] + [0.0] * 8), ONE, [128]
    )
    assert metrics["valid/mlm_loss"] == 2.0
    assert (metrics["valid/mlm_accuracy"], metrics["valid/mlm_accuracy_top5"]) == (0.5, 0.8)
    assert metrics["valid/mlm_perplexity"] == math.exp(2.0)
    assert (metrics["valid/pair_loss"], metrics["valid/pair_accuracy"]) == (0.5, 0.75)
    assert metrics["valid/length/0-127/mlm_accuracy"] == 0.5
    assert metrics["valid/length/128-up/mlm_accuracy_top5"] == 0.75
    assert "valid/length/128-up/pair_loss" not in metrics
    assert not any("source" in name or "component" in name for name in metrics)


def test_nothing_is_said_of_pairs_where_there_are_none():
    assert not any("pair" in name for name in metrics_of(totals([20.0, 5.0, 6.0, 10.0] + [0.0] * 8), ONE, []))


def test_the_loss_as_the_run_trains_is_a_figure_of_its_own():
    metrics = metrics_of(totals([6.0, 1.0, 2.0, 3.0] + [0.0] * 3 + [10.0, 4.0, 0, 0, 0], [0.0] * 12), ONE, [128])
    assert (metrics["valid/mlm_loss"], metrics["valid/own_mlm_loss"]) == (2.0, 2.5)
    assert metrics["valid/length/0-127/own_mlm_loss"] == 2.5
    assert not any("own" in name for name in metrics_of(totals([6.0, 1.0, 2.0, 3.0] + [0.0] * 8), ONE, []))


def test_sources_and_components_have_figures_of_their_own():
    mixed = Origins(("books", "web", "web"), (0, 0, 1), ("one", "two"))
    rows = [[float(n), 0.0, 0.0, 1.0] + [0.0] * 8 for n in (1, 2, 6)]
    metrics = metrics_of(totals(*rows, sources=3), mixed, [])
    assert metrics["valid/mlm_loss"] == 3.0
    assert [metrics[f"valid/source/{name}/mlm_loss"] for name in ("books", "web", "web-2")] == [1.0, 2.0, 6.0]
    assert [metrics[f"valid/component/{name}/mlm_loss"] for name in ("one", "two")] == [1.5, 6.0]


def test_the_largest_of_many_sources_are_listed_and_the_others_are_summed():
    number = 60
    rows = [[0.0, 0.0, 0.0, float(n + 1)] + [0.0] * 8 for n in range(number)]
    origins = Origins(tuple(f"s{n}" for n in range(number)), (0,) * number, ("one",))
    metrics = metrics_of(totals(*rows, sources=number), origins, [])
    told = {name.split("/")[2] for name in metrics if name.startswith("valid/source/")}
    assert told == {f"s{n}" for n in range(10, 60)} | {"others"}


def test_lengths_and_names_are_fit_for_mlflow():
    assert length_names([128, 256]) == ["0-127", "128-255", "256-up"]
    assert metric_names(["wiki", "a/b", "..", "wiki", "été 2.0", "wiki-2"]) == [
        "wiki",
        "a_b",
        "_",
        "wiki-2",
        "été 2.0",
        "wiki-2-2",
    ]


def test_no_two_sources_share_a_name_of_metrics():
    assert metric_names(["wiki-2", "wiki", "news-2020", "news"]) == ["wiki-2", "wiki", "news-2020", "news"]
    assert metric_names(["a-2", "a", "a", "a", "a-2"]) == ["a-2", "a", "a-3", "a-4", "a-2-2"]
    assert metric_names(["others", "others-2"]) == ["others-2", "others-2-2"], "the rest is reported as others"


def test_perplexity_of_a_diverged_loss_is_infinite_and_no_error():
    assert perplexity(1e6) == math.inf


@pytest.fixture(scope="module")
def setting(small_shards: Path) -> tuple[RunConfig, PretrainingModel]:
    overrides = [f"data.shards={small_shards}", "model.hidden_size=32", "model.initializer_range=0.2"]
    overrides += ["evaluation.length_bounds=[40,50,55,58,60]"]
    shard_set = open_shard_set(str(small_shards))
    overrides += [f"model.vocab_size={shard_set.manifest.tokenizer.vocab_size}"]
    config = load_config("tiny_cpu", overrides)
    model = PretrainingModel(config.model, objectives_of("next_sentence"))
    model.initialize(1)
    # Frequent tokens are guessed: so some predictions are right, and more of the first five.
    counts = read_token_counts(str(small_shards), shard_set.manifest)
    model.set_output_bias(torch.from_numpy(counts["train"]))
    return config, model.eval()


def batches_of(config: RunConfig, rank: int = 0, world_size: int = 1) -> list[EvaluationBatch]:
    shard_sets = [open_shard_set(config.data.shards)]
    return list(evaluation_batches(shard_sets, config.data, config.stages[0], 0, rank, world_size, None))


def in_plain_words(model: PretrainingModel, batches: list[EvaluationBatch]) -> dict[str, list[float]]:
    """Sums by length, prediction by prediction."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 12)
    for batch in (b.batch for b in batches):
        with torch.no_grad():
            predictions = model.predict(batch)
        starts, types = sorted(set(batch.cu_seqlens.tolist())), batch.token_type_ids.tolist()

        def name(place: int, starts: list[int] = starts, types: list[int] = types) -> str:
            begin = max(start for start in starts if start <= place)
            end = min(start for start in starts if start > place)
            tokens = end - begin - 2 - types[end - 1]  # a pair has a [SEP] more
            return length_names(BOUNDS)[bisect.bisect_right(BOUNDS, tokens)]

        parts = ((predictions.mlm_logits, batch.labels, batch.masked_positions, 0),)
        parts += ((predictions.pair_logits, batch.next_sentence_labels, batch.cls_positions, 4),)
        for logits, labels, places, column in parts:
            for row, label, place in zip(logits, labels.tolist(), places.tolist(), strict=True):
                if label == IGNORED:
                    continue
                order = row.argsort(descending=True).tolist()
                loss = -torch.log_softmax(row, -1)[label].item()
                found = [loss, order[0] == label, label in order[:5], 1] if not column else [loss, order[0] == label, 1]
                for number, value in enumerate(found, start=column):
                    sums[name(place)][number] += value
    return sums


def test_figures_are_those_counted_prediction_by_prediction(setting):
    config, model = setting
    batches = batches_of(config)
    expected = in_plain_words(model, batches)
    assert len(expected) >= 4 and all(sums[3] > 0 for sums in expected.values())

    class Plain:
        forward, train, eval = model.__call__, model.train, model.eval

    origins = origins_of([open_shard_set(config.data.shards)])
    metrics = evaluate(Plain, batches, Ranks(0, 1, 0, torch.device("cpu")), origins, config.evaluation)
    model.eval()
    whole = torch.tensor([list(expected[name]) for name in length_names(BOUNDS)], dtype=torch.float64)
    told = metrics_of(whole[None], ONE, BOUNDS)
    assert metrics == pytest.approx(told, rel=1e-5)
    assert metrics["valid/mlm_accuracy"] < metrics["valid/mlm_accuracy_top5"]


def test_an_evaluation_is_without_dropout_and_training_continues_with_it(setting):
    """With dropout 0.5 everywhere, through the engine's own verbs."""
    config, exact = setting
    half = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    model = PretrainingModel(config.model.model_copy(update=half), True)
    model.load_state_dict(exact.state_dict())
    model.train()
    engine = Engine(model, config, ALONE, {})
    batches, origins = batches_of(config), origins_of([open_shard_set(config.data.shards)])
    found = evaluate(engine, batches, ALONE, origins, config.evaluation)
    assert all(module.training for module in model.modules()), "training goes on without dropout"
    expected = evaluate(Engine(exact, config, ALONE, {}), batches, ALONE, origins, config.evaluation)
    exact.eval()
    assert found == expected
    first, second = (model(batches[0].batch).mlm_loss_sum.item() for _ in range(2))
    assert first != second, "this model drops nothing at all"


OTHER_WAYS_TO_TRAIN = (
    ("data.mlm_probability=0.3", "training.seed=7"),
    ("data.mask_unit=word", "data.short_seq_probability=0.9"),
    ("data.mask_unit=span", "data.mask_share=1.0", "data.random_share=0.0"),
    ("data.sequence_length=32", "training.micro_batch_tokens=256"),
    ("data.final_mlm_probability=0.6",),
)


@pytest.mark.long
@pytest.mark.parametrize("changes", OTHER_WAYS_TO_TRAIN)
def test_one_model_has_one_score_however_its_run_trains(setting, small_shards: Path, changes: tuple[str, ...]) -> None:
    """The weights are the same, so are valid/mlm_* and valid/pair_*; what the run trains with is another metric."""
    config, model = setting
    base = [f"data.shards={small_shards}", f"model.vocab_size={config.model.vocab_size}", "model.hidden_size=32"]

    def scores(*overrides: str) -> dict[str, float]:
        trained = load_config("tiny_cpu", [*base, "data.sequence_length=128", *overrides])
        shard_sets = [open_shard_set(trained.data.shards)]
        batches = measured_batches(shard_sets, measurements_of(trained.stages[0]), 0, 1)
        return evaluate(Engine(model, trained, ALONE, {}), batches, ALONE, origins_of(shard_sets), trained.evaluation)

    expected, found = scores(), scores(*changes)
    model.eval()
    common = [name for name in expected if not name.endswith("own_mlm_loss")]
    assert {name: found[name] for name in common} == pytest.approx({name: expected[name] for name in common}, rel=1e-6)
    assert "valid/pair_accuracy" in common and found["valid/own_mlm_loss"] != expected["valid/own_mlm_loss"]


@pytest.mark.parametrize("world_size", [3, 4])
def test_the_sums_of_all_ranks_are_those_of_one(setting, world_size):
    """The micro-batches are the same ones; float64 sums of them differ by their order alone."""
    config, model = setting

    def add_up(batches: list[EvaluationBatch]) -> torch.Tensor:
        sums = torch.zeros(1, len(BOUNDS) + 1, 12, dtype=torch.float64)
        with torch.no_grad():
            for batch in batches:
                add_scores(sums, batch, model(batch.batch, scored=True), torch.tensor(BOUNDS))
        return sums

    by_rank = [batches_of(config, rank, world_size) for rank in range(world_size)]
    assert len({len(batches) for batches in by_rank}) == 1
    assert len(by_rank[0]) * world_size > len(batches_of(config)), "nothing is filled up"
    torch.testing.assert_close(sum(map(add_up, by_rank)), add_up(batches_of(config)), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("num_tokens", "type_b", "group"), [(127, 0, 0), (128, 0, 1), (127, 1, 0), (128, 1, 1)])
def test_a_length_leaves_out_as_many_special_tokens_as_there_are(num_tokens: int, type_b: int, group: int) -> None:
    """With sentence_order a document of one sentence stands single among pairs, which have a [SEP] more."""
    places = num_tokens + 2 + type_b
    types = torch.zeros(places, dtype=torch.long)
    types[places // 2 :] = type_b
    unused = torch.full((4,), IGNORED)
    one = torch.ones(1)
    ends = torch.tensor([0, places, places], dtype=torch.int32)
    ids = torch.full((places,), 7)
    micro = Batch(ids, ids, types, ends, torch.tensor([5]), torch.tensor([7]), torch.zeros(4).long(), unused, places)
    scores = PredictionScores(one, one, one, torch.zeros(4), torch.zeros(4))
    sums = torch.zeros(1, 2, 12, dtype=torch.float64)
    add_scores(sums, EvaluationBatch(micro, torch.zeros(places).long()), scores, torch.tensor([128]))
    assert sums[0, :, 3].tolist() == [float(group == 0), float(group == 1)]
