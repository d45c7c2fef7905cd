from __future__ import annotations

import bisect
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from data_prep.dataset.counts import read_token_counts
from data_prep.tokenizer.tokenizer import MASK_TOKEN_ID, SPECIAL_TOKENS, Tokenizer
from trainer import load_config
from trainer.checkpoint.writer import ALONE
from trainer.config.measurements import OWN_MASKED_LM, measurements_of
from trainer.config.model_settings import ModelSettings
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
from trainer.engine.engine import Engine
from trainer.objectives.build import build_objectives
from trainer.objectives.objective import Objective, Scores
from trainer.objectives.pretraining import PretrainingModel
from trainer.validation.loss import Totals, evaluate, length_names, metric_names, perplexity

ONE = Origins(("corpus",), (0,), ("shards",))
BOUNDS = [40, 50, 55, 58, 60]
SIZES = ModelSettings(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16)


def totals_of(num_sources: int, bounds: list[int]) -> Totals:
    return Totals(build_objectives(objectives_of("next_sentence"), SIZES), num_sources, bounds, torch.device("cpu"))


def add(totals: Totals, name: str, source: int = 0, length: int = 1, **values: list[float]) -> None:
    """Predictions of an objective, all about one sequence of so many tokens from one source."""
    places = length + 2
    ids = torch.zeros(places, dtype=torch.int64)
    nothing = torch.zeros(0, dtype=torch.int64)
    micro = Batch(ids, ids, ids, torch.tensor([0, places], dtype=torch.int32), nothing, nothing, places)
    tensors = {value: torch.tensor(numbers) for value, numbers in values.items()}
    number = len(values["loss"])
    scores = Scores(torch.ones(number, dtype=torch.int64), torch.ones(number, dtype=torch.bool), tensors)
    batch = EvaluationBatch(micro, torch.full((places,), source), frozenset({name}))
    totals.add(batch, {"masked_lm" if name == OWN_MASKED_LM else name: scores})


def add_mlm(totals: Totals, *losses: float, **options: int) -> None:
    """Predictions of which none is right."""
    add(totals, "masked_lm", loss=[*losses], accuracy=[0.0] * len(losses), accuracy_top5=[0.0] * len(losses), **options)


def test_means_are_over_all_predictions_and_pairs():
    totals = totals_of(1, [128])
    first = {"loss": [1.0, 3.0] * 3, "accuracy": [1.0] * 3 + [0.0] * 3, "accuracy_top5": [1.0] * 5 + [0.0]}
    add(totals, "masked_lm", **first, length=127)
    add(totals, "sentence_pairs", loss=[0.5, 0.25, 0.75, 0.5], accuracy=[1.0, 1.0, 1.0, 0.0])
    second = {"loss": [2.0] * 4, "accuracy": [1.0] * 2 + [0.0] * 2, "accuracy_top5": [1.0] * 3 + [0.0]}
    add(totals, "masked_lm", **second, length=128)
    metrics = totals.metrics(ONE)
    assert metrics["valid/mlm_loss"] == 2.0
    assert (metrics["valid/mlm_accuracy"], metrics["valid/mlm_accuracy_top5"]) == (0.5, 0.8)
    assert metrics["valid/mlm_perplexity"] == math.exp(2.0)
    assert (metrics["valid/pair_loss"], metrics["valid/pair_accuracy"]) == (0.5, 0.75)
    assert metrics["valid/length/0-127/mlm_accuracy"] == 0.5
    assert metrics["valid/length/128-up/mlm_accuracy_top5"] == 0.75
    assert "valid/length/128-up/pair_loss" not in metrics
    assert not any("source" in name or "component" in name for name in metrics)


def test_nothing_is_said_of_pairs_where_there_are_none():
    totals = totals_of(1, [])
    add_mlm(totals, 2.0)
    assert not any("pair" in name for name in totals.metrics(ONE))


def test_entries_that_are_not_used_count_nowhere():
    totals = totals_of(1, [])
    add_mlm(totals, 2.0)
    micro = Batch(*(torch.zeros(3).long(),) * 3, torch.tensor([0, 3], dtype=torch.int32), *(torch.zeros(0),) * 2, 3)
    used = torch.tensor([True, False])
    values = dict.fromkeys(("loss", "accuracy", "accuracy_top5"), torch.tensor([4.0, math.nan]))
    scores = {"masked_lm": Scores(torch.tensor([1, 0]), used, values)}
    totals.add(EvaluationBatch(micro, torch.zeros(3).long(), frozenset({"masked_lm"})), scores)
    assert totals.metrics(ONE)["valid/mlm_loss"] == 3.0


def test_the_loss_as_the_run_trains_is_a_figure_of_its_own():
    totals = totals_of(1, [128])
    add_mlm(totals, 1.0, 3.0)
    assert not any("own" in name for name in totals.metrics(ONE))
    add(totals, OWN_MASKED_LM, loss=[2.0, 3.0])
    metrics = totals.metrics(ONE)
    assert (metrics["valid/mlm_loss"], metrics["valid/own_mlm_loss"]) == (2.0, 2.5)
    assert metrics["valid/length/0-127/own_mlm_loss"] == 2.5
    assert not [name for name in metrics if "own" in name and not name.endswith("own_mlm_loss")]


def test_sources_and_components_have_figures_of_their_own():
    totals = totals_of(3, [])
    for source, loss in enumerate((1.0, 2.0, 6.0)):
        add_mlm(totals, loss, source=source)
    metrics = totals.metrics(Origins(("books", "web", "web"), (0, 0, 1), ("one", "two")))
    assert metrics["valid/mlm_loss"] == 3.0
    assert [metrics[f"valid/source/{name}/mlm_loss"] for name in ("books", "web", "web-2")] == [1.0, 2.0, 6.0]
    assert [metrics[f"valid/component/{name}/mlm_loss"] for name in ("one", "two")] == [1.5, 6.0]


def test_the_largest_of_many_sources_are_listed_and_the_others_are_summed():
    number = 60
    totals = totals_of(number, [])
    for source in range(number):
        add_mlm(totals, *[0.0] * (source + 1), source=source)
    metrics = totals.metrics(Origins(tuple(f"s{n}" for n in range(number)), (0,) * number, ("one",)))
    told = {name.split("/")[2] for name in metrics if name.startswith("valid/source/")}
    assert told == {f"s{n}" for n in range(10, 60)} | {"others"}


class Own(Objective):
    """A user's."""

    metric, values = "mine", ("loss", "share")


def test_an_objective_of_the_users_is_measured_under_its_metric():
    totals = Totals({"some.module:Own": Own(SIZES)}, 2, [], torch.device("cpu"))
    add(totals, "some.module:Own", loss=[1.0, 2.0], share=[0.5, 1.5])
    add(totals, "some.module:Own", loss=[6.0], share=[4.0], source=1)
    metrics = totals.metrics(Origins(("books", "web"), (0, 0), ("shards",)))
    assert (metrics["valid/mine_loss"], metrics["valid/mine_share"]) == (3.0, 2.0)
    assert (metrics["valid/source/books/mine_loss"], metrics["valid/source/web/mine_loss"]) == (1.5, 6.0)
    assert all("mine_" in name for name in metrics)


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
    """Sums by length, prediction by prediction: three values of masked tokens and their number, then two of pairs."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 7)
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


def means(prefix: str, sums: list[float]) -> dict[str, float]:
    """What is reported of sums as `in_plain_words` has them."""
    loss, first, of_five, masked, pair_loss, right, pairs = sums
    found = {"mlm_loss": loss / masked, "mlm_accuracy": first / masked, "mlm_accuracy_top5": of_five / masked}
    found["mlm_perplexity"] = math.exp(loss / masked)
    if pairs:
        found |= {"pair_loss": pair_loss / pairs, "pair_accuracy": right / pairs}
    return {f"{prefix}/{name}": value for name, value in found.items()}


def test_figures_are_those_counted_prediction_by_prediction(setting):
    config, model = setting
    batches = batches_of(config)
    expected = in_plain_words(model, batches)
    assert len(expected) >= 4 and all(sums[3] > 0 for sums in expected.values())

    class Plain:
        forward, train, eval = model.__call__, model.train, model.eval

    origins = origins_of([open_shard_set(config.data.shards)])
    metrics = evaluate(Plain, model.objectives, batches, ALONE, origins, config.evaluation)
    model.eval()
    told = means("valid", [sum(column) for column in zip(*expected.values(), strict=True)])
    for name, sums in expected.items():
        told |= means(f"valid/length/{name}", sums)
    assert metrics == pytest.approx(told, rel=1e-5)
    assert metrics["valid/mlm_accuracy"] < metrics["valid/mlm_accuracy_top5"]


def test_an_evaluation_is_without_dropout_and_training_continues_with_it(setting):
    """With dropout 0.5 everywhere, through the engine's own verbs."""
    config, exact = setting
    half = {"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    model = PretrainingModel(config.model.model_copy(update=half), objectives_of("next_sentence"))
    model.load_state_dict(exact.state_dict())
    model.train()
    engine = Engine(model, config, ALONE, {})
    batches, origins = batches_of(config), origins_of([open_shard_set(config.data.shards)])
    found = evaluate(engine, model.objectives, batches, ALONE, origins, config.evaluation)
    assert all(module.training for module in model.modules()), "training goes on without dropout"
    expected = evaluate(Engine(exact, config, ALONE, {}), exact.objectives, batches, ALONE, origins, config.evaluation)
    exact.eval()
    assert found == expected
    first, second = (model(batches[0].batch)["masked_lm"]["loss"].item() for _ in range(2))
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
        engine, origins = Engine(model, trained, ALONE, {}), origins_of(shard_sets)
        return evaluate(engine, model.objectives, batches, ALONE, origins, trained.evaluation)

    expected, found = scores(), scores(*changes)
    model.eval()
    common = [name for name in expected if not name.endswith("own_mlm_loss")]
    assert {name: found[name] for name in common} == pytest.approx({name: expected[name] for name in common}, rel=1e-6)
    assert "valid/pair_accuracy" in common and found["valid/own_mlm_loss"] != expected["valid/own_mlm_loss"]


def test_the_loss_at_several_rates_and_the_bound_are_those_counted_prediction_by_prediction(setting) -> None:
    config, model = setting
    asked = load_config(
        "tiny_cpu",
        [
            *(f"data.shards={config.data.shards}", f"model.vocab_size={config.model.vocab_size}"),
            *("evaluation.masking_rates=true", "model.hidden_size=32", "data.sentence_pairs=none"),
        ],
    )
    shard_sets = [open_shard_set(config.data.shards)]
    tokenizer = Tokenizer.load(shard_sets[0].tokenizer_folder)
    measurements, engine = measurements_of(asked.stages[0]), Engine(model, asked, ALONE, {})
    batches = [*measured_batches(shard_sets, measurements, 0, 1)]
    found = evaluate(engine, model.objectives, batches, ALONE, origins_of(shard_sets), asked.evaluation)
    model.eval()
    expected, rates, num_bytes = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list), 0
    for each in batches:
        (name,), batch = each.metrics, each.batch
        used = batch.labels != IGNORED
        with torch.no_grad():
            logits = model.predict(batch).mlm_logits[used]
        losses = torch.nn.functional.cross_entropy(logits, batch.labels[used], reduction="none")
        rows = (batch.masked_positions // batch.sequence_length)[used]
        texts = batch.input_ids.clone()
        texts[batch.masked_positions[used]] = batch.labels[used]
        assert (
            name in ("masked_lm", OWN_MASKED_LM)
            or (batch.input_ids[batch.masked_positions[used]] == MASK_TOKEN_ID).all()
        )
        sizes = (texts >= len(SPECIAL_TOKENS)).view(batch.num_rows, -1).sum(1)
        rates[name] += [int((rows == row).sum()) / int(size) for row, size in enumerate(sizes) if size]
        if name == "bound":
            num_bytes += sum(int(tokenizer.byte_lengths[token]) for token in texts.tolist())
            counts = rows.bincount(minlength=batch.num_rows)
            losses = losses * (sizes / counts.clamp(min=1) * (1 + (sizes == counts)))[rows]
        expected[name] += losses.tolist()
    for percent in (15, 30, 50, 80):
        losses_at, rates_at = expected[f"masked_lm at {percent}"], rates[f"masked_lm at {percent}"]
        assert found[f"valid/mlm_loss_at_{percent}"] == pytest.approx(sum(losses_at) / len(losses_at), rel=1e-5)
        assert sum(rates_at) / len(rates_at) == pytest.approx(percent / 100, abs=0.01)
    bound = sum(expected["bound"]) / math.log(2) / num_bytes
    assert found["valid/bound_bits_per_byte"] == pytest.approx(bound, rel=1e-5)
    assert min(rates["bound"]) < 0.1 and max(rates["bound"]) > 0.9
    assert not {name for name in found if "_at_" in name or "bound" in name} - {
        *(f"valid/mlm_loss_at_{percent}" for percent in (15, 30, 50, 80)),
        "valid/bound_bits_per_byte",
    }


@pytest.mark.parametrize("world_size", [3, 4])
def test_the_sums_of_all_ranks_are_those_of_one(setting, world_size):
    """The micro-batches are the same ones; float64 sums of them differ by their order alone."""
    config, model = setting

    def add_up(batches: list[EvaluationBatch]) -> torch.Tensor:
        totals = Totals(model.objectives, 1, BOUNDS, torch.device("cpu"))
        with torch.no_grad():
            for batch in batches:
                totals.add(batch, model(batch.batch, scored=batch.metrics))
        return totals._sums

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
    ends = torch.tensor([0, places, places], dtype=torch.int32)
    ids = torch.full((places,), 7)
    micro = Batch(ids, ids, types, ends, torch.tensor([5]), torch.tensor([7]), places)
    values = dict.fromkeys(("loss", "accuracy", "accuracy_top5"), torch.ones(1))
    scores = Scores(torch.tensor([5]), torch.tensor([True]), values)
    totals = totals_of(1, [128])
    totals.add(EvaluationBatch(micro, torch.zeros(places).long(), frozenset({"masked_lm"})), {"masked_lm": scores})
    found = [f"valid/length/{name}/mlm_loss" in totals.metrics(ONE) for name in ("0-127", "128-up")]
    assert found == [group == 0, group == 1]
