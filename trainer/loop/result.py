"""The result of a run; for a finished run it is read from files, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from data_prep.base.errors import UserError
from trainer.checkpoint.compatibility import check_compatible
from trainer.checkpoint.data_version import with_epochs_counted
from trainer.checkpoint.format import CheckpointFolder, list_steps, step_folder
from trainer.checkpoint.late_scores import read_late_scores
from trainer.config.run_config import RunConfig
from trainer.distributed.rank_environment import local_world_size, world_size
from trainer.distributed.stop_signal import STOPPED_EXIT_STATUS
from trainer.tracking.delivery import Delivery
from trainer.tracking.journal import Journal
from trainer.tracking.mlflow_server import resolve_tracking_uri, view_hint
from trainer.tracking.status import State, read_status


@dataclass(frozen=True)
class RunResult:
    """The end of a training run."""

    output_dir: Path
    status: State
    """"finished", or "stopped" by a signal after saving: the same call resumes."""
    step: int
    """Completed optimizer steps."""
    metrics: Mapping[str, float | None]
    """The newest value of each metric, under its MLflow name; on rank 0."""
    checkpoint: Path | None
    """The newest complete checkpoint."""
    mlflow_run_id: str | None
    view_hint: str
    """Command and URL that show the run in MLflow."""
    all_registered: bool = True
    """Whether every due registration and every due suite is done."""

    @property
    def exit_status(self) -> int:
        return STOPPED_EXIT_STATUS if self.status == "stopped" else int(not self.all_registered)


def find_finished_run(config: RunConfig) -> RunResult | None:
    """Return the result of the finished run of `config.output_dir`; None if anything may be left to do.

    Something is left where settings changed, a suite or a registration is due, checkpoints are uploaded, or metrics are
    unsent; and where ranks of several hosts would have to agree.
    """
    registers = config.registry.name is not None and config.checkpoint.follow
    is_one_host = world_size() in (1, local_world_size())
    if not is_one_host or registers or config.checkpoint.upload_to is not None:
        return None
    output_dir = Path(config.output_dir)
    try:
        status = read_status(output_dir)
        steps, _ = list_steps(output_dir)
        if status is None or status.state != "finished" or not steps:
            return None
        config = with_epochs_counted(config)  # which takes long for sentence pairs that nobody counted
        if steps[0] < config.max_steps:
            return None
        checkpoint = step_folder(output_dir, steps[0])
        scores = config.evaluation.suite is not None and config.checkpoint.follow
        if scores and not _is_scored(output_dir, steps):
            return None
        saved = CheckpointFolder(checkpoint).read_state()
        precision = saved.config["training"]["precision"]
        if config.training.precision == "auto":  # resuming keeps the checkpoint's
            training = config.training.model_copy(update={"precision": precision})
            config = config.model_copy(update={"training": training})
        check_compatible(saved, config, saved.data, saved.world_size, saved.numerics)
        journal = Journal.read_only(output_dir / "tracking")
        uri = resolve_tracking_uri(config.tracking.uri, journal.record.tracking_uri or None)
        delivery = Delivery(journal, uri, lambda message: None)
        if not delivery.is_complete:
            return None
    except (UserError, OSError):  # the full start reports it
        return None
    cursor = delivery.cursor
    hint = view_hint(uri, cursor.experiment_id, cursor.run_id)
    return RunResult(output_dir, "finished", steps[0], status.metrics, checkpoint, cursor.run_id, hint)


def _is_scored(output_dir: Path, steps: list[int]) -> bool:
    """Return whether the suite scored the last checkpoint, and no other checkpoint is left to score."""
    scores = [read_late_scores(step_folder(output_dir, step)) for step in steps]
    return scores[0] is not None and all(each is None or each.state == "done" for each in scores)
