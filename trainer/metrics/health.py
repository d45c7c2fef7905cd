"""Whether a run is well: losses that are not finite, spikes, a plateau at the unigram entropy, suspicious pairs.

Everything here goes from numbers to judgments and sentences; `trainer/loop/train.py` prints, logs and stops.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from data_prep.base.errors import UserError
from trainer.config.run_settings import HealthSettings
from trainer.data.sample_range import SampleRange
from trainer.metrics.throughput import slow_rank

MIN_HISTORY = 20
"""Steps before a median says anything; with fewer the window's spread is chance."""

SLOW_INTERVALS = 3
"""Log intervals in a row in which a rank must be slow before it is named."""

MAX_PROBES = 4
"""Overflows of fp16 in a row that are the search for a loss scale: DeepSpeed lets one pass (`fp16.hysteresis`), then
halves the scale with each."""

_MAD_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution in units of its median absolute deviation."""


class SpikeDetector:
    """Tells losses that stand out above the running median, by a spread that single outliers do not widen."""

    def __init__(self, window_steps: int, threshold: float) -> None:
        self._window: deque[float] = deque(maxlen=window_steps)
        self._threshold = threshold

    def judge(self, loss: float) -> float | None:
        """How many standard deviations a loss lies above the median, where that is a spike; remembers the loss."""
        deviations = None
        if len(self._window) >= MIN_HISTORY:
            median = statistics.median(self._window)
            spread = _MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in self._window)
            # Of a curve that has come to rest any ripple would stand out.
            deviations = (loss - median) / max(spread, 1e-3 * abs(median), 1e-12)
        self._window.append(loss)
        return deviations if deviations is not None and deviations > self._threshold else None

    @property
    def median(self) -> float:
        """Of the window; NaN where it is empty."""
        return statistics.median(self._window) if self._window else math.nan


@dataclass(frozen=True)
class NonFiniteSteps:
    """The steps in a row whose loss or gradient is not finite: a streak, in which nothing is saved.

    So a checkpoint is never of a streak, and a resumed run counts from 0.
    """

    max_in_a_row: int
    streak: tuple[tuple[int, SampleRange], ...] = ()
    what: str = ""
    num_probes: int = 0

    @property
    def in_streak(self) -> bool:
        """Whether no step has been finite since one that was not."""
        return bool(self.streak)

    def is_probe(self, losses: tuple[float, float], scale_can_fall: bool, is_first_update: bool) -> bool:
        """Whether a skipped step shows only that fp16's loss scale was too large.

        Args:
            losses: of the step, over all ranks.
            scale_can_fall: DeepSpeed lowers the scale, which is above its minimum.
            is_first_update: the optimizer has made no step: the scale is still searched for, however long.
        """
        if self.in_streak or not scale_can_fall or not all(map(math.isfinite, losses)):
            return False
        return is_first_update or self.num_probes < MAX_PROBES

    def after_probe(self) -> NonFiniteSteps:
        """The count with a probe more."""
        return replace(self, num_probes=self.num_probes + 1)

    def after(self, step: int, samples: SampleRange, losses: tuple[float, float]) -> NonFiniteSteps:
        """The streak with a step more, which changed neither weights nor optimizer state."""
        what = "loss" if not all(map(math.isfinite, losses)) else "gradient"
        return replace(self, streak=(*self.streak, (step, samples)), what=what)

    def after_finite(self) -> NonFiniteSteps:
        """The count after a step that was finite."""
        return NonFiniteSteps(self.max_in_a_row)

    @property
    def is_too_long(self) -> bool:
        """Whether the run has to end."""
        return len(self.streak) > self.max_in_a_row

    def warning(self) -> str:
        """The warning about the last step of the streak."""
        step, samples = self.streak[-1]
        return (
            f"the {self.what} of step {step:,} ({samples}) is not finite; the step changed nothing "
            f"({len(self.streak)} in a row; the run ends after more than {self.max_in_a_row})"
        )

    def check(self, saved_step: int | None) -> None:
        """End a run whose streak is too long; `saved_step` is that of the last good checkpoint.

        Raises:
            UserError: it is too long; names steps and samples.
        """
        if self.is_too_long:
            raise UserError(self.describe(f", more than health.max_nonfinite_steps={self.max_in_a_row}", saved_step))

    def describe(self, why_it_ends: str, saved_step: int | None) -> str:
        """The streak that ends a run, its steps and samples, and how to train on from the last good checkpoint."""
        (first, _), (last, samples) = self.streak[0], self.streak[-1]
        of_epoch = [found for _, found in self.streak if (found.stage, found.epoch) == (samples.stage, samples.epoch)]
        steps = ", ".join(f"{number:,} ({range_})" for number, range_ in self.streak[-5:])
        skip = f"--skip-samples {of_epoch[0].first}:{samples.stop} --skip-epoch {samples.epoch}"
        again = "" if saved_step is None else f", or resume with pretrain.py --resume-from {saved_step} {skip}"
        return (
            f"the {self.what} was not finite in {len(self.streak)} steps in a row{why_it_ends}: steps {first:,} to "
            f"{last:,}, the last of them {steps}. Weights and optimizer state are those before step {first:,}. Fix: "
            f"look at the rows with launch/show_batch.py {samples.as_options(last)}; then lower "
            f"optimizer.learning_rate{again}"
        )


class Health:
    """Watches the metrics of a run, step by step in their order."""

    def __init__(self, settings: HealthSettings, unigram_entropy_nats: float | None) -> None:
        """`unigram_entropy_nats` is that of the training data (`unigram.py`); None leaves the plateau unwatched."""
        self._settings = settings
        self._entropy = unigram_entropy_nats
        self._losses = SpikeDetector(settings.spike_window_steps, settings.spike_threshold or math.inf)
        self._mlm_losses: deque[float] = deque(maxlen=settings.spike_window_steps)
        self._pair_accuracies: deque[float] = deque(maxlen=settings.spike_window_steps)
        self._warned: set[str] = set()
        self._slow_for = (-1, 0)
        self.num_spikes = 0

    def observe(self, step: int, samples: SampleRange, metrics: Mapping[str, float]) -> list[str]:
        """Return the warnings about the metrics of a step: each trouble once, spikes every time."""
        loss = metrics.get("train/loss", math.nan)
        if not math.isfinite(loss):  # counted where the step was taken; no part of any median
            return []
        self._mlm_losses.append(metrics["train/mlm_loss"])
        if "train/pair_accuracy" in metrics:
            self._pair_accuracies.append(metrics["train/pair_accuracy"])
        median = self._losses.median
        deviations = self._losses.judge(loss)
        warnings = []
        if deviations is not None:
            self.num_spikes += 1
            warnings.append(
                f"loss spike: {loss:.4f} in step {step:,} is {deviations:.0f} deviations above the running median "
                f"{median:.4f}; its rows: launch/show_batch.py {samples.as_options(step)}"
            )
        if len(self._mlm_losses) >= MIN_HISTORY:
            warnings += self._once("plateau", plateau_warning(step, self._mlm_loss, self._entropy, self._settings))
        if len(self._pair_accuracies) >= MIN_HISTORY:
            accuracy = statistics.fmean(self._pair_accuracies)
            warnings += self._once("pairs", pair_warning(step, accuracy, self._settings))
        return warnings

    def observe_speed(self, work_seconds: Sequence[float]) -> list[str]:
        """What is to be said of the ranks' seconds of work a step: one that is slow time and again is named once."""
        rank = slow_rank(work_seconds, self._settings.slow_rank_ratio)
        before, times = self._slow_for
        self._slow_for = (-1, 0) if rank is None else (rank, times + 1 if rank == before else 1)
        if rank is None or self._slow_for[1] < SLOW_INTERVALS:
            return []
        return self._once(
            f"slow rank {rank}",
            f"rank {rank} takes {work_seconds[rank]:.3f} s a step for data and forward passes, over "
            f"health.slow_rank_ratio={self._settings.slow_rank_ratio} times the others' median; all wait for it: look "
            "at its host",
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The state of health under its MLflow names."""
        values = {"health/loss_spikes": float(self.num_spikes)}
        if self._entropy is not None and self._mlm_losses:
            values["health/nats_below_unigram_entropy"] = self._entropy - self._mlm_loss
        return values

    @property
    def _mlm_loss(self) -> float:
        return statistics.median(self._mlm_losses)

    def _once(self, kind: str, warning: str | None) -> list[str]:
        if warning is None or kind in self._warned:
            return []
        self._warned.add(kind)
        return [warning]


def plateau_warning(step: int, mlm_loss: float, entropy: float | None, settings: HealthSettings) -> str | None:
    """Where the loss should have left the unigram entropy by this step and has not: what to say."""
    if entropy is None or step < settings.plateau_steps or mlm_loss < entropy - settings.plateau_margin_nats:
        return None
    return (
        f"after {step:,} steps the MLM loss {mlm_loss:.4f} has not left the unigram entropy {entropy:.4f} of the "
        "corpus: the model predicts how frequent each piece is and uses no context; raise optimizer.learning_rate, "
        "lengthen the warm-up, or look at the rows with launch/show_batch.py"
    )


def pair_warning(step: int, accuracy: float, settings: HealthSettings) -> str | None:
    """Where the accuracy on sentence pairs is no better than chance for too long, or too good too soon: what to say."""
    if step >= settings.plateau_steps and abs(accuracy - 0.5) <= settings.chance_margin:
        return (
            f"after {step:,} steps the accuracy on sentence pairs is {accuracy:.1%}, as by chance; raise "
            "optimizer.learning_rate, or set data.sentence_pairs=none"
        )
    if step <= settings.plateau_steps // 10 and accuracy >= settings.suspicious_pair_accuracy:
        return (
            f"the accuracy on sentence pairs is {accuracy:.1%} after only {step:,} steps; look with "
            "launch/show_batch.py for something that gives the answer away, such as near-duplicates or a corpus whose "
            "documents have nothing in common"
        )
    return None
