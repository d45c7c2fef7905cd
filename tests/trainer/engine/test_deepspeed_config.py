from __future__ import annotations

import inspect

import pytest

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from trainer import load_config
from trainer.config.data_settings import DataSettings
from trainer.config.run_config import RunConfig
from trainer.config.training_settings import OptimizerSettings, StageSettings, TrainingSettings, ZeroSettings
from trainer.engine.deepspeed_config import deepspeed_config, with_deepspeed_file
from trainer.engine.deepspeed_keys import KEYS, Owned, Passed, Refused


def make_config(zero_stage: int = 1, precision: str = "bf16", offload: bool = False, **training) -> RunConfig:
    settings = {"max_steps": 10, "micro_batch_tokens": 2 * 128, "global_batch_tokens": 16 * 128} | training
    return RunConfig(
        output_dir="runs/one",
        data=DataSettings(shards="shards", sequence_length=128),
        training=TrainingSettings(precision=precision, **settings),
        optimizer=OptimizerSettings(learning_rate=1e-3),
        zero=ZeroSettings(stage=zero_stage, offload_optimizer=offload),
    )


def test_batch_sizes_are_in_rows_and_multiply_up():
    settings = deepspeed_config(make_config(), world_size=2)
    assert settings["train_micro_batch_size_per_gpu"] == 2
    assert settings["gradient_accumulation_steps"] == 4
    assert settings["train_batch_size"] == 16


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 64])
def test_batch_sizes_satisfy_deepspeed_on_every_number_of_ranks(world_size):
    settings = deepspeed_config(make_config(), world_size)
    product = settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"] * world_size
    assert settings["train_batch_size"] == product >= 16


def test_with_stages_the_first_one_counts():
    config = make_config(
        max_steps=None,
        micro_batch_tokens=None,
        global_batch_tokens=None,
        stages=(
            StageSettings(steps=5, sequence_length=128, micro_batch_tokens=256, global_batch_tokens=1024),
            StageSettings(steps=5, sequence_length=512, micro_batch_tokens=512, global_batch_tokens=1024),
        ),
    )
    assert deepspeed_config(config, 1)["train_micro_batch_size_per_gpu"] == 2


def test_gradients_are_accumulated_in_fp32_wherever_zero_divides():
    for zero_stage in (1, 2, 3):
        for precision in ("fp32", "bf16", "fp16"):
            settings = deepspeed_config(make_config(zero_stage, precision), 2)
            assert settings["data_types"] == {"grad_accum_dtype": "fp32"}
            assert settings["zero_optimization"]["stage"] == zero_stage
            enabled = [name for name in ("fp16", "bf16") if settings.get(name, {}).get("enabled")]
            assert enabled == ([] if precision == "fp32" else [precision])


def test_gradients_are_added_up_as_they_come_where_deepspeed_can():
    """BF16_Optimizer alone reads it; false leaves the reduction to DeepSpeed, after the backward."""
    assert deepspeed_config(make_config(1), 2)["bf16"] == {"enabled": True, "immediate_grad_update": True}
    assert deepspeed_config(make_config(2), 2)["bf16"] == {"enabled": True}
    assert "bf16" not in deepspeed_config(make_config(1, "fp32"), 2)
    user = {"bf16": {"immediate_grad_update": False}}
    assert deepspeed_config(make_config(1), 2, user)["bf16"]["immediate_grad_update"] is False


@pytest.mark.parametrize(
    ("zero_stage", "precision", "user", "expected"),
    [
        (1, "bf16", {}, "bf16"),
        (1, "bf16", {"communication_data_type": "fp32"}, "fp32"),
        (1, "bf16", {"bf16": {"immediate_grad_update": False}}, "fp32"),
        *((zero_stage, "bf16", {"communication_data_type": None}, "fp32") for zero_stage in (2, 3)),
        *((zero_stage, "fp16", {}, "fp32") for zero_stage in (1, 2, 3)),
        (2, "bf16", {"communication_data_type": "bf16"}, "bf16"),
    ],
)
def test_deepspeed_reduces_in_fp32_and_what_is_exchanged_travels_in_bf16(zero_stage, precision, user, expected):
    assert deepspeed_config(make_config(zero_stage, precision), 2, user)["communication_data_type"] == expected
    alone = deepspeed_config(make_config(zero_stage, precision), 1, user)
    assert alone.get("communication_data_type") == user.get("communication_data_type"), "there is no sum"


def test_stage_3_gathers_weights_for_each_use_unless_the_user_says_otherwise():
    """DeepSpeed's own 1e9 would keep all weights of any model of ours from the forward to the backward."""
    assert deepspeed_config(make_config(3), 2)["zero_optimization"]["stage3_max_reuse_distance"] == 0
    assert "stage3_max_reuse_distance" not in deepspeed_config(make_config(2), 2)["zero_optimization"]
    user = {"zero_optimization": {"stage3_max_reuse_distance": 1000}}
    assert deepspeed_config(make_config(3), 2, user)["zero_optimization"]["stage3_max_reuse_distance"] == 1000


def test_clipping_follows_the_yaml_even_where_deepspeed_has_a_default():
    assert deepspeed_config(make_config(gradient_clipping=0.0), 1)["gradient_clipping"] == 0.0


def test_offload_needs_no_compiler():
    settings = deepspeed_config(make_config(2, offload=True), 2)
    assert settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert settings["zero_force_ds_cpu_optimizer"] is False


def test_all_contradictions_are_reported_at_once_with_both_values():
    user = {
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3},
        "fp16": {"enabled": True},
        "train_batch_size": 99,
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-4}},
    }
    with pytest.raises(UsageError) as raised:
        deepspeed_config(make_config(), 2, user)
    message = str(raised.value)
    for part in ("gradient_clipping=0.5", "1.0", "zero_optimization.stage=3", "zero.stage", "fp16.enabled=True"):
        assert part in message
    for part in ("training.precision=bf16", "train_batch_size=99", "16", "optimizer.type='Lamb'", "0.001"):
        assert part in message


def test_auto_and_agreeing_values_are_taken_from_the_yaml():
    user = {
        "train_batch_size": "auto",
        "gradient_clipping": 1,
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-6}},
    }
    assert deepspeed_config(make_config(), 2, user) == deepspeed_config(make_config(), 2)


def test_an_optimizer_of_this_projects_own_is_deepspeeds_only_by_that_name():
    config = make_config()
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"name": "muon"})})
    merged = deepspeed_config(config, 2, {"optimizer": {"type": "muon", "params": {"lr": "auto"}}})
    assert merged["zero_allow_untested_optimizer"] is True and "optimizer" not in merged
    for other in ("AdamW", "Muon"):
        with pytest.raises(UsageError, match=f"optimizer.type='{other}'", check=coded("deepspeed-settings")):
            deepspeed_config(config, 2, {"optimizer": {"type": other}})


def test_the_micro_batch_of_the_yaml_agrees_where_many_ranks_need_a_smaller_one():
    for size in (2, 1):
        settings = deepspeed_config(make_config(), 16, {"train_micro_batch_size_per_gpu": size})
        assert settings["train_micro_batch_size_per_gpu"] == 1
    with pytest.raises(UsageError, match="train_micro_batch_size_per_gpu=3", check=coded("deepspeed-settings")):
        deepspeed_config(make_config(), 16, {"train_micro_batch_size_per_gpu": 3})


def test_deepspeed_settings_that_the_yaml_lacks_are_merged():
    user = {"zero_optimization": {"overlap_comm": True}, "bfloat16": {"enabled": True}, "wall_clock_breakdown": True}
    settings = deepspeed_config(make_config(2), 2, user)
    assert settings["zero_optimization"]["overlap_comm"] is True
    assert settings["zero_optimization"]["stage"] == 2
    assert settings["wall_clock_breakdown"] is True
    assert settings["bf16"] == {"enabled": True}


def test_the_configs_own_deepspeed_block_is_merged():
    config = make_config(2).model_copy(update={"deepspeed": {"fp16": {"hysteresis": 4}}})
    assert deepspeed_config(config, 1)["fp16"] == {"hysteresis": 4}


def test_an_unknown_key_is_refused_with_the_nearest_name():
    with pytest.raises(UsageError, match="gradient_cliping .*did you mean gradient_clipping"):
        deepspeed_config(make_config(), 1, {"gradient_cliping": 1.0})


@pytest.mark.parametrize(
    ("user", "part"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler=.* remove it"),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto"}}}, "remove it"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5}}}, "remove it"),
        ({"gradient_allreduce_op": "sum"}, "averaged"),
        ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"zero_optimization": {"zero_hpz_partition_size": 8}}, "zero_hpz_partition_size=8"),
        ({"bf16": {"check_grad_overflow": False}}, "non-finite"),
        ({"optimizer": {"params": {"adam_w_mode": True}}}, "adam_w_mode"),
        ({"hybrid_engine": {"enabled": True}}, "hybrid_engine"),
        ({"zero_optimization": 3}, "must be a mapping"),
        ({"comms_logger": True}, "must be a mapping"),
        ({"tensorboard": {"output_path": "logs"}}, "MLflow tracks the run"),
        (
            {"comet": {"enabled": True, "api_key": "hunter2"}},
            r"comet={'enabled': True, 'api_key': '\(hidden\)'} is not",
        ),
        ({"communication_data_type": "fp16"}, "communication_data_type='fp16' contradicts the YAML, which sets 'bf16'"),
    ],
)
def test_settings_that_break_a_contract_are_refused(user, part):
    with pytest.raises(UsageError, match=part):
        deepspeed_config(make_config(), 1, user)


@pytest.mark.parametrize("kind", [{}, {"type": "auto"}, {"type": "WarmupDecayLR"}])
def test_a_scheduler_that_is_all_auto_is_that_of_the_yaml(kind):
    """As in the files of Hugging Face's guide; WarmupDecayLR is its name of the linear schedule."""
    params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    assert deepspeed_config(make_config(), 1, {"scheduler": {**kind, "params": params}}) == deepspeed_config(
        make_config(), 1
    )


def test_sections_that_are_switched_off_are_accepted():
    user = {
        "amp": {"enabled": False},
        "wandb": {"enabled": False, "project": "birds"},
        "hybrid_engine": {"enabled": False},
        "gradient_allreduce_op": "mean",
        "zero_optimization": {"offload_param": {"device": "none"}, "zero_hpz_partition_size": 1},
        "data_efficiency": {"enabled": False},
    }
    merged = deepspeed_config(make_config(), 1, user)
    without = deepspeed_config(make_config(), 1)
    assert merged.keys() == without.keys()
    assert merged["zero_optimization"]["stage"] == without["zero_optimization"]["stage"]
    assert {name: merged[name] for name in without if name != "zero_optimization"} == {
        name: without[name] for name in without if name != "zero_optimization"
    }


def test_the_users_dict_is_left_as_it_is():
    user = {"optimizer": {"params": {"lr": "auto"}}, "bfloat16": {"enabled": True}}
    deepspeed_config(make_config(), 1, user)
    assert user == {"optimizer": {"params": {"lr": "auto"}}, "bfloat16": {"enabled": True}}


def test_every_key_that_is_refused_or_follows_from_the_yaml_is_refused_where_it_says_otherwise():
    """An odd value agrees with nothing."""
    for path, key in KEYS.items():
        if isinstance(key, Owned | Refused):
            user: object = "odd"
            for part in reversed(path.split(".")):
                user = {part: user}
            with pytest.raises(UsageError, match=f"[ ;]{path}='odd' ", check=coded("deepspeed-settings")):
                deepspeed_config(make_config(), 2, user)


EXCHANGED = {path: key.exchanged for path, key in KEYS.items() if isinstance(key, Passed) and key.exchanged is not None}


@pytest.mark.parametrize("path", EXCHANGED)
def test_settings_that_the_gradient_exchange_ignores_are_refused_only_with_it(path):
    def settings(value, zero_stage=1, precision="bf16", **section):
        user: object = value
        for part in reversed(path.split(".")):
            user = {part: user}
        return deepspeed_config(make_config(zero_stage, precision), 2, {**user, **section})

    other = 2.0 if path == "gradient_predivide_factor" else not EXCHANGED[path]
    with pytest.raises(UsageError, match=f" {path}={other} has no effect at ZeRO 1", check=coded("deepspeed-settings")):
        settings(other)
    for value in ("auto", None, EXCHANGED[path]):
        settings(value)
    settings(other, bf16={"immediate_grad_update": False})
    for zero_stage, precision in ((2, "bf16"), (3, "bf16"), (1, "fp32")):
        settings(other, zero_stage, precision)


def test_every_key_of_deepspeeds_reduction_is_read_by_the_exchange_or_in_the_list_of_keys():
    """What DeepSpeed's own optimizer of ZeRO 1 and 2 is built with: a key that a later version adds is found here."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    read = {"reduce_bucket_size", "allgather_bucket_size"}
    elsewhere = {"elastic_checkpoint"}  # of checkpoints, which are this project's own
    arguments = set(inspect.signature(DeepSpeedZeroOptimizer).parameters)
    known = {path.rpartition(".")[2] for path in KEYS}
    assert arguments & DeepSpeedZeroConfig.model_fields.keys() <= known | read | elsewhere
    assert {"overlap_comm", "round_robin_gradients", "reduce_scatter"} <= arguments


def test_the_file_stands_for_the_block(tmp_path):
    config = load_config("tiny_cpu")
    assert with_deepspeed_file(config, None) is config
    path = tmp_path / "ds.json"
    path.write_text('{"steps_per_print": 3}')
    assert with_deepspeed_file(config, str(path)).deepspeed == {"steps_per_print": 3}
    with pytest.raises(UsageError, check=coded("contradicting-options")):
        with_deepspeed_file(load_config("tiny_cpu", ["deepspeed={}"]), str(path))


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "invalid-deepspeed-file"),
        ("[1]", "invalid-deepspeed-file"),
        (None, "unreadable-config"),
        ('{"comet":' * 100_000 + "1" + "}" * 100_000, "invalid-deepspeed-file"),
        ('{"comet":' + "[" * 100 + "]" * 100 + "}", "invalid-deepspeed-file"),
        ('{"gradient_predivide_factor": NaN}', "invalid-deepspeed-file"),
        (r'{"comet": {"project": "\ud800"}}', "invalid-deepspeed-file"),
    ],
    ids=["torn", "list", "missing", "too deep to read", "too deep to write", "NaN", "surrogate"],
)
def test_what_is_no_json_object_is_refused(text, code, tmp_path):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, check=coded(code)):
        with_deepspeed_file(load_config("tiny_cpu"), str(path))
