"""From a checkpoint to a registered version, and to an alias where its gate lets it pass.

`python -m trainer.registry.register_checkpoint PID` does it in a process of its own, which the follower (its process id
is PID) starts and which ends with it: the request comes as JSON on standard input (an address may hold a password, and
command lines are seen by all), the answer goes to standard output.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from data_prep.base.errors import UserError, run_command
from trainer.config.promotion import parse_conditions
from trainer.distributed.side_process import end_with_parent
from trainer.hf_export.export import export_checkpoint
from trainer.registry.model_versions import NotPromoted, promote
from trainer.registry.registration import Registration, register
from trainer.registry.registration_request import RegistrationRequest


def register_checkpoint(request: RegistrationRequest) -> tuple[Registration, str]:
    """Export, register, promote; returns the version and what became of the promotion, in words.

    An existing version of this checkpoint is reused, and no alias moves to an earlier step of the run: a registration
    may be killed before it reports, and a start on another machine has no notes of what was registered.

    Raises:
        UserError: the export is refused, or the registry; then nothing is registered.
    """
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
    # An exception from now on, so that an upload that is cut short leaves a model that says so.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    registration, promotion = register_checkpoint(RegistrationRequest(**json.load(sys.stdin)))
    print(json.dumps({**asdict(registration), "promotion": promotion}))


if __name__ == "__main__":
    run_command(main)
