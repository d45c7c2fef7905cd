"""Score and register the checkpoints of a run, while it trains or afterwards.

    clozeworks follow OUTPUT_DIR
    clozeworks follow OUTPUT_DIR evaluation.suite=glue evaluation.suite_overrides=[data=DIR]

A run does this itself, in a process beside rank 0, if its configuration sets evaluation.suite or registry.name. With
checkpoint.follow=false the run leaves both to this command, which works on any machine that sees OUTPUT_DIR, with the
configuration of the newest checkpoint. The command ends once the run is no longer active and no job is due. An active
run attaches the scores to its MLflow run itself; this command attaches those of a run that has ended. One follower at a
time works on an OUTPUT_DIR. The server is that of the run; if the server needs a login, set MLFLOW_TRACKING_URI.
Exit status: 0 all due jobs were done, 1 one failed, 2 wrong usage, 128+n stopped by a signal.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from data_prep.base.errors import UsageError, run_command
from data_prep.base.load_settings import validate_settings
from data_prep.base.logs import logger
from data_prep.base.settings import merged
from data_prep.base.terminal import counted
from data_prep.storage import storage
from launch.options import add_dry_run, add_tracking_uri, command_parser
from trainer.config.run_config import RunConfig

LOG = logger(__name__)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("follow.py", __doc__)
    parser.add_argument("output_dir", type=Path, metavar="OUTPUT_DIR", help="output_dir of a pretraining run")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.field=value",
        help="overrides of evaluation.suite* and registry.*",
    )
    add_tracking_uri(parser)
    add_dry_run(parser, "list what is due, and start nothing")
    return parser.parse_intermixed_args(arguments)


def main() -> None:
    arguments = parse_arguments()
    wait_for_checkpoint(arguments.output_dir, is_patient=not arguments.dry_run)
    config = config_of_run(arguments.output_dir, arguments.overrides, arguments.tracking_uri)
    storage.configure(config.storage_options)
    from trainer.follow.follower import follow, is_active
    from trainer.follow.jobs import due_jobs, jobs_of
    from trainer.follow.notes import end_of_notes, read_notes, unattached

    if not arguments.dry_run:
        if status := follow(config, LOG.info, LOG.warning):
            raise SystemExit(status)
        return
    due = due_jobs(jobs_of(config), arguments.output_dir, since=end_of_notes(arguments.output_dir))
    for job, step in due:
        print(job.describe(step))
    for note in unattached(arguments.output_dir, read_notes(arguments.output_dir)):
        print(f"step {note.step:,}: attach scores to the run")
    more = "; the run is active, and more may follow" if is_active(arguments.output_dir) else ""
    print(f"dry run: {counted(len(due), 'job')} {'is' if len(due) == 1 else 'are'} due{more}; nothing was started")


def wait_for_checkpoint(output_dir: Path, is_patient: bool) -> None:
    """Wait for the first checkpoint of an active run.

    Raises:
        UsageError: the directory does not exist, or has no checkpoint of a run that is active and waited for.
    """
    from trainer.checkpoint.format import list_steps
    from trainer.follow.follower import LOOK_SECONDS, is_active

    is_reported = False
    while not output_dir.is_dir() or not list_steps(output_dir)[0]:
        if not is_patient or not is_active(output_dir):
            is_there = output_dir.exists()
            raise UsageError(
                f"{output_dir} has no complete checkpoint" if is_there else f"{output_dir} does not exist",
                fix="give the output_dir of a run",
                code="no-checkpoint" if is_there else "missing-output-dir",
            )
        if not is_reported:
            LOG.info("waiting for the first checkpoint")
        is_reported = True
        time.sleep(LOOK_SECONDS)


def config_of_run(output_dir: Path, overrides: list[str], tracking_uri: str | None) -> RunConfig:
    """Return the configuration of the newest checkpoint with the overrides and this output_dir.

    Raises:
        UsageError: an override is wrong or of something else than suite and registry, or there is nothing to do.
    """
    from data_prep.base.overrides import read_settings
    from trainer.checkpoint.format import CheckpointFolder, list_steps, step_folder

    steps, _ = list_steps(output_dir)
    folder = step_folder(output_dir, steps[0])
    changes = read_settings(RunConfig, None, overrides, "the command line") if overrides else {}
    of_run = RunConfig.model_fields.keys() - {"evaluation", "registry"}  # refused below
    own = {name: change for name, change in changes.items() if name not in of_run}
    values = merged(CheckpointFolder(folder).read_state().config, own)
    values["output_dir"] = str(output_dir)
    config = validate_settings(RunConfig, values, f"{folder}/state.json with the overrides")
    _check_changes(changes)
    if config.evaluation.suite is None and config.registry.name is None:
        raise UsageError(
            f"the run of {output_dir} sets neither evaluation.suite nor registry.name, so there is nothing to do",
            fix="add evaluation.suite=FILE or registry.name=NAME to the command",
            code="nothing-to-follow",
        )
    uri = tracking_uri or uri_of_run(output_dir, config)
    return config.model_copy(update={"tracking": config.tracking.model_copy(update={"uri": uri})})


def uri_of_run(output_dir: Path, config: RunConfig) -> str:
    """Return the server of the run, with the login of MLFLOW_TRACKING_URI if that is the same server."""
    from trainer.tracking.journal import read_record
    from trainer.tracking.mlflow_server import resolve_tracking_uri

    record, variable = read_record(output_dir / "tracking"), os.environ.get("MLFLOW_TRACKING_URI", "").strip()
    recorded = (record and record.tracking_uri) or config.tracking.uri
    if variable and storage.redact(variable) == recorded:
        return variable
    return resolve_tracking_uri(recorded)


def _check_changes(changes: dict[str, Any]) -> None:
    """Refuse overrides of other settings than the suite and the registry: the run's results stay what they are."""
    for section, change in changes.items():
        names = [f"{section}.{name}" for name in change] if isinstance(change, dict) else [section]
        if other := [name for name in names if not name.startswith(("evaluation.suite", "registry."))]:
            raise UsageError(
                f"{other[0]} is a setting of the run, which this command does not change",
                fix="override only evaluation.suite* and registry.*; --tracking-uri names another server",
                code="override-of-run",
            )


if __name__ == "__main__":
    run_command(main)
