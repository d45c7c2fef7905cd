"""Setting a run up, without DeepSpeed: which data its weights will have seen, through every kind of beginning."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_prep import open_dataset
from data_prep.base.errors import UsageError, UserError
from data_prep.base.processor import Processor
from data_prep.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from tests.support.living_data_sets import change_manifest
from tests.support.toy_run import tiny_config
from trainer.api import EXTENSIONS
from trainer.checkpoint import writer
from trainer.checkpoint.compatibility import check_compatible
from trainer.checkpoint.format import CheckpointFolder, TrainState
from trainer.checkpoint.late_scores import EVALUATION_NAME, LateScores, write_late_scores
from trainer.checkpoint.writer import ALONE
from trainer.config.run_config import RunConfig
from trainer.data.batch import IGNORED, Batch
from trainer.data.sample_range import Branch
from trainer.data.shard_set import open_shard_set
from trainer.engine import fragments
from trainer.hf_export.export import write_model
from trainer.hf_export.export_source import read_source
from trainer.loop import setup as runs
from trainer.loop import warmup
from trainer.loop.checkpoints import Progress
from trainer.loop.run import Run
from trainer.loop.step import StepRequests
from trainer.loop.training_loop import what_is_due
from trainer.metrics.health import NonFiniteSteps
from trainer.model import numerics
from trainer.objectives.pretraining import PretrainingModel
from trainer.preflight.data_checks import EVALUATION_IS_OFF
from trainer.tracking.journal import ADOPTED_TAG, LINEAGE_TAG, TEACHERS_TAG
from trainer.tracking.tracker import NullTracker

BASE, BEFORE_BASE = "b" * 64, "a" * 64


class BareEngine:
    """What setting up and saving ask of an engine, at stage 0 on one rank."""

    zero_stage = 0
    ranks = ALONE
    optimizer_steps = 0

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.0)

    def warmup_step(self, compute_loss: Callable[[], torch.Tensor]) -> None:
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()

    def fragments(self) -> list[fragments.Fragment]:
        return list(fragments.fragments(self.module, self.optimizer, 0, 0, 1))

    def finish_setting(self, steps: int) -> None: ...

    def loss_scaler_state(self) -> None: ...

    def set_loss_scaler_state(self, state: None) -> None: ...


class TryingEngine(BareEngine):
    """An engine whose forward is that of the model."""

    def forward(self, batch: Batch, **options: Any) -> Any:
        return self.module(batch, **options)

    def eval(self) -> None:
        self.module.eval()

    def train(self) -> None:
        self.module.train()


class TagTracker(NullTracker):
    """Keeps the run's tags and texts."""

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.texts: dict[str, str] = {}

    def log_artifact_text(self, name: str, text: str) -> None:
        self.texts[name] = text

    def log_tags(self, tags: Any) -> None:
        self.tags.update(tags)


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> TagTracker:
    tracker = TagTracker()
    monkeypatch.setattr(runs, "build_engine", lambda model, config, ranks: BareEngine(model))
    monkeypatch.setattr(runs, "open_tracker", lambda config, branch, state, warn: tracker)
    # Here these would be the modules of all tests, whose text takes its time.
    for module in ("identity", "setup"):
        monkeypatch.setattr(f"trainer.loop.{module}.own_modules", lambda task_modules=(): {})
    return tracker


@pytest.fixture
def config(small_shards: Path, tmp_path: Path) -> RunConfig:
    return tiny_config(
        tmp_path / "run",
        model={"vocab_size": 800, "max_position_embeddings": 512},
        data={"shards": str(small_shards), "sequence_length": 64, "num_workers": 0},
        training={"max_steps": 10, "micro_batch_tokens": 256, "global_batch_tokens": 512},
    )


@pytest.mark.long
def test_a_run_without_a_valid_split_is_set_up_on_train_rows_and_evaluates_nothing(
    shards_without_valid: Path, config: RunConfig, tracker: TagTracker, capsys: pytest.CaptureFixture[str]
) -> None:
    data = config.data.model_copy(update={"shards": str(shards_without_valid)})
    run, _, _ = set_up(config.model_copy(update={"data": data}))
    assert not run.data.can_evaluate and EVALUATION_IS_OFF in capsys.readouterr().out
    batch = warmup.first_batch(run.config.stages[0], data, run.config, run.data.shard_sets, ALONE)
    assert (batch.labels != IGNORED).any()
    result, state, progress = SimpleNamespace(is_nonfinite=False), TrainState(step=10), Progress(NonFiniteSteps(20))
    due = [what_is_due(run.config, state, progress, result, StepRequests(), each) for each in (False, True)]
    assert [each.evaluation for each in due] == [False, True] and due[0].save and due[0].log


@pytest.fixture
def base(config: RunConfig, small_tokenizer: Path, tmp_path: Path) -> Path:
    """An exported folder of the same architecture, whose weights saw data of two versions."""
    folder = tmp_path / "base"
    folder.mkdir()
    write_model(folder, config, PretrainingModel(config.model), Tokenizer.load(small_tokenizer))
    provenance = {"data_digests": {"elsewhere": BASE}, "data_lineage": [BASE, BEFORE_BASE]}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    return folder


def set_up(
    config: RunConfig, allow_change: bool = False, branch: Branch | None = None, verbose: bool = False
) -> tuple[Run, TrainState, Progress]:
    shard_sets = [open_shard_set(component.url) for component in config.data.components]
    nothing: Any = SimpleNamespace(activity=lambda: None, mark=lambda doing: None)
    return runs.set_up(config, EXTENSIONS, shard_sets, ALONE, None, nothing, nothing, allow_change, branch, verbose)


def save(begun: tuple[Run, TrainState, Progress], step: int) -> Path:
    run, state, _ = begun
    state = state.model_copy(update={"step": step})
    data, description = run.checkpoints.data, run.checkpoints.description
    saved = writer.save(run.config.output_dir, run.engine, state, run.config, data, description=description)
    assert saved is not None
    return saved.folder


def on_other_data(config: RunConfig, folder: Path) -> RunConfig:
    """The run with a copy of its shards whose manifest says other things, and so has another digest."""
    shutil.copytree(config.data.shards, folder)
    change_manifest(folder, clozeworks_version="another")
    return config.model_copy(update={"data": config.data.model_copy(update={"shards": str(folder)})})


@pytest.mark.long
def test_the_data_of_the_weights_that_a_run_starts_with_counts_as_seen(
    config: RunConfig, base: Path, tracker: TagTracker
) -> None:
    digest = open_dataset(config.data.shards).manifest.digest
    begun = config.model_copy(update={"init_from": str(base)})
    folder = save(set_up(begun), 2)
    seen = (digest, BASE, BEFORE_BASE)
    assert read_source(folder).facts.data_lineage == seen and tracker.tags[LINEAGE_TAG] == ",".join(seen)
    shutil.rmtree(base)
    assert set_up(begun)[1].data_lineage == seen, "a resumed run does not read its base again"


@pytest.mark.long
def test_what_was_adopted_is_part_of_the_run_and_of_its_checkpoints(
    config: RunConfig, base: Path, tracker: TagTracker, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = config.model.num_hidden_layers
    deeper = config.model.model_copy(update={"num_hidden_layers": 2 * layers})
    begun = config.model_copy(update={"init_from": str(base), "adopt": ("size",), "model": deeper})
    begun_run = set_up(begun)
    (line,) = begun_run[1].adopted
    assert line == "size: layers 0, 0 of 1 become 0 to 1" and f"adopting {line}" in capsys.readouterr().out
    folder = save(begun_run, 2)
    assert read_source(folder).facts.adopted == (line,) and tracker.tags[ADOPTED_TAG] == line
    shutil.rmtree(base)
    assert set_up(begun)[1].adopted == (line,), "a resumed run does not read its base again"
    with pytest.raises(UsageError, match="adopt was", check=coded("incompatible-change")):
        set_up(begun.model_copy(update={"adopt": ()}))


@pytest.mark.long
def test_every_teacher_stays_named_in_order(
    config: RunConfig, tmp_path: Path, tracker: TagTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = "1" * 64, "2" * 64

    def taught_by(digest: str) -> None:
        teacher = SimpleNamespace(digest=digest, attach_to=lambda objectives: None, describe=lambda: "a teacher")
        monkeypatch.setattr(runs, "teacher_of", lambda *given: teacher)

    taught_by(first)
    run, state, progress = set_up(config)
    assert state.teachers == (first,) and tracker.tags[TEACHERS_TAG] == first
    before_histories = state.model_copy(update={"teachers": ()})  # as the first version with teachers kept it
    assert read_source(save((run, before_histories, progress), 2)).facts.teachers == (first,)
    assert set_up(config)[1].teachers == (first,), "the same teacher is named once"
    taught_by(second)
    branch = set_up(branching(config, tmp_path / "branch"))
    assert branch[1].teachers == (first, second)
    facts = read_source(save(branch, 3)).facts
    assert facts.teachers == (first, second) and tracker.tags[TEACHERS_TAG] == f"{first},{second}"
    assert set_up(branching(config, tmp_path / "branch"))[1].teachers == (first, second)
    assert set_up(config, allow_change=True)[1].teachers == (first, second), "a resumed run"
    monkeypatch.setattr(runs, "teacher_of", lambda *given: None)
    run, state, _ = set_up(branching(config, tmp_path / "branch"))
    assert state.teachers == (first, second) and run.checkpoints.data.teacher == second, "its stage is over"


@pytest.mark.long
@pytest.mark.parametrize("before", [("1" * 64,), ("3" * 64, "1" * 64)])
def test_teachers_of_the_weights_that_a_run_starts_with_stay_named(
    config: RunConfig, base: Path, tmp_path: Path, tracker: TagTracker, monkeypatch: pytest.MonkeyPatch, before
) -> None:
    """Whether the run has a teacher of its own or not; a resumed run does not take them for its own."""
    provenance = json.loads((base / "provenance.json").read_text())
    provenance |= {"teacher": {"address": "models:/large/1", "sha256": before[-1]}}
    provenance |= {"teachers_sha256": [*before]} if len(before) > 1 else {}
    (base / "provenance.json").write_text(json.dumps(provenance))
    begun = config.model_copy(update={"init_from": str(base)})
    first = set_up(begun)
    assert first[1].teachers == before and first[0].checkpoints.data.teacher is None
    assert tracker.tags[TEACHERS_TAG] == ",".join(before)
    assert read_source(save(first, 2)).facts.teachers == before
    run, state, _ = set_up(begun)
    assert state.teachers == before and run.checkpoints.data.teacher is None, "a resumed run"
    taught = begun.model_copy(update={"output_dir": str(tmp_path / "taught")})
    for digest, expected in (("1" * 64, before), ("2" * 64, (*before, "2" * 64))):
        teacher = SimpleNamespace(digest=digest, attach_to=lambda objectives: None, describe=lambda: "a teacher")
        monkeypatch.setattr(runs, "teacher_of", lambda *given, teacher=teacher: teacher)
        shutil.rmtree(taught.output_dir, ignore_errors=True)
        first = set_up(taught)
        assert first[1].teachers == expected
        assert read_source(save(first, 2)).facts.teachers == expected
        run, state, _ = set_up(taught)
        assert state.teachers == expected and run.checkpoints.data.teacher == digest
    (base / "provenance.json").write_text(json.dumps(provenance | {"teacher": {"sha256": "no digest"}}))
    shutil.rmtree(begun.output_dir)
    with pytest.raises(UserError, check=coded("damaged-provenance")):
        set_up(begun)


@pytest.mark.long
def test_data_that_was_changed_on_the_way_stays_seen(config: RunConfig, tmp_path: Path, tracker: TagTracker) -> None:
    first = open_dataset(config.data.shards).manifest.digest
    assert set_up(config)[1].data_lineage == (first,)
    save(set_up(config), 2)
    changed = on_other_data(config, tmp_path / "other")
    second = open_dataset(changed.data.shards).manifest.digest
    folder = save(set_up(changed, allow_change=True), 4)
    facts = read_source(folder).facts
    assert first != second and facts.data_lineage == (second, first)
    assert list(facts.data_digests.values()) == [second] and tracker.tags[LINEAGE_TAG] == f"{second},{first}"
    assert set_up(changed)[1].data_lineage == (second, first), "at the next start too"
    _, back, _ = set_up(config, allow_change=True, branch=Branch(step=2))
    assert back.data_lineage == (first,), "the course that was left saw more than the new one"


@pytest.mark.long
def test_a_checkpoint_without_a_lineage_saw_its_shards(config: RunConfig, tmp_path: Path, tracker: TagTracker) -> None:
    """As those of earlier releases are."""
    run, state, progress = set_up(config)
    state = state.model_copy(update={"data_lineage": ()})
    first = open_dataset(config.data.shards).manifest.digest
    assert read_source(save((run, state, progress), 2)).facts.data_lineage == (first,)
    changed = on_other_data(config, tmp_path / "other")
    second = open_dataset(changed.data.shards).manifest.digest
    assert set_up(changed, allow_change=True)[1].data_lineage == (second, first)


def branching(config: RunConfig, output_dir: Path, **changes: Any) -> RunConfig:
    """A branch from step 2 of the run, to a stage that differs in its learning rate."""
    values = config.model_dump()
    stages = [{"name": "stable", "steps": 10}, {"name": "decay", "steps": 3, "learning_rate": 1e-5} | changes]
    values["training"] |= {"stages": stages, "duration": None}
    branch = {"run": config.output_dir, "step": 2, "stage": "decay"}
    return RunConfig.model_validate(values | {"output_dir": str(output_dir), "branch": branch})


@pytest.mark.long
def test_a_branch_reads_on_where_the_other_run_stood_if_its_samples_are_the_same(
    config: RunConfig, tmp_path: Path, tracker: TagTracker, capsys: pytest.CaptureFixture[str]
) -> None:
    run, state, progress = set_up(config)
    save((run, state.model_copy(update={"next_sample": 16, "tokens_seen": 1024}), progress), 2)
    begun, state, progress = set_up(branching(config, tmp_path / "same"))
    assert f"from step 2 of {config.output_dir}" in capsys.readouterr().out
    assert (state.step, state.stage, state.epoch, state.next_sample, state.tokens_seen) == (2, 0, 0, 16, 1024)
    assert (state.branched_at, progress.saved_step, begun.config.max_steps) == (2, None, 5)
    _, state, _ = set_up(branching(config, tmp_path / "shorter", sequence_length=32))
    assert (state.step, state.epoch, state.next_sample) == (2, 1, 0), "other rows are a new epoch"


def test_a_branch_of_another_model_or_from_a_missing_step_is_refused(
    config: RunConfig, tmp_path: Path, tracker: TagTracker
) -> None:
    with pytest.raises(UsageError, check=coded("missing-path"), match=re.escape(config.output_dir)):
        set_up(branching(config, tmp_path / "branch"))
    Path(config.output_dir).mkdir()
    with pytest.raises(UsageError, check=coded("unknown-checkpoint-step"), match="step 2 .*existing steps: none"):
        set_up(branching(config, tmp_path / "branch"))
    save(set_up(config), 2)
    other = branching(config, tmp_path / "branch")
    other = other.model_copy(update={"training": other.training.model_copy(update={"seed": 5})})
    with pytest.raises(UsageError, check=coded("incompatible-branch"), match="training.seed was 0 and is 5"):
        set_up(other)


@pytest.mark.long
def test_a_damaged_status_hinders_no_resume(config: RunConfig, tracker: TagTracker) -> None:
    save(set_up(config), 2)
    (Path(config.output_dir) / "status.json").write_text('{"state": "failed", "written_at": 1, "step": 2}')
    run, state, _ = set_up(config)
    assert state.step == 2 and run.reporter.metrics == {}


def test_the_tokenizer_alone_is_kept_of_a_folder_that_holds_a_model_too(
    config: RunConfig, small_tokenizer: Path, tmp_path: Path
) -> None:
    """`data.tokenizer` names an exported folder, or, in a run that goes on, the run's own copy."""
    exported = Path(shutil.copytree(small_tokenizer, tmp_path / "exported"))
    (exported / "model.safetensors").write_bytes(b"weights")
    (exported / "1_Pooling").mkdir()
    shard_set = open_shard_set(str(config.data.shards))
    for source in (exported, Path(config.output_dir) / "tokenizer"):
        named = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": str(source)})})
        runs.keep_tokenizer(named, shard_set)
        kept = {path.name: path.read_bytes() for path in Path(config.output_dir, "tokenizer").iterdir()}
        assert kept == {path.name: path.read_bytes() for path in small_tokenizer.iterdir()}


def test_a_kept_tokenizer_is_left_as_it_is_and_a_broken_one_is_made_again(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard_set, folder = open_shard_set(str(config.data.shards)), Path(config.output_dir) / "tokenizer"
    runs.keep_tokenizer(config, shard_set)
    with monkeypatch.context() as patch:
        patch.setattr(SentencePieceTokenizer, "copy_files", lambda *given: pytest.fail("it was written again"))
        runs.keep_tokenizer(config, shard_set)
    (folder / "tokenizer.model").write_bytes(b"half")
    runs.keep_tokenizer(config, shard_set)
    assert Tokenizer.load(folder).fingerprint == shard_set.manifest.tokenizer.fingerprint


def test_a_registry_that_is_refused_today_makes_no_checkpoint_unreadable(
    config: RunConfig, tracker: TagTracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = set_up(config)
    run, folder = begun[0], save(begun, 2)
    saved = CheckpointFolder(folder).read_state()
    registry = {**saved.config["registry"], "name": "birds", "alias": "champion", "promote_to": "champion"}
    saved = saved.model_copy(update={"config": saved.config | {"registry": registry}})
    assert check_compatible(saved, run.config, run.checkpoints.data, 1, saved.numerics) == []
    monkeypatch.setattr(CheckpointFolder, "read_state", lambda folder: saved)
    assert read_source(folder).config.registry.name is None


@pytest.mark.long
def test_a_run_of_precision_auto_that_moves_to_another_processor_continues_in_its_own(
    config: RunConfig, tracker: TagTracker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_precision(precision: str) -> RunConfig:
        return config.model_copy(update={"training": config.training.model_copy(update={"precision": precision})})

    slow, fast = (Processor("Xeon", "GenuineIntel", sets) for sets in (("avx2",), ("amx_bf16", "avx2")))
    monkeypatch.setattr(numerics, "this_processor", lambda: slow)
    begun = set_up(in_precision("auto"))
    assert begun[0].config.training.precision == "fp32"
    assert CheckpointFolder(save(begun, 2)).read_state().config["training"]["precision"] == "fp32"
    assert set_up(in_precision("auto"))[1].step == 2 and "precision" not in capsys.readouterr().err
    monkeypatch.setattr(numerics, "this_processor", lambda: fast)
    moved, state, _ = set_up(in_precision("auto"))
    assert (moved.config.training.precision, state.step) == ("fp32", 2)
    assert "the run stays in fp32, in which it was begun; a new run would take bf16" in capsys.readouterr().err
    with pytest.raises(UserError, match="training.precision was 'fp32' and is 'bf16'"):
        set_up(in_precision("bf16"))
    shutil.rmtree(config.output_dir)
    assert set_up(in_precision("auto"))[0].config.training.precision == "bf16"


@pytest.mark.long
def test_a_checkpoint_that_was_not_evaluated_is_evaluated_first(config: RunConfig, tracker: TagTracker) -> None:
    folder = save(set_up(config), 2)
    for scores, due in (
        (LateScores(state="pending"), (True, True)),
        (LateScores(state="pending", metrics={"valid/mlm_loss": 5.0}), (False, True)),
        (LateScores(state="done", metrics={"valid/mlm_loss": 5.0, "average/mlm_loss": 4.0}), (False, False)),
    ):
        write_late_scores(folder, scores, EVALUATION_NAME)
        _, state, progress = set_up(config)
        assert (progress.evaluation_is_due, progress.average_is_due) == due
        assert progress.averaged_step == (2 if "average/mlm_loss" in scores.metrics else None)
    assert state.evaluation == {"valid/mlm_loss": 5.0}, "a branch that saves this step again keeps them"


@pytest.mark.long
@pytest.mark.parametrize(("step", "metrics"), [(2, {"train/loss": 5.0}), (3, {}), (None, {})])
def test_the_last_metrics_are_kept_where_the_last_start_ended_at_this_step(
    step: int | None, metrics: dict[str, float], config: RunConfig, tracker: TagTracker
) -> None:
    save(set_up(config), 2)
    status = {"state": "stopped", "written_at": 1, "step": step, "metrics": {"train/loss": 5.0}}
    (Path(config.output_dir) / "status.json").write_text(json.dumps(status))
    assert set_up(config)[0].reporter.metrics == metrics


@pytest.mark.long
def test_a_branch_from_another_run_does_not_evaluate_what_that_run_left(
    config: RunConfig, tmp_path: Path, tracker: TagTracker
) -> None:
    write_late_scores(save(set_up(config), 2), LateScores(state="pending"), EVALUATION_NAME)
    _, _, progress = set_up(branching(config, tmp_path / "branch"))
    assert not progress.is_scored_later


@pytest.mark.parametrize(
    ("parameters", "is_requested", "warns"),
    [(110_000_000, False, True), (110_000_000, True, False), (90_000_000, False, False)],
)
def test_a_large_model_on_a_cpu_for_which_nobody_asked_is_warned_of(
    parameters: int,
    is_requested: bool,
    warns: bool,
    config: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runs, "num_parameters", lambda *arguments: parameters)
    monkeypatch.setattr(runs, "is_cpu_requested", lambda: is_requested)
    monkeypatch.setattr(runs, "warnings", lambda run: [])
    runs.log_device(config, EXTENSIONS, ALONE, None, "a decision")
    said = capsys.readouterr()
    assert said.out.startswith("1 rank on 1 host (") and "| device CPU (" in said.out.splitlines()[0]
    assert ("no GPU was found" in said.err) == warns and "a decision" in said.err


def phased(*shapes: tuple[int, int, int], max_steps: int | None = None) -> RunConfig:
    """A run whose stages take (steps, micro_batch_tokens, sequence_length)."""
    names = ("steps", "micro_batch_tokens", "sequence_length")
    stages = [{**dict(zip(names, shape, strict=True)), "global_batch_tokens": 4096} for shape in shapes]
    training = {"stages": stages, "max_steps": max_steps}
    return RunConfig.model_validate(
        {"output_dir": "x", "model": {"vocab_size": 800}, "data": {"shards": "x"}, "training": training}
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, [(2048, 128), (1024, 512), (1024, 64)]),
        (4, [(2048, 128), (1024, 512), (1024, 64)]),
        (5, [(2048, 128), (1024, 64)]),
        (8, [(2048, 128)]),
        (10, [(2048, 128)]),  # its end
    ],
)
def test_the_shapes_that_a_run_still_has_are_named_once_and_the_largest_first(step, expected) -> None:
    config = phased((5, 1024, 512), (2, 1024, 64), (1, 1024, 64), (2, 2048, 128), (9, 4096, 64), max_steps=10)
    found = [
        (stage.micro_batch_tokens, stage.sequence_length)
        for stage in warmup.one_of_each_shape(warmup.stages_after(step, config))
    ]
    assert found == expected


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([(512, False), (256, True), (128, True)], [(512, False), (256, True)]),
        ([(256, False), (256, True)], [(256, False), (256, True)]),  # as large, and more with the teacher
        ([(256, False), (512, True)], [(512, True)]),
        ([(256, False), (512, False)], [(512, False)]),
    ],
)
def test_the_memory_of_a_taught_stage_is_tried_beside_that_of_the_largest_micro_batch(
    config: RunConfig, stages: list[tuple[int, bool]], expected: list[tuple[int, bool]]
) -> None:
    """Without compilation, where other shapes need no trial; (tokens, whether a teacher takes part)."""
    taught = [{"name": "distillation"}, {"name": "masked_lm"}]
    settings = [
        {"steps": 2, "micro_batch_tokens": tokens, "objectives": taught if is_taught else taught[1:]}
        for tokens, is_taught in stages
    ]
    values = config.model_dump()
    values["data"] |= {"sentence_pairs": "none"}
    values["training"] |= {"duration": None, "max_steps": None, "stages": settings}
    values |= {"objectives": None, "teacher": "somewhere" if any(has for _, has in stages) else None}
    tried: list[tuple[int, bool]] = []

    def forward(batch: Batch, objectives: list[str]) -> Any:
        tried.append((batch.input_ids.numel(), "distillation" in objectives))
        return {"any": {"loss": torch.zeros(())}}

    engine: Any = SimpleNamespace(forward=forward, warmup_step=lambda *losses: [loss() for loss in losses])
    nothing: Any = SimpleNamespace(mark=lambda doing: None)
    shard_sets = [open_shard_set(config.data.shards)]
    warmup.warmup_step(engine, RunConfig.model_validate(values), shard_sets, ALONE, 0, nothing)
    assert tried == expected


@pytest.mark.parametrize(
    ("name", "problem"), [("Toy", None), ("CountsPadding", "counts 32 predictions of a micro-batch and scores 16")]
)
def test_an_objective_that_counts_padding_is_refused_although_the_first_micro_batch_has_none(
    small_shards: Path, name: str, problem: str | None
) -> None:
    sizes = {"micro_batch_tokens": 32, "global_batch_tokens": 32}
    data = {"shards": str(small_shards), "sequence_length": 16}
    config = tiny_config(model={"vocab_size": 800}, data=data, training=sizes)
    own = [{"name": f"tests.support.toy_objectives:{name}"}]
    config = RunConfig.model_validate({**config.model_dump(), "objectives": own})
    shard_sets = [open_shard_set(str(small_shards))]
    batch = warmup.first_batch(config.stages[0], config.stages[0].data, config, shard_sets, ALONE)
    assert batch.num_tokens == 32
    engine = TryingEngine(PretrainingModel(config.model, config.all_objectives))
    with contextlib.nullcontext() if problem is None else pytest.raises(UserError, match=problem):
        warmup.try_own_objectives(engine, config, shard_sets, ALONE)


SOURCES = {"trainer/data/masking.py": "1", "module mine": "1", "launch/options.py": "1"}
EDITED = {"trainer/data/masking.py": "2", "module mine": "2", "launch/options.py": "2"}


def warnings_of_sources(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "the source of" in r.getMessage()]
    caplog.clear()
    return found


@pytest.mark.long
def test_edited_source_is_a_warning_at_the_resume_and_once(config, tracker, monkeypatch, caplog):
    monkeypatch.setattr(runs, "running_sources", lambda task_modules: SOURCES)
    save(set_up(config), 2)
    assert tracker.texts["source/step-00000000.diff"].startswith("# ") and not warnings_of_sources(caplog)
    set_up(config)
    assert not warnings_of_sources(caplog) and "source/step-00000002.diff" not in tracker.texts
    monkeypatch.setattr(runs, "running_sources", lambda task_modules: EDITED)
    begun = set_up(config)
    (warning,) = warnings_of_sources(caplog)
    assert "module mine, trainer/data/masking.py;" in warning and "launch/options.py" not in warning
    assert "source/step-00000002.diff" in warning and "source/step-00000002.diff" in tracker.texts
    save(begun, 4)
    set_up(config)
    assert not warnings_of_sources(caplog)


@pytest.mark.long
def test_other_edited_files_are_listed_with_verbose_alone(config, tracker, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(runs, "running_sources", lambda task_modules: {"launch/options.py": "1"})
    save(set_up(config), 2)
    monkeypatch.setattr(runs, "running_sources", lambda task_modules: {"launch/options.py": "2"})
    set_up(config)
    assert "launch/options.py" not in caplog.text
    set_up(config, verbose=True)
    assert "other source files: launch/options.py" in caplog.text and not warnings_of_sources(caplog)


@pytest.mark.long
def test_branches_compare_the_source_with_that_of_their_checkpoint(config, tracker, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(runs, "running_sources", lambda task_modules: SOURCES)
    save(set_up(config), 2)
    monkeypatch.setattr(runs, "running_sources", lambda task_modules: EDITED)
    set_up(config, branch=Branch(step=2))
    assert len(warnings_of_sources(caplog)) == 1
    values = config.model_dump()
    values |= {
        "output_dir": str(tmp_path / "branch"),
        "branch": {"run": config.output_dir, "step": 2, "stage": "decay"},
    }
    values["training"] |= {"duration": None, "stages": [{"name": "decay", "steps": 2}]}
    set_up(RunConfig.model_validate(values))
    assert len(warnings_of_sources(caplog)) == 1


def test_a_checkpoint_without_digests_resumes_without_a_warning_and_keeps_the_source(
    config, tracker, monkeypatch, caplog
):
    monkeypatch.setattr(runs, "running_sources", lambda task_modules: {})
    save(set_up(config), 2)
    monkeypatch.setattr(runs, "running_sources", lambda task_modules: EDITED)
    set_up(config)
    assert not warnings_of_sources(caplog) and "source/step-00000002.diff" in tracker.texts
