import pytest

from data_prep.base.errors import UsageError
from data_prep.base.settings import load_settings, to_yaml, validate_settings
from trainer.config.batch_arithmetic import batch_arithmetic
from trainer.config.data_settings import DataSettings
from trainer.config.model_settings import ModelSettings
from trainer.config.run_config import RunConfig, without_secrets

PRESETS = (
    """tiny_cpu small_cpu bert_base bert_large bert_large_64gpu bert_large_phased small_gpu modern_large""".split()
)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_loads_and_reads_back(preset, tmp_path):
    config = load_settings(RunConfig, preset)
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_settings(RunConfig, path) == config


def test_bert_large_64gpu_is_bert_large_with_robertas_batch_and_schedule():
    """Liu et al. 2019, table 9: 8K sequences of 512, peak 4e-4, 30k steps of warmup of 500k, no clipping."""
    config, large = (load_settings(RunConfig, name) for name in ("bert_large_64gpu", "bert_large"))
    assert config.model == large.model
    (stage,) = config.stages
    assert (stage.global_batch_tokens, stage.sequence_length) == (8192 * 512, 512)
    assert (config.max_steps, config.schedule.num_warmup_steps(config.max_steps)) == (500_000, 30_000)
    assert (config.optimizer.learning_rate, config.optimizer.beta2, config.optimizer.eps) == (4e-4, 0.98, 1e-6)
    assert (config.optimizer.beta1, config.optimizer.weight_decay, config.training.gradient_clipping) == (0.9, 0.01, 0)
    assert batch_arithmetic(stage, 64).accumulation_steps == 1


def test_bert_large_is_the_published_architecture():
    model = load_settings(RunConfig, "configs/bert_large.yaml").model
    assert (model.num_hidden_layers, model.hidden_size, model.num_attention_heads, model.intermediate_size) == (
        24,
        1024,
        16,
        4096,
    )
    assert model.padded_vocab_size == 30528


def test_modern_large_is_the_published_architecture():
    model = load_settings(RunConfig, "modern_large").model
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
    config = load_settings(RunConfig, "bert_large_phased")
    assert [stage.sequence_length for stage in config.stages] == [128, 512]
    assert config.max_steps == 1_000_000


def test_the_published_recipe_computes_no_row_for_nothing_on_8_gpus():
    stages = load_settings(RunConfig, "bert_large_phased").stages
    assert [batch_arithmetic(stage, 8).filling_share for stage in stages] == [0.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["data.sequence_length=1024", "training.micro_batch_tokens=1024"],
            "longer than model.max_position_embeddings",
        ),
        (["training.micro_batch_tokens=1000"], "not a multiple of the sequence length 64. Fix: the nearest is 1024"),
        (["training.micro_batch_tokens=4096"], "more than training.global_batch_tokens"),
        (
            ["training.batch_warmup={initial_tokens: 2048, steps: 9}"],
            "initial_tokens=2048 is not less than training.gl",
        ),
        (
            ["training.batch_warmup={initial_tokens: 512, steps: 9}"],
            "more than training.batch_warmup.initial_tokens=512",
        ),
        (["training.batch_warmup={initial_tokens: 1030, steps: 9}"], "initial_tokens=1030 is not a multiple"),
        (["training.batch_warmup={initial_tokens: 1024, steps: 9999}"], "is longer than the 3000 steps"),
        (
            ["checkpoint.keep_best=1", "checkpoint.best_metric=valid/pair_accuracy", "data.sentence_pairs=none"],
            "is never measured with data.sentence_pairs=none",
        ),
        (
            ["checkpoint.keep_best=1", "checkpoint.best_metric=valid/minimal_pairs_accuracy"],
            "is never measured without evaluation.minimal_pairs",
        ),
        (["evaluation.length_bounds=[128, 64]"], "evaluation.length_bounds=[128, 64] must rise"),
        (["model.num_attention_heads=3"], "not a multiple of model.num_attention_heads=3"),
        (["schedule.warmup_steps=5000"], "longer than the run's"),
        (["schedule.decay_steps=5"], "is for schedule.name=warmup_stable_decay"),
        (["optimizer.learning_rate=-1"], "optimizer.learning_rate=-1"),
        (["optimizer.learning_rate=.nan"], "optimizer.learning_rate"),
        (["training.gradient_clipping=-1"], "training.gradient_clipping=-1"),
        (
            ["zero.stage=0", "training.precision=bf16"],
            "accumulates gradients in bf16 in DeepSpeed. Fix: set zero.stage to 1",
        ),
        (
            ["zero.stage=0", "training.precision=fp16"],
            "accumulates gradients in fp16 in DeepSpeed. Fix: set zero.stage to 1",
        ),
        (["zero.stage=4"], "zero.stage=4"),
        (["data.mask_share=0.9", "data.random_share=0.2"], "sum to more than 1"),
        (
            ["training.stages=[{steps: 1, sequence_length: 64, micro_batch_tokens: 64, global_batch_tokens: 64}]"],
            "a stage has batch sizes of its own",
        ),
        (["trainning.seed=3"], "did you mean training"),
        (["data.sentence_pairs=next_sentence", "model.type_vocab_size=1"], "model.type_vocab_size=1. Fix: set it to 2"),
        (["model.norm=rmsnorm"], "model.family=bert does not have model.norm=rmsnorm (BERT has LayerNorm)"),
        (["model.hidden_act=geglu", "model.bias=false"], "model.bias=False (BERT has biases"),
        (["model.family=modernbert", "model.norm_position=post"], "(ModernBERT normalizes before each sublayer)"),
        (["model.family=modernbert"], "ModernBERT has neither segments nor a head for pairs"),
        (["model.family=modernbert", "model.num_attention_heads=128"], "gives heads of odd size 1"),
        (["model.family=modernbert", "model.local_attention=127"], "half of it lies on each side"),
        (["model.global_rope_theta=5"], "never used where model.position_embedding=learned"),
        (["model.family=modernbert", "model.local_attention=null"], "model.local_attention is not set"),
        (["model.family=modernbert", "model.global_attn_every_n_layers=1"], "model.local_attention=128 is never used"),
        (
            ["model.family=custom", "model.position_embedding=sinusoidal", "model.hidden_size=129"]
            + ["model.num_attention_heads=3"],
            "model.hidden_size=129 is odd",
        ),
        (["model.family=roberta"], "model.family"),
        ([f"training.max_steps={10**30}"], "must be at most 9,223,372,036,854,775,807"),
        (["model.family=[bert]"], "model.family"),
        (["training.seed={a: 1}"], 'training.seed={"a": 1} must be a valid integer'),
        (["data.shards=[]"], "data.shards is empty. Fix: name the folder"),
        (["data.shards="], "data.shards"),
        (["checkpoint.upload_to=''"], 'checkpoint.upload_to="": string should have at least 1 character'),
        (["data.num_workers=5000"], "data.num_workers=5000 must be less than or equal to 1024"),
        (["distributed.timeout_seconds=9999999999"], "distributed.timeout_seconds=9999999999"),
        (["health.spike_window_steps=19"], "health.spike_window_steps=19 must be greater than or equal to 20"),
    ],
)
def test_a_contradiction_names_setting_rule_and_remedy(overrides, said):
    with pytest.raises(UsageError) as caught:
        load_settings(RunConfig, "tiny_cpu", overrides)
    assert said in str(caught.value)


def test_a_mapping_in_place_of_a_value_names_the_setting():
    values = load_settings(RunConfig, "tiny_cpu").model_dump(mode="json")
    given = [(section, name) for section in values if isinstance(values[section], dict) for name in values[section]]
    mappings = {("training", "batch_warmup")}
    assert len(given) > 90
    for section, name in set(given) - mappings:
        with pytest.raises(UsageError) as caught:
            validate_settings(RunConfig, values | {section: values[section] | {name: {"a": 1}}}, "test")
        assert f'{section}.{name}={{"a": 1}} must be' in str(caught.value).replace(".str=", "="), name


def test_a_stage_that_contradicts_is_named_by_its_number():
    stage = "{steps: 9, sequence_length: 1024, micro_batch_tokens: 1024, global_batch_tokens: 1024}"
    with pytest.raises(UsageError, match="training.stages.0.sequence_length=1024 is longer than model.max_position"):
        load_settings(RunConfig, "bert_large_phased", [f"training.stages=[{stage}]"])


def test_a_configuration_to_keep_holds_no_secret():
    url = "https://user:hunter2@host/shards?sig=hunter2"
    config = load_settings(RunConfig, "tiny_cpu", [f"data.shards=[{{url: '{url}'}}]", "tracking.uri=sqlite:///m.db"])
    kept = without_secrets(config)
    assert kept.data.components[0].url == "https://host/shards"
    assert kept.tracking.uri == "sqlite:///m.db" and kept.training == config.training
    assert "hunter2" not in kept.model_dump_json()


def test_a_run_that_ends_early_takes_fewer_steps_in_its_stages():
    config = load_settings(RunConfig, "bert_large_phased", ["training.max_steps=900003"])
    assert config.steps_by_stage == (900_000, 3)
    assert config.longest_sequence == 512
    assert load_settings(RunConfig, "bert_large_phased", ["training.max_steps=5"]).longest_sequence == 128


def test_more_steps_than_the_stages_have_are_refused():
    with pytest.raises(UsageError, match="more than the 1000000 steps"):
        load_settings(RunConfig, "bert_large_phased", ["training.max_steps=2000000"])


def test_steps_are_required_without_stages():
    values = {
        "output_dir": "x",
        "data": {"shards": "s"},
        "training": {"global_batch_tokens": 512, "micro_batch_tokens": 512},
    }
    with pytest.raises(UsageError, match="training.max_steps is required"):
        validate_settings(RunConfig, values, "test")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"shards": [{"url": "a", "weight": 1}, {"url": "b"}]}, r"data.shards\[1\] has no weight and others have"),
        ({"shards": [{"url": "a", "weight": 1}], "sampling_alpha": 0.5}, "leave out the one or the other"),
    ],
)
def test_shares_of_a_mixture_do_not_contradict_each_other(data: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(**data)


def test_a_configuration_to_keep_shows_where_a_store_is_and_not_its_key() -> None:
    options = "storage_options={'s3://shards': {key: me, secret: hunter2, endpoint_url: 'http://store:9000'}}"
    kept = without_secrets(load_settings(RunConfig, "tiny_cpu", [options]))
    assert "http://store:9000" in kept.model_dump_json() and "hunter2" not in kept.model_dump_json()


def test_a_configuration_to_keep_hides_the_keys_of_deepspeeds_monitors() -> None:
    config = load_settings(RunConfig, "tiny_cpu", ["tracking.uri='postgresql://me:hun/ter2@db/x?passwd=ter2'"])
    monitors = {"comet": {"enabled": False, "api_key": "hunter2", "project": "birds"}, "hosts": [{"token": "hunter2"}]}
    kept = without_secrets(config.model_copy(update={"deepspeed": monitors}))
    assert kept.deepspeed is not None and kept.deepspeed["comet"]["project"] == "birds"
    assert kept.tracking.uri == "postgresql://db/x" and "ter2" not in kept.model_dump_json()
    assert without_secrets(kept) == kept, "what is kept is compared with what is given"


def test_a_configuration_of_an_earlier_release_may_have_a_url_as_output_dir() -> None:
    assert load_settings(RunConfig, "tiny_cpu", ["output_dir=file:///runs/one"]).output_dir == "file:///runs/one"


def test_an_experiment_has_a_name_that_mlflow_keeps() -> None:
    with pytest.raises(UsageError, match="tracking.experiment=.*at most 500 characters"):
        load_settings(RunConfig, "tiny_cpu", [f"tracking.experiment={'x' * 501}"])
    assert load_settings(RunConfig, "tiny_cpu", [f"tracking.experiment={'x' * 500}"])
