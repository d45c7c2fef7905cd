"""A run and what it works with: opening data, model, engine, checkpoint and tracking in the right order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from data_prep import storage
from data_prep.manifest import TOKENIZER_FOLDER
from data_prep.settings import to_yaml
from trainer import checkpoint
from trainer.batch_arithmetic import batch_arithmetic
from trainer.checkpoint import DataIdentity, TrainState, check_compatible, find_latest, warn_on_stderr
from trainer.config import RunConfig
from trainer.data.loader import Loader, evaluation_batches
from trainer.data.shard_set import ShardSet
from trainer.distributed import Ranks
from trainer.engine import Engine, build_engine
from trainer.model.pretraining import PretrainingModel
from trainer.model.sizes import num_parameters
from trainer.recorder import Recorder
from trainer.status import read_status
from trainer.stop_signal import StopSignal
from trainer.tracking import MetricLog, NullTracker, Tracker, describe_environment, git_revision


@dataclass
class Run:
    """What a run works with. Only `state`, `loader` and `metrics` change while it goes on."""

    config: RunConfig
    ranks: Ranks
    shard_sets: list[ShardSet]
    engine: Engine
    tracker: MetricLog
    recorder: Recorder
    stop_signal: StopSignal
    state: TrainState
    loader: Loader | None = None
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.ranks.is_first:
            print(text, flush=True)

    @property
    def data(self) -> DataIdentity:
        return data_identity(self.shard_sets)


def set_up(
    config: RunConfig, shard_sets: list[ShardSet], ranks: Ranks, stop_signal: StopSignal, allow_change: bool
) -> Run:
    """Build model and engine, and put them where the newest checkpoint stands, or at the beginning."""
    output_dir, data = Path(config.output_dir), data_identity(shard_sets)
    latest = find_latest(output_dir, ranks)
    changes = check_compatible(latest.saved, config, data, ranks.world_size, allow_change) if latest else []
    if ranks.is_first:  # after the check: a refused run leaves the folder as it was
        copy_tokenizer(config, shard_sets[0])
    next_sentence = config.data.sentence_pairs == "next_sentence"
    model = PretrainingModel(config.model, next_sentence, config.training.activation_checkpointing)
    model.initialise(config.training.seed)
    if config.model.output_bias == "frequencies":
        counts = sum(shard_set.token_counts("train") for shard_set in shard_sets)
        model.set_output_bias(torch.from_numpy(counts))
    if config.training.compile:
        model.compile_blocks()
    engine = build_engine(model, config, ranks)
    rehearse(engine, config, shard_sets, ranks)
    if latest:
        checkpoint.load(engine, latest)
    tracker = Tracker.open(config.tracking, output_dir, warn_on_stderr) if ranks.is_first else NullTracker()
    state = latest.saved.state if latest else TrainState()
    run = Run(config, ranks, shard_sets, engine, tracker, Recorder(ranks), stop_signal, state)
    status = read_status(output_dir)
    if status and status.get("step") == state.step:
        run.metrics = status["metrics"]
    introduce(run, changes)
    return run


def rehearse(engine: Engine, config: RunConfig, shard_sets: list[ShardSet], ranks: Ranks) -> None:
    """One step at the run's largest micro-batch that changes nothing: meets out-of-memory before the first real one."""
    largest = max(config.phases, key=lambda phase: (phase.micro_batch_tokens, phase.sequence_length))
    batches = evaluation_batches(
        shard_sets, config.data, largest, config.training.seed, ranks.rank, ranks.world_size, largest.micro_batch_tokens
    )
    batch = next(batches).to(ranks.device)

    def loss() -> torch.Tensor:
        output = engine.forward(batch)
        return output.mlm_loss_sum + output.nsp_loss_sum

    engine.prepare(loss)


def introduce(run: Run, changes: list[str]) -> None:
    """Say how the run begins, and give MLflow what describes it."""
    config, state = run.config, run.state
    phase = config.phases[min(state.phase, len(config.phases) - 1)]
    run.say(f"{parameters_of(config):,} parameters; {batch_arithmetic(phase, run.ranks.world_size)}")
    run.say(
        f"resuming after step {state.step:,} of {config.max_steps:,} in {config.output_dir}"
        if state.step
        else f"beginning {config.max_steps:,} steps in {config.output_dir}"
    )
    if config.model.attention_probs_dropout_prob and run.ranks.device.type == "cuda":
        run.say("model.attention_probs_dropout_prob is over 0: attention takes the reference path, which is slower")
    for change in changes:
        run.say(f"changed since the checkpoint: {change}")
    settings = config.model_dump(mode="json")
    settings["training"]["max_steps"] = config.max_steps
    run.tracker.log_params(settings)
    run.tracker.log_artifact_text("config.yaml", to_yaml(config))
    tags = {"clozeworks.manifest_digest": ",".join(run.data.manifest_digests)} | {
        f"clozeworks.environment.{name}": version for name, version in describe_environment().items()
    }
    revision = git_revision()
    run.tracker.log_tags(tags | ({"clozeworks.git_revision": revision} if revision else {}))


def parameters_of(config: RunConfig) -> int:
    return num_parameters(config.model, config.data.sentence_pairs == "next_sentence")


def data_identity(shard_sets: list[ShardSet]) -> DataIdentity:
    """Exactly which data the run reads."""
    return DataIdentity(
        manifest_digests=tuple(shard_set.manifest.digest for shard_set in shard_sets),
        tokenizer_fingerprint=shard_sets[0].manifest.tokenizer.fingerprint,
    )


def copy_tokenizer(config: RunConfig, shard_set: ShardSet) -> None:
    """Keep the tokenizer with the run, so that a checkpoint can be exported wherever the run's folder is."""
    source = config.data.tokenizer or shard_set.tokenizer_folder
    for name in storage.list_names(source):
        storage.write_bytes(
            Path(config.output_dir) / TOKENIZER_FOLDER / name, storage.read_bytes(storage.join(source, name))
        )
