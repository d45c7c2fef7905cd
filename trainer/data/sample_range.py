"""Range of samples in the global order, as logs print it and commands accept it, to show or to skip."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from data_prep.base.errors import UsageError

_RANGE = re.compile(r"(\d+):(\d+)")
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


class SampleRange(BaseModel):
    """Samples `first` to `stop` - 1 of an epoch: positions in its order, the same on any number of ranks.

    `epoch`, on which order and masks depend, counts on over the stages. Logs and options count the epochs of the data
    (`shown_epoch`): a stage with other samples than the one before begins with 0.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Count
    epoch: Count
    first: Count
    stop: Count
    first_epoch: Count = 0
    """The `epoch` in which these data began."""

    @property
    def shown_epoch(self) -> int:
        return self.epoch - self.first_epoch

    def __str__(self) -> str:
        return f"stage {self.stage} epoch {self.shown_epoch} samples {self.first}:{self.stop}"

    def as_options(self, step: int) -> str:
        """Return the options of `clozeworks show-batch`; `step`, counted from 1, trained on the range."""
        return f"--stage {self.stage} --epoch {self.shown_epoch} --samples {self.first}:{self.stop} --step {step - 1}"


@dataclass(frozen=True)
class Branch:
    """Where a branch begins (`trainer/loop/start.py`): at a checkpoint of this run, or of another one."""

    step: int
    skip: tuple[tuple[int, int], ...] = ()
    """Samples (first, stop) of an epoch that are not predicted, for a branch of the same run."""
    epoch: int | None = None
    """Epoch of the samples (`SampleRange.shown_epoch`); None for the epoch of the step."""
    run: str | None = None
    """Output directory of the other run, which `branch` of the configuration alone sets; None for this one."""


def parse_ranges(text: str, option: str) -> list[tuple[int, int]]:
    """Parse `A:B` or `A:B,C:D` as (first, stop): the samples A to B - 1, as in Python slices.

    Raises:
        UsageError: the text has another form, or a range is empty.
    """
    ranges = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or int(match[1]) >= int(match[2]) or int(match[2]) >= 1 << 63:
            raise UsageError(
                f"{option} {text}: {part.strip()!r} is not a range of samples",
                fix="give A:B with A less than B for samples A to B - 1, several separated by commas",
                code="invalid-sample-range",
            )
        ranges.append((int(match[1]), int(match[2])))
    return ranges
