from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.objectives import all_objectives, loss_sum
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import objectives_of
from trainer.model import encoder
from trainer.objectives.pretraining import PretrainingModel, num_parameters, parameter_counts


def gradients(model, batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_sum(model(batch)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


COMBINATIONS = {
    "position_embedding": ["learned", "sinusoidal", "rotary", "none"],
    "norm": ["layernorm", "rmsnorm"],
    "norm_position": ["post", "pre"],
    "embedding_norm": [True, False],
    "hidden_act": ["gelu", "geglu", "swiglu", "relu"],
    "num_key_value_heads": [None, 1, 2],
    "bias": [True, False],
    "type_vocab_size": [0, 2],
    "window_and_period": [(None, 1), (4, 2), (64, 3)],
}


@pytest.mark.long
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    options=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in COMBINATIONS.items()}),
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=5),
    in_training_with_dropout_0=st.booleans(),
)
def test_a_documents_hidden_states_are_the_same_alone_and_packed(
    tiny_config, make_model, make_documents, pack, options, lengths, in_training_with_dropout_0
):
    window, period = options.pop("window_and_period")
    sizes = tiny_config.model_dump(include={"vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"})
    config = ModelSettings(
        family="custom",
        **sizes,
        **options,
        num_hidden_layers=3,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        local_attention=window,
        global_attn_every_n_layers=period,
    )
    documents = make_documents(lengths)
    model = make_model(config).train(in_training_with_dropout_0)
    packed = pack(documents, 16)
    together = model.encoder(packed.batch)
    assert together.isfinite().all()
    for document, start in zip(documents, packed.starts, strict=True):
        length = len(document.input_ids)
        alone = model.encoder(pack([document], 16).batch)
        scale = alone.abs().max().item()
        torch.testing.assert_close(together[start : start + length], alone[:length], rtol=1e-5, atol=1e-5 * scale)


def test_without_positions_an_encoder_does_not_see_the_order(tiny_config, make_model, make_documents, pack):
    document = replace(make_documents([12])[0], token_type_ids=[0] * 12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = replace(document, input_ids=[document.input_ids[n] for n in order])
    for positions, is_blind in (("none", True), ("learned", False), ("rotary", False)):
        config = ModelSettings(**{**dict(tiny_config), "family": "custom", "position_embedding": positions})
        encode = make_model(config).encoder
        states, others = (encode(pack([each], 16).batch)[:12] for each in (document, shuffled))
        assert torch.allclose(others, states[order], rtol=1e-4, atol=1e-4) == is_blind, positions


def test_an_order_blind_model_learns(tiny_config, make_documents, pack):
    config = ModelSettings(**{**dict(tiny_config), "family": "custom", "position_embedding": "none"})
    model = PretrainingModel(config, objectives_of("none"))
    model.initialize(0)
    assert not [name for name, _ in model.named_parameters() if "position" in name]
    batch = pack(make_documents([9, 6, 12]), 16).batch
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = loss_sum(model(batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_both_cpu_ways_of_attention_give_the_same_model(modern_config, make_model, make_documents, pack, monkeypatch):
    batch = pack(make_documents([9, 6, 30, 16, 1]), 32).batch
    model = make_model(modern_config)
    results = []
    for kernel in ("by_sequence", "masked"):
        monkeypatch.setattr(encoder, "choose_kernel", lambda *_, kernel=kernel: kernel)
        results.append(gradients(model, batch))
    for name, gradient in results[0].items():
        torch.testing.assert_close(gradient, results[1][name], rtol=1e-5, atol=1e-5 * gradient.abs().max().item())


def test_losses_are_sums_over_labels_other_than_ignored(tiny_config, make_model, make_documents, pack):
    batch = pack(make_documents([9, 6, 12]), 16).batch
    model = make_model(tiny_config)
    output, predictions = model(batch), model.predict(batch)
    expected = -F.log_softmax(predictions.mlm_logits[: batch.num_masked], -1).gather(
        1, batch.labels[: batch.num_masked, None]
    )
    torch.testing.assert_close(output["masked_lm"]["loss"], expected.sum())
    pair_losses = -F.log_softmax(predictions.pair_logits[:3], -1).gather(1, batch.next_sentence_labels[:3, None])
    torch.testing.assert_close(output["sentence_pairs"]["loss"], pair_losses.sum())


def test_losses_add_up_over_micro_batches(tiny_config, make_model, make_documents, pack):
    documents = make_documents([9, 6, 12, 16])
    model = make_model(tiny_config)
    objectives = all_objectives(model)
    whole, *parts = (
        objectives.stacked(model(pack(some, 16).batch), like=torch.zeros((), dtype=torch.float64))
        for some in (documents, documents[:2], documents[2:])
    )
    assert objectives.columns == (("masked_lm", "loss"), ("sentence_pairs", "loss"), ("sentence_pairs", "accuracy"))
    torch.testing.assert_close(whole, sum(parts), rtol=1e-6, atol=0)


def test_rows_without_labels_give_zero_loss_and_zero_gradients(tiny_config, make_model, make_documents, pack):
    batch = pack(make_documents([9, 6]), 16).batch
    dead = replace(
        batch,
        labels=torch.full_like(batch.labels, -100),
        next_sentence_labels=torch.full_like(batch.next_sentence_labels, -100),
    )
    model = make_model(tiny_config)
    sums = all_objectives(model).stacked(model(dead), like=torch.zeros((), dtype=torch.float64))
    assert sums.tolist() == [0, 0, 0]
    assert all(not gradient.any() for gradient in gradients(model, dead).values())


@pytest.mark.parametrize("next_sentence", [True, False])
def test_a_batch_without_pairs_has_zero_pair_entries(tiny_config, make_model, make_documents, pack, next_sentence):
    batch = pack(make_documents([9, 6]), 16).batch
    nothing = torch.zeros(0, dtype=torch.int64)
    output = make_model(tiny_config, next_sentence)(replace(batch, cls_positions=nothing, next_sentence_labels=nothing))
    assert {name: total.item() for name, total in output.get("sentence_pairs", {}).items()} == (
        {"loss": 0, "accuracy": 0} if next_sentence else {}
    )
    assert output["masked_lm"]["loss"] > 0


def test_the_decoder_is_the_word_matrix(tiny_config, make_model, make_documents, pack):
    batch = pack(make_documents([9]), 16).batch
    model = make_model(tiny_config)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert shapes.count((tiny_config.padded_vocab_size, tiny_config.hidden_size)) == 1
    gradient = gradients(model, batch)["encoder.embeddings.word_embeddings.weight"]
    assert gradient.any(dim=-1).all()  # ids that no document holds learn through the softmax


def test_padded_vocabulary_rows_are_driven_down(tiny_config, make_model, make_documents, pack):
    batch = pack(make_documents([9]), 16).batch
    assert tiny_config.padded_vocab_size == 64 > tiny_config.vocab_size
    bias_gradient = gradients(make_model(tiny_config), batch)["mlm_head.bias"]
    assert (bias_gradient[tiny_config.vocab_size :] > 0).all()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_changes_no_gradient(tiny_config, make_model, make_documents, pack, dropout):
    batch = pack(make_documents([9, 6, 12]), 16).batch
    config = tiny_config.model_copy(update={"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout})
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        results.append(gradients(make_model(config, activation_checkpointing=checkpointing), batch))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_dropout_follows_torchs_generator(tiny_config, make_model, make_documents, pack):
    batch = pack(make_documents([9, 6]), 16).batch
    model = make_model(tiny_config.model_copy(update={"hidden_dropout_prob": 0.3}))

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return model(batch)["masked_lm"]["loss"].item()

    assert loss(1) == loss(1) != loss(2)
    model.eval()
    assert loss(1) == loss(2)


def test_bfloat16_runs_with_losses_in_float32(tiny_config, make_model, make_documents, pack):
    batch = pack(make_documents([9, 6, 12]), 16).batch
    exact = make_model(tiny_config)(batch)
    output = make_model(tiny_config).to(torch.bfloat16)(batch)
    assert output["masked_lm"]["loss"].dtype == output["sentence_pairs"]["loss"].dtype == torch.float32
    torch.testing.assert_close(output["masked_lm"]["loss"], exact["masked_lm"]["loss"], rtol=0.05, atol=0)


def test_losses_of_a_bfloat16_model_are_float32_cross_entropies_of_its_logits(
    tiny_config, make_model, make_documents, pack
):
    """Rounded to bfloat16, in which the sum has 8 bits, or computed in it, they would differ by up to one in 256."""
    batch = pack(make_documents([9, 6, 12, 16]), 16).batch
    model = make_model(tiny_config).to(torch.bfloat16).eval()
    with torch.no_grad():
        predictions, output, scores = model.predict(batch), model(batch), model(batch, scored=model.objectives)
    for name, logits, labels in (
        ("masked_lm", predictions.mlm_logits, batch.labels),
        ("sentence_pairs", predictions.pair_logits, batch.next_sentence_labels),
    ):
        total, each = output[name]["loss"], scores[name].values["loss"]
        assert logits.dtype == torch.bfloat16 and total.dtype == each.dtype == torch.float32
        expected = F.cross_entropy(logits.double(), labels, ignore_index=-100, reduction="none")
        torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(total.double(), expected.sum(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kernel", ["by_sequence", "masked"])
def test_an_evaluated_model_drops_nothing_whichever_way_attention_takes(
    tiny_config, make_model, make_documents, pack, monkeypatch, kernel
):
    """On CUDA without flash attention the masked way, which can drop, serves evaluation too."""
    batch = pack(make_documents([9, 6, 12]), 16).batch
    monkeypatch.setattr(encoder, "choose_kernel", lambda *_: kernel)
    dropping = tiny_config.model_copy(update={"hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5})
    exact = make_model(tiny_config).eval().predict(batch)
    evaluated = make_model(dropping).eval().predict(batch)
    for found, expected in zip(evaluated, exact, strict=True):
        assert torch.equal(found, expected)


def test_attention_dropout_is_requested_in_training_alone(tiny_config, make_model, make_documents, pack, monkeypatch):
    """In evaluation the fast kernel serves, which has no dropout."""
    asked = []
    choose = encoder.choose_kernel
    monkeypatch.setattr(encoder, "choose_kernel", lambda *arguments: asked.append(arguments[3]) or choose(*arguments))
    batch = pack(make_documents([9]), 16).batch
    model = make_model(tiny_config.model_copy(update={"attention_probs_dropout_prob": 0.5}))
    model.train()(batch)
    model.eval()(batch)
    assert asked == [0.5, 0.0]


def test_without_next_sentence_there_is_no_pooler(tiny_config):
    names = [name for name, _ in PretrainingModel(tiny_config).named_parameters()]
    assert names and not [name for name in names if "pooler" in name or "next_sentence" in name]


@pytest.mark.parametrize("family", ["tiny", "modern", "euro"])
def test_hidden_matrices_are_the_blocks_weights_of_two_dimensions(family, tiny_config, modern_config, euro_config):
    """What Muon updates: neither embeddings nor heads, pooler or classifier, which have two dimensions too."""
    config = {"tiny": tiny_config, "modern": modern_config, "euro": euro_config}[family]
    model = PretrainingModel(config, objectives_of("next_sentence" if family == "tiny" else "none"))
    matrices = model.hidden_matrices()
    names = {name for name, parameter in model.named_parameters() if parameter in matrices}
    in_blocks = {n for n, p in model.named_parameters() if n.startswith("encoder.layers.") and p.dim() > 1}
    assert names == in_blocks and len(names) == 4 * config.num_hidden_layers
    width, inner = config.hidden_size, config.intermediate_size
    of_keys = (width // 2 if family == "euro" else width, width)
    per_block = [(width, width)] * 2 + [of_keys] * 2 + [(inner, width)] * (1 if family == "tiny" else 2)
    per_block += [(width, inner)]
    found = [(rows, parameter.shape[1]) for parameter, stacked in matrices.items() for rows in stacked]
    assert all(sum(stacked) == len(parameter) for parameter, stacked in matrices.items())
    assert sorted(found) == sorted(per_block * config.num_hidden_layers)


def test_compiled_blocks_are_called_in_place(tiny_config, make_model, make_documents, pack, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: compiled.append(function) or function)
    model = make_model(tiny_config)
    names = list(model.state_dict())
    model.compile_blocks()
    model(pack(make_documents([9]), 16).batch)
    assert len(compiled) == tiny_config.num_hidden_layers + 1, "every block, and the MLM head with its loss"
    assert list(model.state_dict()) == names


@pytest.mark.parametrize("family", ["tiny", "modern", "euro"])
def test_each_part_counts_its_content(family, tiny_config, modern_config, euro_config):
    """A decoder that is the word matrix counts once."""
    config = {"tiny": tiny_config, "modern": modern_config, "euro": euro_config}[family]
    with torch.device("meta"):
        model = PretrainingModel(config, objectives_of("next_sentence"))
    embeddings, layers = model.encoder.embeddings, model.encoder.layers
    modules = {
        "embeddings.word": [embeddings.word_embeddings],
        "embeddings.position": [embeddings.position_embeddings],
        "embeddings.token_type": [embeddings.token_type_embeddings],
        "embeddings.norm": [embeddings.norm],
        "layers.attention": [layer.attention for layer in layers],
        "layers.feed_forward": [layer.feed_forward for layer in layers],
        "layers.norms": [norm for layer in layers for norm in (layer.attention_norm, layer.feed_forward_norm)],
        "final_norm": [model.encoder.final_norm],
        "mlm_head": [model.mlm_head],
        "pooler": [model.pooler],
        "next_sentence_head": [model.next_sentence_head],
    }
    expected = {
        part: sum(p.numel() for module in found if module is not None for p in module.parameters())
        for part, found in modules.items()
    }
    counts = parameter_counts(model)
    assert counts.pop("total") == sum(p.numel() for p in model.parameters()) == sum(expected.values())
    assert counts == {part: count for part, count in expected.items() if count}
    absent = {"final_norm"} if family == "tiny" else {"embeddings.position", "embeddings.token_type"}
    absent |= {"embeddings.norm"} if family == "euro" else set()
    assert expected.keys() - counts.keys() == absent


def test_bert_large_has_its_published_size():
    config = ModelSettings(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    assert config.padded_vocab_size == 30528
    assert num_parameters(config, objectives_of("next_sentence")) == 336_232_258
    with torch.device("meta"):
        counts = parameter_counts(PretrainingModel(config))
    encoder = counts["total"] - counts["mlm_head"]
    assert encoder + 1024**2 + 1024 == 335_141_888 + 6 * 1024  # published BertModel, and 6 padded rows


def test_modern_large_has_its_published_size():
    """395M (Warner et al. 2024, section 2.1); transformers' ModernBertForMaskedLM has as many."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 2624}
    config = ModelSettings(family="modernbert", vocab_size=50368, max_position_embeddings=8192, **sizes)
    assert num_parameters(config, objectives_of("none")) == 395_881_664


@pytest.mark.parametrize("tied", [False, True])
def test_eurobert_210m_has_its_published_size(tied):
    """210M are those of the encoder; the decoder has 98.5M more, as transformers' EuroBertForMaskedLM."""
    config = ModelSettings(family="eurobert", vocab_size=128256, tie_word_embeddings=tied)
    with torch.device("meta"):
        counts = parameter_counts(PretrainingModel(config))
    assert counts["total"] - counts.get("mlm_head", 0) == 211_766_016
    assert counts["total"] == 211_766_016 + (0 if tied else 128_256 * 768)
