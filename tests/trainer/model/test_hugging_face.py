"""Our model against transformers' BertForPreTraining and ModernBertForMaskedLM with the same weights, fp32."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, ModernBertConfig, ModernBertForMaskedLM

from data_prep.base.errors import UserError
from trainer.config.model_settings import ModelSettings
from trainer.data.batch import Batch
from trainer.model.hugging_face import (
    FAMILIES,
    family_in_transformers,
    from_hugging_face,
    hugging_face_config,
    to_hugging_face,
)
from trainer.objectives.pretraining import PretrainingModel

TOLERANCE = 1e-5
"""Relative to the largest entry of each tensor; fp32 keeps 6e-8 and sums run in another order."""

INPUTS = {
    "padded": ([9, 10, 13], 16),  # one document a row, padding behind it
    "packed": ([5, 7, 4, 11, 5, 16, 3, 2], 16),
    "length one": ([1, 1, 6, 1], 8),
    "longer than the window": ([32, 20, 12], 32),
}
REFERENCES = {"bert": (BertConfig, BertForPreTraining), "modernbert": (ModernBertConfig, ModernBertForMaskedLM)}
TIED = {
    "bert": {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"},
    "modernbert": {"decoder.weight"},
}


class Both(NamedTuple):
    """The two models on the same documents."""

    model: PretrainingModel
    batch: Batch
    reference: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    family: str


def reference_model(config: ModelSettings, model: PretrainingModel) -> torch.nn.Module:
    config_class, model_class = REFERENCES[config.family]
    has_pairs = "sentence_pairs" in model.objectives
    reference = model_class(config_class(**hugging_face_config(config, has_pairs)))
    missing, unexpected = reference.load_state_dict(to_hugging_face(model.state_dict(), config.family), strict=False)
    assert set(missing) == TIED[config.family] and not unexpected
    reference.tie_weights()
    return reference.train()


def padded_inputs(documents, family: str) -> dict[str, torch.Tensor]:
    """One document a row, padded to the longest, as transformers takes them."""
    width = max(len(document.input_ids) for document in documents)
    shape = (len(documents), width)
    inputs = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "token_type_ids", "attention_mask")}
    inputs["labels"] = torch.full(shape, -100)
    for row, document in enumerate(documents):
        length = len(document.input_ids)
        inputs["input_ids"][row, :length] = torch.tensor(document.input_ids)
        inputs["token_type_ids"][row, :length] = torch.tensor(document.token_type_ids)
        inputs["attention_mask"][row, :length] = 1
        inputs["labels"][row, document.masked] = torch.tensor(document.labels)
    if family == "modernbert":
        del inputs["token_type_ids"]
    else:
        inputs["next_sentence_label"] = torch.tensor([document.next_sentence_label for document in documents])
    return inputs


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    difference = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)
    assert difference <= TOLERANCE, f"{what}: {difference:.2e}"


VARIANTS = {
    "bert": {"family": "bert"},
    "bert with relu and three segments": {"family": "bert", "hidden_act": "relu", "type_vocab_size": 3},
    "modernbert": {"family": "modernbert", "local_attention": 6},
    "modernbert with biases": {"family": "modernbert", "local_attention": 2, "bias": True},
    "modernbert without local layers": {
        "family": "modernbert",
        "local_attention": None,
        "global_attn_every_n_layers": 1,
        "global_rope_theta": 500.0,
    },
}
SIZES = {
    "vocab_size": 61,
    "pad_vocab_size_to_multiple_of": 16,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
}


@pytest.fixture(params=[(variant, inputs) for variant in VARIANTS for inputs in INPUTS], ids=" on ".join)
def both(request, make_model, make_documents, pack) -> Both:
    variant, inputs = request.param
    lengths, sequence_length = INPUTS[inputs]
    config = ModelSettings(**SIZES, **VARIANTS[variant])
    documents = make_documents(lengths)
    model = make_model(config, next_sentence=config.family == "bert")
    packed = pack(documents, sequence_length)
    assert (packed.batch.num_rows == len(documents)) == (inputs == "padded")
    reference = reference_model(config, model)
    return Both(model, packed.batch, reference, padded_inputs(documents, config.family), config.family)


def test_logits_losses_and_every_gradient_agree(both):
    model, batch, reference, inputs, family = both
    theirs = reference(**inputs)
    theirs.loss.backward()
    ours = model(batch)
    loss = ours["masked_lm"]["loss"] / batch.num_masked
    predictions = model.predict(batch)
    if family == "bert":
        loss = loss + ours["sentence_pairs"]["loss"] / batch.num_pairs
        assert_near(predictions.pair_logits[: batch.num_pairs], theirs.seq_relationship_logits, "next-sentence logits")
    loss.backward()
    mlm_logits = theirs.prediction_logits if family == "bert" else theirs.logits
    assert_near(predictions.mlm_logits[: batch.num_masked], mlm_logits[inputs["labels"] != -100], "MLM logits")
    assert_near(loss, theirs.loss, "loss")
    gradients = to_hugging_face({name: parameter.grad for name, parameter in model.named_parameters()}, family)
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        # The key bias shifts every score of a query alike, so its gradient is zero but for rounding.
        if name.endswith("key.bias"):
            assert gradient.abs().max() < 1e-6 and expected[name].abs().max() < 1e-6
        else:
            assert_near(gradient, expected[name], name)


@pytest.mark.parametrize("family", REFERENCES)
@pytest.mark.parametrize(("hidden", "attention"), [(0.3, 0.0), (0.0, 0.3), (0.3, 0.3)])
def test_dropout_is_where_transformers_has_it(make_model, make_documents, pack, family, hidden, attention):
    """With the same seed both draw the same masks, where they draw at the same places in the same order."""
    probabilities = {"hidden_dropout_prob": hidden, "attention_probs_dropout_prob": attention}
    config = ModelSettings(family=family, **SIZES | probabilities)
    documents = make_documents([16, 16, 16])
    model, batch = make_model(config, next_sentence=family == "bert").train(), pack(documents, 16).batch
    reference, inputs = reference_model(config, model), padded_inputs(documents, family)
    reference.set_attn_implementation("eager")

    def logits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        ours = model.predict(batch).mlm_logits[: batch.num_masked]
        torch.manual_seed(seed)
        theirs = reference(**inputs)
        theirs = theirs.prediction_logits if family == "bert" else theirs.logits
        return ours, theirs[inputs["labels"] != -100]

    first, second = logits(1), logits(2)
    assert_near(*first, "seed 1")
    assert_near(*second, "seed 2")
    assert (first[0] - second[0]).abs().max() > 0.1


def test_correct_counts_agree(both):
    model, batch, reference, inputs, family = both
    with torch.no_grad():
        theirs, ours, scores = reference(**inputs), model(batch), model(batch, scored=("masked_lm",))["masked_lm"]
    assert torch.equal(scores.used, batch.labels != -100)
    mlm_logits = theirs.prediction_logits if family == "bert" else theirs.logits
    assert scores.values["accuracy"][scores.used].sum() == (mlm_logits.argmax(-1) == inputs["labels"]).sum()
    if family == "bert":
        assert (
            ours["sentence_pairs"]["accuracy"]
            == (theirs.seq_relationship_logits.argmax(-1) == inputs["next_sentence_label"]).sum()
        )


@pytest.mark.parametrize(("family", "next_sentence"), [("bert", True), ("bert", False), ("modernbert", False)])
def test_weights_survive_the_way_there_and_back(make_model, family, next_sentence):
    config = ModelSettings(family=family, **SIZES)
    weights = make_model(config, next_sentence).state_dict()
    converted = to_hugging_face(weights, family)
    # In BERT a QKV matrix and its bias are three each.
    assert len(converted) == len(weights) + (4 * config.num_hidden_layers if family == "bert" else 0)
    restored, lacking = from_hugging_face(converted, weights, family)
    assert not lacking and restored.keys() == weights.keys()
    assert all(torch.equal(restored[name], weights[name]) for name in weights)


def test_missing_weights_of_another_architecture_are_named(tiny_config, make_model):
    weights = make_model(tiny_config).state_dict()
    converted = to_hugging_face(weights, "bert")
    del converted["bert.encoder.layer.1.attention.self.key.weight"]
    restored, lacking = from_hugging_face(converted, weights, "bert")
    assert list(lacking.values()) == [["bert.encoder.layer.1.attention.self.key.weight"]]
    assert restored.keys() == weights.keys() - lacking.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_architecture_is_read_back_from_config_json(variant):
    config = ModelSettings(**SIZES, **VARIANTS[variant])
    config_class, _ = REFERENCES[config.family]
    read = FAMILIES[config.family].settings_of(config_class(**hugging_face_config(config, False)).to_dict())
    kinds = read.pop("attention_kinds", config.attention_kinds)
    assert kinds == config.attention_kinds
    assert read == {name: getattr(config, name) for name in read}


def test_a_custom_model_that_is_of_a_family_is_found_to_be_one():
    modern = ModelSettings(family="modernbert", **SIZES)
    assert family_in_transformers(modern.model_copy(update={"family": "custom"}), next_sentence=False) == "modernbert"
    assert family_in_transformers(ModelSettings(family="custom", **SIZES), next_sentence=True) == "bert"


@pytest.mark.parametrize(
    ("options", "next_sentence", "said"),
    [
        ({"norm": "rmsnorm"}, False, r"model.norm=rmsnorm \(BERT has LayerNorm\)"),
        ({"position_embedding": "sinusoidal"}, True, "model.position_embedding=sinusoidal"),
        ({"position_embedding": "rotary", "norm_position": "pre"}, False, "model.hidden_act=gelu"),
    ],
)
def test_a_model_without_a_class_reports_the_obstacle(options, next_sentence, said):
    with pytest.raises(UserError, match=said) as caught:
        hugging_face_config(ModelSettings(family="custom", **SIZES, **options), next_sentence)
    assert "evaluated and fills masks from its own checkpoints" in str(caught.value)


def test_modernbert_with_a_head_for_pairs_is_beyond_transformers():
    config = ModelSettings(family="modernbert", **SIZES)
    with pytest.raises(UserError, match="the head for sentence pairs"):
        family_in_transformers(config, next_sentence=True)
