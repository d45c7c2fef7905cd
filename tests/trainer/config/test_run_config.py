import pytest

from data_prep.base.errors import UsageError
from tests.support.error_codes import coded
from tests.support.settings import validated, yaml_of
from trainer import load_config
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.data_settings import DataSettings
from trainer.config.model_settings import ModelSettings
from trainer.config.run_config import RunConfig, without_secrets

PRESETS = (
    """tiny_cpu small_cpu bert_base bert_large bert_large_64gpu bert_large_phased small_gpu modern_large""".split()
)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_loads_and_reads_back(preset, tmp_path):
    config = load_config(preset)
    path = tmp_path / "again.yaml"
    path.write_text(yaml_of(config), encoding="utf-8")
    assert load_config(path) == config


def test_bert_large_64gpu_is_bert_large_with_robertas_batch_and_schedule():
    """Liu et al. 2019, table 9: 8K sequences of 512, peak 4e-4, 30k steps of warmup of 500k, no clipping."""
    config, large = (load_config(name) for name in ("bert_large_64gpu", "bert_large"))
    assert config.model == large.model
    (stage,) = config.stages
    assert (stage.global_batch_tokens, stage.sequence_length) == (8192 * 512, 512)
    assert (config.max_steps, config.schedule.warmup.steps) == (500_000, 30_000)
    assert (config.optimizer.learning_rate, config.optimizer.beta2, config.optimizer.eps) == (4e-4, 0.98, 1e-6)
    assert (config.optimizer.beta1, config.optimizer.weight_decay, config.training.gradient_clipping) == (0.9, 0.01, 0)
    assert batch_arithmetic(stage, 64).accumulation_steps == 1


def test_bert_large_is_the_published_architecture():
    model = load_config("configs/bert_large.yaml").model
    assert (model.num_hidden_layers, model.hidden_size, model.num_attention_heads, model.intermediate_size) == (
        24,
        1024,
        16,
        4096,
    )
    assert model.padded_vocab_size == 30528


def test_modern_large_is_the_published_architecture():
    model = load_config("modern_large").model
    assert (model.num_hidden_layers, model.hidden_size, model.intermediate_size) == (28, 1024, 2624)
    assert model.attention_kinds[:7] == ("global", "local", "local", "global", "local", "local", "global")
    assert (model.local_attention, model.global_rope_theta, model.local_rope_theta) == (128, 160_000, 10_000)
    assert (model.position_embedding, model.norm_position, model.hidden_act) == ("rotary", "pre", "geglu")
    assert not model.bias and model.type_vocab_size == 0 and model.layer_norm_eps == 1e-5


def test_a_family_brings_its_options_and_given_ones_count_before_them():
    assert ModelSettings(family="modernbert", local_attention=64).local_attention == 64
    assert ModelSettings(family="modernbert").hidden_act == "geglu"
    assert ModelSettings(family="custom").model_dump(exclude={"family"}) == ModelSettings().model_dump(
        exclude={"family"}
    )


def test_stages_are_the_runs_steps_and_lengths():
    config = load_config("bert_large_phased")
    assert [stage.sequence_length for stage in config.stages] == [128, 512]
    assert config.max_steps == 1_000_000


def test_the_published_recipe_computes_no_row_for_nothing_on_8_gpus():
    stages = load_config("bert_large_phased").stages
    assert [batch_arithmetic(stage, 8).padding_share for stage in stages] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "code", "shown"),
    [
        (
            ["data.sequence_length=1024", "training.micro_batch_tokens=1024"],
            "sequence-too-long",
            "data.sequence_length=1024 exceeds model.max_position_embeddings=",
        ),
        (["data.sequence_length=4"], "sequence-too-short", "data.sequence_length=4"),
        (
            ["training.micro_batch_tokens=1000"],
            "tokens-not-whole-rows",
            "training.micro_batch_tokens=1000 is not a multiple of data.sequence_length=64. Fix: set "
            "training.micro_batch_tokens=1024",
        ),
        (
            ["training.micro_batch_tokens=4096"],
            "micro-batch-exceeds-global-batch",
            "training.micro_batch_tokens=4096 exceeds training.global_batch_tokens=2048",
        ),
        (
            ["training.batch_warmup={initial_tokens: 2048, steps: 9}"],
            "batch-warmup-without-growth",
            "training.batch_warmup.initial_tokens=2048",
        ),
        (
            ["training.batch_warmup={initial_tokens: 512, steps: 9}"],
            "micro-batch-exceeds-global-batch",
            "exceeds training.batch_warmup.initial_tokens=512",
        ),
        (
            ["training.batch_warmup={initial_tokens: 1030, steps: 9}"],
            "tokens-not-whole-rows",
            "training.batch_warmup.initial_tokens=1030",
        ),
        (
            ["training.batch_warmup={initial_tokens: 1024, steps: 9999}"],
            "batch-warmup-longer-than-stage",
            "training.batch_warmup.steps=9999 exceeds the 3000 steps of the run",
        ),
        (
            ["checkpoint.keep_best=1", "checkpoint.best_metric=valid/pair_accuracy", "data.sentence_pairs=none"],
            "best-metric-not-measured",
            "data.sentence_pairs=none",
        ),
        (
            ["checkpoint.keep_best=1", "checkpoint.best_metric=valid/minimal_pairs_accuracy"],
            "best-metric-not-measured",
            "evaluation.minimal_pairs",
        ),
        (
            ["registry={name: a, promote_to: b, only_if: 'valid/mlm_loss < b and valid/minimal_pairs_accuracy > 0.5'}"],
            "gate-not-measured",
            "registry.only_if compares valid/minimal_pairs_accuracy",
        ),
        (
            ["registry={name: a, promote_to: b, only_if: 'suite/own/average > b'}"],
            "gate-not-measured",
            "evaluation.suite",
        ),
        (["evaluation.length_bounds=[128, 64]"], "length-bounds-not-ascending", "evaluation.length_bounds=[128, 64]"),
        (["model.num_attention_heads=3"], "heads-do-not-divide-hidden-size", "model.num_attention_heads=3"),
        (["schedule.warmup_steps=5000"], "schedule-longer-than-run", "schedule.warmup_steps=5000"),
        (["schedule.decay_steps=5"], "setting-without-effect", "schedule.decay_steps=5"),
        (
            ["schedule.decay_ratio=0.2", "schedule.decay=cosine"],
            "setting-without-effect",
            "Fix: set schedule.decay_ratio=0 schedule.decay=linear, or schedule.name=warmup_stable_decay",
        ),
        (["optimizer.learning_rate=-1"], "invalid-setting", "optimizer.learning_rate=-1 must be greater than 0"),
        (["checkpoint.average_last=3"], "average-of-removed-checkpoints", "checkpoint.keep_last=2"),
        (["optimizer.name=adam"], "unknown-optimizer", "adam"),
        (["optimizer.learning_rate=.nan"], "invalid-setting", "optimizer.learning_rate=NaN"),
        (["training.gradient_clipping=-1"], "invalid-setting", "training.gradient_clipping=-1 must be at least 0"),
        (["zero.stage=0", "training.precision=bf16"], "zero-stage-0-in-half-precision", "training.precision=bf16"),
        (["zero.stage=0", "training.precision=fp16"], "zero-stage-0-in-half-precision", "training.precision=fp16"),
        (["zero.stage=0", "zero.offload_optimizer=true"], "offload-needs-zero", "zero.stage=0"),
        (["zero.stage=4"], "invalid-setting", "zero.stage=4 must be one of 0, 1, 2 or 3"),
        (["data.mask_share=0.9", "data.random_share=0.2"], "mask-shares-exceed-one", "data.random_share=0.2"),
        (["trainning.seed=3"], "unknown-setting", "did you mean training"),
        (
            ["data.sentence_pairs=next_sentence", "model.type_vocab_size=1"],
            "pairs-without-token-types",
            "model.type_vocab_size=1. Fix: set model.type_vocab_size=2",
        ),
        (["model.norm=rmsnorm"], "option-not-of-family", "model.norm=rmsnorm (BERT has LayerNorm)"),
        (["model.hidden_act=geglu", "model.bias=false"], "option-not-of-family", "model.bias=False (BERT has biases"),
        (["model.family=modernbert", "model.norm_position=post"], "option-not-of-family", "model.norm_position=post"),
        (["model.family=modernbert"], "pairs-without-token-types", "set data.sentence_pairs=none"),
        (["model.family=roberta"], "pairs-without-token-types", "has one token type and no head for sentence pairs"),
        (["model.family=xlm-roberta", "model.hidden_act=relu"], "option-not-of-family", "XLM-RoBERTa's head has GELU"),
        (["model.family=modernbert", "model.num_attention_heads=128"], "odd-head-size", " is 1."),
        (["model.family=custom", "model.num_key_value_heads=3"], "key-value-heads-do-not-divide-heads", "heads=3. Fix"),
        (
            ["model.family=custom", "model.decoder_bias=false", "model.output_bias=frequencies"],
            "setting-without-effect",
            "which model.decoder_bias=false leaves out",
        ),
        (["model.family=modernbert", "model.local_attention=127"], "odd-local-attention", "model.local_attention=128"),
        (["model.global_rope_theta=5"], "setting-without-effect", "model.global_rope_theta=5"),
        (
            ["model.family=modernbert", "model.local_attention=null"],
            "local-attention-not-set",
            "model.global_attn_every_n_layers=3",
        ),
        (
            ["model.family=modernbert", "model.global_attn_every_n_layers=1"],
            "setting-without-effect",
            "model.local_attention=128",
        ),
        (
            ["model.family=custom", "model.position_embedding=sinusoidal", "model.hidden_size=129"]
            + ["model.num_attention_heads=3"],
            "odd-hidden-size",
            "got 129",
        ),
        (["model.family=electra"], "invalid-setting", "model.family"),
        ([f"model.hidden_size={2**40}"], "invalid-setting", "must be at most 131,072"),
        (["model.num_hidden_layers=1000000000"], "invalid-setting", "must be at most 1,000"),
        ([f"model.vocab_size={10**30}"], "invalid-setting", "must be at most 4,294,967,296"),
        ([f"training.max_steps={10**30}"], "invalid-setting", "must be at most 9,223,372,036,854,775,807"),
        (["model.family=[bert]"], "invalid-setting", "model.family"),
        (["training.seed={a: 1}"], "invalid-setting", 'training.seed={"a": 1} must be an integer'),
        (["data.shards=[]"], "empty-shards", "data.shards"),
        (["data.shards="], "empty-shards", "data.shards"),
        (["checkpoint.upload_to=''"], "invalid-setting", 'checkpoint.upload_to="" must be a non-empty string'),
        (["data.num_workers=5000"], "invalid-setting", "data.num_workers=5000 must be at most 1,024"),
        (["distributed.timeout_seconds=9999999999"], "invalid-setting", "distributed.timeout_seconds=9999999999"),
        (["health.spike_window_steps=19"], "invalid-setting", "health.spike_window_steps=19 must be at least 20"),
        (
            ["init_from=x", "model.output_bias=frequencies"],
            "output-bias-with-init-from",
            "model.output_bias=frequencies",
        ),
    ],
)
def test_a_contradiction_states_setting_value_fix_and_code(overrides, code, shown):
    with pytest.raises(UsageError, check=coded(code)) as caught:
        load_config("tiny_cpu", overrides)
    assert shown in str(caught.value) and caught.value.fix


def test_a_mapping_in_place_of_a_value_names_the_setting():
    values = load_config("tiny_cpu").model_dump(mode="json")
    given = [(section, name) for section in values if isinstance(values[section], dict) for name in values[section]]
    mappings = {("training", "batch_warmup"), ("data", "masking_law")}
    assert len(given) > 90
    for section, name in set(given) - mappings:
        with pytest.raises(UsageError, check=coded("invalid-setting")) as caught:
            validated(RunConfig, values | {section: values[section] | {name: {"a": 1}}})
        assert f'{section}.{name}={{"a": 1}} must be' in str(caught.value).replace(".str=", "="), name


def test_a_stage_that_contradicts_is_named_by_its_number():
    stage = "{steps: 9, sequence_length: 1024, micro_batch_tokens: 1024, global_batch_tokens: 1024}"
    with pytest.raises(UsageError, check=coded("sequence-too-long"), match="training.stages.0.sequence_length=1024"):
        load_config("bert_large_phased", [f"training.stages=[{stage}]"])


def test_a_configuration_to_keep_contains_no_secret():
    url = "https://user:hunter2@host/shards?sig=hunter2"
    config = load_config("tiny_cpu", [f"data.shards=[{{url: '{url}'}}]", "tracking.uri=sqlite:///m.db"])
    kept = without_secrets(config)
    assert kept.data.components[0].url == "https://host/shards"
    assert kept.tracking.uri == "sqlite:///m.db" and kept.training == config.training
    assert "hunter2" not in kept.model_dump_json()


def test_a_run_that_ends_early_takes_fewer_steps_in_its_stages():
    config = load_config("bert_large_phased", ["training.max_steps=900003"])
    assert [stage.taken_steps for stage in config.stages] == [900_000, 3]
    assert config.longest_sequence == 512
    assert load_config("bert_large_phased", ["training.max_steps=5"]).longest_sequence == 128


def test_more_steps_than_the_stages_have_are_refused():
    with pytest.raises(UsageError, check=coded("more-steps-than-stages"), match="1000000 steps"):
        load_config("bert_large_phased", ["training.max_steps=2000000"])


def test_steps_are_required_without_stages():
    values = {
        "output_dir": "x",
        "data": {"shards": "s"},
        "training": {"global_batch_tokens": 512, "micro_batch_tokens": 512},
    }
    with pytest.raises(UsageError, check=coded("missing-setting"), match="training.duration is required"):
        validated(RunConfig, values)


@pytest.mark.parametrize(
    ("data", "code", "shown"),
    [
        ({"shards": [{"url": "a", "weight": 1}, {"url": "b"}]}, "weight-of-some-components", "data.shards[1]"),
        ({"shards": [{"url": "a", "weight": 1}], "sampling_alpha": 0.5}, "sampling-alpha-with-weights", "=0.5"),
    ],
)
def test_shares_of_a_mixture_do_not_contradict_each_other(data: dict, code: str, shown: str) -> None:
    with pytest.raises(UsageError, check=coded(code)) as caught:
        validated(DataSettings, data)
    assert shown in str(caught.value)


def test_a_configuration_to_keep_shows_where_a_store_is_and_not_its_key() -> None:
    options = "storage_options={'s3://shards': {key: me, secret: hunter2, endpoint_url: 'http://store:9000'}}"
    kept = without_secrets(load_config("tiny_cpu", [options]))
    assert "http://store:9000" in kept.model_dump_json() and "hunter2" not in kept.model_dump_json()


def test_a_configuration_to_keep_hides_the_keys_of_deepspeeds_monitors() -> None:
    config = load_config("tiny_cpu", ["tracking.uri='postgresql://me:hun/ter2@db/x?passwd=ter2'"])
    monitors = {"comet": {"enabled": False, "api_key": "hunter2", "project": "birds"}, "hosts": [{"token": "hunter2"}]}
    kept = without_secrets(config.model_copy(update={"deepspeed": monitors}))
    assert kept.deepspeed is not None and kept.deepspeed["comet"]["project"] == "birds"
    assert kept.tracking.uri == "postgresql://db/x" and "ter2" not in kept.model_dump_json()
    assert without_secrets(kept) == kept, "what is kept is compared with what is given"


def test_a_configuration_of_an_earlier_release_may_have_a_url_as_output_dir() -> None:
    assert load_config("tiny_cpu", ["output_dir=file:///runs/one"]).output_dir == "file:///runs/one"


def test_an_experiment_has_a_name_that_mlflow_keeps() -> None:
    with pytest.raises(UsageError, match="tracking.experiment=.*at most 500 characters"):
        load_config("tiny_cpu", [f"tracking.experiment={'x' * 501}"])
    assert load_config("tiny_cpu", [f"tracking.experiment={'x' * 500}"])
