"""The next token under a causal mask: as transformers' decoders compute it, with the head of masked_lm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel, MistralConfig, MistralForCausalLM

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.support.objectives import all_objectives, loss_sum
from trainer.checkpoint.initial_weights import load_initial_weights
from trainer.checkpoint.writer import ALONE
from trainer.config.families.eurobert import EuroBert
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import CAUSAL, MASKED_LM, MASKED_LM_ALONE, ObjectiveSettings
from trainer.data.batch import Batch
from trainer.model import encoder
from trainer.model.attention import Kernel
from trainer.model.hugging_face import to_hugging_face
from trainer.objectives.pretraining import PretrainingModel

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
LENGTH = 32
LENGTHS = [9, 6, 1, 16, 30, 2]
CAUSAL_ALONE = (ObjectiveSettings(name=CAUSAL),)
BOTH = (*MASKED_LM_ALONE, *CAUSAL_ALONE)


def causal(batch: Batch) -> Batch:
    """The batch with the next token of every sequence to predict; padding is 0."""
    starts, ids = {*batch.cu_seqlens.tolist()}, batch.input_ids
    predicted = [place for place in range(len(ids)) if place not in starts and ids[place] != 0]
    places = torch.tensor([*predicted, 0]) - torch.tensor([*[1] * len(predicted), 0])
    labels = torch.tensor([*ids[predicted].tolist(), -100])
    return replace(batch, masked_positions=places, labels=labels, is_causal=True)


def llama(key_value_heads: int = 4, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(3)
    settings = SIZES | {"num_key_value_heads": key_value_heads, "rms_norm_eps": 1e-5, "rope_theta": 5000.0} | options
    model = LlamaForCausalLM(LlamaConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def ours(key_value_heads: int = 4, is_tied: bool = False) -> ModelSettings:
    return ModelSettings(
        family="eurobert",
        num_key_value_heads=key_value_heads,
        tie_word_embeddings=is_tied,
        pad_vocab_size_to_multiple_of=1,
        global_rope_theta=5000.0,
        **SIZES,
    )


def begin(folder: Path, config: ModelSettings, objectives: Sequence[ObjectiveSettings] = CAUSAL_ALONE) -> Any:
    """A model that starts from the folder."""
    model = PretrainingModel(config, tuple(objectives))
    model.initialize(seed=5)
    (line,) = load_initial_weights(model, str(folder), lambda: folder, ALONE).notes
    number = len([*model.named_parameters()])
    assert line.endswith(f"{number} of {number} tensors"), "no tensor is missing, and none is left over"
    return model.eval()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_a_run_from_a_llama_folder_has_its_loss_and_its_gradients(
    make_documents, pack, tmp_path, key_value_heads: int, is_tied: bool
) -> None:
    """Of documents packed into rows, which transformers reads one by one."""
    theirs = llama(key_value_heads, tie_word_embeddings=is_tied)
    theirs.save_pretrained(tmp_path)
    model = begin(tmp_path, ours(key_value_heads, is_tied))
    documents = make_documents(LENGTHS)
    loss = loss_sum(model(causal(pack(documents, LENGTH).batch)))
    loss.backward()
    expected = torch.zeros(())
    for document in documents:
        ids = torch.tensor([document.input_ids])
        if len(document.input_ids) > 1:
            expected = expected + theirs(input_ids=ids, labels=ids).loss * (len(document.input_ids) - 1)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    gradients = {name: each.grad for name, each in model.named_parameters()}
    found = to_hugging_face(gradients, model.config, EuroBert())
    wanted = {name: each.grad for name, each in theirs.named_parameters()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5 * scale, msg=name)


def test_without_the_causal_mask_a_decoder_has_the_hidden_states_of_transformers(make_documents, pack, tmp_path):
    theirs = llama(2)
    theirs.save_pretrained(tmp_path)
    model = begin(tmp_path, ours(2), BOTH)
    (document,) = make_documents([20])
    with torch.no_grad():
        found = model.encoder(pack([document], LENGTH).batch)[:20]
        ids, visible = torch.tensor([document.input_ids]), torch.zeros(1, 1, 20, 20)
        decoder: LlamaModel = theirs.model
        expected = decoder(input_ids=ids, attention_mask=visible, position_ids=torch.arange(20)[None])
        torch.testing.assert_close(found, expected.last_hidden_state[0], rtol=1e-5, atol=1e-5)
        in_one_direction = decoder(input_ids=ids).last_hidden_state[0]
    assert not torch.allclose(found, in_one_direction, atol=1e-2)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}},
            "global_rope_theta is 5000",
        ),
        ({"attention_bias": True}, "model.bias is False and there in some modules only"),
        ({"hidden_act": "gelu"}, "model.hidden_act is swiglu and there gated gelu"),
        ({"head_dim": 16}, "model.head_size is 8 and there 16"),
        ({"tie_word_embeddings": True}, "model.tie_word_embeddings"),
    ],
)
def test_a_decoder_that_the_family_cannot_express_is_refused(tmp_path, options, shown) -> None:
    llama(**options).save_pretrained(tmp_path)
    with pytest.raises(UserError, check=coded("other-architecture")) as caught:
        begin(tmp_path, ours())
    assert shown in str(caught.value)


@pytest.mark.parametrize("window", [None, 8])
def test_mistral_is_a_llama_unless_it_sees_a_window(tmp_path, window) -> None:
    settings = SIZES | {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 5000.0}
    MistralForCausalLM(MistralConfig(sliding_window=window, **settings)).save_pretrained(tmp_path)
    if window is None:
        begin(tmp_path, ours())
        return
    with pytest.raises(UserError, check=coded("other-architecture"), match="8 tokens to the left"):
        begin(tmp_path, ours())


def model_of(family: str, config: dict[str, ModelSettings]) -> ModelSettings:
    return config[family] if family in config else ours(2)


@pytest.mark.parametrize("kernel", ["masked", "by_sequence"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "eurobert"])
def test_a_token_is_seen_by_those_after_it_in_its_document_alone(
    tiny_config, modern_config, make_documents, pack, monkeypatch, family: str, kernel: Kernel
) -> None:
    monkeypatch.setattr(encoder, "choose_kernel", lambda *_: kernel)
    config = model_of(family, {"bert": tiny_config, "modernbert": modern_config})
    model = PretrainingModel(config, CAUSAL_ALONE)
    model.initialize(0)
    packed = pack(make_documents([9, 12, 6]), LENGTH)
    batch, changed = replace(packed.batch, is_causal=True), packed.starts[1] + 5
    other = batch.input_ids.clone()
    other[changed] = 7 if other[changed] != 7 else 8
    with torch.no_grad():
        before, after = (model.eval().encoder(each) for each in (batch, replace(batch, input_ids=other)))
    differs = (before != after).any(-1).nonzero().flatten().tolist()
    assert differs[0] == changed and differs[-1] < packed.starts[2]
    reach = LENGTH if family != "modernbert" else config.num_hidden_layers * LENGTH
    assert differs == [*range(changed, min(packed.starts[2], changed + reach))]


def test_masked_lm_and_causal_have_one_head_under_the_names_of_masked_lm(tiny_config) -> None:
    masked, both, alone = (PretrainingModel(tiny_config, each) for each in (MASKED_LM_ALONE, BOTH, CAUSAL_ALONE))
    assert [*masked.state_dict()] == [*both.state_dict()] == [*alone.state_dict()]
    assert both.objectives[CAUSAL].mlm_head is both.objectives[MASKED_LM].mlm_head is both.mlm_head
    weights = []
    for model in (masked, both, alone):
        model.initialize(3)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], other[name]) for other in weights[1:] for name in weights[0])


def test_a_stage_trains_one_of_the_two_and_a_causal_one_gives_its_scores(tiny_config, make_model, make_documents, pack):
    model: PretrainingModel = PretrainingModel(tiny_config, BOTH)
    model.initialize(0)
    packed = pack(make_documents(LENGTHS), LENGTH).batch
    batch = causal(packed)
    (name,) = model.eval()(batch, objectives=(CAUSAL,))
    assert name == CAUSAL and all_objectives(model).columns == ((MASKED_LM, "loss"), (CAUSAL, "loss"))
    with torch.no_grad():
        sums, scores = model(batch, objectives=(CAUSAL,)), model(batch, scored=(CAUSAL,))[CAUSAL]
    assert scores.used.sum() == sum(length - 1 for length in LENGTHS) == model.objectives[CAUSAL].num_predictions(batch)
    torch.testing.assert_close(scores.values["loss"][scores.used].sum(), sums[CAUSAL]["loss"])
    with torch.no_grad():
        assert not torch.allclose(model(replace(batch, is_causal=False))[CAUSAL]["loss"], sums[CAUSAL]["loss"])


def gradients(model: PretrainingModel, batch: Batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_sum(model(batch)).backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_recomputed_blocks_see_as_little(modern_config, make_documents, pack) -> None:
    batch: Batch = causal(pack(make_documents(LENGTHS), LENGTH).batch)
    found = []
    make: Callable[..., PretrainingModel] = PretrainingModel
    for checkpointing in (False, True):
        model = make(modern_config, CAUSAL_ALONE, activation_checkpointing=checkpointing)
        model.initialize(0)
        found.append(gradients(model, batch))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())
