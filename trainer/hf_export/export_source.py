"""The inputs of an export: a checkpoint's weights and configuration, and the facts of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from data_prep.base.errors import UsageError, UserError
from data_prep.base.load_settings import validate_settings
from data_prep.dataset.manifest import TOKENIZER_FOLDER, read_manifest
from data_prep.dataset.manifest_records import SourceRecord
from data_prep.storage import storage
from data_prep.tokenizer.tokenizer import Tokenizer
from trainer.checkpoint.format import STATE_NAME, CheckpointFolder, SavedState, list_steps, step_folder
from trainer.checkpoint.late_scores import evaluation_of, suite_scores_of
from trainer.checkpoint.tensors import read_weights
from trainer.config.run_config import RunConfig, without_registry
from trainer.hf_export.model_card import TrainingFacts
from trainer.tracking.journal import GIT_TAG, LINEAGE_TAG, read_record
from trainer.tracking.status import read_status


@dataclass(frozen=True)
class ExportSource:
    """The content of a checkpoint that an export needs."""

    config: RunConfig
    weights: dict[str, torch.Tensor]
    tokenizer_folder: Path
    facts: TrainingFacts


def read_source(checkpoint: Path, weights: dict[str, torch.Tensor] | None = None) -> ExportSource:
    """Read a checkpoint folder, or the newest complete checkpoint of a run; `weights` replace those of the checkpoint.

    Raises:
        UserError: there is no complete checkpoint, one of its files is damaged, or the run's directory does not contain
            the tokenizer that the model was trained with.
    """
    folder = find_checkpoint(checkpoint)
    saved = CheckpointFolder(folder).read_state()
    config = validate_settings(RunConfig, without_registry(saved.config), str(folder / STATE_NAME))
    # The RoPE bases are those that the weights were last trained with.
    config = config.model_copy(update={"model": config.stage_of(saved.state.step).model})
    output_dir = folder.parent.parent
    tokenizer_folder = output_dir / TOKENIZER_FOLDER
    _check_tokenizer(tokenizer_folder, saved)
    weights = read_weights(folder) if weights is None else weights
    return ExportSource(config, weights, tokenizer_folder, _facts(folder, saved, config))


def find_checkpoint(folder: Path) -> Path:
    """Return the newest complete checkpoint if `folder` is the output_dir of a run, else `folder`."""
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a directory",
            fix="give a checkpoint (OUTPUT_DIR/checkpoints/step-NNNNNNNN) or a run's OUTPUT_DIR",
            code="missing-checkpoint",
        )
    complete, _ = list_steps(folder)
    return (step_folder(folder, complete[0]) if complete else folder).resolve()


def _check_tokenizer(folder: Path, saved: SavedState) -> None:
    if not folder.is_dir():
        raise UserError(
            f"{folder}, the tokenizer of the run, is missing",
            fix="copy the directory tokenizer/ of the shards there",
            code="missing-data-file",
        )
    tokenizer, expected = Tokenizer.load(folder), saved.data.tokenizer_fingerprint
    if not tokenizer.is_named(expected):
        raise UserError(
            f"{folder} is not the tokenizer that the model was trained with: its fingerprint is "
            f"{tokenizer.fingerprint}, but the shards had {expected}",
            fix="copy the directory tokenizer/ of the shards there",
            code="other-tokenizer",
        )


def _facts(folder: Path, saved: SavedState, config: RunConfig) -> TrainingFacts:
    digests = dict(zip(map(storage.redact, config.data_sets), saved.data.manifest_digests, strict=False))
    tags = _tracked_tags(folder.parent.parent)
    scores, evaluation = _scores(folder, saved)
    return TrainingFacts(
        checkpoint=folder.name,
        step=saved.state.step,
        tokens_seen=saved.state.tokens_seen,
        mlflow_run_id=saved.state.mlflow_run_id,
        git_revision=tags.get(GIT_TAG),
        data_lineage=_lineage(saved, tags),
        adopted=saved.state.adopted,
        teachers=saved.teachers,
        data_digests=digests,
        sources=_sources(config, saved.data.manifest_digests),
        scores=scores,
        evaluation=evaluation,
    )


def _scores(folder: Path, saved: SavedState) -> tuple[dict[str, float], dict[str, str]]:
    """Return the scores of the checkpoint and how they were measured.

    The run measured them at this step after the save, and in earlier releases before the save.
    """
    own, suite, status = evaluation_of(folder), suite_scores_of(folder), read_status(folder.parent.parent)
    scores = _overall({**saved.state.evaluation, **own.metrics})
    facts = {**saved.state.evaluated_as, **own.facts}
    if not scores and status is not None and status.step == saved.state.step:
        scores, facts = _overall(status.metrics), status.evaluation
    return {**scores, **suite.metrics}, {**facts, **suite.facts} if scores or suite.metrics else {}


def _lineage(saved: SavedState, tags: Mapping[str, str]) -> tuple[str, ...]:
    """Return the digests of all data that the weights saw; for checkpoints of earlier releases as logged to MLflow."""
    if saved.state.data_lineage:
        return saved.data_lineage
    tracked = (digest for digest in tags.get(LINEAGE_TAG, "").split(",") if digest)
    return tuple(dict.fromkeys((*saved.data_lineage, *tracked)))


def _tracked_tags(output_dir: Path) -> dict[str, str]:
    """Return the tags that the run logged to MLflow; empty without a readable record, which an export does not need."""
    try:
        record = read_record(output_dir / "tracking")
    except (UserError, OSError):
        return {}
    return record.tags if record is not None else {}


def _sources(config: RunConfig, digests: tuple[str, ...]) -> tuple[SourceRecord, ...]:
    """Return the sources of the shards that were trained on; empty if a manifest cannot be read any more."""
    sources: list[SourceRecord] = []
    for url, digest in zip(config.data_sets, digests, strict=False):
        try:
            # A removed source is still listed, without documents.
            sources += [source for source in read_manifest(url, digest).sources if source.documents]
        except (UserError, OSError):
            return ()  # the card reports it; an export must not depend on the data
    return tuple(sources)


def _overall(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the scores of the whole valid split, by which versions are compared."""
    overall = {name for name in metrics if name.startswith("valid/") and name.count("/") == 1}  # of no source or length
    return {name: float(value) for name, value in metrics.items() if name in overall and value is not None}
