"""Health of a run: non-finite losses, spikes, a plateau at the unigram entropy, and what objectives warn of.

Pure functions from numbers to warnings; `trainer/loop/training_loop.py` prints, logs and stops.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from data_prep.base.errors import UserError
from trainer.config.run_settings import HealthSettings
from trainer.data.sample_range import SampleRange
from trainer.metrics.throughput import slow_rank
from trainer.objectives.objective import Objective, explained

MIN_HISTORY = 20
"""Minimum steps in a window: the spread of fewer losses is chance."""

SLOW_INTERVALS = 3
"""Consecutive log intervals in which a rank must be slow before a warning."""

MAX_PROBES = 4
"""Consecutive fp16 overflows that count as the search for a loss scale: DeepSpeed ignores one (`fp16.hysteresis`), then
halves the scale with each."""

_MAD_TO_DEVIATION = 1.4826
"""The standard deviation of a normal distribution in units of its median absolute deviation."""


class SpikeDetector:
    """Detects losses far above the running median, by a spread that is robust to single outliers."""

    def __init__(self, window_steps: int, threshold: float) -> None:
        self._window: deque[float] = deque(maxlen=window_steps)
        self._threshold = threshold

    def judge(self, loss: float) -> float | None:
        """Add a loss; return its standard deviations above the median if it is a spike, else None."""
        deviations = None
        if len(self._window) >= MIN_HISTORY:
            median = statistics.median(self._window)
            spread = _MAD_TO_DEVIATION * statistics.median(abs(value - median) for value in self._window)
            # On a flat curve any ripple would be a spike.
            deviations = (loss - median) / max(spread, 1e-3 * abs(median), 1e-12)
        self._window.append(loss)
        return deviations if deviations is not None and deviations > self._threshold else None

    @property
    def median(self) -> float:
        """Median of the window; NaN if it is empty."""
        return statistics.median(self._window) if self._window else math.nan


@dataclass(frozen=True)
class NonFiniteSteps:
    """Consecutive steps with a non-finite loss or gradient: a streak, during which nothing is saved.

    A checkpoint is never part of a streak, so a resumed run counts from 0.
    """

    max_in_a_row: int
    streak: tuple[tuple[int, SampleRange], ...] = ()
    what: str = ""
    num_probes: int = 0

    @property
    def in_streak(self) -> bool:
        """Whether the last step was non-finite."""
        return bool(self.streak)

    def is_probe(self, losses: Sequence[float], scale_can_fall: bool, is_first_update: bool) -> bool:
        """Return whether a skipped step only shows that fp16's loss scale was too large.

        Args:
            losses: of each objective in the step, over all ranks.
            scale_can_fall: DeepSpeed can lower the scale, which is above its minimum.
            is_first_update: the optimizer has made no step: the search for the scale may take any number of steps.
        """
        if self.in_streak or not scale_can_fall or not all(map(math.isfinite, losses)):
            return False
        return is_first_update or self.num_probes < MAX_PROBES

    def after_probe(self) -> NonFiniteSteps:
        """Return the count with one more probe."""
        return replace(self, num_probes=self.num_probes + 1)

    def after(self, step: int, samples: SampleRange, losses: Sequence[float]) -> NonFiniteSteps:
        """Return the streak with one more step, which changed neither weights nor optimizer state."""
        what = "loss" if not all(map(math.isfinite, losses)) else "gradient"
        return replace(self, streak=(*self.streak, (step, samples)), what=what)

    def after_finite(self) -> NonFiniteSteps:
        """Return the count after a finite step."""
        return NonFiniteSteps(self.max_in_a_row)

    @property
    def is_too_long(self) -> bool:
        """Whether the run must end."""
        return len(self.streak) > self.max_in_a_row

    def warning(self) -> str:
        """Return the warning about the last step of the streak."""
        step, samples = self.streak[-1]
        return (
            f"the {self.what} of step {step:,} ({samples}) is not finite; step skipped "
            f"({len(self.streak)} in a row, at most {self.max_in_a_row} allowed)"
        )

    def check(self, saved_step: int | None, first_step: int) -> None:
        """End a run whose streak is too long; arguments as `error`.

        Raises:
            UserError: the streak is too long; lists steps and samples.
        """
        if self.is_too_long:
            raise self.error(f", more than health.max_nonfinite_steps={self.max_in_a_row}", saved_step, first_step)

    def error(self, why_it_ends: str, saved_step: int | None, first_step: int) -> UserError:
        """Create the error that ends a run, with steps, samples, and how to resume from the last good checkpoint.

        Args:
            saved_step: the step of that checkpoint. One of an earlier stage cannot skip samples of this one.
            first_step: completed steps of the run where the stage begins.
        """
        (first, _), (last, samples) = self.streak[0], self.streak[-1]
        of_epoch = [each for _, each in self.streak if (each.stage, each.epoch) == (samples.stage, samples.epoch)]
        steps = ", ".join(f"{number:,} ({range_})" for number, range_ in self.streak[-5:])
        skip = f"--skip-samples {of_epoch[0].first}:{samples.stop} --skip-epoch {samples.shown_epoch}"
        can_skip = saved_step is not None and saved_step > first_step * bool(samples.stage)
        again = f", or resume with pretrain.py --resume-from {saved_step} {skip}" if can_skip else ""
        return UserError(
            f"the {self.what} was not finite in {len(self.streak)} steps in a row{why_it_ends}: steps {first:,} to "
            f"{last:,}, the last of them {steps}. Weights and optimizer state stay as before step {first:,}",
            fix=f"look at the samples with `clozeworks show-batch --config CONFIG {samples.as_options(last)}`, with "
            f"CONFIG and overrides of the run; then lower optimizer.learning_rate{again}",
            code="nonfinite-steps",
        )


class _Recent:
    """The metrics of one objective in the last steps that predicted anything."""

    def __init__(self, objective: Objective, settings: HealthSettings) -> None:
        self.objective, self._settings = objective, settings
        self._windows = {
            value: deque[float](maxlen=settings.spike_window_steps)
            for value in objective.training_values or objective.values
        }
        self._stage: int | None = None
        """The last stage that trained the objective."""
        self.first_step = 1
        """The step from which on every stage that this process saw trained the objective."""

    def add(self, step: int, stage: int, metrics: Mapping[str, float], is_first_stage: bool) -> None:
        """Add the metrics of a step; `is_first_stage` says that this process saw no earlier stage."""
        named = {value: f"train/{self.objective.metric}_{value}" for value in self._windows}
        if not {*named.values()} & metrics.keys():
            return
        if (self._stage is None and not is_first_stage) or (self._stage is not None and stage > self._stage + 1):
            self.first_step = step
            for window in self._windows.values():
                window.clear()
        self._stage = stage
        for value, name in named.items():
            if name in metrics:
                self._windows[value].append(metrics[name])

    def is_trained(self, stage: int | None) -> bool:
        """Return whether the stage has trained the objective."""
        return self._stage is not None and self._stage == stage

    def is_known(self, stage: int) -> bool:
        """Return whether the stage has trained the objective for at least `MIN_HISTORY` steps."""
        return self.is_trained(stage) and min(map(len, self._windows.values())) >= MIN_HISTORY

    @property
    def median(self) -> float:
        """Median of the losses."""
        return statistics.median(self._windows["loss"])

    def warning(self, step: int, stage: int) -> str | None:
        """Return the objective's warning about the means of the window."""
        if not self.is_known(stage):
            return None
        means = {value: statistics.fmean(window) for value, window in self._windows.items()}
        with explained(self.objective.name):
            return self.objective.warning(step - self.first_step + 1, means, self._settings)


class Health:
    """Checks the metrics of a run, step by step."""

    def __init__(
        self, settings: HealthSettings, unigram_entropy_nats: float | None, objectives: Collection[Objective]
    ) -> None:
        """Prepare the checks; `unigram_entropy_nats` is of the training data, and None disables the plateau check."""
        self._settings = settings
        self._entropy = unigram_entropy_nats
        self._of_objectives = [_Recent(each, settings) for each in objectives]
        self._losses = SpikeDetector(settings.spike_window_steps, settings.spike_threshold or math.inf)
        self._stage: int | None = None
        self._is_first_stage = True
        self._warned: set[str] = set()
        self._slow_for = (-1, 0)
        self.num_spikes = 0

    def observe(self, step: int, samples: SampleRange, metrics: Mapping[str, float]) -> list[str]:
        """Return the warnings about the metrics of a step: each kind once, spikes every time."""
        loss = metrics.get("train/loss", math.nan)
        if not math.isfinite(loss):  # counted by the loop; not part of any median
            return []
        if samples.stage != self._stage:  # another loss may begin: of other lengths, masks or objectives
            self._losses = SpikeDetector(self._settings.spike_window_steps, self._settings.spike_threshold or math.inf)
            self._is_first_stage, self._stage = self._stage is None, samples.stage
        for recent in self._of_objectives:
            recent.add(step, samples.stage, metrics, self._is_first_stage)
        median = self._losses.median
        deviations = self._losses.judge(loss)
        warnings = []
        if deviations is not None:
            self.num_spikes += 1
            warnings.append(
                f"loss spike: {loss:.4f} in step {step:,} is {deviations:.0f} standard deviations above the running "
                f"median {median:.4f}; show its samples: `clozeworks show-batch --config CONFIG "
                f"{samples.as_options(step)}`, with CONFIG and overrides of the run"
            )
        if (tokens := self._of_tokens) is not None and tokens.is_known(samples.stage):
            since = step - tokens.first_step + 1
            name = tokens.objective.metric
            warnings += self._once(
                f"plateau of {name}", plateau_warning(since, tokens.median, self._entropy, self._settings, name)
            )
        for recent in self._of_objectives:
            warnings += self._once(f"objective {recent.objective.metric}", recent.warning(step, samples.stage))
        return warnings

    def observe_speed(self, work_seconds: Sequence[float]) -> list[str]:
        """Return the warning about the ranks' seconds of work per step: a rank that stays slow is reported once."""
        rank = slow_rank(work_seconds, self._settings.slow_rank_ratio)
        before, times = self._slow_for
        self._slow_for = (-1, 0) if rank is None else (rank, times + 1 if rank == before else 1)
        if rank is None or self._slow_for[1] < SLOW_INTERVALS:
            return []
        return self._once(
            f"slow rank {rank}",
            f"rank {rank} takes {work_seconds[rank]:.3f} s per step for data and forward passes, more than "
            f"health.slow_rank_ratio={self._settings.slow_rank_ratio} times the median; all ranks wait for it. Check "
            "its host",
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Health under its MLflow names."""
        values = {"health/loss_spikes": float(self.num_spikes)}
        if self._entropy is not None and (tokens := self._of_tokens) is not None:
            values["health/nats_below_unigram_entropy"] = self._entropy - tokens.median
        return values

    @property
    def _of_tokens(self) -> _Recent | None:
        """The metrics of the objective that predicts tokens in the current stage."""
        trained = (recent for recent in self._of_objectives if recent.is_trained(self._stage))
        return next((recent for recent in trained if recent.objective.metric in ("mlm", "causal")), None)

    def _once(self, kind: str, warning: str | None) -> list[str]:
        if warning is None or kind in self._warned:
            return []
        self._warned.add(kind)
        return [warning]


def plateau_warning(
    step: int, loss: float, entropy: float | None, settings: HealthSettings, metric: str = "mlm"
) -> str | None:
    """Warn if the loss of `metric` is still at the unigram entropy after `plateau_steps`; else None."""
    if entropy is None or step < settings.plateau_steps or loss < entropy - settings.plateau_margin_nats:
        return None
    return (
        f"the {metric.upper()} loss {loss:.4f} is still at the unigram entropy {entropy:.4f} after {step:,} steps: the "
        "model predicts token frequencies and ignores context. Raise optimizer.learning_rate, lengthen the warmup, or "
        "check the samples with `clozeworks show-batch`"
    )
