"""`registry`: whether a run registers its model in MLflow, under which names, and on which condition an alias moves."""

from __future__ import annotations

import math
from typing import Literal

import regex
from pydantic import Field, model_validator

from data_prep.base.errors import UsageError
from data_prep.base.settings import SettingError, Settings
from trainer.config.run_settings import CheckpointSettings

PREVIOUS = "previous"
"""Alias of the version that had the promoted alias before."""


class RegistrySettings(Settings):
    """The MLflow model registry at `tracking.uri`."""

    name: str | None = Field(
        None, description="name of the registered model (exported and checked); by default nothing is registered"
    )
    when: Literal["end", "kept"] = Field(
        "end",
        description="which checkpoints are registered: the last one (end), or also those of "
        "checkpoint.keep_every_steps (kept)",
    )
    alias: str | None = Field(None, description="alias for the newest registered version, such as latest-run")
    promote_to: str | None = Field(
        None, description="alias that moves if only_if is met, such as champion; the old version becomes `previous`"
    )
    only_if: str | None = Field(
        None, description="condition of promote_to, such as 'valid/mlm_loss < champion' or 'valid/mlm_loss < 2.5'"
    )
    allow_different_evaluation: bool = Field(
        False,
        description="let only_if compare versions that were evaluated differently: with other settings, other data or "
        "another tokenizer; otherwise such a promotion is refused",
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> RegistrySettings:
        if self.name is None and (self.alias or self.promote_to or self.only_if):
            raise SettingError(
                "registry.alias, registry.promote_to and registry.only_if require registry.name, which is not set",
                fix="set registry.name",
                code="registry-without-name",
            )
        if self.only_if is not None and self.promote_to is None:
            raise SettingError(
                f"registry.only_if={self.only_if!r} is the condition of registry.promote_to, which is not set",
                fix="set both or neither",
                code="condition-without-promotion",
            )
        if self.alias is not None and self.alias == self.promote_to:
            raise SettingError(
                f"registry.alias and registry.promote_to are both {self.alias!r}: registry.alias moves without a "
                "condition",
                fix="remove one of them, or give two names",
                code="same-alias-twice",
            )
        for setting, alias in (("alias", self.alias), ("promote_to", self.promote_to)):
            if alias == PREVIOUS:
                raise SettingError(
                    f"registry.{setting}={PREVIOUS} is reserved: a promotion gives this alias to the old version",
                    fix="choose another alias",
                    code="reserved-alias",
                )
        try:
            if self.name is not None:
                for alias in (self.alias, self.promote_to):
                    check_names(self.name, alias)
            if self.only_if is not None:
                from trainer.config.promotion import parse_conditions

                parse_conditions(self.only_if)
        except UsageError as error:
            problem = (
                error.problem.replace("--name", "registry.name")
                .replace("--if", "registry.only_if")
                .replace("--alias", "registry.alias or registry.promote_to")
            )
            raise SettingError(problem, fix=error.fix, code=error.code) from None
        return self


def check_kept(
    registry: RegistrySettings, checkpoint: CheckpointSettings, evaluation_every_steps: int, max_steps: int
) -> None:
    """Check that `when=kept` has checkpoints to register, with scores if `only_if` needs them.

    Raises:
        SettingError: no checkpoint is kept, or some are kept at steps that are not evaluated.
    """
    if checkpoint.keep_every_steps is None:
        raise SettingError(
            "registry.when=kept registers the checkpoints of checkpoint.keep_every_steps, which is not set",
            fix="set checkpoint.keep_every_steps, or registry.when=end",
            code="nothing-kept-to-register",
        )
    kept_every_steps = math.lcm(checkpoint.keep_every_steps, checkpoint.every_steps)
    is_scored = kept_every_steps >= max_steps or kept_every_steps % evaluation_every_steps == 0
    if registry.only_if is not None and not is_scored:
        raise SettingError(
            f"registry.only_if={registry.only_if!r} needs scores, and evaluation.every_steps={evaluation_every_steps} "
            f"does not evaluate every checkpoint kept, one per {kept_every_steps} steps",
            fix=f"set evaluation.every_steps to a divisor of {kept_every_steps}, or registry.when=end",
            code="kept-without-scores",
        )


def check_names(name: str, alias: str | None) -> None:
    """Check a model name and an alias before the work, because MLflow checks them after it.

    Raises:
        UsageError: MLflow does not allow the name or the alias.
    """
    if (
        name != name.strip()
        or not regex.fullmatch(r"[^/:@%?#\\'\"\p{Cc}\p{Cs}\p{Zl}\p{Zp}]{1,250}", name)
        or not name.strip(".")
        or name.startswith("..")
    ):
        raise UsageError(
            f"--name {name!r} is not a valid model name",
            fix="use 1 to 250 characters without / : @ % ? # \\, quotation marks and control characters",
            code="invalid-model-name",
        )
    if alias is not None and (
        not regex.fullmatch(r"[\w-]{1,255}", alias) or regex.fullmatch(r"v\d+|latest", alias, regex.IGNORECASE)
    ):
        raise UsageError(
            f"--alias {alias!r} is not a valid alias",
            fix="use letters, digits, '-' and '_', but neither 'latest' nor 'v1'",
            code="invalid-alias",
        )


def check_promoted(name: str, alias: str) -> None:
    """Check an alias that a promotion is to move.

    Raises:
        UsageError: as `check_names`, or the alias is reserved for the version that had the promoted alias before.
    """
    check_names(name, alias)
    if alias == PREVIOUS:
        raise UsageError(
            f"--promote {PREVIOUS} is reserved: a promotion gives this alias to the old version",
            fix="choose another alias",
            code="reserved-alias",
        )
