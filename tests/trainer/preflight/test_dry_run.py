import json
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from data_prep import open_dataset
from data_prep.base.errors import UsageError, UserError
from tests.support.doctor import planned
from tests.support.error_codes import coded
from tests.support.toy_run import preset_config
from trainer import load_config
from trainer.checkpoint.format import CheckpointFolder, DataIdentity, Marker, SavedState, TrainState, step_folder
from trainer.config.objective_settings import MASKED_LM_ALONE
from trainer.config.run_config import RunConfig
from trainer.config.training_settings import BranchSettings
from trainer.metrics.throughput import flops_per_position
from trainer.model.hugging_face import family_in_transformers, hugging_face_config, to_hugging_face
from trainer.model.sizes import flops_per_token
from trainer.objectives.pretraining import PretrainingModel, num_parameters
from trainer.preflight.checks import CHECKS, _look_at_unused_masks
from trainer.preflight.data_checks import tokens_by_data_set
from trainer.preflight.dry_run import (
    activation_lines,
    batch_lines,
    branch_line,
    explain,
    flops_lines,
    memory_lines,
    parameter_lines,
    reading_lines,
    resume_line,
    shard_lines,
    stage_lines,
    windows_bytes,
)


def write_model(folder: Path, config: RunConfig) -> None:
    """A Hugging Face folder of the model's architecture; the numbers of its weights are never read."""
    folder.mkdir()
    pairs = config.data.has_sentence_pairs
    (folder / "config.json").write_text(json.dumps(hugging_face_config(config.model, pairs)))
    weights = dict(PretrainingModel(config.model, config.all_objectives).named_parameters())
    written = to_hugging_face(weights, config.model, family_in_transformers(config.model, pairs))
    save_file(
        {name: weight.detach().clone() for name, weight in written.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


@pytest.mark.parametrize(
    "preset",
    [
        *("tiny_cpu", "small_cpu", "bert_base", "bert_large", "bert_large_64gpu", "bert_large_phased", "small_gpu"),
        "modern_large",
    ],
)
def test_parameters_are_counted_by_part_of_the_model(preset):
    header, *parts, total = (line.split() for line in parameter_lines(planned(load_config(preset))))
    assert header == ["module", "parameters"] and total[0] == "total" and parts[0][0] == "embeddings.word"
    counts = [int(count.replace(",", "")) for _, count in parts]
    assert sum(counts) == int(total[1].replace(",", "")) and min(counts) > 0


def test_batches_are_reckoned_over_the_steps_that_the_run_takes():
    run = planned(load_config("bert_large_phased", ["training.max_steps=900010"]), 8)
    first, _ = (line for line in batch_lines(run) if "upper bound" not in line)
    (last,) = (line.split() for line in stage_lines(run) if line.startswith("1 "))
    assert "32 rows x 128 tokens x 8 ranks x 1 gradient accumulation step" in first
    assert last[2:6] == ["10", "of", "100,000", "1,310,720"]


def test_operations_of_a_run_are_those_a_token_times_its_tokens():
    config = load_config("bert_large", ["training.max_steps=10"])
    assert flops_lines(config) == [
        "length 512: 1.992 GFLOP per token, forward and backward",
        f"whole run: {1.9920e9 * 10 * 1_048_576:.3g} FLOP",
    ]


def test_memory_is_reported_for_every_stage_and_this_runs_stage_is_marked():
    lines = memory_lines(planned(load_config("bert_large"), 8))
    assert [line.split()[0] for line in lines] == ["ZeRO", "0", "1", "2", "3"]
    assert [line.endswith("<- this run") for line in lines] == [False, False, True, False, False]
    totals = [float(line.removesuffix("<- this run").split()[-1]) for line in lines[1:]]
    assert totals == sorted(totals, reverse=True)


def test_memory_is_that_of_the_stage_with_the_largest_micro_batch_after_it_is_divided_over_the_ranks():
    """The second stage allows larger micro-batches, but 64 ranks divide its small global batch into smaller ones."""
    stages = [
        {"steps": 1, "sequence_length": 512, "micro_batch_tokens": 32_768, "global_batch_tokens": 4_194_304},
        {"steps": 1, "sequence_length": 512, "micro_batch_tokens": 65_536, "global_batch_tokens": 262_144},
    ]
    two = load_config("bert_large_phased", [f"training.stages={json.dumps(stages)}"])
    one = load_config("bert_large_phased", [f"training.stages={json.dumps(stages[:1])}"])
    assert memory_lines(planned(two, 64)) == memory_lines(planned(one, 64))
    assert activation_lines(planned(two, 64)) == activation_lines(planned(one, 64))


def test_missing_shards_are_reported_and_no_error():
    text = explain(planned(load_config("tiny_cpu", ["data.shards=nowhere"])))
    assert "skipped: data.shards=nowhere does not exist" in text and "warning:" not in text


def test_unprepared_shards_are_warned_of_with_the_code_of_a_run(tmp_path):
    config = load_config("tiny_cpu", [f"data.shards={tmp_path / 'a.txt'}"])
    (line,) = shard_lines(planned(config, 1), expects_shards=True)
    assert line.startswith("warning: ") and line.endswith("[missing-path]")
    (tmp_path / "a.txt").touch()
    (line,) = shard_lines(planned(config, 1))
    assert line.startswith("warning: ") and line.endswith("[text-instead-of-shards]")


def test_shards_that_hardly_fit_the_run_are_warned_of(small_shards):
    def warnings(*settings):
        config = load_config("tiny_cpu", [f"data.shards={small_shards}", *settings])
        return [line for line in shard_lines(planned(config, 1)) if line.startswith("warning: ")]

    fits = ("model.vocab_size=896", "training.max_steps=1")
    assert warnings(*fits) == [], "800 tokens, rounded up to a multiple of 128"
    (line,) = warnings(*fits, "model.vocab_size=897")
    assert "model.vocab_size=897" in line and "800 tokens" in line
    (line,) = warnings(*fits, "training.max_steps=10000000")
    assert re.search(r"\d,\d{3}\.\d\d times the train tokens; lower", line)
    (line,) = warnings(*fits, "training.max_steps=10000000", "data.sentence_pairs=none")
    assert re.search(r"\d,\d{3} epochs of the train tokens; lower", line)


def test_pairs_of_shards_without_sentences_are_refused_as_by_the_run(shards_without_sentences):
    settings = [f"data.shards={shards_without_sentences}"]
    with pytest.raises(UserError, match="data.sentence_pairs=next_sentence", check=coded("no-sentences")):
        list(shard_lines(planned(load_config("tiny_cpu", settings))))
    assert list(shard_lines(planned(load_config("tiny_cpu", [*settings, "data.sentence_pairs=none"]))))


def test_a_micro_batch_that_is_less_than_its_bound_is_named():
    lines = batch_lines(planned(load_config("bert_large_phased", ["training.max_steps=900010"]), 512))
    assert any("micro_batch_tokens=" in line and "upper bound" in line for line in lines)


def test_shards_are_counted_against_ranks_and_ids_against_the_vocabulary(small_shards):
    config = load_config("tiny_cpu", [f"data.shards={small_shards}"])
    assert "4 train shards for 2 ranks" in next(shard_lines(planned(config, 2)))
    with pytest.raises(UserError, match="model.vocab_size=800", check=coded("vocabulary-too-small")):
        list(shard_lines(planned(load_config("tiny_cpu", [f"data.shards={small_shards}", "model.vocab_size=700"]))))


def test_a_node_reads_every_shard_and_its_cache_needs_two_windows(small_shards):
    manifest = open_dataset(small_shards).manifest
    assert windows_bytes(manifest) == sum(shard.bytes for shard in manifest.train.shards), "fewer than 32 shards"
    (shard, *_) = manifest.train.shards
    shards = tuple(shard.model_copy(update={"bytes": (1 << 30) * size}) for size in (*(1,) * 10, *(3,) * 40))
    train = manifest.train.model_copy(update={"shards": shards})
    large = manifest.model_copy(update={"train": train, "valid": train.model_copy(update={"shards": shards[:2]})})
    assert windows_bytes(large) == 32 * 3 << 30
    whole, cache, advice = reading_lines([large, large], cache_bytes=190 << 30)
    assert "Each node reads all train shards (260.00 GiB) once per epoch" in whole
    assert "196.00 GiB for two windows of 16 shards and the valid shards, 264.00 GiB to download all once" in cache
    assert cache.endswith("with 190.00 GiB every epoch downloads them again")
    assert advice.endswith(f"Fix: set data.cache_bytes={196 << 30}")
    _, cache = reading_lines([large], cache_bytes=132 << 30)
    assert cache.endswith("with 132.00 GiB they are downloaded once")


def test_initial_weights_are_looked_at_with_the_tokenizer_of_the_shards(small_shards, tmp_path):
    begins = f"init_from={tmp_path / 'theirs'}"
    settings = ["model.output_bias=zeros", begins, f"data.shards={small_shards}", f"output_dir={tmp_path / 'run'}"]
    config = load_config("tiny_cpu", settings)
    with pytest.raises(UserError, match="theirs", check=coded("unknown-model")):
        explain(planned(config))
    write_model(tmp_path / "theirs", config)
    told = explain(planned(config)).partition("Initial weights")[2]
    assert f"{tmp_path / 'theirs'} is a bert of this architecture" in told and "has no tokenizer.json" in told
    count = len(dict(PretrainingModel(config.model, config.all_objectives).named_parameters()))
    assert f"initializes {count} of {count} tensors\n" in told and "dropped" not in told
    shutil.copytree(small_shards / "tokenizer", tmp_path / "theirs", dirs_exist_ok=True)
    assert "has no tokenizer.json" not in explain(planned(config))
    narrower = load_config("tiny_cpu", [*settings, "model.intermediate_size=100"])
    with pytest.raises(UserError, match="model.intermediate_size is 100 and there"):
        explain(planned(narrower))
    larger = load_config("tiny_cpu", [*settings, "model.intermediate_size=600", "adopt=[tokenizer,size]"])
    told = explain(planned(larger))
    assert "adopts size: tiled from the middle: model.intermediate_size from 512 to 600" in told
    assert "adopts tokenizer: nothing differs" in told


@pytest.mark.parametrize(
    ("preset", "told"),
    [
        ("continue_domain", "of this architecture"),
        ("extend_context", "adopts rope: model.global_rope_theta from 10,000 to 160,000\nadopts positions: model."),
    ],
)
def test_a_preset_that_continues_a_model_tells_what_becomes_of_it(preset, told, tmp_path):
    sizes = ["model.num_hidden_layers=2", "model.hidden_size=64", "model.num_attention_heads=1"]
    theirs = tmp_path / "theirs"
    write_model(theirs, load_config(preset, sizes))
    if preset == "extend_context":
        values = json.loads((theirs / "config.json").read_text())
        values |= {"max_position_embeddings": 1024, "global_rope_theta": 10_000}
        (theirs / "config.json").write_text(json.dumps(values))
    config = load_config(preset, [*sizes, f"init_from={theirs}", f"output_dir={tmp_path / 'run'}"])
    assert told in explain(planned(config)).partition("Initial weights")[2]


def test_the_cost_of_a_teacher_is_told_and_one_that_does_not_fit_is_refused(small_shards, tmp_path):
    teacher = load_config("tiny_cpu", ["model.num_hidden_layers=6", "model.hidden_size=192", "output_dir=none"])
    stages = [{"name": "taught", "steps": 3}, {"name": "alone", "steps": 5, "objectives": [{"name": "masked_lm"}]}]
    settings = [
        *(f"data.shards={small_shards}", f"output_dir={tmp_path / 'run'}", f"teacher={tmp_path / 'teacher'}"),
        *("objectives=[{name: masked_lm}, {name: distillation}]", "data.sentence_pairs=none"),
        *(
            "training.max_steps=null",
            f"training.stages={json.dumps(stages)}",
            "training.precision=bf16",
            "zero.stage=3",
        ),
        *("training.precision=bf16", "zero.stage=3", "schedule.warmup=0"),
    ]
    config = load_config("tiny_cpu", settings)
    with pytest.raises(UserError, match="teacher", check=coded("unknown-model")):
        explain(planned(config, 2))
    assert "teacher" not in memory_lines(planned(config, 2))[0], "the memory of the rest is still shown"
    write_model(tmp_path / "teacher", teacher)
    with pytest.raises(UserError, check=coded("no-tokenizer-of-teacher")):
        explain(planned(config, 2))
    shutil.copytree(small_shards / "tokenizer", tmp_path / "teacher", dirs_exist_ok=True)
    run = planned(config, 2, tokens_per_second=1000.0)
    told = explain(run).partition("\nTeacher\n")[2].splitlines()
    number = num_parameters(teacher.model, MASKED_LM_ALONE)
    assert f"{tmp_path / 'teacher'} is a bert of {number:,} parameters" in told[1]
    assert "at any ZeRO stage (bf16)" in told[1]
    taught, alone = config.stages
    share = run.teacher_share(taught)
    whole = flops_per_token(teacher.model, taught.sequence_length, taught.predicted_share)
    assert share == pytest.approx(whole / 3 / flops_per_position(config, taught)) and run.teacher_share(alone) == 0
    assert f"stage 0 (taught): {share:.0%} more operations" in told[2] and "at the speed of the model alone" in told[2]
    assert told[3] == "", "no line of the stage without it"
    whole_memory, divided = (run.memory_in_stage(taught, stage)["teacher"] for stage in (0, 3))
    assert whole_memory == divided > 2 * number and run.memory_in_stage(alone)["teacher"] == 0


def test_a_run_of_next_tokens_alone_is_told_of_masking_that_has_no_effect():
    def told(*settings: str) -> list[str]:
        shared = ("data.sentence_pairs=none", "model.output_bias=zeros")
        config = preset_config(*shared, *settings)
        return [each.text for each in _look_at_unused_masks(planned(config))]

    causal, rate, last = "objectives=[{name: causal}]", "data.mlm_probability=0.4", "data.final_mlm_probability=null"
    assert told(causal, "data.mlm_probability=0.15", last) == []
    (line,) = told(causal, rate, last)
    assert line.startswith("data.mlm_probability=0.4 has no effect: every stage trains causal")
    assert told(rate, last) == []
    assert any(each.look is _look_at_unused_masks and each.warns for each in CHECKS)


def test_a_run_that_has_checkpoints_does_not_look_at_initial_weights(tmp_path):
    (tmp_path / "checkpoints" / "step-00000007").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000007" / "checkpoint.json").write_text("{}")
    settings = ["model.output_bias=zeros", "init_from=nowhere", f"output_dir={tmp_path}"]
    explained = explain(planned(load_config("tiny_cpu", settings)))
    assert "has checkpoints, and the run resumes from the newest" in explained


def test_a_batch_warmup_is_reported_size_by_size_and_its_tokens_are_what_is_read():
    warmup = "training.batch_warmup={initial_tokens: 1024, steps: 4}"
    sizes = ["training.global_batch_tokens=3072", "training.micro_batch_tokens=512", "training.max_steps=6"]
    run = planned(load_config("tiny_cpu", [*sizes, warmup]), 2)
    lines = batch_lines(run)
    assert f"  6      {2 * 1024 + 2 * 2048 + 2 * 3072:,}  " in stage_lines(run)[1]
    assert [line.strip() for line in lines[2:]] == [
        "from step 1: 1,024 tokens, 1 accumulation",
        "from step 3: 2,048 tokens, 2 accumulation",
        "from step 5: 3,072 tokens, 3 accumulation",
    ]
    assert "33.3% padding" in batch_lines(planned(load_config("tiny_cpu", [*sizes, warmup]), 3))[2]


def test_the_step_to_go_back_to_is_looked_for_in_the_folder_and_in_the_store(tmp_path):
    run, store = tmp_path / "run", tmp_path / "store"
    config = load_config("tiny_cpu", [f"output_dir={run}"])
    assert resume_line(config, 7).endswith(f"{run} has no complete checkpoint of that step; existing steps: none")
    for folder in (run / "checkpoints" / "step-00000003", store / "step-00000007"):
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text("{}")
    assert resume_line(config, 7).endswith("existing steps: 3")
    assert resume_line(config, 3) == "--resume-from 3: the checkpoint exists"
    both = load_config("tiny_cpu", [f"output_dir={run}", f"checkpoint.upload_to=file://{store}"])
    assert resume_line(both, 7) == "--resume-from 7: the checkpoint exists"


def test_the_checkpoint_of_a_branch_is_looked_for_and_compared(tmp_path: Path) -> None:
    branch = BranchSettings(run=str(tmp_path), step=4, stage="decay")
    config = load_config("tiny_cpu")
    line = branch_line(config, branch)
    assert line.startswith("warning: ") and "step 4; existing steps: none" in line
    gone = branch_line(config, branch.model_copy(update={"run": str(tmp_path / "gone")}))
    assert gone.startswith("warning: ") and "gone does not exist" in gone
    data = DataIdentity(manifest_digests=("a" * 64,), tokenizer_fingerprint="b" * 64)
    saved = SavedState(
        format_version=1,
        state=TrainState(step=4),
        config=config.model_dump(mode="json"),
        data=data,
        world_size=1,
        zero_stage=1,
        shapes={},
        optimizer_steps=4,
        loss_scaler=None,
        versions={},
    )
    for step in (2, 4):
        folder = CheckpointFolder(step_folder(tmp_path, step))
        record = folder.write_state(saved.model_copy(update={"state": TrainState(step=step)}))
        folder.write_marker(Marker(format_version=1, step=step, files=(record,)))
    assert "step 4" in branch_line(config, branch) and "warning" not in branch_line(config, branch)
    assert branch_line(config, branch.model_copy(update={"step": 3})).endswith("existing steps: 2, 4")
    muon = load_config("tiny_cpu", ["optimizer.name=muon"]).model_copy(update={"branch": branch})
    with pytest.raises(UsageError, check=coded("incompatible-branch"), match="'adamw' and is 'muon'"):
        branch_line(muon, branch)


def test_the_table_of_stages_has_tokens_masks_rates_and_hours() -> None:
    stages = [
        {"name": "stable", "steps": 100},
        {"name": "decay", "steps": 50, "mlm_probability": 0.3, "final_mlm_probability": 0.1, "mask_unit": "word"}
        | {"learning_rate": 1e-3, "schedule": {"name": "one_minus_sqrt", "final_ratio": 0.5}},
    ]
    overrides = [f"training.stages={json.dumps(stages)}", "training.max_steps=140"]
    config = load_config("tiny_cpu", [*overrides, "schedule={name: warmup_stable_decay, warmup_steps: 9}"])
    header, stable, decay, total = stage_lines(planned(config, tokens_per_second=2048 / 36))
    columns = [re.split(r"  +", line) for line in (header, stable, decay)]
    assert columns[1][:6] == ["0", "stable", "100", "204,800", "64", "0.15"]
    assert columns[2][:6] == ["1", "decay", "40 of 50", "81,920", "64", "0.3 to 0.141, words"]
    assert "0.002 at most, 0.002 at the end, 9 warmup steps" in stable
    assert "0.001 at most, 0.00056 at the end, one_minus_sqrt" in decay
    assert (columns[1][-1], columns[2][-1]) == ("1.0", "0.4") and total == "whole run: 1:24:00, 2.8 device-hours, given"
    causal = load_config("tiny_cpu", ["objectives=[{name: causal}]", "data.sentence_pairs=none"])
    assert re.split(r"  +", stage_lines(planned(causal))[1])[5] == "none (causal)"
    own = load_config("tiny_cpu", ["data.masking=a:b", "data.mask_unit=word"])
    assert re.split(r"  +", stage_lines(planned(own))[1])[5] == "0.15, a:b"
    drawn = load_config("tiny_cpu", ["data.masking_law={name: uniform, from: 0.1, to: 0.5}"])
    room = f"room for {drawn.stages[0].room_for_labels:.1%} of the tokens, about 614 predictions per step"
    told = re.split(r"  +", stage_lines(planned(drawn))[1])[5]
    assert told == f"uniform from 0.1 to 0.5, 0.3 on average ({room})" and 0.3 < drawn.stages[0].room_for_labels < 0.5
    assert stage_lines(planned(config))[1].endswith("-") and "--tokens-per-second" in stage_lines(planned(config))[-1]


def test_a_stage_with_its_part_of_the_runs_schedule_shows_the_highest_rate_of_that_part() -> None:
    _, first, second, _ = stage_lines(planned(load_config("bert_large_phased"), tokens_per_second=1e6))
    assert "0.0001 at most, 1e-05 at the end, 10,000 warmup steps" in first
    assert "1.01e-05 at most, 1e-10 at the end, linear" in second


def test_the_tokens_of_a_data_set_are_those_of_its_stages_and_its_share() -> None:
    mixture = "[{url: b, weight: 3}, {url: c, weight: 1}]"
    stages = f"[{{steps: 10}}, {{steps: 20, data: {{shards: {mixture}}}}}]"
    config = load_config("tiny_cpu", ["data.shards=a", "training.max_steps=null", f"training.stages={stages}"])
    assert config.data_sets == ("a", "b", "c")
    assert tokens_by_data_set(config, [100, 7, 7]) == [10 * 2048, 15 * 2048, 5 * 2048]
