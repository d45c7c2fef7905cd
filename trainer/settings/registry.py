"""`registry`: whether the training registers what it has trained, and under which conditions an alias moves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from data_prep.errors import UsageError
from data_prep.settings import Settings
from trainer.registry.names import check_names
from trainer.registry.promotion import parse_conditions


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
