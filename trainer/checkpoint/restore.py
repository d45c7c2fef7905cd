"""Resuming from a checkpoint: all ranks find the newest undamaged one, and each rank reads its own part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data_prep.base.errors import UsageError, UserError
from data_prep.base.logs import logger
from data_prep.dataset.manifest_records import FileRecord
from data_prep.storage import storage
from trainer.checkpoint.format import (
    MARKER_NAME,
    STATE_NAME,
    Checkpoint,
    CheckpointFolder,
    Marker,
    checkpoints_folder,
    list_steps,
    open_checkpoint,
    rank_file_name,
    step_folder,
    steps_in,
)
from trainer.checkpoint.late_scores import SCORE_FILES
from trainer.checkpoint.tensors import check_coverage, own_first, read_alone, read_shared
from trainer.checkpoint.writer import ALONE, Warn, bring_back_replaced, ignore, in_turn
from trainer.distributed.agreement import raise_error_of_any
from trainer.distributed.process_group import Ranks, broadcast_object, gather_objects
from trainer.engine.engine import Engine
from trainer.engine.fragments import parameter_shapes

LOG = logger(__name__)


def find_latest(
    output_dir: str | Path,
    ranks: Ranks = ALONE,
    warn: Warn = LOG.warning,
    remote: str | None = None,
    zero_stage: int | None = None,
    step: int | None = None,
) -> Checkpoint | None:
    """Return the newest intact checkpoint, the same one on all ranks; None if there is no complete one.

    A damaged checkpoint is skipped with a warning.

    Args:
        remote: `checkpoint.upload_to`, from which a node fetches files that its disk lacks. Without a remote, all nodes
            are assumed to share the folder, and every rank verifies a share of the files.
        zero_stage: ZeRO stage of the run, by which a rank knows which files it needs.
        step: take the checkpoint of this step and no other.

    Raises:
        UserError: all checkpoints are damaged, or there is none of `step`.
    """
    report = warn if ranks.is_first else ignore
    steps = _candidates(output_dir, ranks, remote, report)
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UsageError(
            f"there is no checkpoint of step {step} in {output_dir}; existing steps: {there}",
            fix="give one of the existing steps",
            code="unknown-checkpoint-step",
        )
    newest_problem = ""
    for candidate in steps if step is None else [step]:
        folder = CheckpointFolder(step_folder(output_dir, candidate))
        if remote is None:
            problem = _first_problem(folder, ranks)
        else:
            problem = fetch_checkpoint(CheckpointFolder.of_step(remote, candidate), folder, zero_stage, ranks)
        problems = [each for each in gather_objects(problem, ranks) if each]
        if not problems:
            return open_checkpoint(folder.url, verified=True)
        if step is not None:
            others = ", ".join(str(other) for other in steps if other != step) or "none"
            raise UserError(
                f"checkpoint {folder} is damaged ({problems[0]}); other steps: {others}",
                fix="resume from another step",
                code="damaged-checkpoint",
            )
        report(f"checkpoint {folder} is damaged and skipped: {problems[0]}")
        newest_problem = newest_problem or problems[0]
    if steps:
        raise UserError(
            f"all {len(steps)} checkpoints in {checkpoints_folder(output_dir)} are damaged, so the run cannot resume; "
            f"the newest one: {newest_problem}",
            fix="restore one from a copy, use the release that wrote them if they are of another format version, or "
            "move the directory away to start from the beginning",
            code="no-intact-checkpoint",
        )
    return None


def open_verified(output_dir: str | Path, step: int, ranks: Ranks = ALONE) -> Checkpoint:
    """Return the checkpoint of a step of another run; all ranks verify it together and do not change it.

    Raises:
        UserError: the checkpoint does not exist or is damaged.
    """
    folder = CheckpointFolder(step_folder(output_dir, step))
    problems = [each for each in gather_objects(_first_problem(folder, ranks), ranks) if each]
    if problems:
        if not any(gather_objects(Path(output_dir).is_dir(), ranks)):
            raise UsageError(f"{output_dir} does not exist", fix="give the output_dir of a run", code="missing-path")
        steps = ", ".join(map(str, list_steps(output_dir)[0])) or "none"
        raise UsageError(
            f"there is no intact checkpoint of step {step} in {output_dir} ({problems[0]}); existing steps: {steps}",
            fix="give one of the existing steps",
            code="unknown-checkpoint-step",
        )
    return open_checkpoint(folder.url, verified=True)


def _candidates(output_dir: str | Path, ranks: Ranks, remote: str | None, report: Warn) -> list[int]:
    """Return the steps with a complete checkpoint on a node's disk or in the store, newest first, on all ranks."""
    in_turn(lambda: bring_back_replaced(output_dir), ranks, nodes_have_disks=remote is not None)
    complete, unfinished = list_steps(output_dir) if remote is not None or ranks.is_first else ([], [])
    steps = sorted({step for of_rank in gather_objects(complete, ranks) for step in of_rank}, reverse=True)
    if remote is not None:
        stored, problem = broadcast_object(_stored_steps(remote) if ranks.is_first else None, ranks)
        if problem and not steps:
            raise UserError(
                f"cannot determine whether there is a checkpoint to resume from: {problem}",
                fix="make checkpoint.upload_to readable, or remove the setting to start without it",
                code="checkpoints-unreadable",
            )
        if problem:
            report(f"{problem}; considering only the checkpoints on disk")
        steps = sorted({*steps, *stored}, reverse=True)
    for step in unfinished:
        if not steps or step > steps[0]:
            report(f"{step_folder(output_dir, step)} has no {MARKER_NAME}: its save was interrupted, and it is ignored")
    return steps


def _stored_steps(remote: str) -> tuple[list[int], str | None]:
    try:
        return steps_in(remote)[0], None
    except UserError as error:
        return [], error.problem


def _first_problem(folder: CheckpointFolder, ranks: Ranks) -> str | None:
    """Return the first problem in this rank's share of a checkpoint's files."""
    try:
        records = folder.read_marker().files
        problems = (folder.find_problem(record) for record in records[ranks.rank :: ranks.world_size])
        problem = next((problem for problem in problems if problem), None)
        if problem is None and ranks.is_first:
            folder.read_state()
        return problem
    except UserError as error:
        return error.problem


def fetch_checkpoint(
    stored: CheckpointFolder, folder: CheckpointFolder, zero_stage: int | None, ranks: Ranks
) -> str | None:
    """Fetch the files of a stored checkpoint that the ranks of this node need to `folder`, and verify them.

    Only needed files that are missing or damaged are fetched. A rank that resumes on the same number of ranks at the
    same ZeRO stage needs the file that it wrote; in every other case each node needs all of them.

    Returns the problem that this rank found, if any. The marker is written last, so a folder with a marker has all
    files that this node needs. If nodes have different saves of the step, all take that of the store.
    """
    leads = ranks.local_rank == 0
    marker, problem = _attempt(lambda: _marker(stored, folder))
    if len(set(gather_objects(marker, ranks))) > 1:
        marker, problem = _attempt(stored.read_marker)
    if problem is None and marker is not None and leads:
        state_record = [record for record in marker.files if record.name == STATE_NAME]
        _, problem = _attempt(lambda: _ensure_files(stored, folder, state_record))
    if any(gather_objects(problem, ranks)):
        return problem
    assert marker is not None
    _, problem = _attempt(lambda: _ensure_files(stored, folder, needed_files(marker, folder, zero_stage, ranks)))
    if any(gather_objects(problem, ranks)):
        return problem
    if leads:
        _, problem = _attempt(lambda: _write_marker(stored, folder, marker))
    gather_objects(problem, ranks)  # until every node's lead has written it
    return problem


def needed_files(marker: Marker, folder: CheckpointFolder, zero_stage: int | None, ranks: Ranks) -> list[FileRecord]:
    """Return the tensor files that this rank fetches: its own, or all of them on one rank of a node."""
    saved, tensors = folder.parse_state(marker), marker.tensor_files
    if zero_stage and (saved.world_size, saved.zero_stage) == (ranks.world_size, zero_stage):
        own = rank_file_name(ranks.rank, ranks.world_size)
        return [record for record in tensors if record.name == own]
    return tensors if ranks.local_rank == 0 else []


def _marker(stored: CheckpointFolder, folder: CheckpointFolder) -> Marker:
    """Return the local marker, or that of the store if the local one is missing or unusable."""
    local, problem = _attempt(folder.read_marker) if folder.is_complete else (None, None)
    if local is not None:
        return local
    try:
        return stored.read_marker()
    except UserError as error:
        if problem is None:
            raise
        raise UserError(f"{problem}; {error.problem}", fix=error.fix, code=error.code) from None


def _ensure_files(stored: CheckpointFolder, folder: CheckpointFolder, records: list[FileRecord]) -> None:
    for record in records:
        if folder.find_problem(record) is None:
            continue
        folder.refuse_link()
        storage.copy(stored.file(record.name), folder.file(record.name))
        if problem := folder.find_problem(record):
            raise UserError(
                f"{stored} returned a different file: {problem}",
                fix="resume from another checkpoint",
                code="damaged-checkpoint",
            )


def _write_marker(stored: CheckpointFolder, folder: CheckpointFolder, marker: Marker) -> None:
    if not folder.has_marker(marker):
        folder.refuse_link()
        for name in SCORE_FILES:  # which say whether the step is still to be evaluated
            if storage.exists(stored.file(name)):
                storage.copy(stored.file(name), folder.file(name))
        folder.write_marker(marker)


def _attempt(action: Callable[[], Marker | None]) -> tuple[Marker | None, str | None]:
    try:
        return action(), None
    except UserError as error:
        return None, error.problem


def load(engine: Engine, checkpoint: Checkpoint) -> None:
    """Set weights and optimizer state of a prepared engine, all ranks together.

    On the number of ranks and at the ZeRO stage of the save, each rank reads its own file. In every other case one rank
    reads each file and sends the others their parts.

    Raises:
        UserError: the checkpoint's model has other parameters, or a rank cannot read a file; on all ranks.
    """
    _check_shapes(parameter_shapes(engine.module), checkpoint)
    fragments, ranks, saved = engine.fragments(), engine.ranks, checkpoint.saved
    missing = {f"{kind} of {f.name}": f.stop - f.start for f in fragments for kind in f.kinds}
    by_name = {fragment.name: fragment for fragment in fragments}
    wanted = [(fragment.name, fragment.start, fragment.stop, fragment.kinds) for fragment in fragments]
    is_alike = (saved.world_size, saved.zero_stage) == (ranks.world_size, engine.zero_stage)
    has_own_file = engine.zero_stage > 0 and is_alike
    names = own_first(checkpoint.tensor_files, ranks)
    if has_own_file or ranks.world_size == 1:
        values_read = read_alone(checkpoint.folder, names, wanted, lambda: any(missing.values()))
    else:
        values_read = read_shared(checkpoint.folder, checkpoint.tensor_files, wanted, ranks)
    error: UserError | None = None
    try:
        for kind, name, start, values in values_read:
            by_name[name].write(kind, start, values)
            missing[f"{kind} of {name}"] -= len(values)
        check_coverage(missing, checkpoint.folder)
    except UserError as problem:
        error = problem
    raise_error_of_any(error, ranks)
    engine.set_loss_scaler_state(checkpoint.saved.loss_scaler)
    engine.finish_setting(checkpoint.saved.optimizer_steps)


def _check_shapes(shapes: dict[str, tuple[int, ...]], checkpoint: Checkpoint) -> None:
    saved = checkpoint.saved.shapes
    for name in sorted(shapes.keys() | saved.keys()):
        if shapes.get(name) != saved.get(name):
            raise UserError(
                f"checkpoint {checkpoint.folder} belongs to another model: {name} has shape {saved.get(name)} "
                f"there and {shapes.get(name)} here",
                fix="use the model settings of its state.json, or give another output_dir",
                code="checkpoint-of-another-model",
            )
