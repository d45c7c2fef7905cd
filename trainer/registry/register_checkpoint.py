"""Register a checkpoint of a run: export it, register the export as a version, and promote the version.

The follower of a run starts `python -m trainer.registry.register_checkpoint PID`, where PID is the follower's process
id, and the process ends with the follower. It reads the request as JSON from standard input, because a URL may contain
a password and everybody sees command lines, and prints its result as JSON.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_prep.base.errors import UserError, run_command
from trainer.distributed.launcher import end_with_parent
from trainer.tracking.mlflow_server import server_options

if TYPE_CHECKING:
    from trainer.registry.registration import Registration


@dataclass(frozen=True)
class RegistrationRequest:
    """The checkpoint and the name to register it under, and the alias to set or to promote to."""

    checkpoint: str
    name: str
    alias: str | None = None
    promote_to: str | None = None
    only_if: str | None = None
    tracking_uri: str | None = None
    allow_different_evaluation: bool = False

    @property
    def alias_options(self) -> list[str]:
        """The options of `clozeworks register` for the alias; `promote_to` replaces `alias`."""
        if self.promote_to is None:
            return ["--alias", self.alias] if self.alias else []
        condition = ["--if", self.only_if] if self.only_if else []
        allowed = ["--allow-different-evaluation"] if self.only_if and self.allow_different_evaluation else []
        return ["--promote", self.promote_to, *condition, *allowed]

    def command(self, version: str | None = None) -> str:
        """Return the command line by which a user registers the checkpoint, or promotes `version` of it."""
        name, server = ["--name", self.name], server_options(self.tracking_uri)
        subject = ["--checkpoint", self.checkpoint, *name] if version is None else [*name, "--version", version]
        return shlex.join(["clozeworks", "register", *subject, *self.alias_options, *server])


def register_checkpoint(request: RegistrationRequest) -> tuple[Registration, str]:
    """Export, register and promote a checkpoint; return the version, and the outcome of the promotion in words.

    An existing version of this checkpoint is reused, and no alias moves to an earlier step of the run: a registration
    may be killed before it reports, and a start on another machine has no notes of earlier registrations.

    Raises:
        UserError: the export or the registry refuses; then nothing is registered.
    """
    from trainer.config.promotion import parse_conditions  # here: the follower makes requests alone
    from trainer.hf_export.export import export_checkpoint
    from trainer.registry.model_versions import NotPromoted, promote
    from trainer.registry.registration import register

    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        folder = Path(temporary) / request.name  # the model card takes its title from here
        export_checkpoint(Path(request.checkpoint), folder)
        registration = register(folder, request.name, request.alias, request.tracking_uri, once=True)
    if request.promote_to is None:
        is_left = request.alias is not None and registration.alias is None
        return registration, f"{request.alias} stays on a later step of the run" if is_left else ""
    conditions = parse_conditions(request.only_if) if request.only_if else ()
    try:
        decision = promote(
            request.name,
            registration.version,
            request.promote_to,
            conditions,
            request.tracking_uri,
            request.allow_different_evaluation,
            forward=True,
        )
    except NotPromoted as error:
        return registration, error.problem
    except UserError as error:
        command = request.command(str(registration.version))
        return registration, f"the promotion failed ({error.problem}); repeat it with `{command}`"
    return registration, f"promoted to {request.promote_to} ({'; '.join(decision.reasons) or 'no condition'})"


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    # SIGTERM raises an exception from now on, so that an interrupted upload marks its model as failed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    registration, promotion = register_checkpoint(RegistrationRequest(**json.load(sys.stdin)))
    print(json.dumps({**asdict(registration), "promotion": promotion}))


if __name__ == "__main__":
    run_command(main)
