"""What is to be registered of a run, for the process that does it, and the command with which a person does it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from trainer.tracking.mlflow_server import server_options


@dataclass(frozen=True)
class RegistrationRequest:
    """What is to be registered, and which aliases are to move."""

    checkpoint: str
    name: str
    alias: str | None = None
    promote_to: str | None = None
    only_if: str | None = None
    tracking_uri: str | None = None
    allow_different_evaluation: bool = False

    @property
    def alias_options(self) -> list[str]:
        """The options of `clozeworks register` that move the same alias by the same condition: `promote_to`, if set."""
        if self.promote_to is None:
            return ["--alias", self.alias] if self.alias else []
        condition = ["--if", self.only_if] if self.only_if else []
        allowed = ["--allow-different-evaluation"] if self.only_if and self.allow_different_evaluation else []
        return ["--promote", self.promote_to, *condition, *allowed]

    def command(self, version: str | None = None) -> str:
        """The command line with which a person registers the checkpoint, or promotes its registered version."""
        name, server = ["--name", self.name], server_options(self.tracking_uri)
        subject = ["--checkpoint", self.checkpoint, *name] if version is None else [*name, "--version", version]
        return shlex.join(["clozeworks", "register", *subject, *self.alias_options, *server])
