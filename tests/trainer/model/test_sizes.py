from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.objectives import loss_sum
from trainer.config.families.eurobert import EuroBert
from trainer.config.families.modernbert import ModernBert
from trainer.config.model_settings import ModelSettings
from trainer.data.batch import Batch
from trainer.model import encoder
from trainer.model.attention import AttentionLayout
from trainer.model.sizes import (
    FLOPS_FORMULA,
    activation_bytes,
    flops_per_token,
    memory_per_rank,
)
from trainer.objectives.pretraining import PretrainingModel

BERT_LARGE = ModelSettings(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
MODERN_LARGE = ModelSettings(
    family="modernbert", vocab_size=50368, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
    intermediate_size=2624, max_position_embeddings=8192,
)  # fmt: skip
CONFIGS = {
    "tiny": ModelSettings(
        vocab_size=1000, hidden_size=48, num_hidden_layers=3, num_attention_heads=2, intermediate_size=100,
        max_position_embeddings=40, type_vocab_size=3, pad_vocab_size_to_multiple_of=7,
    ),
    "bert_base": ModelSettings(),
    "bert_large": BERT_LARGE,
    "modern_large": MODERN_LARGE,
    "modernbert with biases": ModelSettings(family="modernbert", bias=True),
    "modernbert with RMSNorm": ModelSettings(
        family="custom", **{**ModernBert.defaults, "norm": "rmsnorm", "embedding_norm": False, "hidden_act": "relu"}
    ),
    "eurobert": ModelSettings(family="eurobert", num_key_value_heads=4),
    "bert with sinusoids": ModelSettings(family="custom", position_embedding="sinusoidal", hidden_act="geglu"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_the_printed_formula_describes_the_computation(name):
    config = CONFIGS[name]
    names = config.model_dump() | {
        "padded_vocab_size": config.padded_vocab_size,
        "num_feed_forward_matrices": 3 if config.hidden_act in ("geglu", "swiglu") else 2,
        "num_dense_matrices": 1 if config.mlm_head == "dense" else 0,
        "key_value_size": config.hidden_size * (config.num_key_value_heads or 12) // 12,
        "num_global_layers": config.attention_kinds.count("global"),
        "num_local_layers": config.attention_kinds.count("local"),
        "local_attention": config.local_attention or 0,
        "sequence_length": 512,
        "mlm_probability": 0.3,
    }
    assert eval(FLOPS_FORMULA, names) == flops_per_token(config, 512, 0.3)  # noqa: S307 - of this project


@pytest.mark.parametrize(("sequence_length", "published"), [(128, 1.879e9), (512, 1.992e9)])
def test_operations_of_bert_large_are_the_published_ones(sequence_length, published):
    assert flops_per_token(BERT_LARGE, sequence_length) == pytest.approx(published, rel=3e-4)


def counted_flops(config: ModelSettings, model: PretrainingModel, batch: Batch, monkeypatch) -> float:
    """Operations of matrix products in forward and backward, counted by torch where attention is made of products."""
    monkeypatch.setattr(encoder, "choose_kernel", lambda *_: "masked")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss_sum(model(batch)).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"hidden_act": "geglu"},
        {"hidden_act": "swiglu", "num_key_value_heads": 1, "mlm_head": "linear", "tie_word_embeddings": False},
    ],
)
@pytest.mark.parametrize("next_sentence", [True, False])
def test_operations_are_those_that_torch_counts(
    tiny_config, make_model, make_documents, pack, monkeypatch, changes, next_sentence
):
    config = tiny_config.model_copy(update=changes)
    batch = pack(make_documents([32] * 3), 32).batch
    share = batch.masked_positions.numel() / batch.input_ids.numel()
    counted = counted_flops(config, make_model(config, next_sentence), batch, monkeypatch)
    expected = flops_per_token(config, 32, share) * 96
    pairs = flops_per_token(config, 32, share, next_sentence=True) * 96 - expected  # computed for one pair a row
    expected += pairs * batch.cls_positions.numel() / 3 if next_sentence else 0.0
    assert counted == pytest.approx(expected, rel=1e-6)


def test_local_layers_count_their_window_alone():
    length = 1024
    saved = 12 * 1024 * 18 * (length - 128)  # 18 of 28 layers see 128 positions
    everywhere = MODERN_LARGE.model_copy(update={"local_attention": None, "global_attn_every_n_layers": 1})
    assert flops_per_token(everywhere, length) - flops_per_token(MODERN_LARGE, length) == pytest.approx(saved)
    assert flops_per_token(everywhere, 128) == flops_per_token(MODERN_LARGE, 128)


NUM_PARAMETERS = 336_232_258


def memory(zero_stage: int, world_size: int = 8, device_type: str = "cuda", **options) -> dict[str, int]:
    return memory_per_rank(
        BERT_LARGE,
        num_parameters=NUM_PARAMETERS,
        zero_stage=zero_stage,
        world_size=world_size,
        micro_batch_tokens=8192,
        sequence_length=512,
        device_type=device_type,
        **options,
    )


def test_each_stage_divides_one_part_more():
    parts = ("weights", "gradients", "gradient_copy", "master_weights", "optimizer")
    per_parameter = {
        zero_stage: [round(memory(zero_stage)[part] * 8 / NUM_PARAMETERS) for part in parts] for zero_stage in range(4)
    }
    assert per_parameter == {
        0: [16, 32, 0, 32, 64],
        1: [16, 32, 0, 4, 8],
        2: [16, 4, 4, 4, 8],
        3: [2, 4, 4, 4, 8],
    }
    assert round(memory(1, precision="fp32")["gradient_copy"] * 8 / NUM_PARAMETERS) == 4


def test_one_rank_divides_nothing_and_fp32_at_stage_0_has_no_master_weights():
    assert memory(3, world_size=1)["weights"] == 2 * NUM_PARAMETERS
    fp32 = memory(0, precision="fp32")
    assert fp32["weights"] == 4 * NUM_PARAMETERS and fp32["master_weights"] == 0


def test_gloo_receives_the_gathered_weights_in_a_copy_and_nccl_does_not():
    gathered = {stage: memory(stage, device_type="cpu")["gather_copy"] for stage in range(4)}
    assert gathered == {0: 0, 1: 2 * NUM_PARAMETERS, 2: 2 * NUM_PARAMETERS, 3: 0}
    assert memory(2, device_type="cpu", precision="fp32")["gather_copy"] == 4 * NUM_PARAMETERS
    assert memory(2, device_type="cpu", world_size=1)["gather_copy"] == 0
    assert "gather_copy" not in memory(2)


def measured_activations(model: PretrainingModel, batch: Batch) -> dict[str, int]:
    """Bytes that autograd keeps of a forward, by the part that first keeps them; weights, biases of attention and
    angles, which all layers share, are left out."""
    kept: dict[int, tuple[str, int, torch.Tensor]] = {}
    part = ["embeddings"]
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known and tensor.is_floating_point() and tensor.dim() > 1:
            kept.setdefault(storage.data_ptr(), (part[-1], storage.nbytes(), tensor))
        return tensor

    def within(name: str, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: part.append(name))
        module.register_forward_hook(lambda *_: part.pop() and None)

    for layer in model.encoder.layers:
        within("attention", layer.attention)
        within("feed_forward", layer.feed_forward)
        within("norms", layer.attention_norm)
        within("norms", layer.feed_forward_norm)
    within("norms", model.encoder.final_norm)
    make_layout = encoder.attention_layout

    def note(*arguments: object) -> AttentionLayout:
        layout = make_layout(*arguments)
        shared = [layout.bias, *(layout.rotation or ())]
        known.update(tensor.untyped_storage().data_ptr() for tensor in shared if tensor is not None)
        return layout

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "attention_layout", note)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden_states = model.encoder(batch)
    assert hidden_states.requires_grad
    sizes: dict[str, int] = {}
    for name, nbytes, _ in kept.values():
        sizes[name] = sizes.get(name, 0) + nbytes
    return sizes


ACTIVATION_TOLERANCE = 0.05
"""Relative: means and deviations of the norms are left out of the closed form, and so is how short axes are padded."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "key_heads"), [("bert", None), ("modernbert", None), ("custom", 2), ("euro", 2)])
def test_activations_by_part_are_what_autograd_keeps(make_model, make_documents, pack, family, key_heads, dtype):
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "hidden_dropout_prob": 0.0}
    if family == "euro":  # with LayerNorm: of an RMSNorm the CPU keeps more, which is made of several operations there
        family, sizes = "custom", {**EuroBert.defaults, **sizes, "norm": "layernorm"}
    config = ModelSettings(
        family=family, vocab_size=61, num_hidden_layers=8, max_position_embeddings=32, num_key_value_heads=key_heads,
        **sizes,
    )  # fmt: skip
    batch = pack(make_documents([16] * 16), 16).batch
    expected = activation_bytes(config, batch.input_ids.numel(), dtype.itemsize, activation_checkpointing=False)
    measured = measured_activations(make_model(config, next_sentence=False).to(dtype), batch)
    assert measured.keys() == {part for part, size in expected.items() if size}
    for part, size in measured.items():
        assert size == pytest.approx(expected[part], rel=ACTIVATION_TOLERANCE), part


def test_checkpointing_keeps_every_blocks_input_and_one_block(tiny_config, make_model, make_documents, pack):
    config = tiny_config.model_copy(update={"num_hidden_layers": 8})
    batch = pack(make_documents([16] * 16), 16).batch
    expected = activation_bytes(config, batch.input_ids.numel(), 4, activation_checkpointing=True)
    measured = measured_activations(make_model(config, activation_checkpointing=True), batch)
    # The one block is computed again in the backward, which is not seen here.
    assert sum(measured.values()) == pytest.approx(expected["checkpoints"] + expected["embeddings"], rel=0.05)
    one = activation_bytes(config.model_copy(update={"num_hidden_layers": 1}), batch.input_ids.numel(), 4, False)
    assert expected["attention"] == one["attention"] and expected["feed_forward"] == one["feed_forward"]


def test_the_loss_keeps_one_of_four_copies_of_the_logits(tiny_config, make_model, make_documents, pack):
    """In fp32: the logits, their log-softmax, its gradient, and a copy in float32 that is none there."""
    batch = pack(make_documents([16] * 4), 16).batch
    model = make_model(tiny_config, next_sentence=False)
    kept: dict[int, int] = {}
    shape = (batch.masked_positions.numel(), tiny_config.padded_vocab_size)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == shape:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(batch)
    share = batch.masked_positions.numel() / batch.input_ids.numel()
    sizes = {
        "num_parameters": 0,
        "zero_stage": 0,
        "world_size": 1,
        "micro_batch_tokens": 64,
        "sequence_length": 64,
        "device_type": "cpu",
        "precision": "fp32",
    }
    assert 4 * sum(kept.values()) == memory_per_rank(tiny_config, **sizes, mlm_probability=share)["logits"]
