from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from trainer.config.families.modernbert import ModernBert
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.model.hugging_face import hugging_face_config, to_hugging_face
from trainer.objectives.pretraining import PretrainingModel


def initialized(config, next_sentence=True, seed=7) -> dict[str, torch.Tensor]:
    torch.manual_seed(torch.seed() % 1000)  # whatever the global generator holds must not matter
    model = PretrainingModel(config, objectives_of("next_sentence" if next_sentence else "none"))
    model.initialize(seed)
    return model.state_dict()


def test_weights_follow_from_the_seed_alone(tiny_config):
    first, second, other = (
        initialized(tiny_config),
        initialized(tiny_config),
        initialized(tiny_config, seed=8),
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    name = "encoder.layers.0.attention.qkv.weight"
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["encoder.layers.1.attention.qkv.weight"])


def test_weights_do_not_depend_on_the_heads_there_are(tiny_config):
    with_pairs, without = initialized(tiny_config), initialized(tiny_config, next_sentence=False)
    assert len(without) < len(with_pairs)
    assert all(torch.equal(without[name], with_pairs[name]) for name in without)


def test_matrices_are_normal_cut_at_two_deviations_and_the_rest_is_zero_or_one(tiny_config):
    weights = initialized(tiny_config)
    matrices = [tensor for tensor in weights.values() if tensor.dim() == 2]
    values = torch.cat([matrix.flatten() for matrix in matrices])
    assert values.abs().max() <= 0.04
    assert abs(values.std().item() - 0.02 * 0.8796) < 5e-4  # deviation of a normal cut at two deviations
    for name, tensor in weights.items():
        if tensor.dim() == 1:
            assert (tensor == (1.0 if "norm" in name and name.endswith("weight") else 0.0)).all(), name


def test_output_bias_from_frequencies_predicts_them_without_context(tiny_config):
    model = PretrainingModel(tiny_config)
    model.initialize(7)
    counts = torch.arange(tiny_config.vocab_size) * 1000
    model.set_output_bias(counts)
    predicted = model.mlm_head.bias.softmax(dim=0)
    assert torch.allclose(predicted[: len(counts)], counts / counts.sum(), atol=1e-6)
    assert 0 < predicted[len(counts) :].sum() < 1e-6


def test_depth_scaled_matrices_into_the_residual_stream_and_the_heads_are_smaller(tiny_config):
    scaled = tiny_config.model_copy(update={"initialization": "depth_scaled"})
    plain, weights = initialized(tiny_config), initialized(scaled)
    into_stream = {name for name in weights if name.endswith(("attention.output.weight", "feed_forward.output.weight"))}
    assert len(into_stream) == 2 * tiny_config.num_hidden_layers
    small = into_stream | {"mlm_head.dense.weight"}
    for name, weight in weights.items():
        factor = (2 * tiny_config.num_hidden_layers) ** -0.5 if name in small else 1.0
        torch.testing.assert_close(weight, plain[name] * factor)


def test_rms_norms_start_at_one(tiny_config):
    weights = initialized(tiny_config.model_copy(update={"norm": "rmsnorm"}))
    assert (weights["encoder.layers.0.attention_norm.weight"] == 1.0).all()


def test_modernbert_starts_with_the_deviations_that_transformers_gives_it():
    sizes = {"vocab_size": 640, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = ModelSettings(family="modernbert", intermediate_size=96, max_position_embeddings=32, **sizes)
    ours = to_hugging_face(initialized(config, next_sentence=False), config, ModernBert())
    values = hugging_face_config(config, next_sentence=False)
    torch.manual_seed(3)
    theirs = AutoModelForMaskedLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).state_dict()
    matrices = {name for name, tensor in theirs.items() if tensor.dim() == 2}
    assert len(matrices & ours.keys()) >= 4 * config.num_hidden_layers + 2
    for name in matrices & ours.keys():
        torch.testing.assert_close(ours[name].std(), theirs[name].std(), rtol=0.05, atol=0, msg=name)
