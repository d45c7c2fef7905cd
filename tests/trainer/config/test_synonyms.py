import re

import pytest

from data_prep.base.errors import UsageError
from data_prep.config.preparation_config import PreparationConfig
from tests.generated_pages import names_of_other_projects
from tests.support.error_codes import coded
from tests.support.settings import names_of, settings_of
from trainer.config.run_config import RunConfig, load_config
from trainer.config.synonyms import _IN_STAGE, explain_synonym, synonyms

SETTINGS = set(names_of(RunConfig)) | set(names_of(PreparationConfig))
REQUIRED = ["output_dir=x", "data.shards=y", "training.max_steps=1"]


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("lr=1e-4", "optimizer.learning_rate=1e-4"),
        ("learning_rate=3e-5", "optimizer.learning_rate=3e-5"),
        ("training.learning_rate=3e-5", "optimizer.learning_rate=3e-5"),
        ("per_device_train_batch_size=32", "training.micro_batch_tokens=4096 (32 rows x data.sequence_length=128"),
        ("micro_batch_size=8", "training.micro_batch_tokens=1024 (8 rows"),
        ("micro_batch_size=[8]", "N rows are N x data.sequence_length tokens"),
        ("global_batch_size=256", "training.global_batch_tokens=32768 (256 rows"),
        ("training.warmup=10", "set schedule.warmup to 10 (steps)"),
        ("trainig.max_steps=10", "Fix: write training.max_steps=10"),
        ("batch_size=64", "training.micro_batch_tokens"),
        ("training.batch_size=64", "training.global_batch_tokens"),
        ("gradient_accumulation_steps=4", "4 x training.micro_batch_tokens x (number of ranks)"),
        ("num_train_epochs=3", 'write training.duration="3 epochs"'),
        ("warmup_steps=500", "schedule.warmup_steps=500 (steps)"),
        ("warmup_ratio=0.1", "schedule.warmup_ratio=0.1 (share"),
        ("bf16=true", "write training.precision=bf16"),
        ("fp16=true", "write training.precision=fp16"),
        ("max_grad_norm=1.0", "training.gradient_clipping=1.0"),
        ("weight_decay=0.1", "optimizer.weight_decay=0.1"),
        ("max_seq_length=128", "data.sequence_length=128 (tokens"),
        ("save_steps=500", "checkpoint.every_steps=500"),
        ("logging_steps=10", "logging.every_steps=10"),
        ("eval_steps=100", "evaluation.every_steps=100"),
        ("seed=7", "training.seed=7"),
        ("train_iters=1000", "training.max_steps=1000"),
        ("lr_decay_style=cosine", "schedule.name"),
        ("tensorboard_dir=tb", "tracking.uri"),
        ("train_file=corpus.txt", "clozeworks shards --input TEXT"),
        ("min_lr=1e-5", "schedule.final_ratio to 1e-5 / optimizer.learning_rate"),
        ("bf16=false", "set training.precision to auto, fp32, bf16 or fp16"),
        ("gradient_checkpointing=False", "write training.activation_checkpointing=false"),
        ("whole_word_mask=false", "write data.mask_unit=token"),
        ("learningrate=1e-4", "optimizer.learning_rate=1e-4"),
        ("max_tokens=4096", "set training.micro_batch_tokens (tokens per forward pass of one rank)"),
        ("max_sentences=8", "training.micro_batch_tokens=1024 (8 rows"),
        ("update_freq=4", "4 x training.micro_batch_tokens x (number of ranks)"),
        ("max_update=1000", "training.max_steps=1000"),
        ("warmup_updates=10", "schedule.warmup_steps=10"),
        ("tokens_per_sample=128", "data.sequence_length=128"),
        ("steps=10", "training.max_steps=10"),
        ("training.tokens=10000", 'training.duration="10000 tokens"'),
        ("encoder_embed_dim=768", "model.hidden_size=768"),
        ("checkpoint_dir=runs/x", "output_dir=runs/x"),
        ("zero_optimization.stage=2", "set zero.stage to 0, 1, 2 or 3"),
        ("distributed.distributed_timeout_minutes=30", "distributed.timeout_seconds to 30 x 60"),
    ],
)
def test_a_name_of_another_project_is_answered_with_our_setting_and_its_unit(typed, answer):
    with pytest.raises(UsageError, check=coded("unknown-setting")) as caught:
        settings_of(RunConfig, *REQUIRED, "data.sequence_length=128", typed)
    assert answer in str(caught.value)
    assert "did you mean" not in str(caught.value) or "trainig" in typed


@pytest.mark.parametrize("length", ["seq_length=128", "data.max_seq_length=128", "training.max_length=128"])
def test_sequences_are_converted_with_the_length_that_is_given_under_another_name(length):
    with pytest.raises(UsageError, check=coded("unknown-setting")) as caught:
        settings_of(RunConfig, *REQUIRED, length, "micro_batch_size=16")
    assert "data.sequence_length=128 (" in str(caught.value)
    assert "training.micro_batch_tokens=2048 (16 rows x data.sequence_length=128" in str(caught.value)


def test_two_lengths_leave_the_conversion_to_the_reader():
    with pytest.raises(UsageError, check=coded("unknown-setting")) as caught:
        settings_of(RunConfig, *REQUIRED, "data.sequence_length=64", "seq_len=128", "micro_batch_size=16")
    assert "16 rows are 16 x data.sequence_length tokens" in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("masking_rate: 0.2", "write training.stages.1.mlm_probability=0.2 (share)"),
        ("shards: w/x", "write training.stages.1.data.shards=w/x (in YAML: `data: {shards: w/x}`"),
        ("max_steps: 9", "write training.stages.1.steps=9 ("),
        ("rope_theta: 160000", "write training.stages.1.global_rope_theta=160000 ("),
        ("lr_scheduler_type: cosine", "set training.stages.1.schedule.name to linear"),
        ("micro_batch_size: 4", "training.stages.1.micro_batch_tokens=1024 (4 rows x training.stages.1."),
        ("seed: 4", "write training.seed=4 "),
    ],
)
def test_a_name_inside_a_stage_is_answered_with_the_setting_of_that_stage(typed, answer):
    stages = f"training.stages=[{{steps: 1}}, {{steps: 1, sequence_length: 256, {typed}}}]"
    with pytest.raises(UsageError, check=coded("unknown-setting")) as caught:
        settings_of(RunConfig, *REQUIRED[:2], stages)
    assert answer in str(caught.value)


def test_every_setting_of_a_stage_that_an_answer_names_exists():
    of_stage = {name for name in SETTINGS if name.startswith("training.stages.")}
    assert {f"training.stages.{name}" for name in _IN_STAGE.values()} <= of_stage
    assert _IN_STAGE.keys() <= SETTINGS


@pytest.mark.parametrize(
    ("typed", "code", "answer"),
    [
        ("schedule.name=constant", "invalid-setting", "write schedule.name=warmup_stable_decay"),
        ("schedule.name=wsd", "invalid-setting", "write schedule.name=warmup_stable_decay"),
        ("optimizer.name=adam", "unknown-optimizer", "set optimizer.name=adamw."),
        ("optimizer=adam", "invalid-setting", "set optimizer.name to adamw"),
        ("deepspeed=ds.json", "invalid-setting", "write --deepspeed_config ds.json"),
        ("model=bert", "invalid-setting", "write model.SETTING=value"),
        ("checkpoint.steps=10", "unknown-setting", "checkpoint.every_steps"),
        ("optimizer.name=adamw_torch", "unknown-optimizer", "set optimizer.name=adamw."),
        (
            "training.stages=[{name: 2 late, steps: 1}]",
            "invalid-setting",
            "begin with a letter and contain only letters",
        ),
    ],
)
def test_a_wrong_value_of_a_name_is_answered_in_words(typed, code, answer):
    with pytest.raises(UsageError, check=coded(code)) as caught:
        settings_of(RunConfig, *REQUIRED, typed)
    assert answer in str(caught.value)


def test_the_masking_rate_is_the_mlm_probability():
    assert explain_synonym("data.masking_rate", 0.3) == "write data.mlm_probability=0.3 (share)"


def test_every_setting_that_an_answer_names_exists():
    for synonym in synonyms():
        named = re.findall(r"\b[a-z_]+\.[a-z_0-9]+\b", synonym.setting + " " + synonym.advice)
        for name in named:
            assert name in SETTINGS or name.endswith((".py", ".db")), (synonym.names, name)


def test_a_name_means_one_thing():
    names = [name for synonym in synonyms() for name in synonym.names]
    assert len(names) == len(set(names))


def test_a_look_alike_with_another_meaning_is_not_suggested():
    for name in (
        "save_total",
        "tokens_seen",
        "model_path",
        "dampening",
        "betas",
        "modle",
        "every_steps",
        "length_bound",
    ):
        with pytest.raises(UsageError, check=coded("unknown-setting")) as caught:
            settings_of(RunConfig, *REQUIRED, f"{name}=1")
        assert "did you mean" not in str(caught.value), str(caught.value)


def test_options_with_dashes_and_other_values_than_scalars_are_understood():
    assert explain_synonym("--learning-rate", "1e-4") == "write optimizer.learning_rate=1e-4 (peak learning rate)"
    assert explain_synonym("optimizer.lr", {"a": 1}) == "write optimizer.learning_rate=N (peak learning rate)"
    assert explain_synonym("--deepspeed", "ds.json") == "write --deepspeed_config ds.json (DeepSpeed JSON)"
    assert explain_synonym("nonsense", 1) is None


def test_a_common_name_on_the_page_means_what_its_error_says():
    _, _, *lines = names_of_other_projects()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert len(rows) >= 20 and all(len(row) == 3 for row in rows)
    for _, name, here in rows:
        error = explain_synonym(name.strip("`"), "1")
        assert error is not None
        meant = re.findall(r"`([^`]+)`", here)
        assert meant[0] in error if meant else error.startswith(here), (name, here, error)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("stages.decay.tokens=5", "Fix: write training.stages.decay.tokens=5"),
        ("training.stage.decay.tokens=5", "Fix: write training.stages.decay.tokens=5"),
        ("stage.decay.data.shards=x", "Fix: write training.stages.decay.data.shards=x"),
        ("training.decay.duration=5e9 tokens", "Fix: write 'training.stages.decay.duration=5e9 tokens'"),
        ("decay.mlm_probability=0.1", "Fix: write training.stages.decay.mlm_probability=0.1"),
        ("training.stages.Decay.tokens=5", "(did you mean decay?)"),
        ("training.stages.deca.tokens=5", "(did you mean decay?)"),
        ("training.stages.decay.tokns=5", "Fix: write training.stages.2.tokens=5"),
    ],
)
def test_a_setting_of_one_stage_is_answered_with_its_path(typed, answer):
    with pytest.raises(UsageError, match=re.escape(answer)):
        load_config("modernbert_base", [typed])


def test_a_file_replaces_a_duration_of_its_base_under_any_name(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("base: bert_large\nschedule: {warmup_steps: 70}\ntraining: {duration: 5e9 tokens}\n")
    config = load_config(path)
    assert config.stages[0].schedule.warmup.steps == 70
    assert config.max_steps == -(-5_000_000_000 // config.training.global_batch_tokens)
    both = ["training.max_steps=90"]
    assert (load_config(path, both).max_steps, load_config("bert_large", both).max_steps) == (90, 90)
