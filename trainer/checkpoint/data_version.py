"""The data version of a run: the one it started with, whatever was added or removed since."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from data_prep.base.errors import UserError
from data_prep.dataset.manifest import UnknownVersion, read_manifest
from data_prep.storage import storage
from trainer.checkpoint.format import CheckpointFolder, checkpoints_folder, step_folder, steps_in
from trainer.config.run_config import RunConfig, without_registry, without_secrets
from trainer.config.training_settings import BranchSettings
from trainer.data.shard_set import ShardSet, open_shard_set


def open_data(config: RunConfig, allow_change: bool = False) -> list[ShardSet]:
    """Open the data sets of all stages of a run: the versions of its checkpoint, else the current ones.

    Raises:
        UserError: a data set is missing or damaged, or the run's version of it was deleted.
    """
    data, output_dir = config.data, Path(config.output_dir)
    digests: Sequence[str | None] = () if allow_change else run_digests(output_dir, config.checkpoint.upload_to)
    if not digests and config.branch is not None and not allow_change:
        digests = _of_branch(config, config.branch)
    if len(digests) != len(config.data_sets):  # other data, which `check_compatible` reports
        digests = [None] * len(config.data_sets)
    try:
        return [
            open_shard_set(url, data.cache_dir, data.cache_bytes, digest)
            for url, digest in zip(config.data_sets, digests, strict=True)
        ]
    except UnknownVersion as error:
        raise UserError(
            f"the data version of the run in {output_dir} is missing: {error.problem}",
            fix="restore it, start a new run in another output_dir, or give --allow-change to use the current version",
            code="missing-data-version",
        ) from None


def _of_branch(config: RunConfig, branch: BranchSettings) -> list[str | None]:
    """Return the versions of the data sets that the run has in common with the one it branches from."""
    try:
        saved = CheckpointFolder(step_folder(branch.run, branch.step)).read_state()
        before = RunConfig.model_validate(without_registry(saved.config))
    except (UserError, ValidationError):
        return []  # the start of the branch reports it
    known = dict(zip(before.data_sets, saved.data.manifest_digests, strict=False))
    return [known.get(url) for url in without_secrets(config).data_sets]


def run_digests(output_dir: str | Path, remote: str | None = None) -> tuple[str, ...]:
    """Return the manifest digests of the run's data from its newest readable checkpoint; empty without one.

    Args:
        remote: `checkpoint.upload_to`, searched if this node's disk has no checkpoint, as after a move to another node.
    """
    digests = _newest_digests(checkpoints_folder(output_dir))
    if digests or remote is None:
        return digests
    try:
        return _newest_digests(remote)
    except UserError:
        return ()  # resuming searches the storage too, and fails if it does not answer


def _newest_digests(url: str | Path) -> tuple[str, ...]:
    for step in steps_in(url)[0]:
        try:
            return CheckpointFolder.of_step(url, step).read_state().data.manifest_digests
        except UserError:
            continue  # resuming warns and uses an earlier one too
    return ()


def describe_versions(shard_sets: Sequence[ShardSet]) -> Iterator[str]:
    """Yield one line per data set: its version, and a newer one if it exists."""
    for shard_set in shard_sets:
        manifest, newest = shard_set.manifest, read_manifest(shard_set.url).version
        newer = f" (the newest is {newest}; a run keeps its own)" if newest != manifest.version else ""
        yield f"data {storage.redact(shard_set.url)}: version {manifest.version} ({manifest.digest[:16]}){newer}"
