"""What a fine-tuning tries where nobody says it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from trainer.finetune.plan import FROZEN_RATES, learning_rates


def request(*rates: float) -> Any:
    return cast(Any, SimpleNamespace(learning_rates=rates))


@pytest.mark.parametrize(("hidden_size", "published"), [(768, (2e-5, 5e-5)), (1024, (2e-5, 5e-5))])
def test_the_rates_of_full_fine_tuning_cover_the_published_ones(
    hidden_size: int, published: tuple[float, float]
) -> None:
    rates = learning_rates(request(), "full", hidden_size)
    assert min(rates) <= published[0] * 1.25 and max(rates) >= published[1]


def test_narrower_encoders_are_given_larger_rates_up_to_a_bound() -> None:
    usual = [learning_rates(request(), "full", hidden_size)[1] for hidden_size in (1024, 768, 256, 128, 16)]
    assert usual == sorted(usual) and usual[-1] == 1e-3


def test_scratch_starts_at_the_usual_rate_and_frozen_has_its_own() -> None:
    assert learning_rates(request(), "scratch", 768) == (5e-5, 1e-4, 2e-4)
    assert learning_rates(request(), "frozen", 768) == FROZEN_RATES


def test_rates_asked_for_are_taken_once_each_in_their_order() -> None:
    assert learning_rates(request(3e-4, 1e-4, 3e-4), "full", 768) == (3e-4, 1e-4)
