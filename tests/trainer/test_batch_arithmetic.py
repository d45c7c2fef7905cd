from hypothesis import given
from hypothesis import strategies as st

from trainer.batch_arithmetic import batch_arithmetic
from trainer.settings.training import Phase


def phase(length: int, micro_rows: int, global_rows: int) -> Phase:
    return Phase(
        steps=1,
        sequence_length=length,
        micro_batch_tokens=length * micro_rows,
        global_batch_tokens=length * global_rows,
    )


def test_four_rows_are_one_rank_times_four_or_two_times_two():
    assert batch_arithmetic(phase(8, 1, 4), 1).accumulation_steps == 4
    assert batch_arithmetic(phase(8, 1, 4), 2).accumulation_steps == 2
    assert batch_arithmetic(phase(8, 1, 4), 4).accumulation_steps == 1


def test_ranks_that_do_not_divide_the_batch_are_filled_up_and_say_so():
    arithmetic = batch_arithmetic(phase(8, 2, 8), 3)
    assert (arithmetic.accumulation_steps, arithmetic.computed_rows) == (2, 12)
    assert "33.3% are rows that only fill up" in str(arithmetic)


@given(length=st.integers(8, 64), micro=st.integers(1, 16), extra=st.integers(0, 100), world_size=st.integers(1, 64))
def test_every_batch_fits_and_one_accumulation_step_less_would_not(length, micro, extra, world_size):
    arithmetic = batch_arithmetic(phase(length, micro, micro + extra), world_size)
    assert arithmetic.computed_rows >= arithmetic.global_rows
    rows_a_rank = -(-arithmetic.global_rows // world_size)
    assert (arithmetic.accumulation_steps - 1) * micro < rows_a_rank <= arithmetic.accumulation_steps * micro


@given(length=st.just(8), micro=st.integers(1, 8), extra=st.integers(0, 50), world_size=st.integers(1, 16))
def test_slices_are_consecutive_cover_the_batch_once_and_fit_a_micro_batch(length, micro, extra, world_size):
    arithmetic = batch_arithmetic(phase(length, micro, micro + extra), world_size)
    slices = [arithmetic.slice_of(number) for number in range(world_size * arithmetic.accumulation_steps)]
    assert [row for first, stop in slices for row in range(first, stop)] == list(range(micro + extra))
    sizes = {stop - first for first, stop in slices}
    assert max(sizes) <= micro and max(sizes) - min(sizes) <= 1
