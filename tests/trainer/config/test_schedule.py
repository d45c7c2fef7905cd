from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.batch_arithmetic import StageShape
from trainer.config.data_settings import DataSettings
from trainer.config.schedule import (
    global_batch_sizes,
    global_batch_tokens,
    learning_rate,
    masking_rate,
    rate_jump_warning,
    steps_for_tokens,
    steps_of_last_tokens,
    tokens_of_stage,
)
from trainer.config.training_settings import BatchWarmup, ScheduleSettings


def rates(max_steps: int, **settings: object) -> list[float]:
    schedule = ScheduleSettings(**settings)
    return [learning_rate(step, max_steps, 1.0, schedule) for step in range(max_steps)]


def test_linear_rises_to_the_peak_and_falls_to_its_last_share():
    assert rates(6, name="linear", warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_a_warmup_may_be_a_share_of_the_run():
    assert rates(10, name="linear", warmup_ratio=0.2) == rates(10, name="linear", warmup_steps=2)


def test_the_final_decay_may_be_a_share_of_the_run() -> None:
    share = rates(10, name="warmup_stable_decay", decay_ratio=0.3)
    assert share == rates(10, name="warmup_stable_decay", decay_steps=3) and share[7] == 1.0 > share[8]
    steps_win = rates(10, name="warmup_stable_decay", decay_ratio=0.3, decay_steps=5)
    assert steps_win == rates(10, name="warmup_stable_decay", decay_steps=5)
    assert rates(1, name="warmup_stable_decay", decay_ratio=0.2) == [1.0]


def test_cosine_is_half_way_down_in_the_middle_of_its_decay():
    assert rates(4, name="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_warmup_stable_decay_stays_at_the_peak_until_its_last_steps():
    assert rates(6, name="warmup_stable_decay", warmup_steps=1, decay_steps=2) == pytest.approx([1, 1, 1, 1, 1, 0.5])


def test_final_ratio_is_the_floor():
    assert rates(5, name="linear", final_ratio=0.2) == pytest.approx([1.0, 0.84, 0.68, 0.52, 0.36])


@given(
    name=st.sampled_from(["linear", "cosine", "warmup_stable_decay"]),
    max_steps=st.integers(1, 200),
    warmup=st.integers(0, 200),
    decay=st.integers(0, 200),
    final_ratio=st.floats(0, 1),
)
def test_every_rate_is_between_zero_and_the_peak_and_never_rises_after_the_warmup(
    name, max_steps, warmup, decay, final_ratio
):
    warmup = min(warmup, max_steps)
    decay = min(decay, max_steps - warmup) if name == "warmup_stable_decay" else 0
    values = rates(max_steps, name=name, warmup_steps=warmup, decay_steps=decay, final_ratio=final_ratio)
    assert all(0.0 < value <= 1.0 for value in values)
    after = values[max(warmup - 1, 0) :]
    assert all(later <= earlier + 1e-12 for earlier, later in zip(after, after[1:], strict=False))


def test_matches_the_schedule_of_transformers_where_both_have_it():
    import torch
    from transformers import get_linear_schedule_with_warmup

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=10)
    expected = []
    for _ in range(10):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates(10, name="linear") == pytest.approx(expected)


def test_the_masking_rate_goes_straight_from_the_first_step_to_the_last() -> None:
    falling = DataSettings(shards="x", mlm_probability=0.3, final_mlm_probability=0.15)
    rates = [masking_rate(step, 4, falling) for step in range(4)]
    assert rates == pytest.approx([0.3, 0.25, 0.2, 0.15])
    assert (falling.max_mlm_probability, falling.evaluated_mlm_probability) == (0.3, 0.15)
    assert masking_rate(0, 1, falling) == 0.3
    constant = DataSettings(shards="x")
    assert {masking_rate(step, 9, constant) for step in range(9)} == {0.15}


def growing(initial: int, full: int, warmup_steps: int) -> StageShape:
    return StageShape(
        steps=1000,
        sequence_length=8,
        micro_batch_tokens=8,
        global_batch_tokens=full,
        batch_warmup=BatchWarmup(initial_tokens=initial, steps=warmup_steps),
    )


def test_a_batch_grows_by_its_first_size_and_each_size_has_as_many_steps():
    stage = growing(8, 32, 6)
    assert [global_batch_tokens(step, stage) for step in range(8)] == [8, 8, 16, 16, 24, 24, 32, 32]


def test_the_sizes_are_reported_with_their_first_steps():
    assert global_batch_sizes(growing(8, 32, 6)) == [(0, 8), (2, 16), (4, 24), (6, 32)]
    assert global_batch_sizes(replace(growing(8, 32, 6), batch_warmup=None)) == [(0, 32)]


def test_the_sizes_of_modernbert():
    """768 to 4,608 rows: six sizes, five of them in the warm-up."""
    stage = growing(768 * 8, 4608 * 8, 500)
    sizes = [global_batch_tokens(step, stage) // 8 for step in range(501)]
    assert sorted(set(sizes)) == [768, 1536, 2304, 3072, 3840, 4608]
    assert {sizes.count(size) for size in set(sizes) - {4608}} == {100}


@given(initial=st.integers(1, 9), full=st.integers(10, 99), steps=st.integers(1, 50), stop=st.integers(0, 120))
def test_a_batch_never_shrinks_and_its_tokens_add_up(initial, full, steps, stop):
    stage = growing(initial * 8, full * 8, steps)
    sizes = [global_batch_tokens(step, stage) for step in range(121)]
    assert sizes == sorted(sizes) and sizes[0] == initial * 8 and set(sizes[steps:]) == {full * 8}
    assert all(size % (initial * 8) == 0 for size in sizes[:steps])
    counts = Counter(sizes[:steps]).values()
    assert max(counts) - min(counts) <= 1
    for first in (0, stop // 2):
        assert tokens_of_stage(stage, first, stop) == sum(sizes[first:stop])


def test_tokens_are_counted_from_either_end_of_a_run_through_its_stages():
    stages = [replace(growing(8, 32, 6), steps=8), replace(growing(16, 32, 2), steps=4)]
    sizes = [8, 8, 16, 16, 24, 24, 32, 32] + [16, 16, 32, 32]
    for tokens in range(1, sum(sizes) + 2):
        for count, in_order in ((steps_for_tokens, sizes), (steps_of_last_tokens, sizes[::-1])):
            fewest = next((n for n in range(1, 13) if sum(in_order[:n]) >= tokens), 13)
            assert count(tokens, stages) == fewest


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_run_extended_after_its_decay_warns_of_the_jump_with_both_rates(name: str) -> None:
    schedule = ScheduleSettings(name=name, warmup_steps=100)
    warning = rate_jump_warning(3000, 3000, 6000, 2e-3, schedule, schedule)
    old, new = learning_rate(2999, 3000, 2e-3, schedule), learning_rate(3000, 6000, 2e-3, schedule)
    assert warning is not None and f"from {old:.1e} to {new:.1e} at step 3001" in warning
    assert "training.max_steps changed from 3000 to 6000" in warning and "warmup_stable_decay" in warning


def test_a_run_may_be_extended_without_a_jump_before_the_decay_of_warmup_stable_decay() -> None:
    schedule = ScheduleSettings(name="warmup_stable_decay", warmup_steps=100, decay_steps=500)
    assert rate_jump_warning(2500, 3000, 6000, 2e-3, schedule, schedule) is None
    warning = rate_jump_warning(3000, 3000, 6000, 2e-3, schedule, schedule)
    assert warning is not None and "--resume-from STEP with STEP <= 2500" in warning


def test_the_decay_of_the_shorter_run_reports_where_it_may_be_extended() -> None:
    before, after = (ScheduleSettings(name="warmup_stable_decay", decay_steps=steps) for steps in (500, 1000))
    assert rate_jump_warning(2500, 3000, 6000, 2e-3, before, after) is None
    warning = rate_jump_warning(3000, 3000, 6000, 2e-3, before, after)
    assert warning is not None and "--resume-from STEP with STEP <= 2500" in warning


def test_a_small_change_of_the_length_is_no_jump() -> None:
    schedule = ScheduleSettings(name="linear", warmup_steps=0)
    assert rate_jump_warning(100, 3000, 3050, 2e-3, schedule, schedule) is None
