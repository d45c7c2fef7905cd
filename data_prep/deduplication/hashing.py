"""Hashing of 64-bit words by a pseudorandom bijection."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finishing step of splitmix64 (Steele et al. 2014) to every value of a uint64 array."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
