"""Lengths: percentiles and bins are those of numpy over all values, in memory that does not grow."""

from __future__ import annotations

import math

import numpy as np
import pytest

from data_prep.reports.lengths import EXACT_LENGTHS, LengthHistogram

PERCENTS = (0, 0.1, 5, 25, 50, 75, 95, 99.9, 100)


def histogram_of(values: np.ndarray) -> LengthHistogram:
    histogram = LengthHistogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    return histogram


def test_a_case_checked_by_hand() -> None:
    histogram = histogram_of(np.array([3, 1, 4, 1, 5, 9, 2, 6], np.uint32))
    assert (histogram.num, histogram.sum, histogram.shortest, histogram.longest) == (8, 31, 1, 9)
    assert [histogram.percentile(percent) for percent in (0, 25, 50, 75, 100)] == [1, 1, 3, 5, 9]
    assert histogram.bins() == [(1, 1, 2), (2, 3, 2), (4, 7, 3), (8, 15, 1)]
    assert [low for low, _, _ in histogram.bins(2)] == [1, 2, 3, 4, 6, 8]


@pytest.mark.parametrize("seed", range(3))
def test_percentiles_are_exact_where_lengths_are_counted_one_by_one(seed: int) -> None:
    values = np.random.default_rng(seed).lognormal(5, 1.5, 20_001).astype(np.uint32).clip(1, EXACT_LENGTHS - 1)
    histogram = histogram_of(values)
    expected = np.percentile(values, PERCENTS, method="inverted_cdf").tolist()
    assert [histogram.percentile(percent) for percent in PERCENTS] == expected
    assert (histogram.num, histogram.mean) == (len(values), pytest.approx(values.mean()))


def test_longer_lengths_are_never_over_and_at_most_a_third_of_a_percent_under() -> None:
    values = np.random.default_rng(1).lognormal(13, 2, 10_001).astype(np.int64).clip(1)
    histogram = histogram_of(values)
    for percent in PERCENTS:
        expected = int(np.percentile(values, percent, method="inverted_cdf"))
        assert expected * 0.997 <= histogram.percentile(percent) <= expected
    assert histogram.longest == values.max() > EXACT_LENGTHS


@pytest.mark.parametrize("bins_per_octave", [1, 2, 4])
def test_bins_hold_every_length_once_whatever_its_size(bins_per_octave: int) -> None:
    edges = [math.ceil(2 ** (power / 2)) for power in range(70)]
    values = np.array([value + step for value in edges for step in (-1, 0, 1) if value + step > 0], np.int64)
    bins = histogram_of(values).bins(bins_per_octave)
    assert sum(item.num for item in bins) == len(values)
    assert all(one.high + 1 == two.low for one, two in zip(bins, bins[1:], strict=False))
    for low, high, num in bins:
        assert num == ((low <= values) & (values <= high)).sum(), (low, high)


def test_nothing_has_no_lengths() -> None:
    histogram = histogram_of(np.zeros(0, np.uint32))
    assert (histogram.num, histogram.mean, histogram.percentile(50), histogram.bins()) == (0, 0.0, 0, [])
