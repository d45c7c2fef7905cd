"""A run that begins with the weights of a checkpoint made by transformers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertModel,
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from data_prep.base.errors import UsageError, UserError
from data_prep.tokenizer.foreign_files import fingerprint_of
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import WRITERS
from trainer import load_config
from trainer.checkpoint.initial_weights import (
    ANY_TOKENIZER,
    SHUT,
    Wanted,
    load_initial_weights,
    look_at_initial_weights,
)
from trainer.checkpoint.writer import ALONE
from trainer.config.model_settings import ModelSettings
from trainer.config.objective_settings import MASKED_LM_ALONE, ObjectiveSettings, objectives_of
from trainer.data.batch import Batch
from trainer.inference.pulled_model import folder_without_weights, pull
from trainer.objectives.pretraining import PretrainingModel

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}
OURS = {
    "bert": ModelSettings(family="bert", vocab_size=70, pad_vocab_size_to_multiple_of=1, **SIZES),
    "modernbert": ModelSettings(
        family="modernbert", vocab_size=70, pad_vocab_size_to_multiple_of=1, local_attention=8, **SIZES
    ),
    "eurobert": ModelSettings(
        family="eurobert", vocab_size=70, pad_vocab_size_to_multiple_of=1, num_key_value_heads=1, **SIZES
    ),
    "xlm-roberta": ModelSettings(family="xlm-roberta", vocab_size=70, pad_vocab_size_to_multiple_of=1, **SIZES),
}
WITH_BIAS = pytest.mark.parametrize("family", ["bert", "modernbert"])
"""The families whose decoder has a bias, which keeps the rows that pad the vocabulary out of the softmax."""
LENGTH = 20


def make_theirs(family: str, vocab_size: int = 70, **options: Any) -> PreTrainedModel:
    torch.manual_seed(3)
    if family == "bert":
        model: PreTrainedModel = BertForPreTraining(BertConfig(vocab_size=vocab_size, **SIZES, **options))
    elif family == "eurobert":
        rope = {"rope_type": "default", "rope_theta": 250_000.0}
        values = {"vocab_size": vocab_size, "pad_token_id": 0, "num_key_value_heads": 1, "rope_parameters": rope}
        model = EuroBertForMaskedLM(EuroBertConfig(**values | SIZES | options))
    elif family == "xlm-roberta":
        published = {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1, "max_position_embeddings": 26}
        model = XLMRobertaForMaskedLM(XLMRobertaConfig(vocab_size=vocab_size, **SIZES | published | options))
    else:
        model = ModernBertForMaskedLM(
            ModernBertConfig(vocab_size=vocab_size, local_attention=8, pad_token_id=0, **SIZES, **options)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@pytest.fixture(params=OURS)
def family(request) -> str:
    return request.param


@pytest.fixture
def folder(family, tmp_path) -> Path:
    make_theirs(family).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def begin(config: ModelSettings, folder: Path, next_sentence: bool = False) -> tuple[PretrainingModel, list[str]]:
    model = PretrainingModel(config, objectives_of("next_sentence" if next_sentence else "none"))
    model.initialize(seed=5)
    return model.eval(), load_initial_weights(model, str(folder), lambda: pull(folder), ALONE).notes


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    masked = torch.tensor([2, 7, 11, 19, 23, 38])
    return Batch(
        input_ids=torch.randint(5, 70, (2 * LENGTH,), generator=generator),
        position_ids=torch.arange(LENGTH).repeat(2),
        token_type_ids=torch.zeros(2 * LENGTH, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, LENGTH, 2 * LENGTH], dtype=torch.int32),
        masked_positions=masked,
        labels=torch.randint(5, 70, masked.shape, generator=generator),
        cls_positions=torch.tensor([0, LENGTH]),
        next_sentence_labels=torch.tensor([0, 1]),
        sequence_length=LENGTH,
    )


@pytest.mark.parametrize(
    ("family", "multiple"), [("bert", 1), ("bert", 64), ("modernbert", 1), ("modernbert", 64), ("eurobert", 1)]
)
def test_the_first_loss_is_transformers_on_the_same_batch(family, folder, multiple):
    """Also where rows were added that only pad the vocabulary: they take no probability and get no gradient."""
    has_pairs = family == "bert"
    model, lines = begin(OURS[family].model_copy(update={"pad_vocab_size_to_multiple_of": multiple}), folder, has_pairs)
    batch = make_batch()
    labels = torch.full((2 * LENGTH,), -100).scatter(0, batch.masked_positions, batch.labels).view(2, LENGTH)
    pairs = {"next_sentence_label": batch.next_sentence_labels} if has_pairs else {}
    ours = model(batch)
    with torch.no_grad():
        theirs = make_theirs(family)(input_ids=batch.input_ids.view(2, LENGTH), labels=labels, **pairs)
    loss = ours["masked_lm"]["loss"] / len(batch.labels)
    if has_pairs:
        loss = loss + ours["sentence_pairs"]["loss"] / 2
    torch.testing.assert_close(loss, theirs.loss, rtol=1e-5, atol=0)
    assert "initializing from" in lines[0] and len(lines) == (1 if multiple == 1 else 2)
    if family == "eurobert":
        return
    loss.backward()
    padding = model.mlm_head.bias.grad[70:]
    assert len(padding) == (0 if multiple == 1 else 58) and not padding.any()


@pytest.mark.parametrize("multiple", [1, 64])
def test_a_decoder_without_a_bias_starts_with_zeros_and_its_padding_shut(tmp_path, multiple):
    theirs = make_theirs("modernbert", decoder_bias=False)
    theirs.save_pretrained(tmp_path)
    model, lines = begin(OURS["modernbert"].model_copy(update={"pad_vocab_size_to_multiple_of": multiple}), tmp_path)
    batch = make_batch()
    with torch.no_grad():
        logits = theirs(input_ids=batch.input_ids.view(2, LENGTH)).logits.flatten(0, 1)[batch.masked_positions]
        loss = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
        torch.testing.assert_close(model(batch)["masked_lm"]["loss"], loss, rtol=1e-5, atol=0)
    assert "mlm_head.bias" in lines[1]


@WITH_BIAS
def test_a_missing_token_starts_with_bias_0_and_padding_rows_are_shut(family, folder):
    config = OURS[family].model_copy(update={"vocab_size": 73, "pad_vocab_size_to_multiple_of": 16})
    model, _ = begin(config, folder)
    assert model.mlm_head.bias[70:].tolist() == [0.0] * 3 + [SHUT] * 7


@pytest.mark.parametrize("writer", WRITERS)
def test_a_checkpoint_of_another_tokenizer_than_the_shards_is_refused(folder, writer, family):
    model = PretrainingModel(OURS[family])
    lines, *_ = load_initial_weights(model, str(folder), lambda: pull(folder), ALONE, wanted=Wanted("0" * 64))
    assert "has no tokenizer.json" in lines[-1]
    fingerprint = Tokenizer.load(WRITERS[writer](folder, ["a few words of text"] * 9, vocab_size=400)).fingerprint
    lines, *_ = load_initial_weights(model, str(folder), lambda: pull(folder), ALONE, wanted=Wanted(fingerprint))
    assert "tokenizer" not in str(lines)
    with pytest.raises(UserError, match=f"{fingerprint}.*{'0' * 64}", check=coded("other-tokenizer")):
        load_initial_weights(model, str(folder), lambda: pull(folder), ALONE, wanted=Wanted("0" * 64))


def test_the_fingerprint_that_an_earlier_release_took_of_a_unigram_model_is_that_of_the_model(folder, family):
    written = WRITERS["xlm-roberta"](folder, ["a few words of text"] * 9, vocab_size=400)
    values = json.loads((written / "tokenizer.json").read_text())
    values["model"]["vocab"][9][1] += 1e-15
    (written / "tokenizer.json").write_text(json.dumps(values))
    files = {path.name: path.read_bytes() for path in written.iterdir() if path.suffix == ".json"}
    earlier = fingerprint_of(files, Tokenizer.load(written).special_tokens, exact_scores=True)
    assert earlier != Tokenizer.load(written).fingerprint
    assert "tokenizer" not in str(look(OURS[family], str(folder), wanted=Wanted(earlier))[1:])


@WITH_BIAS
def test_rows_that_the_vocabulary_has_more_are_initialized_and_reported(family, folder):
    config = OURS[family].model_copy(update={"vocab_size": 71, "pad_vocab_size_to_multiple_of": 16})
    model, lines = begin(config, folder)
    fresh = PretrainingModel(config)
    fresh.initialize(seed=5)
    words, fresh_words = (m.encoder.embeddings.word_embeddings.weight for m in (model, fresh))
    assert words.shape == (80, 32) and torch.equal(words[70:], fresh_words[70:])
    assert torch.equal(words[:70], make_theirs(family).get_input_embeddings().weight)
    assert "word_embeddings.weight from row 70 of 80" in lines[1]


def test_heads_that_are_missing_are_initialized_and_reported(tmp_path):
    theirs = make_theirs("bert")
    BertModel.save_pretrained(theirs.bert, tmp_path / "encoder")
    model, lines = begin(OURS["bert"], tmp_path / "encoder", next_sentence=True)
    assert torch.equal(model.pooler.dense.weight, theirs.bert.pooler.dense.weight)
    assert "mlm_head.dense.weight" in lines[1] and "next_sentence_head.dense.bias" in lines[1]
    assert "encoder." not in lines[1] and "pooler" not in lines[1]


@pytest.mark.parametrize("beside", [MASKED_LM_ALONE, ()])
def test_a_users_objective_begins_with_weights_of_its_own(family, folder, beside):
    """Whatever its modules are called: no published model has them."""
    own = ObjectiveSettings(name="tests.support.replaced_token_detection:ReplacedTokenDetection")
    model = PretrainingModel(OURS[family], (*beside, own))
    model.initialize(seed=5)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    _, line, *_ = load_initial_weights(model, str(folder), lambda: pull(folder), ALONE).notes
    fresh = set(line.partition(": ")[2].split(", "))
    assert "detector.weight" in fresh and all(name.startswith(("generator", "detector")) for name in fresh)
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert not changed & fresh and {name for name in changed if name.startswith("encoder.")}
    assert any(name.startswith("mlm_head.") for name in changed) == bool(beside)


def test_a_decoder_without_a_bias_gets_new_tokens_and_no_rows_that_only_pad(tmp_path):
    """Their probability could not be 0."""
    theirs = make_theirs("eurobert")
    theirs.save_pretrained(tmp_path)
    longer = OURS["eurobert"].model_copy(update={"vocab_size": 72})
    model, lines = begin(longer, tmp_path)
    assert torch.equal(model.mlm_head.decoder.weight[:70], theirs.lm_head.weight)
    assert "mlm_head.decoder.weight from row 70 of 72" in lines[1]
    with pytest.raises(UserError, match="model.pad_vocab_size_to_multiple_of=64 adds rows to the 70 there"):
        begin(longer.model_copy(update={"pad_vocab_size_to_multiple_of": 64}), tmp_path)


def test_an_encoder_without_a_decoder_gets_a_new_one(tmp_path):
    theirs = make_theirs("eurobert")
    EuroBertModel.save_pretrained(theirs.model, tmp_path)
    model, lines = begin(OURS["eurobert"], tmp_path)
    assert torch.equal(model.encoder.final_norm.weight, theirs.model.norm.weight)
    assert lines[1] == "newly initialized (missing there): mlm_head.decoder.weight"


def test_old_names_of_norms_are_understood(tmp_path):
    """As in the checkpoints that Google published."""
    make_theirs("bert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): w
        for n, w in weights.items()
    }
    assert old.keys() != weights.keys()
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, lines = begin(OURS["bert"], tmp_path)
    assert "newly initialized" not in str(lines)
    assert torch.equal(model.encoder.embeddings.norm.weight, weights["bert.embeddings.LayerNorm.weight"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": 48, "intermediate_size": 40}, ["model.hidden_size is 48 and there 32", "and there 48"]),
        ({"num_hidden_layers": 3}, ["model.num_hidden_layers is 3 and there 4"]),
        ({"layer_norm_eps": 1e-6}, ["model.layer_norm_eps is 1e-06 and there"]),
        ({"vocab_size": 60}, ["model.vocab_size is 60 and there 70"]),
    ],
)
def test_another_architecture_is_refused_and_every_difference_named(family, folder, changes, said):
    with pytest.raises(UserError) as caught:
        begin(OURS[family].model_copy(update=changes), folder)
    assert all(words in str(caught.value) for words in said)


@pytest.mark.parametrize(
    "changes", [{"local_attention": 16}, {"global_attn_every_n_layers": 2}, {"bias": True}, {"local_rope_theta": 500.0}]
)
def test_config_json_of_modernbert_must_be_consistent(tmp_path, changes):
    make_theirs("modernbert").save_pretrained(tmp_path)
    with pytest.raises(UserError, check=coded("other-architecture")):
        begin(OURS["modernbert"].model_copy(update=changes), tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"family": "modernbert", "classifier_activation": "silu"},
            "model.hidden_act is geglu and there gated gelu and",
        ),
        (
            {"family": "modernbert", "hidden_activation": "relu"},
            "model.hidden_act is geglu and there gated gelu and re",
        ),
        ({"family": "bert", "is_decoder": True}, "model.local_attention is None and there to the left alone"),
        ({"family": "bert", "hidden_act": "gelu_new"}, "model.hidden_act is gelu and there gelu_new"),
        ({"family": "eurobert", "hidden_act": "gelu"}, "model.hidden_act is swiglu and there gated gelu"),
        ({"family": "eurobert", "attention_bias": True}, "model.bias is False and there in some modules only"),
        ({"family": "eurobert", "attention_bias": True, "mlp_bias": True}, "model.bias is False and there True"),
        ({"family": "eurobert", "head_dim": 8}, "model.head_size is 16 and there 8"),
        ({"family": "eurobert", "num_key_value_heads": 2}, "model.num_key_value_heads is 1 and there 2"),
        ({"family": "eurobert", "tie_word_embeddings": True}, "a matrix of its own and there the word matrix"),
        (
            {"family": "eurobert", "rope_parameters": {"rope_type": "linear", "rope_theta": 250_000.0, "factor": 2.0}},
            "model.global_rope_theta is 250000.0 and there scaled",
        ),
        ({"family": "xlm-roberta", "pad_token_id": 3}, "model.max_position_embeddings is 24 and there 22"),
    ],
)
def test_options_that_no_setting_covers_are_refused(tmp_path, options, said):
    make_theirs(**options).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        begin(OURS[options["family"]], tmp_path)


def test_another_family_is_refused(tmp_path):
    make_theirs("bert").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a bert, .* modernbert", check=coded("other-architecture")):
        begin(OURS["modernbert"], tmp_path)
    config = ModelSettings(family="custom", norm="rmsnorm", **SIZES)
    with pytest.raises(UserError, match="model.norm=rmsnorm"):
        begin(config, tmp_path)


def test_a_pickle_is_refused_with_the_reason(family, folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="pytorch_model.bin", check=coded("weights-not-safetensors")):
        begin(OURS[family], folder)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    make_theirs("bert").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["bert.encoder.layer.2.output.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="bert.encoder.layer.2.output.dense.weight", check=coded("missing-weights")):
        begin(OURS["bert"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match="a matrix of its own"):
        begin(OURS["bert"], tmp_path)


def look(config, source, tracking_uri=None, wanted=ANY_TOKENIZER):
    find_folder = partial(folder_without_weights, source, tracking_uri)
    return look_at_initial_weights(config, source, find_folder, wanted)


def test_a_look_reads_the_names_and_shapes_of_the_weights(family, folder, tmp_path):
    """Also in shards with an index; a refusal for other reasons does not open them."""
    parameters = len(dict(PretrainingModel(OURS[family]).named_parameters()))
    expected = [f"{folder} is a {family} of this architecture", f"initializes {parameters} of {parameters} tensors"]
    pairs = "bert.pooler.dense.bias, bert.pooler.dense.weight, cls.seq_relationship.bias, cls.seq_relationship.weight"
    expected += [f"dropped (not in this model): {pairs}"] if family == "bert" else []
    assert look(OURS[family], str(folder)) == expected
    assert begin(OURS[family], folder)[1][1:] == expected[2:]
    make_theirs(family).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 2
    assert look(OURS[family], str(tmp_path / "shards"))[1:] == expected[1:]
    for weights in folder.glob("*.safetensors"):
        weights.write_bytes(b"")
    with pytest.raises(UserError, match="safetensors is not a whole file", check=coded("damaged-model")):
        look(OURS[family], str(folder))
    fingerprint = Tokenizer.load(WRITERS["wordpiece"](folder, ["a few words of text"] * 9, vocab_size=400)).fingerprint
    with pytest.raises(UserError, match=fingerprint, check=coded("other-tokenizer")):
        look(OURS[family], str(folder), wanted=Wanted("0" * 64))
    with pytest.raises(UserError, match="model.num_hidden_layers is 3 and there 4", check=coded("other-architecture")):
        look(OURS[family].model_copy(update={"num_hidden_layers": 3}), str(folder))
    with pytest.raises(UserError, match="nowhere", check=coded("unknown-model")):
        look(OURS[family], str(tmp_path / "nowhere"))


@pytest.mark.parametrize("in_shards", [False, True])
@pytest.mark.parametrize("damage", ["missing", "odd", "more layers", "integers", "cut", "pickles"])
def test_a_look_refuses_the_tensors_that_the_run_refuses(damage, in_shards, family, tmp_path):
    """With the same error, before any time of an accelerator."""
    theirs, folder = make_theirs(family), tmp_path / "theirs"
    theirs.save_pretrained(folder, max_shard_size="20KB" if in_shards else "1GB")
    path, name = next(
        (path, name)
        for path in sorted(folder.glob("*.safetensors"))
        for name, weight in sorted(load_file(path).items())
        if ".2." in name and weight.ndim == 2
    )
    weights = load_file(path)
    changed = {
        "odd": {name: weights[name][:7].contiguous()},
        "more layers": {name: weights[name], name.replace(".2.", ".9."): weights[name].clone()},
        "integers": {name: weights[name].to(torch.int8)},
    }
    save_file({**{n: w for n, w in weights.items() if n != name}, **changed.get(damage, {})}, path, {"format": "pt"})
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    elif damage == "pickles":
        for each in folder.glob("*.safetensors*"):
            each.rename(each.with_suffix(".bin"))
    said = []
    for find in (look, begin):
        with pytest.raises(UserError) as caught:
            find(OURS[family], str(folder) if find is look else folder)
        said.append((caught.value.code, caught.value.problem))
    assert said[0] == said[1]


def test_a_look_names_what_is_new_and_reads_no_number(tmp_path):
    """A model without a head, with old names of norms; numbers that are not finite are found by the run."""
    theirs = make_theirs("bert")
    BertModel.save_pretrained(theirs.bert, tmp_path / "encoder")
    path = tmp_path / "encoder" / "model.safetensors"
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): weight for name, weight in load_file(path).items()}
    save_file(old | {"embeddings.LayerNorm.gamma": torch.full((32,), torch.nan)}, path, metadata={"format": "pt"})
    *_, fresh, dropped = look(OURS["bert"], str(tmp_path / "encoder"))
    assert fresh.startswith("newly initialized (missing there): mlm_head.bias, mlm_head.") and "encoder." not in fresh
    assert dropped == "dropped (not in this model): bert.pooler.dense.bias, bert.pooler.dense.weight"
    with pytest.raises(UserError, check=coded("weights-not-finite")):
        begin(OURS["bert"], tmp_path / "encoder")


def test_a_look_at_a_folder_without_weights_says_that_the_run_checks_them(family, folder):
    """As the configuration and the tokenizer of a model on the Hub are."""
    (folder / "model.safetensors").unlink()
    _, line = look_at_initial_weights(OURS[family], "owner/name", lambda: folder)
    assert line == "its weights are not downloaded; the run checks its tensors"


def test_a_registered_model_is_looked_up_and_not_downloaded(monkeypatch):
    asked = []
    monkeypatch.setattr("trainer.inference.pulled_model.check_is_there", lambda *given: asked.append(given))
    said = look(OURS["bert"], "models:/small/1", "sqlite:///m.db")
    assert said == ["models:/small/1 exists; the run checks whether it fits this model"]
    assert asked == [("models:/small/1", "sqlite:///m.db")]


def test_a_bias_from_frequencies_and_trained_weights_exclude_each_other():
    with pytest.raises(UsageError, match="set model.output_bias=zeros"):
        load_config("tiny_cpu", ["init_from=folder"])
    assert load_config("tiny_cpu", ["init_from=folder", "model.output_bias=zeros"]).init_from == "folder"


def test_what_learns_from_a_teacher_alone_keeps_its_initial_weights(tmp_path) -> None:
    """A published model has no such matrices; the head that distillation trains is that of masked_lm."""
    make_theirs("modernbert").save_pretrained(tmp_path / "theirs")
    states = ObjectiveSettings(name="hidden_states", settings={"teacher_hidden_size": 48})
    objectives = (*MASKED_LM_ALONE, ObjectiveSettings(name="distillation"), states)
    model, plain = (PretrainingModel(OURS["modernbert"], each) for each in (objectives, MASKED_LM_ALONE))
    for each in (model, plain):
        each.initialize(seed=5)
    before = model.projections[0].weight.clone()
    said = [
        load_initial_weights(each, "theirs", lambda: pull(tmp_path / "theirs"), ALONE).notes for each in (model, plain)
    ]
    assert "newly initialized (missing there): projections.0.weight" in said[0][1] and len(said[1]) == 1
    assert torch.equal(model.projections[0].weight, before)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in plain.state_dict().items())
