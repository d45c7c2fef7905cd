"""Python API: train, open_loader.

`train` does what `launch/pretrain.py` does, without ending the process. This module stands above the packages: a run
gets from it what it uses of trained models, suites and the registry.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.base.environment import environment_now
from data_prep.storage import storage
from trainer.config.run_config import Overrides, RunConfig, check_output_dir, resolve_config
from trainer.config.run_settings import EvaluationSettings
from trainer.config.stages import epochs_of
from trainer.data.sample_range import Branch
from trainer.distributed.rank_environment import (
    RANK_VARIABLES,
    check_rank_environment,
    is_launched,
    log_environment,
    world_size,
)
from trainer.engine.deepspeed_config import deepspeed_config
from trainer.loop.result import RunResult, find_finished_run

if TYPE_CHECKING:
    from trainer.data.loader import GlobalBatch
    from trainer.loop.checkpoints import Follower, Say
    from trainer.loop.run import Extensions


class _OfThisProject:
    """The models, suites and registry of this project (`trainer.loop.run.Extensions`), imported when they are used."""

    def pull_model(self, source: str, tracking_uri: str | None) -> Path:
        from trainer.inference.pulled_model import pull

        return pull(source, tracking_uri=tracking_uri)

    def look_at_model(self, source: str, tracking_uri: str | None) -> Path | None:
        from trainer.inference.pulled_model import folder_without_weights

        return folder_without_weights(source, tracking_uri)

    def check_suite(self, settings: EvaluationSettings, evaluates: bool) -> None:
        if settings.suite is None:
            return
        from trainer.evaluation.suite_settings import check_files, load_suite

        suite = load_suite(settings.suite, settings.suite_overrides)
        if not evaluates:
            return
        from trainer.evaluation.suite_plan import check_suite  # with fine-tuning's libraries

        check_files(suite)
        check_suite(suite)

    def modules_of_suite(self, settings: EvaluationSettings) -> list[str]:
        if settings.suite is None:
            return []
        from trainer.evaluation.suite_settings import load_suite

        tasks = load_suite(settings.suite, settings.suite_overrides).tasks.values()
        return [task.function.partition(":")[0] for task in tasks if ":" in task.function]

    def open_follower(self, config: RunConfig, warn: Say, log: Say) -> Follower | None:
        has_jobs = config.evaluation.suite is not None or config.registry.name is not None
        # Notes of earlier starts or of `clozeworks follow` (`trainer/follow/notes.py`).
        notes = (Path(config.output_dir) / name for name in ("jobs.jsonl", "registered.jsonl"))
        if not has_jobs and not any(path.exists() for path in notes):
            return None
        from trainer.follow.client import FollowerClient

        return FollowerClient(config, warn, log)


EXTENSIONS: Extensions = _OfThisProject()

TrainResult = RunResult

Training = Callable[..., RunResult]
"""`trainer.loop.train.train`, given the run: it takes `stop_signal`, `watched`, `verbose` and `on_forced_end`."""


def start(
    config: RunConfig, allow_change: bool, branch: Branch | None, begin: Callable[[Training], RunResult]
) -> RunResult:
    """Start or resume a run, as `train` and the command `pretrain` both do; a finished run is returned as it is.

    `begin` calls the training that it is given.

    Raises:
        UserError: a setting or the environment is wrong, or training failed.
    """
    check_rank_environment()
    check_output_dir(config.output_dir, config.checkpoint.upload_to)
    if world_size() == 1 and not epochs_of(config.training):  # several ranks, and epochs, are checked later
        deepspeed_config(config, world_size())
    if branch is None and not allow_change and (finished := find_finished_run(config)) is not None:
        return finished
    os.environ.update(log_environment(environment_now()))  # before torch is imported

    def training(**how: Any) -> RunResult:
        from trainer.loop import train as loop

        return loop.train(config, EXTENSIONS, allow_change, branch, **how)

    return begin(training)


def train(
    config: RunConfig | str | Path,
    overrides: Overrides = (),
    *,
    allow_change: bool = False,
    branch: Branch | None = None,
) -> TrainResult:
    """Start or resume the training run of `config.output_dir` in this process, and return its result.

    One process is one rank: without a launcher the run has one. Ctrl-C saves a checkpoint and returns; a second one
    ends the process. A finished run is returned as it is.

    Args:
        config: a loaded configuration, a YAML file, or the name of a preset.
        overrides: settings that replace the file's (`load_config`).
        allow_change: resume although a setting changed that makes it another run.
        branch: a checkpoint to branch from (`--resume-from`).

    Raises:
        UserError: a setting is wrong, data or checkpoints are unusable, or training failed; `.code` names the rule.
    """

    def begin(training: Training) -> RunResult:
        with _world_of_one(), contextlib.ExitStack() as watched:
            return training(watched=watched)

    return start(resolve_config(config, overrides), allow_change, branch, begin)


def open_loader(
    config: RunConfig | str | Path,
    overrides: Overrides = (),
    *,
    step: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[GlobalBatch]:
    """Return the global batches of a run, as rank `rank` of `world_size` reads them from completed step `step` on.

    The order of samples and their masks are those of training; no model is built. The iterator passes through all
    stages and ends with the run.

    Raises:
        UserError: the data are missing or damaged, or a masking of the user's own cannot be used.
    """
    config = resolve_config(config, overrides)
    storage.configure(config.storage_options)
    from trainer.checkpoint.data_version import open_data, with_epochs_counted
    from trainer.config.custom_code import check_code
    from trainer.data.shard_set import check_tokenizer
    from trainer.loop.global_batches import batches_from

    check_code(config)
    shard_sets = open_data(config)
    config = with_epochs_counted(config, opened=shard_sets)
    check_tokenizer(shard_sets, config.data.tokenizer, config.model.vocab_size)
    return batches_from(config, shard_sets, step, (rank, world_size))


@contextlib.contextmanager
def _world_of_one() -> Iterator[None]:
    """Remove after the block what makes this process a rank, so that another run may follow, also after an error."""
    had_launcher = is_launched()
    try:
        yield
    finally:
        if not had_launcher:
            from trainer.distributed.process_group import forget_groups

            forget_groups()
            for name in RANK_VARIABLES:
                os.environ.pop(name, None)
        # The engine is garbage in cycles now. What set-up exempted from collection is the caller's again.
        gc.unfreeze()
        gc.collect()
