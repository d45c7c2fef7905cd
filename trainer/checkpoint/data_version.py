"""The data version of a run: the version at the first start, whatever was added or removed since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from data_prep.base.errors import UsageError, UserError
from data_prep.base.settings import SettingError
from data_prep.dataset.manifest import UnknownVersion, read_manifest
from data_prep.storage import storage
from trainer.checkpoint.format import CheckpointFolder, SavedState, checkpoints_folder, step_folder, steps_in
from trainer.config.duration import Duration
from trainer.config.run_config import RunConfig, without_registry, without_secrets
from trainer.config.run_rules import check_run
from trainer.config.schedule import steps_of_epochs
from trainer.config.stages import epochs_of, with_steps
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


def with_epochs_counted(
    config: RunConfig, allow_change: bool = False, opened: Sequence[ShardSet] | None = None
) -> RunConfig:
    """Return the configuration with steps in place of epochs: those of the data version that the run reads.

    An epoch of a mixture has as many rows as its data sets have together. The number of sentence pairs differs
    between epochs; each counts as long as the first.

    Args:
        opened: the result of `open_data`, if the data sets are open already.

    Raises:
        UserError: a data set cannot be opened, or an epoch is shorter than a global batch.
    """
    epochs = epochs_of(config.training)
    if not epochs:
        return config
    from trainer.data.pair_counts import PAIR_COUNTS, KeptPairCounts  # here: few runs are as long as epochs
    from trainer.data.samples import check_enough_rows, training_samples

    sources = [config] if config.branch is None else [config, config.model_copy(update={"branch": None})]
    steps: dict[int, int] = {}
    pair_counts = KeptPairCounts(Path(config.output_dir) / PAIR_COUNTS)  # those of an earlier start
    for source in sources:  # a branch has one stage of its own; those before it are counted too
        shard_sets = _open_to_count(source, allow_change, epochs) if opened is None or steps else opened
        for stage in with_steps(source, dict.fromkeys(epochs, 1)).stages:
            number = int(stage.prefix.split(".")[2]) if stage.prefix else 0
            if number not in epochs.keys() - steps.keys():
                continue
            samples = training_samples(shard_sets, stage, config.training.seed, pair_counts)
            num_rows = samples.num_rows_of_first_epochs()
            check_enough_rows(num_rows, stage)
            steps[number] = steps_of_epochs(epochs[number].number, num_rows, samples.is_mixture, stage)
            if not steps[number]:
                raise UsageError(
                    f"{epochs[number].setting} is less than one step of {num_rows:,} rows per epoch",
                    fix="raise it",
                    code="less-than-one-step",
                )
        if steps.keys() == epochs.keys():
            break
    counted = with_steps(config, steps)
    try:
        check_run(counted)
    except SettingError as error:
        raise UsageError(str(error), fix=error.fix, code=error.code) from None
    return counted


def _open_to_count(config: RunConfig, allow_change: bool, epochs: Mapping[int, Duration]) -> list[ShardSet]:
    """Open the data whose rows are counted; the error for missing data names the setting that needs them."""
    try:
        return open_data(config, allow_change)
    except UserError as error:
        written = " and ".join(each.setting for each in epochs.values())
        fix = f"{error.fix}; or set the length in steps or tokens"
        raise UserError(f"{written} cannot be counted: {error.problem}", fix=fix, code=error.code) from None


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
    saved = newest_saved(output_dir, remote)
    return saved.data.manifest_digests if saved is not None else ()


def newest_saved(output_dir: str | Path, remote: str | None = None) -> SavedState | None:
    """Return the newest readable checkpoint of a run without its tensors; None without one; `remote` as above."""
    saved = _newest_in(checkpoints_folder(output_dir))
    if saved is not None or remote is None:
        return saved
    try:
        return _newest_in(remote)
    except UserError:
        return None  # resuming searches the storage too, and fails if it does not answer


def _newest_in(url: str | Path) -> SavedState | None:
    for step in steps_in(url)[0]:
        try:
            return CheckpointFolder.of_step(url, step).read_state()
        except UserError:
            continue  # resuming warns and uses an earlier one too
    return None


def describe_versions(shard_sets: Sequence[ShardSet]) -> Iterator[str]:
    """Yield one line per data set: its version, and a newer one if it exists."""
    for shard_set in shard_sets:
        manifest, newest = shard_set.manifest, read_manifest(shard_set.url).version
        newer = f" (the newest is {newest}; a run keeps its own)" if newest != manifest.version else ""
        yield f"data {storage.redact(shard_set.url)}: version {manifest.version} ({manifest.digest[:16]}){newer}"
