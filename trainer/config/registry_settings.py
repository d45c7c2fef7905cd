"""`registry`: whether the training registers what it has trained, and under which conditions an alias moves."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from data_prep.base.errors import UsageError
from data_prep.base.settings import Settings
from trainer.config.promotion import parse_conditions
from trainer.config.registry_names import PREVIOUS, check_names
from trainer.config.run_settings import CheckpointSettings


class RegistrySettings(Settings):
    """The MLflow model registry, at the server of `tracking`."""

    name: str | None = Field(
        None, description="register the model under this name, exported and checked; by default nothing is registered"
    )
    when: Literal["end", "kept"] = Field(
        "end", description="end registers the last checkpoint, kept those of keep_every_steps as well"
    )
    alias: str | None = Field(
        None, description="alias that points to the newest registered version, such as latest-run"
    )
    promote_to: str | None = Field(
        None, description="alias that moves where only_if holds, such as champion; the version before stays as previous"
    )
    only_if: str | None = Field(
        None, description="condition of promote_to, such as 'valid/mlm_loss < champion' or 'valid/mlm_loss < 2.5'"
    )

    @model_validator(mode="after")
    def _fits_together(self) -> RegistrySettings:
        if self.name is None and (self.alias or self.promote_to or self.only_if):
            raise ValueError("registry.alias, registry.promote_to and registry.only_if need registry.name; set it")
        if self.only_if is not None and self.promote_to is None:
            raise ValueError("registry.only_if is the condition of registry.promote_to; set both or neither")
        if self.alias is not None and self.alias == self.promote_to:
            raise ValueError(
                f"registry.alias and registry.promote_to are both {self.alias!r}: alias moves in any case, before "
                "only_if is asked; leave out one, or name two"
            )
        for setting, alias in (("alias", self.alias), ("promote_to", self.promote_to)):
            if alias == PREVIOUS:
                raise ValueError(
                    f"registry.{setting}={PREVIOUS}: a promotion gives that alias to the version before; take another"
                )
        try:
            if self.name is not None:
                for alias in (self.alias, self.promote_to):
                    check_names(self.name, alias)
            if self.only_if is not None:
                parse_conditions(self.only_if)
        except UsageError as error:
            raise ValueError(
                str(error)
                .replace("--name", "registry.name")
                .replace("--if", "registry.only_if")
                .replace("--alias", "registry.alias or registry.promote_to")
            ) from None
        return self


def check_kept(
    registry: RegistrySettings, checkpoint: CheckpointSettings, evaluation_every_steps: int, max_steps: int
) -> None:
    """With `when=kept`, checkpoints are kept, and have scores where `only_if` asks for them.

    Raises:
        ValueError: none is kept, or some are kept at steps that are not evaluated.
    """
    if checkpoint.keep_every_steps is None:
        raise ValueError(
            "registry.when=kept registers the checkpoints that are kept for good, and checkpoint.keep_every_steps "
            "is not set; set it, or registry.when=end"
        )
    kept_every_steps = math.lcm(checkpoint.keep_every_steps, checkpoint.every_steps)
    is_scored = kept_every_steps >= max_steps or kept_every_steps % evaluation_every_steps == 0
    if registry.only_if is not None and not is_scored:
        raise ValueError(
            f"registry.only_if={registry.only_if!r} asks for scores, and the checkpoints kept every {kept_every_steps} "
            f"steps lack them with evaluation.every_steps={evaluation_every_steps}; set that to a divisor of "
            f"{kept_every_steps}, or registry.when=end"
        )
