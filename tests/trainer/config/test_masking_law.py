from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from tests.support.toy_run import preset_config
from trainer.config.masking_law import (
    LAWS,
    Bimodal,
    Constant,
    Cosine,
    Law,
    Linear,
    Uniform,
    bound_weights,
    capacity,
    law_of,
    num_predicted,
    stratified_draws,
)
from trainer.config.stages import rates_of
from trainer.data.randomness import fold, root_key, uniform

DRAWN = [
    Uniform(0.0, 0.3),
    Uniform(0.0, 1.0),
    Cosine(0.0, 1.0),
    Cosine(1.0, 0.0),
    Cosine(0.1, 0.6),
    Bimodal(0.12, 0.57),
]
PLAIN = ("data.final_mlm_probability=null", "data.mlm_probability=0.15")


def rates(law: Law, rows: int, seed: int = 0, first: int = 0) -> np.ndarray:
    return law.quantile(uniform(stratified_draws(root_key(seed), np.arange(first, first + rows))))


def distance(law: Law, drawn: np.ndarray) -> float:
    """That of Kolmogorov and Smirnov."""
    below, number = law.distribution(np.sort(drawn)), len(drawn)
    return float(
        max(abs(below - np.arange(number) / number).max(), abs(below - np.arange(1, number + 1) / number).max())
    )


@pytest.mark.parametrize("law", DRAWN, ids=lambda law: law.describe())
def test_drawn_rates_follow_the_law(law: Law) -> None:
    assert max(distance(law, rates(law, 4096, seed, seed * 10**9)) for seed in range(5)) < 0.005
    independent = law.quantile(uniform(fold(root_key(1), np.arange(4096))))
    assert distance(law, independent) < 1.63 / math.sqrt(4096)
    assert abs(rates(law, 4096).mean() - law.mean) < 1e-3
    low, high = law.support
    assert low <= rates(law, 4096).min() and rates(law, 4096).max() <= high


def test_densities_are_those_that_the_page_states() -> None:
    stated: dict[Law, Callable[[float], float]] = {
        Uniform(0.1, 0.5): lambda rate: 1 / 0.4,
        Cosine(0.1, 0.5): lambda rate: 2 / (math.pi * 0.4 * math.sqrt(1 - (1 - (rate - 0.1) / 0.4) ** 2)),
        Cosine(0.5, 0.1): lambda rate: 2 / (math.pi * 0.4 * math.sqrt(1 - (1 - (rate - 0.5) / -0.4) ** 2)),
        Bimodal(0.12, 0.57): lambda rate: (
            1 / 0.12 if 0.084 < rate < 0.156 else 2 / (3 * 0.57) if 0.399 < rate < 0.741 else 0
        ),
    }
    for law, density in stated.items():
        for rate in (0.13, 0.2, 0.31, 0.45):
            below, above = law.distribution(np.array([rate - 1e-5, rate + 1e-5]))
            assert (above - below) / 2e-5 == pytest.approx(density(rate), rel=1e-4), (law, rate)
    maskgit = np.cos(np.pi / 2 * np.linspace(0, 0.999, 50))
    np.testing.assert_allclose(Cosine(1.0, 0.0).quantile(np.linspace(0, 0.999, 50)), maskgit, atol=1e-12)


def test_samples_that_a_mixture_takes_follow_the_law_too() -> None:
    """Sample i of a mixture is of the component in slot i modulo 4,096, in every table."""
    samples = np.arange(5, 4096 * 4096, 4096)
    assert distance(Uniform(0, 1), uniform(stratified_draws(root_key(0), samples))) < 0.005


@pytest.mark.parametrize("length", [64, 128, 512])
@pytest.mark.parametrize("law", DRAWN, ids=lambda law: law.describe())
def test_no_run_of_rows_has_more_predictions_than_there_is_room_for(law: Law, length: int) -> None:
    starts = np.random.default_rng(0).integers(0, 2**62, 2000).astype(np.uint64)
    for num_rows in (1, 2, 3, 7, 31, 32, 33, 38, 47, 64, 100):
        room = capacity(law, num_rows, length)
        draws = stratified_draws(np.uint64(0), starts[:, None] + np.arange(num_rows, dtype=np.uint64))
        most = num_predicted(law.quantile(uniform(draws)), length - 2).sum(1).max()
        assert 0.98 * room - 2 <= most <= room, "the largest number that occurs"
        if num_rows >= 32:
            assert room <= 1.1 * law.mean * num_rows * length
    assert capacity(law, 1, length) <= math.ceil(law.support[1] * length)
    large = capacity(law, 2500, length)
    assert law.mean * 2500 * (length - 2) < large < 1.02 * law.mean * 2500 * length


def test_the_room_is_the_largest_number_under_any_shift() -> None:
    """Every shift of a grid so fine that no row's number changes twice between two of its points."""
    for law in DRAWN:
        shifts = (np.arange(2**16, dtype=np.uint64) << np.uint64(48))[:, None]
        for num_rows in (1, 5, 32):
            draws = uniform(stratified_draws(np.uint64(0), np.arange(num_rows)) + shifts)
            most = num_predicted(law.quantile(draws), 28).sum(1).max()
            assert most <= capacity(law, num_rows, 30) <= most + 1


def test_every_law_of_a_mean_has_room_for_at_most_a_tenth_more_than_the_mean() -> None:
    for name, mean, length in itertools.product(("uniform", "cosine", "bimodal"), (0.1, 0.15, 0.3), (64, 128)):
        law = LAWS[name](*LAWS[name].ends_of(mean))
        assert max(capacity(law, rows, length) / (rows * length * mean) for rows in (32, 33, 35, 38, 40, 47, 64)) < 1.1


def test_independent_draws_have_room_for_the_worst_case() -> None:
    assert capacity(Uniform(0.0, 0.5, is_stratified=False), 40, 130) == 40 * 64


@pytest.mark.parametrize("law", [Uniform(0, 1), Cosine(0, 1), Cosine(1, 0)], ids=lambda law: law.describe())
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_weighted_losses_are_the_bound_in_the_mean(law: Law, num_tokens: int) -> None:
    """All orders of the tokens, and all sets of hidden ones, with losses that depend on both in any way."""
    losses = np.random.default_rng(num_tokens).random((2**num_tokens, num_tokens))  # by the set that is hidden

    def number(hidden: tuple[int, ...]) -> int:
        return sum(1 << token for token in hidden)

    orders = [*itertools.permutations(range(num_tokens))]
    bound = sum(losses[number(order[place:]), order[place]] for order in orders for place in range(num_tokens)) / len(
        orders
    )

    draws = (np.arange(400_000) + 0.5) / 400_000
    counts = num_predicted(law.quantile(draws), num_tokens)
    weights = bound_weights(law, counts, np.full(len(counts), num_tokens))
    mean = 0.0
    for count in range(1, num_tokens + 1):
        sets = [*itertools.combinations(range(num_tokens), count)]
        loss = sum(losses[number(hidden), token] for hidden in sets for token in hidden) / len(sets)
        mean += loss * weights[counts == count].sum() / len(draws)
    assert mean == pytest.approx(bound, rel=1e-4)


def test_weights_of_the_uniform_law_are_tokens_by_hidden_ones() -> None:
    weights = bound_weights(Uniform(0, 1), np.array([0, 1, 3, 10, 0]), np.array([10, 10, 10, 10, 0]))
    assert weights == pytest.approx([0, 10, 10 / 3, 2, 0]), "all hidden has half the probability of the others"


def config_of(**data: Any) -> Any:
    values = [f"data.{name}={value}" for name, value in data.items()]
    return preset_config(*PLAIN, *values, preset="small_cpu")


@pytest.mark.parametrize(
    ("law", "mean", "expected"),
    [
        ("{name: constant}", 0.3, Constant(0.3, 0.3)),
        ("{name: linear, from: 0.5, to: 0.3}", 0.4, Linear(0.5, 0.3)),
        ("{name: uniform}", 0.3, Uniform(0.0, 0.6)),
        ("{name: uniform, from: 0.1, to: 0.5, stratified: false}", 0.3, Uniform(0.1, 0.5, False)),
        ("{name: cosine, from: 0, to: 0.8}", 0.2907, Cosine(0.0, 0.8)),
        ("{name: bimodal}", 0.3, Bimodal(0.12, 0.57)),
    ],
)
def test_settings_name_a_law_by_its_mean_or_its_ends(law: str, mean: float, expected: Law) -> None:
    found = config_of(masking_law=law, mlm_probability=mean).data
    assert found.law == type(expected)(
        pytest.approx(expected.first), pytest.approx(expected.last), expected.is_stratified
    ) and type(found.law) is type(expected)
    assert found.law.mean == pytest.approx(mean, abs=5e-4)


def test_the_mean_follows_from_the_ends_where_it_is_not_set() -> None:
    config = preset_config("data.masking_law={name: uniform, from: 0.1, to: 0.5}", preset="bert_base")
    assert config.data.mlm_probability == pytest.approx(0.3)
    assert law_of(None, 0.5, 0.3) == Linear(0.5, 0.3) and law_of(None, 0.5, None) == Constant(0.5, 0.5)


ALL = "{name: uniform, from: 0, to: 1}"
HIDDEN = {"mask_share": 1.0, "random_share": 0.0, "loss_weight": "elbo"}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ({"masking_law": "{name: uniform, from: 0.1, to: 0.5}"}, "masking-law-and-mean"),
        ({"masking_law": "{name: uniform}", "final_mlm_probability": 0.3}, "masking-law-and-final-rate"),
        ({"masking_law": "{name: uniform, from: 0.1}"}, "masking-law-with-one-end"),
        ({"masking_law": "{name: uniform, to: 0.1}"}, "masking-law-with-one-end"),
        ({"masking_law": "{name: uniform, from: 0.5, to: 0.1}"}, "masking-law-ends"),
        ({"masking_law": "{name: cosine, from: 0.5, to: 0.5}"}, "masking-law-ends"),
        ({"masking_law": "{name: bimodal, from: 0.2, to: 0.3}"}, "masking-law-ends"),
        ({"masking_law": "{name: bimodal, from: 0, to: 0.3}"}, "masking-law-ends"),
        ({"masking_law": "{name: bimodal, from: 0.1, to: 0.9}"}, "masking-law-ends"),
        ({"masking_law": "{name: bimodal, from: 0.7, to: 0.1}"}, "masking-law-ends"),
        ({"masking_law": "{name: linear}"}, "masking-law-without-ends"),
        ({"masking_law": "{name: linear, from: 0, to: 0.3}"}, "masking-law-ends"),
        ({"masking_law": "{name: constant, from: 0.1, to: 0.3}"}, "masking-law-ends"),
        ({"masking_law": "{name: constant, stratified: false}"}, "setting-without-effect"),
        ({"masking_law": "{name: uniform}", "mlm_probability": 0.45}, "masking-rate-too-high"),
        ({"masking_law": "{name: gaussian}"}, "invalid-setting"),
        ({"masking_law": "{name: uniform, from: -0.1, to: 0.5}"}, "invalid-setting"),
        ({"loss_weight": "elbo"}, "weight-without-bound"),
        (HIDDEN, "weight-without-bound"),
        ({**HIDDEN, "masking_law": "{name: bimodal}", "mlm_probability": 0.3}, "weight-without-bound"),
        ({**HIDDEN, "masking_law": "{name: uniform}", "mlm_probability": 0.3}, "weight-without-bound"),
        ({**HIDDEN, "masking_law": ALL, "mlm_probability": 0.5, "mask_share": 0.9}, "weight-without-bound"),
        ({**HIDDEN, "masking_law": ALL, "mlm_probability": 0.5, "mask_unit": "word"}, "weight-without-bound"),
        ({**HIDDEN, "masking_law": ALL, "mlm_probability": 0.5, "masking": "a:b"}, "weight-without-bound"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(data: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError, check=coded(code)) as caught:
        config_of(**data)
    assert caught.value.fix
    if "from: 0.7" in str(data):
        assert "lower rate into `from`" in caught.value.fix


def test_a_bound_needs_the_loss_that_it_weights() -> None:
    bound = [f"data.{name}={value}" for name, value in {**HIDDEN, "masking_law": ALL, "mlm_probability": 0.5}.items()]
    own = ("objectives=[{name: 'some.module:Objective'}]", "model.output_bias=zeros", "data.final_mlm_probability=null")
    with pytest.raises(UsageError, check=coded("setting-without-effect"), match="data.loss_weight=elbo"):
        preset_config(*own, *bound, preset="small_cpu")
    with pytest.raises(UsageError, check=coded("setting-needs-masked-lm")):
        preset_config("objectives=[{name: causal}]", "evaluation.masking_rates=true", preset="small_cpu")


def test_all_rates_are_legal_where_the_loss_is_a_bound() -> None:
    for law, mean in (
        (ALL, 0.5),
        ("{name: cosine, from: 0, to: 1}", 0.3634),
        ("{name: cosine, from: 1, to: 0}", 0.6366),
    ):
        config = config_of(**HIDDEN, masking_law=law, mlm_probability=mean)
        assert config.data.law.support == (0, 1) and rates_of(config) == (0, 1)


def test_a_stage_has_the_law_that_it_sets() -> None:
    stages = (
        "{steps: 2, masking_law: {name: uniform, from: 0.1, to: 0.5}}, {steps: 2, mlm_probability: 0.2}, "
        "{steps: 2, masking_law: {name: linear, from: 0.3, to: 0.4}}, {steps: 2}, "
        "{steps: 2, masking_law: {name: bimodal}}"
    )
    config = preset_config(
        *(*PLAIN, "data.masking_law={name: cosine}", "training.max_steps=null", f"training.stages=[{stages}]"),
        preset="small_cpu",
    )
    assert [type(stage.data.law).name for stage in config.stages] == [
        "uniform",
        "constant",
        "linear",
        "cosine",
        "bimodal",
    ]
    assert [stage.data.mlm_probability for stage in config.stages] == pytest.approx([0.3, 0.2, 0.35, 0.15, 0.15])
    assert [config.stages[2].masking_rate(step) for step in (4, 5)] == [0.3, 0.4], "the steps of the stage"
    assert rates_of(config) == (0.0, 0.5)
    for stage in config.stages:
        rows = stage.micro_batch_tokens // stage.sequence_length
        assert stage.room_in(stage.micro_batch_tokens) == pytest.approx(
            stage.room_for_labels * rows * stage.sequence_length, abs=rows
        )
        assert (
            stage.data.mlm_probability < stage.room_for_labels <= stage.data.max_mlm_probability
            or not stage.data.law.is_drawn
        )
    assert {stage.measures_rates for stage in config.stages} == {True}
    plain = preset_config(*PLAIN, preset="small_cpu")
    assert rates_of(plain) == (0.15, 0.15) and not plain.stages[0].measures_rates
    causal = preset_config("objectives=[{name: causal}]", preset="small_cpu")
    assert rates_of(causal) is None
    falling = ("data.final_mlm_probability=0.3", "data.mlm_probability=0.5", "training.max_steps=null")
    with pytest.raises(UsageError, check=coded("masking-law-without-mean")):
        preset_config(*falling, "training.stages=[{steps: 2, masking_law: {name: uniform}}]", preset="small_cpu")


def test_every_law_is_in_the_table_under_its_name() -> None:
    assert [*LAWS] == ["constant", "linear", "uniform", "cosine", "bimodal"]
    for law in LAWS.values():
        assert law(*law.ends_of(0.3)).mean == pytest.approx(0.3)
