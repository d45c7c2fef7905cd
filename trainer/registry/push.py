"""Push models to the Hugging Face Hub: each kept checkpoint of a run, exported, is a branch `step-N`, one is `main`.

Only what passed its checks is sent: an export whose record says that the parity gate passed, a fitted model whose
record has its scores, and both with the sha256 of every file as it was then. A journal on disk says what one
repository has been sent, so that the same command resumes after an outage or a kill:

    OUTPUT_DIR/push/ID.json       the journal of a run and a repository; of a folder in ~/.cache/clozeworks/push
    OUTPUT_DIR/push/exports/      exports that were not sent completely

The Hub is asked too, so a lost journal or a lost answer sends nothing twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from data_prep.base.errors import UsageError, UserError
from data_prep.base.local_paths import home_in
from data_prep.storage import storage
from data_prep.storage.locks import hold_lock
from trainer.checkpoint.format import MARKER_NAME, STATE_NAME, CheckpointFolder, list_steps, step_folder
from trainer.checkpoint.late_scores import best_metric
from trainer.config.run_settings import CheckpointSettings
from trainer.hf_export.export import export_checkpoint
from trainer.hf_export.parity import LOGIT_TOLERANCE, ParityReport
from trainer.inference.pulled_model import is_checkpoint, pull
from trainer.model.model_folder import (
    CARD_FILE,
    FILES_SHA256,
    FINETUNE_FILE,
    PROVENANCE_FILE,
    check_model_folder,
    file_digests,
    folder_digest,
    read_provenance,
)
from trainer.registry.hub_repository import (
    MAIN,
    HubBranch,
    HubRepository,
    check_repository_name,
    files_of,
    hub_address,
)
from trainer.tracking.journal import replace_file

PUSH_FOLDER = "push"
EXPORTS_FOLDER = "exports"
MainChoice = Literal["newest", "best", "none"]
THIS_RUN = "this run"
_DOCUMENTS = (".md", ".png", ".jpg", ".svg")
_DOCUMENT_NAMES = ("LICENSE", "NOTICE", "LICENSE.txt")


class SentRevision(BaseModel):
    """A branch of the repository that was sent, or is being sent."""

    source: str
    """sha256 of the checkpoint's marker, or of the folder."""
    step: int | None
    run: str
    """The training run: `THIS_RUN` in the journal of a run, else its MLflow run, or empty if unknown."""
    weights: dict[str, str]
    """sha256 of the files of weights."""
    commit: str | None = None
    """None until it is sent completely."""


class PushJournal(BaseModel):
    """What one repository has been sent; replaced as a whole after each branch."""

    address: str
    repository: str
    revisions: dict[str, SentRevision] = {}


@dataclass(frozen=True)
class ModelToPush:
    """A model to push: a checkpoint, which is exported first, or a folder."""

    path: Path
    step: int | None
    digest: str
    is_checkpoint: bool

    @property
    def branch(self) -> str:
        return MAIN if self.step is None else f"step-{self.step}"


@dataclass(frozen=True)
class Pushed:
    """A branch of the repository after a push, or as a dry run would send it."""

    branch: str
    source: Path
    proof: str
    """What shows that the files are those that passed their checks; empty if nothing was left to send."""
    num_files: int
    num_bytes: int
    commit: str | None
    num_changes: int = 0
    """Files that were added, replaced or removed by this call."""
    note: str = ""


@home_in("model")
def plan_push(
    model: str | Path, hub: str, main: MainChoice = "newest", tracking_uri: str | None = None
) -> Iterator[Pushed]:
    """Yield what `push` would send, without contacting the Hub; checkpoints are exported to a temporary folder.

    Raises:
        UserError: as `push`, for everything that does not need the Hub.
    """
    check_repository_name(hub)
    candidates, chosen = _candidates(model, main, tracking_uri)
    journal = _read_journal(_journal_path(model, hub), hub)
    with tempfile.TemporaryDirectory(prefix="clozeworks-") as temporary:
        for candidate in candidates:
            is_sent = _is_sent(journal, candidate.branch, candidate)
            is_main = candidate == chosen and not _is_sent(journal, MAIN, candidate)
            if is_sent and not is_main:
                yield Pushed(candidate.branch, candidate.path, "", 0, 0, None, note="sent before")
                continue
            folder = candidate.path
            if candidate.is_checkpoint:
                folder = _export(candidate, Path(temporary) / candidate.branch, hub)
            proof, names = check_pushable(folder), files_of(folder)
            size = sum((folder / name).stat().st_size for name in names)
            branches = [] if is_sent or candidate.branch == MAIN else [candidate.branch]
            for branch in [*branches, *([MAIN] if is_main else [])]:
                yield Pushed(branch, candidate.path, proof, len(names), size, None)
            if candidate.is_checkpoint:
                shutil.rmtree(folder.parent)


@home_in("model")
def push(
    model: str | Path,
    hub: str,
    private: bool = False,
    main: MainChoice = "newest",
    overwrite: bool = False,
    tracking_uri: str | None = None,
) -> Iterator[Pushed]:
    """Send a model to the repository `hub` (OWNER/NAME), which is created if missing; yield each branch sent.

    Args:
        model: a run's output directory (all its checkpoints), a checkpoint, an exported or fitted folder, or a
            registered model.
        private: create the repository as a private one; an existing public one is refused.
        main: which checkpoint becomes `main`: the newest, the best by `checkpoint.best_metric`, or none.
        overwrite: replace branches that hold another model.

    Raises:
        UserError: a model did not pass its checks or changed afterwards, a branch holds another model, or the Hub
            refuses or fails. What was sent before is recorded, and the same call continues.
    """
    check_repository_name(hub)
    candidates, chosen = _candidates(model, main, tracking_uri)
    for candidate in candidates:
        if not candidate.is_checkpoint:
            check_pushable(candidate.path)  # before the Hub is asked
    repository = HubRepository(hub)
    path = _journal_path(model, hub)
    with hold_lock(path.parent):
        journal = _read_journal(path, hub)
        _open(repository, private)
        with contextlib.closing(_Push(repository, journal, path, overwrite)) as sending:
            for candidate in candidates:
                if candidate.branch != MAIN:
                    yield sending.send(candidate.branch, candidate)
                if candidate != chosen:
                    sending.forget(candidate)
            if chosen is not None:
                later = sending.later_main(chosen) if main == "newest" else None
                if later is not None and not overwrite:
                    note = f"stays at the later step-{later.step}"
                    yield Pushed(MAIN, chosen.path, "", 0, 0, later.commit, note=note)
                else:
                    yield sending.send(MAIN, chosen)
                sending.forget(chosen)


class _Push:
    """The push to one repository, whose journal is locked."""

    def __init__(self, repository: HubRepository, journal: PushJournal, path: Path, overwrite: bool) -> None:
        self._repository, self._journal, self._path, self._overwrite = repository, journal, path, overwrite
        self._branches = repository.branches()

    def send(self, branch: str, candidate: ModelToPush) -> Pushed:
        if _is_sent(self._journal, branch, candidate) and (note := self._state(branch)) is not None:
            return Pushed(branch, candidate.path, "", 0, 0, self._branches[branch], note=note)
        folder, proof = self._folder_of(candidate)
        entry = _entry(folder, candidate)
        there = self._repository.read(branch)
        if there is not None:
            self._check_same_model(branch, there, entry, folder)
        self._record(branch, entry)  # before the branch is made: it is known as this command's after a kill
        if there is None:
            self._repository.create_branch(branch)
        is_kept = is_document if branch == MAIN else _nothing
        message = f"{candidate.path.name} by clozeworks push"
        commit, num_changes = self._repository.send(branch, folder, is_kept, message)
        self._record(branch, entry.model_copy(update={"commit": commit}))
        names = files_of(folder)
        size = sum((folder / name).stat().st_size for name in names)
        note = "" if num_changes else "was there"
        return Pushed(branch, candidate.path, proof, len(names), size, commit, num_changes, note)

    def _state(self, branch: str) -> str | None:
        """Return how a branch that was sent is on the Hub; None if it is not, as after the repository was removed."""
        sent = self._journal.revisions[branch]
        if self._branches.get(branch) == sent.commit:
            return "sent before"
        there = self._repository.read(branch)
        is_same = there is not None and _weights_in(there) == sent.weights
        return "sent before, and changed on the Hub since then" if is_same else None

    def later_main(self, chosen: ModelToPush) -> SentRevision | None:
        """Return the entry of `main` if it is of a later step of the same run, and still there."""
        entry = self._journal.revisions.get(MAIN)
        is_there = entry is not None and self._branches.get(MAIN) == entry.commit
        if entry is None or not is_there or entry.step is None or chosen.step is None or entry.step <= chosen.step:
            return None
        run = THIS_RUN if chosen.is_checkpoint else read_provenance(chosen.path).get("mlflow_run_id")
        return entry if entry.run == run else None

    def forget(self, candidate: ModelToPush) -> None:
        """Remove the export of a checkpoint that is not needed any more."""
        if candidate.is_checkpoint:
            shutil.rmtree(self._exports(candidate), ignore_errors=True)

    def close(self) -> None:
        """Remove the folder of exports if it is empty; a failed push keeps its export for the next call."""
        with contextlib.suppress(OSError):
            (self._path.parent / EXPORTS_FOLDER).rmdir()

    def _exports(self, candidate: ModelToPush) -> Path:
        return self._path.parent / EXPORTS_FOLDER / candidate.digest[:16]

    def _folder_of(self, candidate: ModelToPush) -> tuple[Path, str]:
        """Return the checked folder of a candidate, and the proof that it passed its checks."""
        if not candidate.is_checkpoint:
            return candidate.path, check_pushable(candidate.path)
        folder = self._exports(candidate) / self._repository.name.rpartition("/")[2]
        if folder.is_dir():
            with contextlib.suppress(UserError):  # it was damaged meanwhile
                return folder, check_pushable(folder)
            shutil.rmtree(folder)
        folder = _export(candidate, self._exports(candidate), self._repository.name)
        return folder, check_pushable(folder)

    def _check_same_model(self, branch: str, there: HubBranch, entry: SentRevision, folder: Path) -> None:
        """Refuse to replace another model."""
        models = {name for name in there.files if not is_document(name)}
        is_same = all((folder / name).is_file() and there.files[name].is_copy_of(folder / name) for name in models)
        known = self._journal.revisions.get(branch)
        if is_same or self._overwrite or (known is not None and known.source == entry.source):
            return
        if branch == MAIN:
            alike = [each for each in self._journal.revisions.values() if each.weights == _weights_in(there)]
            if any(each.run and each.run == entry.run for each in alike):  # an earlier step of the same run
                return
        raise UserError(
            f"{branch} of {self._repository.url} holds another model than {folder.name}",
            fix="give another repository, or replace it with --overwrite; the Hub keeps its history",
            code="hub-holds-another-model",
        )

    def _record(self, branch: str, entry: SentRevision) -> None:
        self._journal.revisions[branch] = entry
        try:
            replace_file(self._path, self._journal.model_dump_json(indent=1).encode() + b"\n")
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written ({error.strerror or error})",
                fix="free the disk and rerun the same command",
                code="unwritable-file",
            ) from None


def _open(repository: HubRepository, private: bool) -> None:
    """Create the repository if there is none."""
    is_private = repository.is_private()
    if is_private is None:
        repository.create(private)
    elif private and not is_private:
        raise UserError(
            f"{repository.url} exists and is public",
            fix="make it private in its settings on the Hub, or drop --private",
            code="hub-repository-is-public",
        )


def check_pushable(folder: Path) -> str:
    """Return the proof that a folder is what passed its checks, in words.

    Raises:
        UserError: it has pickles or code, has no record of checks that it passed, or a file changed after them.
    """
    check_model_folder(folder, strict=True)
    provenance = read_provenance(folder)
    is_fitted = (folder / FINETUNE_FILE).is_file()
    proof = _scores(folder, provenance) if is_fitted else _parity(folder, provenance)
    _check_unchanged(folder, provenance, is_fitted)
    return proof


def _parity(folder: Path, provenance: Mapping[str, Any]) -> str:
    try:
        report = TypeAdapter(ParityReport).validate_python(provenance.get("parity"))
    except ValidationError:
        raise UserError(
            f"{folder} has no record of the parity gate in {PROVENANCE_FILE}, so nothing shows that it computes what "
            "was trained",
            fix="push the run or checkpoint itself, or what `clozeworks export` wrote",
            code="push-without-gate",
        ) from None
    counts = (report.num_texts, report.num_sequences, report.num_logits)
    if min(counts) < 1 or not 0 <= report.max_logit_difference <= LOGIT_TOLERANCE * report.max_logit < float("inf"):
        raise UserError(
            f"{folder} did not pass the parity gate: {report}",
            fix="export the checkpoint again",
            code="push-without-gate",
        )
    return f"parity gate passed (largest difference {report.max_logit_difference:.1e})"


def _scores(folder: Path, provenance: Mapping[str, Any]) -> str:
    if not provenance.get("scores"):
        raise UserError(
            f"{folder} has no scores in {PROVENANCE_FILE}, so nothing shows what it can do",
            fix="push what `clozeworks finetune` wrote",
            code="push-without-gate",
        )
    return ", ".join(f"{name} {value:.4g}" for name, value in provenance["scores"].items())


def _check_unchanged(folder: Path, provenance: Mapping[str, Any], is_fitted: bool) -> None:
    """Compare all files with those that the checks saw."""
    again = "fine-tune the model again" if is_fitted else "export the checkpoint again, or push the run itself"
    try:
        recorded = TypeAdapter(dict[str, str]).validate_python(provenance.get(FILES_SHA256))
    except ValidationError:
        raise UserError(
            f"{folder / PROVENANCE_FILE} has no sha256 of the files that were checked, as in earlier releases",
            fix=again,
            code="push-without-gate",
        ) from None
    now = file_digests(folder)
    changed = [name for name, digest in recorded.items() if now.get(name, digest) != digest]
    missing = [name for name in recorded if name not in now]
    added = [name for name in now if name not in recorded and (not is_document(name) or (folder / name).is_symlink())]
    for names, problem in ((changed, "changed after"), (missing, "removed after"), (added, "added after")):
        if names:
            raise UserError(
                f"{', '.join(names[:3])} of {folder}: {problem} the checks of the model",
                fix=f"remove what was added, or {again}" if names is added else again,
                code="changed-after-gate",
            )


def is_document(name: str) -> bool:
    """Whether a file is for people and no program reads it with the model: it may be added and changed."""
    path = Path(name)
    return path.name in _DOCUMENT_NAMES or path.suffix.lower() in _DOCUMENTS


def _nothing(name: str) -> bool:
    return False


def _candidates(
    model: str | Path, main: MainChoice, tracking_uri: str | None = None
) -> tuple[list[ModelToPush], ModelToPush | None]:
    """Return what is pushed, the oldest first, and what becomes main."""
    if not is_checkpoint(model):
        folder = pull(model, tracking_uri=tracking_uri)
        step = read_provenance(folder).get("step")
        is_averaged = "merged" in read_provenance(folder)
        step = step if isinstance(step, int) and step >= 0 and not is_averaged else None
        only = ModelToPush(folder, step, folder_digest(folder), False)
        return [only], only if main != "none" or step is None else None
    path = Path(model)
    if (path / STATE_NAME).is_file():
        folders = [path]
    else:
        steps, _ = list_steps(path)
        if not steps:
            raise UsageError(
                f"{path} has no complete checkpoint",
                fix="push the run after its first checkpoint",
                code="missing-checkpoint",
            )
        folders = [step_folder(path, step) for step in reversed(steps)]
    candidates = [_checkpoint(folder) for folder in folders]
    if main == "none":
        return candidates, None
    return candidates, candidates[-1] if main == "newest" else _best(path, candidates)


def _checkpoint(folder: Path) -> ModelToPush:
    step = CheckpointFolder(folder).read_marker().step
    return ModelToPush(folder, step, storage.sha256_of(folder / MARKER_NAME), True)


def _best(run: Path, candidates: Sequence[ModelToPush]) -> ModelToPush:
    """Return the checkpoint with the best score, among those that were measured as the newest scored one."""
    settings = TypeAdapter(CheckpointSettings).validate_python(
        CheckpointFolder(candidates[-1].path).read_state().config.get("checkpoint", {})
    )
    settings = settings.model_copy(update={"keep_best": max(settings.keep_best, 1)})
    scores = [(each, best_metric(CheckpointFolder(each.path), settings)) for each in candidates]
    scored = [(each, score) for each, score in scores if score is not None]
    if not scored:
        raise UserError(
            f"no checkpoint of {run} has {settings.best_metric}, by which the best is chosen",
            fix="give --main newest, or set checkpoint.best_metric to a metric of the run",
            code="no-best-checkpoint",
        )
    sign = 1 if settings.best_metric.endswith("loss") else -1
    alike = [(sign * value, -(each.step or 0), each) for each, (value, facts) in scored if facts == scored[-1][1][1]]
    return min(alike, key=lambda item: item[:2])[2]


def _export(candidate: ModelToPush, parent: Path, hub: str) -> Path:
    """Export a checkpoint to a folder in `parent` with the name of the repository, by which its card calls it."""
    name = hub.rpartition("/")[2]
    folder = export_checkpoint(candidate.path, parent / name).output
    card = folder / CARD_FILE
    text = card.read_text(encoding="utf-8")
    card.write_text(text.replace(json.dumps(name), json.dumps(hub)), encoding="utf-8")
    return folder


def _entry(folder: Path, candidate: ModelToPush) -> SentRevision:
    provenance = read_provenance(folder)
    weights = {name: digest for name, digest in provenance[FILES_SHA256].items() if name.endswith(".safetensors")}
    run = THIS_RUN if candidate.is_checkpoint else provenance.get("mlflow_run_id") or ""
    return SentRevision(source=candidate.digest, step=candidate.step, run=run, weights=weights)


def _weights_in(branch: HubBranch) -> dict[str, str]:
    return {name: file.digest for name, file in branch.files.items() if name.endswith(".safetensors")}


def _is_sent(journal: PushJournal, branch: str, candidate: ModelToPush) -> bool:
    entry = journal.revisions.get(branch)
    return entry is not None and entry.commit is not None and entry.source == candidate.digest


def _journal_path(model: str | Path, hub: str) -> Path:
    path = Path(model)
    name = hashlib.sha256(f"{hub_address()}/{hub}".encode()).hexdigest()[:16] + ".json"
    if not is_checkpoint(model):
        return storage.cache_folder() / PUSH_FOLDER / name
    output_dir = path.resolve().parent.parent if (path / STATE_NAME).is_file() else path
    return output_dir / PUSH_FOLDER / name


def _read_journal(path: Path, hub: str) -> PushJournal:
    """Read the journal; a missing or damaged one is empty, since the Hub is asked as well."""
    try:
        journal = PushJournal.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return PushJournal(address=hub_address(), repository=hub)
    return journal
