from hypothesis import given
from hypothesis import strategies as st

from trainer.config.batch_arithmetic import StageShape, batch_arithmetic


def stage(length: int, micro_rows: int, global_rows: int) -> StageShape:
    return StageShape(
        steps=1,
        sequence_length=length,
        micro_batch_tokens=length * micro_rows,
        global_batch_tokens=length * global_rows,
    )


def test_four_rows_are_one_rank_times_four_or_two_times_two():
    assert batch_arithmetic(stage(8, 1, 4), 1).accumulation_steps == 4
    assert batch_arithmetic(stage(8, 1, 4), 2).accumulation_steps == 2
    assert batch_arithmetic(stage(8, 1, 4), 4).accumulation_steps == 1


def test_ranks_that_do_not_divide_the_batch_are_filled_up_and_say_so():
    arithmetic = batch_arithmetic(stage(8, 2, 8), 3)
    assert (arithmetic.accumulation_steps, arithmetic.computed_rows) == (2, 12)
    assert "- 4 padding rows (33.3% of" in str(arithmetic)


def test_a_micro_batch_is_no_larger_than_many_ranks_need():
    """2,048 rows on 64 ranks: 32 each, although a micro-batch may have 64."""
    arithmetic = batch_arithmetic(stage(512, 64, 2048), 64)
    assert (arithmetic.micro_batch_rows, arithmetic.accumulation_steps) == (32, 1)
    assert arithmetic.padding_share == 0.0


@given(
    micro=st.integers(1, 16),
    extra=st.integers(0, 200),
    first=st.integers(1, 216),
    world_size=st.integers(1, 64),
)
def test_a_stage_has_one_size_of_micro_batches_and_at_full_size_each_lacks_one_row_at_most(
    micro, extra, first, world_size
):
    full = stage(8, micro, micro + extra)
    arithmetic = batch_arithmetic(full, world_size)
    num_slices = world_size * arithmetic.accumulation_steps
    assert arithmetic.micro_batch_rows <= micro
    assert arithmetic.computed_rows - arithmetic.global_rows < num_slices
    smaller = batch_arithmetic(full, world_size, 8 * min(first, micro + extra))
    assert smaller.micro_batch_rows == arithmetic.micro_batch_rows
    assert smaller.accumulation_steps <= arithmetic.accumulation_steps
    assert smaller.computed_rows - world_size * smaller.micro_batch_rows < smaller.global_rows <= smaller.computed_rows


@given(length=st.integers(8, 64), micro=st.integers(1, 16), extra=st.integers(0, 100), world_size=st.integers(1, 64))
def test_every_batch_fits_and_one_accumulation_step_less_would_not(length, micro, extra, world_size):
    arithmetic = batch_arithmetic(stage(length, micro, micro + extra), world_size)
    assert arithmetic.computed_rows >= arithmetic.global_rows
    rows_a_rank = -(-arithmetic.global_rows // world_size)
    assert (arithmetic.accumulation_steps - 1) * micro < rows_a_rank <= arithmetic.accumulation_steps * micro


@given(length=st.just(8), micro=st.integers(1, 8), extra=st.integers(0, 50), world_size=st.integers(1, 16))
def test_slices_are_consecutive_cover_the_batch_once_and_fit_a_micro_batch(length, micro, extra, world_size):
    arithmetic = batch_arithmetic(stage(length, micro, micro + extra), world_size)
    slices = [arithmetic.slice_of(number) for number in range(world_size * arithmetic.accumulation_steps)]
    assert [row for first, stop in slices for row in range(first, stop)] == list(range(micro + extra))
    sizes = {stop - first for first, stop in slices}
    assert max(sizes) <= micro and max(sizes) - min(sizes) <= 1
