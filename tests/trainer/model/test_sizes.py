from __future__ import annotations

import pytest
import torch

from trainer.config import ModelSettings
from trainer.model.pretraining import PretrainingModel
from trainer.model.sizes import (
    FLOPS_FORMULA,
    PAIR_FLOPS_FORMULA,
    activation_bytes,
    counted_parameters,
    flops_per_token,
    memory_per_rank,
    num_parameters,
    parameter_table,
)

BERT_LARGE = ModelSettings(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
CONFIGS = {
    "tiny": ModelSettings(
        vocab_size=1000, hidden_size=48, num_hidden_layers=3, num_attention_heads=2, intermediate_size=100,
        max_position_embeddings=40, type_vocab_size=3, pad_vocab_size_to_multiple_of=7,
    ),
    "bert_base": ModelSettings(),
    "bert_large": BERT_LARGE,
}  # fmt: skip


def sizes_of(config: ModelSettings) -> dict[str, int]:
    return config.model_dump() | {"padded_vocab_size": config.padded_vocab_size}


@pytest.mark.parametrize("next_sentence", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_closed_form_equals_the_parameters_counted(name, next_sentence):
    config = CONFIGS[name]
    with torch.device("meta"):
        model = PretrainingModel(config, next_sentence)
    assert num_parameters(config, next_sentence) == sum(parameter.numel() for parameter in model.parameters())
    table = parameter_table(config, next_sentence)
    assert counted_parameters(model) == {row.module: row.count for row in table}
    for row in parameter_table(config, next_sentence)[:-1]:
        assert eval(row.formula, sizes_of(config)) == row.count, row.module


def test_each_module_counts_what_it_holds():
    config = CONFIGS["tiny"]
    with torch.device("meta"):
        model = PretrainingModel(config, next_sentence=True)
    embeddings = model.encoder.embeddings
    modules = {
        "embeddings.word": [embeddings.word_embeddings],
        "embeddings.position": [embeddings.position_embeddings],
        "embeddings.token_type": [embeddings.token_type_embeddings],
        "embeddings.norm": [embeddings.norm],
        "layers.attention": [layer.attention for layer in model.encoder.layers],
        "layers.feed_forward": [layer.feed_forward for layer in model.encoder.layers],
        "layers.norms": [n for layer in model.encoder.layers for n in (layer.attention_norm, layer.feed_forward_norm)],
        "mlm_head": [model.mlm_head],
        "pooler": [model.pooler],
        "next_sentence_head": [model.next_sentence_head],
    }
    table = parameter_table(config, next_sentence=True)
    assert [row.module for row in table] == [*modules, "total"]
    for row in table[:-1]:
        assert row.count == sum(p.numel() for module in modules[row.module] for p in module.parameters()), row.module


def test_bert_large_has_its_published_size():
    assert BERT_LARGE.padded_vocab_size == 30528
    assert num_parameters(BERT_LARGE, next_sentence=True) == 336_232_258
    encoder = num_parameters(BERT_LARGE, next_sentence=False) - parameter_table(BERT_LARGE, False)[-2].count
    assert encoder + 1024**2 + 1024 == 335_141_888 + 6 * 1024  # published BertModel, and 6 padded rows


@pytest.mark.parametrize(("sequence_length", "published"), [(128, 1.879e9), (512, 1.992e9)])
def test_operations_of_bert_large_are_the_published_ones(sequence_length, published):
    flops = flops_per_token(BERT_LARGE, sequence_length)
    assert flops == pytest.approx(published, rel=3e-4)
    sizes = sizes_of(BERT_LARGE) | {"sequence_length": sequence_length, "mlm_probability": 0.15}
    assert flops == pytest.approx(eval(FLOPS_FORMULA, sizes))
    pairs = flops_per_token(BERT_LARGE, sequence_length, next_sentence=True) - flops
    assert pairs == pytest.approx(eval(PAIR_FLOPS_FORMULA, sizes))


def memory(stage: int, world_size: int = 8, **options) -> dict[str, int]:
    return memory_per_rank(
        BERT_LARGE,
        stage=stage,
        world_size=world_size,
        micro_batch_tokens=8192,
        sequence_length=512,
        **options,
    )


def test_each_stage_divides_one_part_more():
    total = num_parameters(BERT_LARGE, next_sentence=False)
    parts = ("weights", "gradients", "master_weights", "optimizer")
    per_parameter = {stage: [round(memory(stage)[part] * 8 / total) for part in parts] for stage in range(4)}
    assert per_parameter == {0: [16, 32, 32, 64], 1: [16, 32, 4, 8], 2: [16, 4, 4, 8], 3: [2, 4, 4, 8]}


def test_one_rank_divides_nothing_and_fp32_at_stage_0_has_no_master_weights():
    total = num_parameters(BERT_LARGE, next_sentence=False)
    assert memory(3, world_size=1)["weights"] == 2 * total
    fp32 = memory(0, precision="fp32")
    assert fp32["weights"] == 4 * total and fp32["master_weights"] == 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_estimate_is_near_what_autograd_keeps(tiny_config, make_model, make_documents, pack, checkpointing):
    """Counted by the storages that autograd saves, without weights; the attention mask and the heads are not
    in it."""
    config = tiny_config.model_copy(update={"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 256})
    model = make_model(config, activation_checkpointing=checkpointing)
    batch = pack(make_documents([16] * 16), 16).batch
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point() and tensor.dim() > 1:
            storages[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_states = model.encoder(batch)
    assert hidden_states.requires_grad
    measured = sum(nbytes for nbytes, _ in storages.values())
    estimate = activation_bytes(config, batch.input_ids.numel(), 4, checkpointing)
    if checkpointing:  # one block more is recomputed in the backward, which is not seen here
        estimate -= activation_bytes(config.model_copy(update={"num_hidden_layers": 1}), 256, 4, False)
    assert measured == pytest.approx(estimate, rel=0.2)
