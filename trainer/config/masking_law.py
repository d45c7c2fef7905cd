"""`data.masking_law`: how the masking rate of a row is chosen, and what a masked language model's loss then bounds.

A law leads from one rate (`from`) to another (`to`), its ends. `data.mlm_probability` is its mean. `constant` and
`linear` depend on the step alone. The others draw a rate r for every row from v, uniform in [0, 1); d = to - from:

- uniform: r = from + d v, with the density 1 / d between the ends and the mean from + d / 2. With the ends 0 and 1 it
  is the linear schedule of MDLM (Sahoo et al. 2024) and LLaDA (Nie et al. 2025).
- cosine: r = from + d (1 - cos(pi v / 2)), with the density 2 / (pi |d| sqrt(1 - (1 - s)^2)) between the ends, where s
  = (r - from) / d, and the mean from + d (1 - 2 / pi). From 0 to 1 it is the cosine schedule in the code of MDLM and of
  the BabyLM entry below. From 1 to 0 it is cos(pi v / 2), that of MaskGIT (Chang et al. 2022), which masks 64% on
  average instead of 36%.
- bimodal: 60% of the rows have rates within 0.7 and 1.3 times `from`, with the density 1 / from there, the others
  within 0.7 and 1.3 times `to`, with the density 2 / (3 to); the mean is from + 0.4 d. The BabyLM 2025 entry of
  Kosmopoulou et al. (arXiv 2509.05056) draws 60% around 0.12 and the others around a mean that its code moves from 0.40
  to 0.68, from Gaussians whose deviations are about a sixth of their means. This project decides otherwise in two
  points: the upper mode stays where that mean is on average, and each mode is uniform, with a deviation of about a
  sixth of its middle (0.3 / sqrt(3)), so that the rates of a micro-batch have a bound.

Without ends they follow from the mean m: 0 and 2 m (uniform), 0 and m / (1 - 2 / pi) (cosine), 0.4 m and 1.9 m
(bimodal, 0.12 and 0.57 for m = 0.3).

A row with n tokens of text and the drawn rate r predicts k = floor(r n + 1/2) of them.

Stratified, v of sample i is the fractional part of shift + i g, where g is the golden ratio and the shift is drawn for
each epoch: consecutive samples have nearly equal shares of all rates, and so have the samples that a mixture takes from
one of its data sets. In integers modulo 2^64 v is exact for any i. `capacity` is the largest number of predictions that
so many consecutive rows have under any shift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, create_model, model_validator

from data_prep.base.settings import SettingError, Settings

MOST_MASKED = 0.8
"""Largest masking rate of a run that learns from what is left visible; a bound needs all rates up to 1."""
MEAN_TOLERANCE = 5e-4
"""A mean may be written with three decimals."""
LawName = Literal["constant", "linear", "uniform", "cosine", "bimodal"]
LossWeight = Literal["none", "elbo"]
_Rate = Annotated[float, Field(ge=0.0, le=1.0)]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
_WINDOW = 1024  # rows; larger micro-batches are counted in windows of it


class _Named(Settings):
    name: LawName = Field(
        description="how a row gets its rate: constant or linear over the steps, or drawn for each row (uniform, "
        "cosine or bimodal)"
    )


if TYPE_CHECKING:

    class _Ends(_Named):
        to: float | None = None
else:  # `from` is a word of Python
    _Ends = create_model(
        "_Ends",
        __base__=_Named,
        **{
            "from": (
                _Rate | None,
                Field(
                    None,
                    description="first rate: at the first step (linear), one end of the range (uniform and cosine) or "
                    "center of the rates of 60% of the rows (bimodal); by default from mlm_probability",
                ),
            ),
            "to": (
                _Rate | None,
                Field(
                    None,
                    description="second rate: at the last step (linear), other end of the range (uniform and cosine) "
                    "or center of the other rates (bimodal)",
                ),
            ),
        },
    )


class MaskingLaw(_Ends):
    """How the masking rate of a row is chosen (`trainer/config/masking_law.py`)."""

    stratified: bool = Field(
        True,
        description="draw rates so that consecutive rows cover the range evenly; false: draw each rate independently",
    )

    @property
    def ends(self) -> tuple[float, float] | None:
        """`from` and `to`; None where they follow from the mean."""
        first, last = getattr(self, "from"), self.to
        return None if first is None or last is None else (first, last)

    @property
    def mean(self) -> float | None:
        """The mean that the ends imply; None without ends."""
        return None if self.ends is None else LAWS[self.name](*self.ends, self.stratified).mean

    @model_validator(mode="after")
    def _check_ends(self) -> MaskingLaw:
        first, last = getattr(self, "from"), self.to
        if (first is None) != (last is None):
            given, missing = ("to", "from") if first is None else ("from", "to")
            raise SettingError(
                f"masking_law.{given} is set without masking_law.{missing}",
                fix="set both, or neither (mlm_probability then sets them)",
                code="masking-law-with-one-end",
            )
        law = LAWS[self.name]
        if not (law.is_drawn or self.stratified):
            raise SettingError(
                f"masking_law: {self.name} draws no rates, so stratified=false has no effect",
                fix="remove stratified",
                code="setting-without-effect",
            )
        if self.ends is None:
            if self.name == "linear":
                raise SettingError(
                    "masking_law: linear has no from and to, its rates at the first and the last step",
                    fix="set both",
                    code="masking-law-without-ends",
                )
        elif (problem := law.problem_of(*self.ends)) is not None:
            raise SettingError(
                f"masking_law: {self.name} from {first:g} to {last:g} {problem[0]}",
                fix=problem[1],
                code="masking-law-ends",
            )
        return self


@dataclass(frozen=True)
class Law:
    """A law with its ends; a subclass is one law."""

    first: float
    last: float
    is_stratified: bool = True
    name: ClassVar[str]
    middle: ClassVar[float]
    """Where the mean lies between the ends: 0 at the first, 1 at the last."""
    is_drawn: ClassVar[bool] = True
    """Whether every row has a rate of its own."""

    @classmethod
    def ends_of(cls, mean: float) -> tuple[float, float]:
        """Return the ends where the settings name the mean alone."""
        return 0.0, mean / cls.middle

    @classmethod
    def problem_of(cls, first: float, last: float) -> tuple[str, str] | None:
        """Return what is wrong with two ends in [0, 1], and its fix; None if nothing is."""
        if first < last:
            return None
        return "begins at a rate that is not below the other", "put the lower rate into `from`"

    @property
    def mean(self) -> float:
        """The mean rate."""
        return self.first + (self.last - self.first) * self.middle

    @property
    def support(self) -> tuple[float, float]:
        """The lowest and the highest rate."""
        return min(self.first, self.last), max(self.first, self.last)

    def rate_of_step(self, progress: float) -> float:
        """Return the mean rate of the rows of a step; `progress` is 0 at the first and 1 at the last."""
        return self.mean

    @property
    def final_rate(self) -> float:
        """The mean rate of the rows of the last step."""
        return self.mean

    def quantile(self, draws: np.ndarray) -> np.ndarray:
        """Return the rates of `draws` in [0, 1), monotone, of the same shape."""
        raise NotImplementedError

    def distribution(self, rates: np.ndarray) -> np.ndarray:
        """Return the probability of a rate of at most `rates`, of the same shape."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return the law in a few words, for tables and cards."""
        drawn = "" if self.is_stratified else ", drawn independently"
        return f"{self.name} from {self.first:g} to {self.last:g}, {self.mean:.3g} on average{drawn}"


@dataclass(frozen=True)
class Linear(Law):
    """The rate at the first step to that at the last (Yang et al. 2023, "Learning Better Masking for Better Language
    Model Pre-training", find a decreasing rate best)."""

    name = "linear"
    middle = 0.5
    is_drawn = False

    @classmethod
    def problem_of(cls, first: float, last: float) -> tuple[str, str] | None:
        """Return a problem where nothing would be masked."""
        if min(first, last) > 0:
            return None
        return "masks nothing at one end", "set both rates above 0"

    @property
    def final_rate(self) -> float:
        """The rate of the last step."""
        return self.last

    def rate_of_step(self, progress: float) -> float:
        """Return the rate of the step."""
        return self.first + (self.last - self.first) * progress

    def describe(self) -> str:
        """Return the rates at both ends."""
        if self.first == self.last:
            return f"{self.first:g}"
        return f"{self.first:g} at the first step to {self.last:g} at the last"


@dataclass(frozen=True)
class Constant(Linear):
    """One rate."""

    name = "constant"

    @classmethod
    def ends_of(cls, mean: float) -> tuple[float, float]:
        """Return the rate twice."""
        return mean, mean

    @classmethod
    def problem_of(cls, first: float, last: float) -> tuple[str, str] | None:
        """Return that the law has no ends."""
        return "has two rates", "remove both, and set mlm_probability to the rate"


@dataclass(frozen=True)
class Uniform(Law):
    """All rates between the ends."""

    name = "uniform"
    middle = 0.5

    def quantile(self, draws: np.ndarray) -> np.ndarray:
        """Return the rates of draws."""
        return self.first + (self.last - self.first) * draws

    def distribution(self, rates: np.ndarray) -> np.ndarray:
        """Return the cumulative distribution."""
        shares: np.ndarray = np.clip((rates - self.first) / (self.last - self.first), 0.0, 1.0)
        return shares


@dataclass(frozen=True)
class Cosine(Law):
    """Most rates are near the first end, whose density is infinite."""

    name = "cosine"
    middle = 1.0 - 2.0 / math.pi

    @classmethod
    def problem_of(cls, first: float, last: float) -> tuple[str, str] | None:
        """Return a problem of equal ends."""
        return None if first != last else ("has one rate", "set two, or name the law constant")

    def quantile(self, draws: np.ndarray) -> np.ndarray:
        """Return the rates of draws."""
        rates: np.ndarray = self.first + (self.last - self.first) * (1.0 - np.cos(np.pi / 2 * draws))
        return rates

    def distribution(self, rates: np.ndarray) -> np.ndarray:
        """Return the cumulative distribution."""
        shares = np.clip((rates - self.first) / (self.last - self.first), 0.0, 1.0)
        below = np.arccos(1.0 - shares) * (2 / np.pi)
        return below if self.first < self.last else 1.0 - below


@dataclass(frozen=True)
class Bimodal(Law):
    """Two bands of rates."""

    name = "bimodal"
    lower_share: ClassVar[float] = 0.6
    half_width: ClassVar[float] = 0.3
    """Of a band, as a share of the rate in its middle."""
    middle = 0.4

    @classmethod
    def ends_of(cls, mean: float) -> tuple[float, float]:
        """Return the middles of both bands."""
        return 0.4 * mean, 1.9 * mean

    @classmethod
    def problem_of(cls, first: float, last: float) -> tuple[str, str] | None:
        """Return a problem of bands that overlap, or that are not rates."""
        if first <= 0:
            return "has no rates around 0", "raise `from`"
        if (problem := super().problem_of(first, last)) is not None:
            return problem
        if first * (1 + cls.half_width) > last * (1 - cls.half_width):
            return "has two bands of rates that overlap (each is 30% wide to both sides)", "set them farther apart"
        if last * (1 + cls.half_width) > 1.0:
            return f"reaches the rate {last * (1 + cls.half_width):.3g}", "lower `to`"
        return None

    @property
    def support(self) -> tuple[float, float]:
        """The lowest rate of the lower band, and the highest of the upper one."""
        return self.first * (1 - self.half_width), self.last * (1 + self.half_width)

    def quantile(self, draws: np.ndarray) -> np.ndarray:
        """Return the rates of draws."""
        share, width = self.lower_share, self.half_width
        lower = self.first * (1 - width + 2 * width / share * draws)
        upper = self.last * (1 - width + 2 * width / (1 - share) * (draws - share))
        return np.where(draws < share, lower, upper)

    def distribution(self, rates: np.ndarray) -> np.ndarray:
        """Return the cumulative distribution."""
        share, width = self.lower_share, self.half_width
        of_band = (np.clip((rates / middle - 1 + width) / (2 * width), 0, 1) for middle in (self.first, self.last))
        lower, upper = of_band
        below: np.ndarray = share * lower + (1 - share) * upper
        return below


LAWS: dict[str, type[Law]] = {each.name: each for each in (Constant, Linear, Uniform, Cosine, Bimodal)}


def law_of(settings: MaskingLaw | None, mlm_probability: float, final_mlm_probability: float | None) -> Law:
    """Return the law that settings of `data` or of a stage mean."""
    if settings is None:
        if final_mlm_probability is None:
            return Constant(mlm_probability, mlm_probability)
        return Linear(mlm_probability, final_mlm_probability)
    law = LAWS[settings.name]
    return law(*(settings.ends or law.ends_of(mlm_probability)), settings.stratified)


def stratified_draws(shift: np.uint64, samples: np.ndarray) -> np.ndarray:
    """Return v of the samples (n,) int64 under a shift: hashes in uint64, as `randomness.uniform` takes them."""
    with np.errstate(over="ignore"):
        return samples.astype(np.uint64) * _GOLDEN + shift


def num_predicted(rates: np.ndarray, num_tokens: np.ndarray | int) -> np.ndarray:
    """Return how many of `num_tokens` are predicted under rates that were drawn: the nearest whole number."""
    counts: np.ndarray = np.floor(rates * num_tokens + 0.5).astype(np.int64)
    return counts


def capacity(law: Law, num_rows: int, sequence_length: int) -> int:
    """Return the largest number of predictions in so many consecutive rows of one epoch, under a law that draws rates.

    A row has [CLS] and [SEP] at least, so that L - 2 of its tokens are text; one with more special tokens or padding
    predicts no more. Independent draws have room for the largest number of a row in all rows. Stratified, with 32 rows
    or more, the room is less than 1.1 times the mean rate for every law whose ends follow from its mean.

    Proof: a run of R samples that begins at i0 has the draws s + j g modulo 1, j = 0 to R - 1, for s = shift + i0 g, so
    its number of predictions is a function of s alone. Each of its R terms is monotone in s, all in one direction,
    except where its draw passes from 1 to 0. Between two neighbors of these R values of s the sum is monotone, so that
    its maximum is at the last s before one of them, or at one of them. All these are tried, in the integers of the
    draws. More than 1,024 rows are runs of 1,024 and a rest.
    """
    num_tokens = max(sequence_length - 2, 0)
    if not law.is_stratified:
        return num_rows * _largest(law, 1, num_tokens)
    windows, rest = divmod(num_rows, _WINDOW)
    return (windows and windows * _largest(law, _WINDOW, num_tokens)) + _largest(law, rest, num_tokens)


@lru_cache(256)
def _largest(law: Law, num_rows: int, num_tokens: int) -> int:
    passes = stratified_draws(np.uint64(0), -np.arange(num_rows))  # where draw j is 0
    rows = np.arange(num_rows)
    largest = 0
    with np.errstate(over="ignore"):
        for shift in (*passes, *(passes - np.uint64(1))):
            draws = (stratified_draws(shift, rows) >> np.uint64(11)) * 2.0**-53
            largest = max(largest, int(num_predicted(law.quantile(draws), num_tokens).sum()))
    return largest


def bound_weights(law: Law, counts: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Return the weight of the losses of each row with which their sum is unbiased for a bound, (R,) float64.

    For a text x of n tokens and any order of them, -log p(x) is the sum of n losses, each given those before. In the
    mean over all orders, -log p(x) is at most the sum over k = 1 to n of the mean loss of the k hidden tokens, where
    every set of k tokens is hidden with equal probability: the token that is revealed next is any of them. A row hides
    exactly k = floor(r n + 1/2) tokens, with the probability P(k) = F((k + 1/2) / n) - F((k - 1/2) / n) under the
    distribution F of the law, and so the sum of its k losses, each times 1 / (k P(k)), has that bound as its mean. This
    is exact for every n, where a weight 1 / (r density(r)) is so for independent masks of rate r; both are n / k under
    the uniform law for k < n. Every k from 1 to n must have a probability, so the rates must reach from 0 to 1.

    Args:
        counts: (R,) hidden tokens; a row without one has the weight 0, and is a draw that adds nothing.
        num_tokens: (R,) tokens of text of the row.
    """
    tokens = np.maximum(num_tokens, 1)
    above, below = (law.distribution(np.clip((counts + half) / tokens, 0.0, 1.0)) for half in (0.5, -0.5))
    is_used = (counts > 0) & (num_tokens > 0)
    weights: np.ndarray = np.where(is_used, 1.0 / np.where(is_used, counts * (above - below), 1.0), 0.0)
    return weights
