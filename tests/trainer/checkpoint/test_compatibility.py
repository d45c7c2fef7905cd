from __future__ import annotations

import pytest

from data_prep.base.errors import UsageError, UserError
from tests.support.error_codes import coded
from tests.support.toy_training import make_config
from trainer.checkpoint.compatibility import (
    CHANGES_NUMERICS,
    CHANGES_SCORES,
    check_branch,
    check_compatible,
    current_versions,
)
from trainer.checkpoint.format import DataIdentity, SavedState, TrainState
from trainer.config.custom_code import versions_of
from trainer.config.duration import Duration
from trainer.config.gradient_sum import BY_NODES, SUM_OVER_RANKS
from trainer.config.masking_law import MaskingLaw
from trainer.config.model_settings import ModelSettings
from trainer.config.run_config import RunConfig
from trainer.config.training_settings import BatchWarmup, StageSettings, TrainingSettings

NUMERICS = {"attention kernel": "by_sequence", "torch build": "2.13.0+cpu"}
UNIFORM = MaskingLaw(name="uniform")
IDENTITY = DataIdentity(manifest_digests=("digest",), tokenizer_fingerprint="fingerprint")


def saved_with(config: RunConfig, **changes) -> SavedState:
    values = {
        "format_version": 1,
        "state": TrainState(step=7),
        "config": config.model_dump(mode="json"),
        "data": IDENTITY,
        "world_size": 2,
        "zero_stage": 1,
        "shapes": {},
        "optimizer_steps": 7,
        "loss_scaler": None,
        "versions": current_versions(),
        "numerics": NUMERICS,
    }
    return SavedState(**values | changes)


def changed(config: RunConfig, section: str, **values) -> RunConfig:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


CONFIG = make_config("runs/one", 1)


BRANCH = {"run": "runs/stable", "step": 5, "stage": "decay"}


def branch_with(optimizer: str = "tests.support.toy_optimizers:lion", **settings) -> RunConfig:
    values = CONFIG.model_dump(mode="json") | {"branch": BRANCH}
    values["training"] |= {"stages": [{"name": "decay", "steps": 9}], "duration": None}
    values["optimizer"] |= {"name": optimizer} | settings
    return RunConfig.model_validate(values)


@pytest.mark.parametrize("settings", [{"beta1": 0.5}, {"beta2": 0.5}, {"eps": 0.5}, {"momentum": 0.5}])
def test_a_branch_keeps_the_optimizer_and_may_change_its_rate_and_weight_decay(settings):
    saved = saved_with(branch_with("adamw"))
    check_branch(saved, branch_with("adamw", learning_rate=0.5, weight_decay=0.5), IDENTITY)
    ((name, value),) = settings.items()
    with pytest.raises(UsageError, match=f"optimizer.{name} was .* is {value}", check=coded("incompatible-branch")):
        check_branch(saved, branch_with("adamw", **settings), IDENTITY)


def test_a_branch_keeps_the_source_of_an_optimizer_of_ones_own():
    config = branch_with()
    versions = current_versions() | versions_of(config)
    check_branch(saved_with(config, versions=versions), config, IDENTITY)
    with pytest.raises(UsageError, match="the optimizer's source", check=coded("incompatible-branch")):
        check_branch(saved_with(config, versions=versions | {"optimizer": "another"}), config, IDENTITY)


def test_a_branch_is_resumed_as_a_branch_and_another_run_is_not():
    branch = branch_with("adamw")
    assert check_compatible(saved_with(branch), branch, IDENTITY, 2, NUMERICS) == []
    alone = branch.model_copy(update={"branch": None})
    for before, after, fix in (
        (branch, alone, "add --branch-from runs/stable:5 --stage decay"),
        (alone, branch, "another output_dir"),
    ):
        with pytest.raises(UsageError, match=fix, check=coded("another-branch")):
            check_compatible(saved_with(before), after, IDENTITY, 2, NUMERICS, allow_change=True)


def test_the_same_run_has_no_differences():
    assert check_compatible(saved_with(CONFIG), CONFIG, IDENTITY, 2, NUMERICS) == []


def test_lengths_as_an_earlier_release_stored_them_are_no_difference():
    today = changed(CONFIG, "schedule", name="warmup_stable_decay", warmup=Duration(0.07, "share"))
    today = changed(today, "training", batch_warmup=BatchWarmup(initial_tokens=16, duration="500 tokens"))
    today = changed(today, "schedule", decay_duration=Duration(9))
    saved = saved_with(today)
    saved.config["training"] |= {"max_steps": 100, "batch_warmup": {"initial_tokens": 16, "steps": None, "tokens": 500}}
    saved.config["schedule"] |= {"warmup_steps": None, "warmup_tokens": None, "warmup_ratio": 0.07}
    saved.config["schedule"] |= {"decay_steps": 9, "decay_tokens": None, "decay_ratio": 0.2}
    for section, name in (("training", "duration"), ("schedule", "warmup"), ("schedule", "decay_duration")):
        del saved.config[section][name]
    assert check_compatible(saved, today, IDENTITY, 2, NUMERICS) == []


@pytest.mark.parametrize(
    ("section", "values", "line"),
    [
        ("logging", {"every_steps": 3}, "logging.every_steps was 10 and is 3"),
        ("checkpoint", {"keep_last": 5}, "checkpoint.keep_last was 10 and is 5"),
        ("zero", {"stage": 3}, "zero.stage was 1 and is 3"),
        ("data", {"num_workers": 4}, "data.num_workers was 1 and is 4"),
        ("training", {"micro_batch_tokens": 64}, "stage 0 micro_batch_tokens was 16 and is 64"),
        ("training", {"duration": Duration(200)}, "training.max_steps was 100 and is 200"),
        ("training", {"activation_checkpointing": True}, "training.activation_checkpointing was False and is True"),
    ],
)
def test_harmless_differences_are_listed(section, values, line):
    assert check_compatible(saved_with(CONFIG), changed(CONFIG, section, **values), IDENTITY, 2, NUMERICS) == [line]


@pytest.mark.parametrize(
    ("section", "values", "name"),
    [
        ("model", {"layer_norm_eps": 1e-5}, "model.layer_norm_eps was 1e-12 and is 1e-05"),
        ("training", {"seed": 9}, "training.seed was 0 and is 9"),
        ("training", {"precision": "bf16"}, "training.precision was 'fp32' and is 'bf16'"),
        ("training", {"global_batch_tokens": 256}, "stage 0 global_batch_tokens was 128 and is 256"),
        (
            "training",
            {"batch_warmup": BatchWarmup(initial_tokens=16, steps=9)},
            "stage 0 batch_warmup was None and is {'initial_tokens': 16, 'duration': '9 steps'}",
        ),
        ("data", {"mlm_probability": 0.3}, "data.mlm_probability was 0.15 and is 0.3"),
        ("data", {"masking_law": UNIFORM}, "data.masking_law.name was None and is 'uniform'"),
        ("optimizer", {"learning_rate": 1.0}, "optimizer.learning_rate was 0.0001 and is 1.0"),
        ("schedule", {"warmup": Duration(5)}, "schedule.warmup was '0 steps' and is '5 steps'"),
    ],
)
def test_dangerous_differences_are_refused_unless_allowed(section, values, name):
    other = changed(CONFIG, section, **values)
    with pytest.raises(UsageError) as raised:
        check_compatible(saved_with(CONFIG), other, IDENTITY, 2, NUMERICS)
    assert name in str(raised.value) and "--allow-change" in str(raised.value)
    assert name in check_compatible(saved_with(CONFIG), other, IDENTITY, 2, NUMERICS, allow_change=True)


def test_the_spelling_of_a_masking_rate_is_no_difference_and_another_law_of_a_stage_is_one() -> None:
    short = changed(CONFIG, "data", mlm_probability=0.5, final_mlm_probability=0.3)
    linear = MaskingLaw.model_validate({"name": "linear", "from": 0.5, "to": 0.3})
    long = changed(CONFIG, "data", mlm_probability=0.4, masking_law=linear)
    constant = changed(CONFIG, "data", masking_law=MaskingLaw(name="constant"))
    assert check_compatible(saved_with(short), long, IDENTITY, 2, NUMERICS) == []
    assert check_compatible(saved_with(CONFIG), constant, IDENTITY, 2, NUMERICS) == []
    staged = [
        changed(CONFIG, "training", stages=(StageSettings.model_validate({"steps": 100, "masking_law": law}),))
        for law in ({"name": "uniform"}, {"name": "uniform", "stratified": False})
    ]
    different = "stage 0 data.masking_law was .*'stratified': True"
    with pytest.raises(UsageError, match=different, check=coded("incompatible-change")):
        check_compatible(saved_with(staged[0]), staged[1], IDENTITY, 2, NUMERICS)


@pytest.mark.parametrize("values", [{"hidden_size": 96}, {"max_position_embeddings": 1024}, {"vocab_size": 4096}])
def test_a_change_that_no_checkpoint_fits_is_not_offered(values):
    with pytest.raises(UsageError, check=coded("incompatible-change")) as raised:
        check_compatible(saved_with(CONFIG), changed(CONFIG, "model", **values), IDENTITY, 2, NUMERICS)
    assert "--allow-change" not in str(raised.value) and "another output_dir" in str(raised.value)


def test_as_many_key_heads_as_query_heads_is_the_default_however_it_is_written():
    euro = ModelSettings(family="eurobert", num_attention_heads=4, hidden_size=32, vocab_size=70)
    runs = {
        heads: CONFIG.model_copy(update={"model": euro.model_copy(update={"num_key_value_heads": heads})})
        for heads in (None, 4, 2)
    }
    for before, after in ((None, 4), (4, None)):
        assert check_compatible(saved_with(runs[before]), runs[after], IDENTITY, 2, NUMERICS) == []
    for before, after in ((None, 2), (2, 4)):
        with pytest.raises(UsageError, match="model.num_key_value_heads was") as caught:
            check_compatible(saved_with(runs[before]), runs[after], IDENTITY, 2, NUMERICS)
        assert "--allow-change" not in str(caught.value)


def test_other_data_and_another_tokenizer_are_refused_but_another_place_is_not():
    moved = changed(CONFIG, "data", shards="s3://bucket/elsewhere")
    assert check_compatible(saved_with(CONFIG), moved, IDENTITY, 2, NUMERICS) == []
    for field, value in (("manifest_digests", ("other",)), ("tokenizer_fingerprint", "other")):
        with pytest.raises(UserError, match=field, check=coded("incompatible-change")):
            check_compatible(saved_with(CONFIG), CONFIG, IDENTITY.model_copy(update={field: value}), 2, NUMERICS)


def test_another_number_of_ranks_and_other_versions_are_harmless():
    saved = saved_with(CONFIG, world_size=5, versions=current_versions() | {"torch": "1.0"})
    lines = check_compatible(saved, CONFIG, IDENTITY, 2, NUMERICS)
    assert "world_size was 5 and is 2" in lines
    assert any(line.startswith("version of torch was '1.0'") for line in lines)
    assert len(lines) == 2


def test_changes_of_the_bits_of_a_loss_are_reported():
    saved = saved_with(CONFIG, numerics=NUMERICS | {"attention kernel": "varlen"})
    compiled = changed(CONFIG, "training", compile=True)
    lines = check_compatible(saved, compiled, IDENTITY, 2, NUMERICS)
    assert lines == [
        "training.compile was 'auto' and is True",
        "numerics: attention kernel was 'varlen' and is 'by_sequence'",
    ]
    assert all(line.startswith(CHANGES_NUMERICS) for line in lines)


@pytest.mark.parametrize(("before", "after", "is_listed"), [(2, 2, True), (2, 4, True), (1, 2, False), (2, 1, False)])
def test_another_sum_over_ranks_is_listed_where_there_was_and_is_one(before, after, is_listed):
    """A checkpoint of an earlier release has no such entry; on one rank nothing has changed."""
    now = NUMERICS | {SUM_OVER_RANKS: "fp32"}
    lines = check_compatible(saved_with(CONFIG, world_size=before), CONFIG, IDENTITY, after, now)
    line = "numerics: sum over ranks was None and is 'fp32'"
    assert (line in lines) == is_listed and line.startswith(CHANGES_NUMERICS)


@pytest.mark.parametrize(("before", "is_listed"), [(16, True), (32, False)])
def test_other_nodes_are_listed_on_the_same_number_of_ranks(before, is_listed):
    of_nodes = [NUMERICS | {SUM_OVER_RANKS: f"fp32{BY_NODES}{number} ranks"} for number in (4, 8)]
    saved = saved_with(CONFIG, world_size=before, numerics=of_nodes[0])
    lines = check_compatible(saved, CONFIG, IDENTITY, 16, of_nodes[1])
    assert any("first in nodes of 8" in line for line in lines) == is_listed


def test_one_stage_written_as_stages_is_the_same_run():
    (stage,) = CONFIG.stages
    unset = {"micro_batch_tokens": None, "global_batch_tokens": None}
    sizes = ("steps", "sequence_length", "micro_batch_tokens", "global_batch_tokens")
    item = StageSettings(**{name: getattr(stage, name) for name in sizes})
    training = TrainingSettings(**CONFIG.training.model_dump() | unset | {"stages": (item,)})
    other = CONFIG.model_copy(update={"training": training})
    assert check_compatible(saved_with(CONFIG), other, IDENTITY, 2, NUMERICS) == []


def test_a_setting_of_another_release_is_named():
    values = CONFIG.model_dump(mode="json") | {"future": 1}
    with pytest.raises(UserError, match="future", check=coded("checkpoint-of-another-release")):
        check_compatible(saved_with(CONFIG).model_copy(update={"config": values}), CONFIG, IDENTITY, 2, NUMERICS)


def test_secrets_and_addresses_that_an_earlier_release_kept_are_no_difference():
    given = CONFIG.model_copy(update={"deepspeed": {"comet": {"enabled": False, "api_key": "hunter2"}}})
    earlier = changed(given, "tracking", uri="https://***@host/x?schema=one")
    given = changed(given, "tracking", uri="https://me:hunter3@host/x?schema=one")
    assert check_compatible(saved_with(earlier), given, IDENTITY, 2, NUMERICS) == []
    other = given.model_copy(update={"deepspeed": {"comet": {"enabled": True, "api_key": "hunter2"}}})
    (line,) = check_compatible(saved_with(earlier), other, IDENTITY, 2, NUMERICS)
    assert line.startswith("deepspeed was") and "hunter" not in line


PAIRS, SOP = ({"name": "sentence_pairs", "task": task} for task in ("next_sentence", "sentence_order"))
MASKED, NEXT = {"name": "masked_lm"}, {"name": "causal"}


def with_stages(*objectives: list[dict] | None) -> RunConfig:
    values = CONFIG.model_dump(mode="json")
    values["model"] |= {"family": "bert"}
    values["training"] |= {"duration": None}
    values["training"]["stages"] = [{"steps": 5} | ({"objectives": each} if each else {}) for each in objectives]
    return RunConfig.model_validate(values)


@pytest.mark.parametrize(
    ("before", "after", "offered"),
    [
        (([MASKED], [MASKED, PAIRS]), ([MASKED, PAIRS], [MASKED, PAIRS]), True),
        (([MASKED], [MASKED, PAIRS]), (None, [MASKED, SOP]), False),
        (([MASKED], None), ([MASKED | {"weight": 0.12345678}], None), True),
        (([NEXT], [NEXT]), ([NEXT], [MASKED]), True),  # one head
    ],
)
def test_other_objectives_of_a_stage_are_another_run(before, after, offered):
    saved = saved_with(with_stages(*before))
    assert check_compatible(saved, with_stages(*before), IDENTITY, 2, NUMERICS) == []
    with pytest.raises(UsageError, match="objective", check=coded("incompatible-change")) as caught:
        check_compatible(saved, with_stages(*after), IDENTITY, 2, NUMERICS)
    assert ("--allow-change" in caught.value.fix) == offered


def taught(*objectives: dict, teacher: str = "teacher") -> RunConfig:
    return RunConfig.model_validate(
        CONFIG.model_dump(mode="json") | {"teacher": teacher, "objectives": [MASKED, *objectives]}
    )


LEARNS = {"name": "distillation"}


def test_a_teacher_is_what_its_digest_says_wherever_it_is():
    saved = saved_with(taught(LEARNS), data=IDENTITY.model_copy(update={"teacher": "a" * 64}))
    same, other = (IDENTITY.model_copy(update={"teacher": digit * 64}) for digit in "ab")
    (line,) = check_compatible(saved, taught(LEARNS, teacher="models:/a@b"), same, 2, NUMERICS)
    assert line == "teacher was 'teacher' and is 'models:/a@b'"
    with pytest.raises(UsageError, match="sha256 of the teacher was", check=coded("incompatible-change")) as caught:
        check_compatible(saved, taught(LEARNS), other, 2, NUMERICS)
    assert "--allow-change" in caught.value.fix
    (line,) = check_compatible(saved, taught(LEARNS), other, 2, NUMERICS, allow_change=True)
    assert line == f"sha256 of the teacher was '{'a' * 64}' and is '{'b' * 64}'"


@pytest.mark.parametrize(
    ("before", "after", "offered"),
    [
        ([LEARNS], [LEARNS | {"settings": {"temperature": 3.0}}], True),
        ([LEARNS], [LEARNS | {"weight": 0.25}], True),
        ([LEARNS], [LEARNS, {"name": "hidden_states"}], True),
        ([LEARNS], [LEARNS, {"name": "hidden_states", "settings": {"teacher_hidden_size": 999}}], False),
    ],
)
def test_another_way_of_learning_from_a_teacher_is_another_run(before, after, offered):
    with pytest.raises(UsageError, match="objective", check=coded("incompatible-change")) as caught:
        check_compatible(saved_with(taught(*before)), taught(*after), IDENTITY, 2, NUMERICS)
    assert ("--allow-change" in caught.value.fix) == offered


def test_a_written_default_of_distillation_is_no_change():
    written = taught(LEARNS | {"settings": {"temperature": 2}})
    assert check_compatible(saved_with(taught(LEARNS)), written, IDENTITY, 2, NUMERICS) == []


@pytest.mark.parametrize("allow_change", [False, True])
def test_another_optimizer_is_refused_because_its_states_are_missing(allow_change):
    config = changed(CONFIG, "optimizer", name="muon")
    with pytest.raises(UserError, match="=adamw, and this run has .*=muon", check=coded("another-optimizer")):
        check_compatible(saved_with(CONFIG), config, IDENTITY, 2, NUMERICS, allow_change)


def test_another_version_of_a_users_optimizer_is_another_run():
    config = changed(CONFIG, "optimizer", name="tests.support.toy_optimizers:lion")
    saved = saved_with(config, versions=current_versions() | versions_of(config))
    assert check_compatible(saved, config, IDENTITY, 2, NUMERICS) == []
    saved = saved_with(config, versions=current_versions() | {"optimizer": "earlier"})
    with pytest.raises(UserError, match="version of optimizer was 'earlier'", check=coded("incompatible-change")):
        check_compatible(saved, config, IDENTITY, 2, NUMERICS)
    assert len(check_compatible(saved, config, IDENTITY, 2, NUMERICS, allow_change=True)) == 1


def test_a_checkpoint_of_a_release_that_measured_with_its_own_masks_warns():
    saved = saved_with(CONFIG)
    for name in ("mlm_probability", "mask_unit", "seed", "sequence_length"):
        del saved.config["evaluation"][name]
    (line,) = check_compatible(saved, CONFIG, IDENTITY, 2, NUMERICS)
    assert line.startswith(CHANGES_SCORES)
    other = changed(CONFIG, "evaluation", seed=3)
    (line,) = check_compatible(saved_with(CONFIG), other, IDENTITY, 2, NUMERICS)
    assert line.startswith(CHANGES_SCORES) and line == "evaluation.seed was 0 and is 3"


def test_a_checkpoint_of_a_release_without_optimizer_name_is_adamws():
    saved = saved_with(CONFIG)
    del saved.config["optimizer"]["name"]
    assert check_compatible(saved, CONFIG, IDENTITY, 2, NUMERICS) == []
