"""From a checkpoint to a registered version, and to an alias where its gate lets it pass.

`python -m trainer.registry.register_checkpoint PID` does it in a process of its own, which the trainer (its process id
is PID) starts and which ends with it: the request comes as JSON on standard input (an address may hold a password, and
command lines are seen by all), the answer goes to standard output.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from data_prep.base.errors import UserError, run_command
from trainer.config.promotion import parse_conditions
from trainer.distributed.side_process import end_with_parent
from trainer.hf_export.export import export_checkpoint
from trainer.registry.model_versions import NotPromoted, promote
from trainer.registry.registration import Registration, register
from trainer.tracking.sync import server_options


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

    @property
    def command(self) -> str:
        """The command line with which a person registers the checkpoint."""
        options = ["--checkpoint", self.checkpoint, "--name", self.name, *self.alias_options]
        return _register_command(options, self.tracking_uri)


def register_checkpoint(request: RegistrationRequest) -> tuple[Registration, str]:
    """Export, register, promote; returns the version and what became of the promotion, in words.

    An existing version of this checkpoint is reused: a registration may be killed before it reports.

    Raises:
        UserError: the export is refused, or the registry; then nothing is registered.
    """
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        folder = Path(temporary) / request.name  # the model card takes its title from here
        export_checkpoint(Path(request.checkpoint), folder)
        registration = register(folder, request.name, request.alias, request.tracking_uri, once=True)
    if request.promote_to is None:
        return registration, ""
    conditions = parse_conditions(request.only_if) if request.only_if else ()
    try:
        decision = promote(
            request.name,
            registration.version,
            request.promote_to,
            conditions,
            request.tracking_uri,
            request.allow_different_evaluation,
        )
    except NotPromoted as error:
        return registration, error.problem
    except UserError as error:
        options = ["--name", request.name, "--version", str(registration.version), *request.alias_options]
        command = _register_command(options, request.tracking_uri)
        return registration, f"the promotion failed ({error.problem}); repeat it with `{command}`"
    return registration, f"promoted to {request.promote_to} ({'; '.join(decision.reasons) or 'no condition'})"


def _register_command(options: list[str], tracking_uri: str | None) -> str:
    return shlex.join(["clozeworks", "register", *options, *server_options(tracking_uri)])


def main() -> None:
    end_with_parent(int(sys.argv[1]))
    # An exception from now on, so that an upload that is cut short leaves a model that says so.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    registration, promotion = register_checkpoint(RegistrationRequest(**json.load(sys.stdin)))
    print(json.dumps({**asdict(registration), "promotion": promotion}))


if __name__ == "__main__":
    run_command(main)
