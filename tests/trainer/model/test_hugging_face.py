"""Our model against transformers' BertForPreTraining with the same weights, fp32."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForPreTraining

from data_prep.errors import UserError
from trainer.model.hugging_face import from_hugging_face, hugging_face_config, to_hugging_face

TOLERANCE = 1e-5
"""Relative to the largest entry of each tensor; fp32 keeps 6e-8 and sums run in another order."""

INPUTS = {
    "padded": ([9, 10, 13], 16),  # one document a row, dead places behind it
    "packed": ([5, 7, 4, 11, 5, 16, 3, 2], 16),
    "length one": ([1, 1, 6, 1], 8),
}


def reference_model(config, model) -> BertForPreTraining:
    reference = BertForPreTraining(BertConfig(**hugging_face_config(config, next_sentence=True)))
    missing, unexpected = reference.load_state_dict(to_hugging_face(model.state_dict()), strict=False)
    assert set(missing) == {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} and not unexpected
    reference.tie_weights()
    return reference.train()


def padded_inputs(documents) -> dict[str, torch.Tensor]:
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
    inputs["next_sentence_label"] = torch.tensor([document.next_sentence_label for document in documents])
    return inputs


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    difference = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)
    assert difference <= TOLERANCE, f"{what}: {difference:.2e}"


@pytest.fixture(params=INPUTS)
def both(request, tiny_config, make_model, make_documents, pack):
    """(our model, our batch, transformers' model, its inputs) on the same documents."""
    lengths, sequence_length = INPUTS[request.param]
    documents = make_documents(lengths)
    model = make_model(tiny_config)
    packed = pack(documents, sequence_length)
    assert (packed.batch.num_rows == len(documents)) == (request.param == "padded")
    return model, packed.batch, reference_model(tiny_config, model), padded_inputs(documents)


def test_logits_losses_and_every_gradient_agree(both):
    model, batch, reference, inputs = both
    theirs = reference(**inputs)
    theirs.loss.backward()
    ours = model(batch)
    loss = ours.mlm_loss_sum / batch.num_masked + ours.nsp_loss_sum / batch.num_pairs
    loss.backward()
    predictions = model.predict(batch)
    assert_near(
        predictions.mlm_logits[: batch.num_masked],
        theirs.prediction_logits[inputs["labels"] != -100],
        "MLM logits",
    )
    assert_near(predictions.nsp_logits[: batch.num_pairs], theirs.seq_relationship_logits, "next-sentence logits")
    assert_near(loss, theirs.loss, "loss")
    gradients = to_hugging_face({name: parameter.grad for name, parameter in model.named_parameters()})
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        # The key bias shifts every score of a query alike, so its gradient is zero but for rounding.
        if name.endswith("key.bias"):
            assert gradient.abs().max() < 1e-6 and expected[name].abs().max() < 1e-6
        else:
            assert_near(gradient, expected[name], name)


def test_correct_counts_agree(both):
    model, batch, reference, inputs = both
    with torch.no_grad():
        theirs, ours = reference(**inputs), model(batch)
    assert ours.mlm_correct == (theirs.prediction_logits.argmax(-1) == inputs["labels"]).sum()
    assert ours.nsp_correct == (theirs.seq_relationship_logits.argmax(-1) == inputs["next_sentence_label"]).sum()


@pytest.mark.parametrize("next_sentence", [True, False])
def test_weights_survive_the_way_there_and_back(tiny_config, make_model, next_sentence):
    weights = make_model(tiny_config, next_sentence).state_dict()
    converted = to_hugging_face(weights)
    assert len(converted) == len(weights) + 4 * tiny_config.num_hidden_layers  # a QKV matrix and bias are three each
    restored = from_hugging_face(converted, list(weights))
    assert restored.keys() == weights.keys()
    assert all(torch.equal(restored[name], weights[name]) for name in weights)


def test_weights_of_another_architecture_are_refused_by_name(tiny_config, make_model):
    weights = make_model(tiny_config).state_dict()
    converted = to_hugging_face(weights)
    del converted["bert.encoder.layer.1.attention.self.key.weight"]
    with pytest.raises(UserError, match="bert.encoder.layer.1.attention.self.key.weight"):
        from_hugging_face(converted, list(weights))
