"""Our model against each family's class in transformers with the same weights, fp32.

`Ernie` is a family that only this file knows: it is added as one of the product is, by a class and a registration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import pytest
import torch
import transformers

from data_prep.base.errors import UserError
from data_prep.base.settings import choices_of
from data_prep.tokenizer.special_tokens import OWN_SPECIAL_TOKENS, SpecialTokens
from tests.support.preparations import trained
from tests.support.toy_run import tiny_config as tiny_run
from trainer import load_config
from trainer.checkpoint.initial_weights import load_initial_weights
from trainer.checkpoint.writer import ALONE
from trainer.config.families.bert import Bert
from trainer.config.families.family import PublishedFamily
from trainer.config.families.registry import FAMILIES
from trainer.config.families.roberta import Roberta
from trainer.config.model_settings import ModelSettings
from trainer.config.run_config import RunConfig
from trainer.data.batch import Batch
from trainer.hf_export.export import export_model
from trainer.model.hugging_face import (
    family_in_transformers,
    from_hugging_face,
    hugging_face_config,
    to_hugging_face,
)
from trainer.objectives.pretraining import PretrainingModel


class Ernie(Bert):
    """BERT in all that is computed, with another prefix of its tensors."""

    name = "ernie"
    title = "ERNIE"
    masked_lm_class = "ErnieForMaskedLM"
    pairs_class = "ErnieForPreTraining"
    modules: ClassVar = {ours: theirs.replace("bert.", "ernie.") for ours, theirs in Bert.modules.items()}
    blocks = "ernie.encoder.layer"


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """What the line of the registry does; `model.family` takes the names that it finds there at the start."""
    FAMILIES["ernie"] = Ernie()
    take_names()
    yield
    del FAMILIES["ernie"]
    take_names()


def take_names() -> None:
    ModelSettings.model_fields["family"].annotation = Literal[tuple(FAMILIES)]
    for schema in (ModelSettings, RunConfig):
        schema.model_rebuild(force=True)


TOLERANCE = 1e-5
"""Relative to the largest entry of each tensor; fp32 keeps 6e-8 and sums run in another order."""

INPUTS = {
    "padded": ([9, 10, 13], 16),  # one document a row, padding behind it
    "packed": ([5, 7, 4, 11, 5, 16, 3, 2], 16),
    "length one": ([1, 1, 6, 1], 8),
    "longer than the window": ([32, 20, 12], 32),
}


class Both(NamedTuple):
    """The two models on the same documents."""

    model: PretrainingModel
    batch: Batch
    reference: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    family: PublishedFamily


def family_of(config: ModelSettings) -> PublishedFamily:
    family = FAMILIES[config.family]
    assert isinstance(family, PublishedFamily)
    return family


ROBERTA_TOKENS = SpecialTokens(cls=0, pad=1, sep=2, unk=3, mask=60)


def tokens_of(family: PublishedFamily) -> SpecialTokens:
    """The layout of the published vocabularies, on which RoBERTa's positions depend."""
    return ROBERTA_TOKENS if isinstance(family, Roberta) else OWN_SPECIAL_TOKENS


def reference_model(config: ModelSettings, model: PretrainingModel) -> torch.nn.Module:
    special_tokens = tokens_of(family_of(config))
    values = hugging_face_config(config, "sentence_pairs" in model.objectives, special_tokens)
    model_class = getattr(transformers, values["architectures"][0])
    reference = model_class(model_class.config_class(**values))
    weights = to_hugging_face(model.state_dict(), config, family_of(config), special_tokens.pad)
    missing, unexpected = reference.load_state_dict(weights, strict=False)
    assert set(missing) == set(reference.all_tied_weights_keys) and not unexpected
    reference.tie_weights()
    return reference.train()


def padded_inputs(documents, has_pairs: bool, pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """One document a row, padded to the longest, as transformers takes them."""
    width = max(len(document.input_ids) for document in documents)
    shape = (len(documents), width)
    inputs = {name: torch.zeros(shape, dtype=torch.int64) for name in ("input_ids", "token_type_ids", "attention_mask")}
    inputs["input_ids"].fill_(pad_token_id)
    inputs["labels"] = torch.full(shape, -100)
    for row, document in enumerate(documents):
        length = len(document.input_ids)
        inputs["input_ids"][row, :length] = torch.tensor(document.input_ids)
        inputs["token_type_ids"][row, :length] = torch.tensor(document.token_type_ids)
        inputs["attention_mask"][row, :length] = 1
        inputs["labels"][row, document.masked] = torch.tensor(document.labels)
    if has_pairs:
        inputs["next_sentence_label"] = torch.tensor([document.next_sentence_label for document in documents])
    else:
        del inputs["token_type_ids"]
    return inputs


def of_one_type(documents, config: ModelSettings):
    """The documents, without a segment B where the model has no row for it."""
    if config.type_vocab_size != 1:
        return documents
    return [replace(document, token_type_ids=[0] * len(document.input_ids)) for document in documents]


def mlm_logits_of(outputs) -> torch.Tensor:
    return outputs.logits if "logits" in outputs else outputs.prediction_logits


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
    "eurobert with 1 key head": {"family": "eurobert", "num_key_value_heads": 1},
    "eurobert with 2 key heads, tied": {"family": "eurobert", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "eurobert with 4 key heads": {"family": "eurobert"},
    "roberta": {"family": "roberta"},
    "xlm-roberta": {"family": "xlm-roberta"},
    "a family added by a test": {"family": "ernie"},
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
    documents, family = of_one_type(make_documents(lengths), config), family_of(config)
    has_pairs = family.pairs_class is not None
    model = make_model(config, next_sentence=has_pairs)
    packed = pack(documents, sequence_length)
    assert (packed.batch.num_rows == len(documents)) == (inputs == "padded")
    reference = reference_model(config, model)
    return Both(model, packed.batch, reference, padded_inputs(documents, has_pairs, tokens_of(family).pad), family)


def test_logits_losses_and_every_gradient_agree(both):
    model, batch, reference, inputs, family = both
    theirs = reference(**inputs)
    theirs.loss.backward()
    ours = model(batch)
    loss = ours["masked_lm"]["loss"] / batch.num_masked
    predictions = model.predict(batch)
    if family.pairs_class is not None:
        loss = loss + ours["sentence_pairs"]["loss"] / batch.num_pairs
        assert_near(predictions.pair_logits[: batch.num_pairs], theirs.seq_relationship_logits, "next-sentence logits")
    loss.backward()
    mlm_logits = mlm_logits_of(theirs)
    assert_near(predictions.mlm_logits[: batch.num_masked], mlm_logits[inputs["labels"] != -100], "MLM logits")
    assert_near(loss, theirs.loss, "loss")
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = to_hugging_face(ours, model.config, family, tokens_of(family).pad)
    named = reference.named_parameters(remove_duplicate=False)
    expected = {name: parameter.grad for name, parameter in named if name not in reference.all_tied_weights_keys}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        # The key bias shifts every score of a query alike, so its gradient is zero but for rounding.
        if name.endswith("key.bias"):
            assert gradient.abs().max() < 1e-6 and expected[name].abs().max() < 1e-6
        else:
            assert_near(gradient, expected[name], name)


@pytest.mark.parametrize(
    ("name", "hidden", "attention"),
    [
        *((name, *each) for name in ("bert", "modernbert", "roberta") for each in ((0.3, 0.0), (0.0, 0.3), (0.3, 0.3))),
        ("eurobert", 0.0, 0.3),
    ],
)
def test_dropout_is_where_transformers_has_it(make_model, make_documents, pack, name, hidden, attention):
    """With the same seed both draw the same masks, where they draw at the same places in the same order."""
    probabilities = {"hidden_dropout_prob": hidden, "attention_probs_dropout_prob": attention}
    config = ModelSettings(family=name, **SIZES | probabilities)
    documents = of_one_type(make_documents([16, 16, 16]), config)
    has_pairs = family_of(config).pairs_class is not None
    model, batch = make_model(config, next_sentence=has_pairs).train(), pack(documents, 16).batch
    pad = tokens_of(family_of(config)).pad
    reference, inputs = reference_model(config, model), padded_inputs(documents, has_pairs, pad)
    reference.set_attn_implementation("eager")

    def logits(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(seed)
        ours = model.predict(batch).mlm_logits[: batch.num_masked]
        torch.manual_seed(seed)
        theirs = mlm_logits_of(reference(**inputs))
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
    mlm_logits = mlm_logits_of(theirs)
    assert scores.values["accuracy"][scores.used].sum() == (mlm_logits.argmax(-1) == inputs["labels"]).sum()
    if family.pairs_class is not None:
        assert (
            ours["sentence_pairs"]["accuracy"]
            == (theirs.seq_relationship_logits.argmax(-1) == inputs["next_sentence_label"]).sum()
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_survive_the_way_there_and_back(make_model, variant):
    config = ModelSettings(**SIZES, **VARIANTS[variant])
    family = family_of(config)
    weights = make_model(config, family.pairs_class is not None).state_dict()
    converted = to_hugging_face(weights, config, family)
    # In BERT and RoBERTa a QKV matrix and its bias are three each; in EuroBERT it has no bias, and values and gates
    # are two.
    more = {"modernbert": 0, "eurobert": 3}.get(family.name, 4)
    assert len(converted) == len(weights) + more * config.num_hidden_layers
    restored, lacking = from_hugging_face(converted, weights, family)
    assert not lacking and restored.keys() == weights.keys()
    assert all(torch.equal(restored[name], weights[name]) for name in weights)


def test_queries_keys_and_values_are_as_high_as_the_heads_say():
    """A bias too, and a square matrix of all three."""
    config = ModelSettings(family="eurobert", num_key_value_heads=1, **SIZES)
    wide, name = config.num_attention_heads * config.head_size, "encoder.layers.0.attention.qkv"
    rows = wide + 2 * config.head_size
    weights = {f"{name}.bias": torch.arange(rows), f"{name}.weight": torch.arange(rows * rows).view(rows, rows)}
    converted = to_hugging_face(weights, config, family_of(config))
    assert [len(each) for each in converted.values()] == [wide, config.head_size, config.head_size] * 2
    restored, _ = from_hugging_face(converted, weights, family_of(config))
    assert all(torch.equal(restored[each], weights[each]) for each in weights)


def test_missing_weights_of_another_architecture_are_named(tiny_config, make_model):
    weights = make_model(tiny_config).state_dict()
    converted = to_hugging_face(weights, tiny_config, Bert())
    del converted["bert.encoder.layer.1.attention.self.key.weight"]
    restored, lacking = from_hugging_face(converted, weights, Bert())
    assert list(lacking.values()) == [["bert.encoder.layer.1.attention.self.key.weight"]]
    assert restored.keys() == weights.keys() - lacking.keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_architecture_is_read_back_from_config_json(variant):
    config = ModelSettings(**SIZES, **VARIANTS[variant])
    values = hugging_face_config(config, False, tokens_of(family_of(config)))
    read = family_of(config).settings_of(transformers.AutoConfig.for_model(**values).to_dict())
    kinds = read.pop("attention_kinds", config.attention_kinds)
    assert kinds == config.attention_kinds
    assert read == {name: getattr(config, name) for name in read}


def test_the_published_config_json_of_eurobert_210m_is_its_preset(tmp_path):
    """That of commit 66d72a0, without `auto_map`; it has older names of the RoPE base than transformers writes now."""
    published = {
        "model_type": "eurobert",
        **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "hidden_dropout": 0.0},
        **{"hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 8192},
        **{"num_attention_heads": 12, "num_hidden_layers": 12, "num_key_value_heads": 12, "pretraining_tp": 1},
        **{"rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 250000, "tie_word_embeddings": False},
        **{"pad_token_id": 128001, "mask_token_id": 128002, "vocab_size": 128256, "is_decoder": False},
    }
    (tmp_path / "config.json").write_text(json.dumps(published), encoding="utf-8")
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    ours = load_config("eurobert_210m").stages[-1].model
    read = FAMILIES["eurobert"].settings_of(theirs)
    assert read == {name: getattr(ours, name) for name in read}
    assert theirs["vocab_size"] == ours.padded_vocab_size


def test_a_custom_model_that_is_of_a_family_is_found_to_be_one():
    modern = ModelSettings(family="modernbert", **SIZES)
    modern = modern.model_copy(update={"family": "custom"})
    assert family_in_transformers(modern, next_sentence=False).name == "modernbert"
    assert family_in_transformers(ModelSettings(family="custom", **SIZES), next_sentence=True).name == "bert"


@pytest.mark.parametrize(
    ("options", "next_sentence", "said"),
    [
        ({"norm": "rmsnorm"}, False, r"model.norm=rmsnorm \(BERT has LayerNorm\)"),
        ({"position_embedding": "sinusoidal"}, True, "model.position_embedding=sinusoidal"),
        ({"position_embedding": "none"}, False, r"model.position_embedding=none \(BERT has learned position"),
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


def test_an_added_family_is_exported_behind_the_parity_gate_and_initializes_a_run(tmp_path):
    trained(["the quick brown fox jumps over lazy dogs"] * 9, tmp_path / "tokenizer", vocab_size=400)
    config = tiny_run(model={**SIZES, "vocab_size": 400, "family": "ernie"}, data={"sentence_pairs": "next_sentence"})
    model = PretrainingModel(config.model, config.all_objectives)
    model.initialize(0)
    report = export_model(config, model.state_dict(), tmp_path / "tokenizer", tmp_path / "out")
    assert report.parity.num_logits > 10_000
    loaded = transformers.AutoModelForPreTraining.from_pretrained(tmp_path / "out")
    assert type(loaded) is transformers.ErnieForPreTraining
    card = (tmp_path / "out" / "README.md").read_text()
    assert "A ERNIE encoder" in card and "- ernie\n" in card and "`ErnieForPreTraining`" in card
    begun = PretrainingModel(config.model, config.all_objectives)
    notes = load_initial_weights(begun, "out", lambda: tmp_path / "out", ALONE).notes
    assert len(notes) == 1
    assert all(torch.equal(weight, begun.state_dict()[name]) for name, weight in model.state_dict().items())
    with pytest.raises(UserError, match=r"is a ernie, and the model is a bert.*give a checkpoint of BERT"):
        load_initial_weights(PretrainingModel(ModelSettings(**SIZES)), "out", lambda: tmp_path / "out", ALONE)


def test_a_rule_of_an_added_family_holds():
    with pytest.raises(ValueError, match=r"model.family=ernie does not support model.norm=rmsnorm"):
        ModelSettings(**SIZES, family="ernie", norm="rmsnorm")


def test_families_are_named_in_their_own_files_alone():
    assert choices_of(ModelSettings.model_fields["family"].annotation) == tuple(FAMILIES)
    top = Path(__file__).resolve().parents[4]
    name = re.compile(rf"""["']({"|".join(FAMILIES)})["']""")
    files = [path for folder in ("trainer", "launch") for path in (top / folder).rglob("*.py")]
    found = {path.relative_to(top).as_posix(): name.findall(path.read_text(encoding="utf-8")) for path in files}
    found = {file: names for file, names in found.items() if names and "config/families/" not in file}
    assert found == {"trainer/config/model_settings.py": ["bert"]}  # the default
