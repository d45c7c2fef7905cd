"""A folder that lacks weights, or whose parts do not belong together, is not taken for a trained model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from data_prep.base.errors import UserError
from data_prep.tokenizer.tokenizer import Tokenizer
from tests.support.error_codes import coded
from trainer.evaluation.masked_scorers import SentenceEncoder
from trainer.inference.attention_maps import attention_maps
from trainer.inference.embedding import Embedder
from trainer.inference.fill_mask import FillMask
from trainer.model import pretrained
from trainer.model.pretrained import load_config, load_tokenizer, refuse_random_weights

LOST = "bert.encoder.layer.0.output.dense.weight"


@pytest.fixture
def torn(tiny_hugging_face: Path, tmp_path: Path) -> Path:
    """A copy of a model with one matrix of its encoder missing."""
    folder = tmp_path / "torn"
    shutil.copytree(tiny_hugging_face, folder)
    weights = load_file(folder / "model.safetensors")
    del weights[LOST]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_encoder_with_random_weights_is_refused_by_all_that_use_it(torn: Path) -> None:
    with pytest.raises(
        UserError, match="layer.0.output.dense.weight .1 in all.*as an encoder", check=coded("missing-weights")
    ):
        Embedder.load(torn)
    with pytest.raises(UserError, check=coded("missing-weights")):
        attention_maps(torn, "the cat")


@pytest.mark.parametrize(
    "head",
    [
        "",
        "ForMaskedLM",
        "ForNextSentencePrediction",
        "ForQuestionAnswering",
        "ForSequenceClassification",
        "ForTokenClassification",
    ],
)
def test_each_auto_class_has_a_table_of_the_configurations_that_it_takes(head: str) -> None:
    table = getattr(transformers, pretrained._table_of(f"AutoModel{head}"))
    assert table[transformers.BertConfig].__name__ == f"Bert{head or 'Model'}"


def test_weights_that_fine_tuning_trains_may_be_missing() -> None:
    refuse_random_weights(frozenset({"pooler.dense.weight"}), Path("m"), "an encoder", but=("pooler.",))
    with pytest.raises(UserError, match=r"m lacks a, b, c \(4 in all\)"):
        refuse_random_weights(frozenset("dcba"), Path("m"), "an encoder")


@pytest.mark.parametrize("kind", [torch.int8, torch.int64, torch.uint8])
def test_integers_as_weights_are_refused_by_all_that_use_them(
    tiny_hugging_face: Path, tmp_path: Path, kind: torch.dtype
) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(tiny_hugging_face, folder)
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.position_ids"] = torch.arange(8)  # older files have it, which is no weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    Embedder.load(folder)
    weights[LOST] = (100 * weights[LOST]).to(kind)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for load in (Embedder.load, FillMask.load):
        with pytest.raises(UserError, match=f"integers in {LOST}", check=coded("weights-are-integers")):
            load(folder)


@pytest.mark.parametrize(
    ("number", "what"),
    [(float("nan"), "not finite"), (float("inf"), "not finite"), (-1e38, "beyond 1e.06")],
)
def test_weights_that_no_training_gives_are_refused_by_all_that_use_them(
    tiny_hugging_face: Path, tmp_path: Path, number: float, what: str
) -> None:
    folder = tmp_path / "diverged"
    shutil.copytree(tiny_hugging_face, folder)
    weights = load_file(folder / "model.safetensors")
    weights[LOST][1, 2] = number
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for load in (Embedder.load, FillMask.load):
        with pytest.raises(
            UserError, match=f"layer.0.output.dense.weight that are {what}", check=coded("weights-not-finite")
        ):
            load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**7}, "num_hidden_layers=10+, .* from 1 to 1,000"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_attention_heads": -1}, "num_attention_heads=-1, .* at least 1"),
        ({"num_labels": 10**7}, "num_labels=10+, .* 1,000,000"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps=nan, .* finite"),
        ({"layer_norm_eps": -1.0}, "layer_norm_eps=-1.0, .* from 0 to 1"),
        ({"hidden_dropout_prob": 2.0}, "hidden_dropout_prob=2.0"),
    ],
)
def test_numbers_of_no_model_are_refused_before_one_is_made(
    tiny_hugging_face: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = with_config(tiny_hugging_face, tmp_path / "changed", change)
    for load in (Embedder.load, FillMask.load, load_config):
        with pytest.raises(UserError, match=message, check=coded("invalid-model-config")):
            load(folder)


def with_config(source: Path, folder: Path, change: dict[str, Any]) -> Path:
    """A copy with other settings in config.json."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return folder


def test_weights_of_layers_beyond_the_configuration_are_not_left_out(tiny_hugging_face: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_hugging_face, tmp_path / "more"))
    weights = load_file(folder / "model.safetensors")
    weights |= {name.replace("layer.0", "layer.1"): weight.clone() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="layer.1", check=coded("weights-do-not-match")):
        Embedder.load(folder)


def test_answers_do_not_depend_on_the_models_configuration(tiny_hugging_face: Path, tmp_path: Path) -> None:
    change = {"return_dict": False, "output_hidden_states": True, "chunk_size_feed_forward": 7}
    folder = with_config(tiny_hugging_face, tmp_path / "changed", change)
    expected = Embedder.load(tiny_hugging_face).embed(["the cat"]).vectors
    assert np.array_equal(Embedder.load(folder).embed(["the cat"]).vectors, expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attn_implementation", "somebody/kernel"),
        ("_attn_implementation", "kernels-community/flash-attn@main:f"),
        ("attn_implementation", {"": "somebody/kernel"}),
        ("experts_implementation", "somebody/kernel"),
    ],
)
def test_an_implementation_that_the_configuration_names_is_not_fetched(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    def fetched(*arguments: Any, **options: Any) -> None:
        raise AssertionError("transformers asks for code from elsewhere")

    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", fetched)
    folder = with_config(tiny_hugging_face, tmp_path / "changed", {name: value})
    expected = Embedder.load(tiny_hugging_face).embed(["the cat"]).vectors
    assert np.array_equal(Embedder.load(folder).embed(["the cat"]).vectors, expected)
    assert (
        FillMask.load(folder).predict("the [MASK]").masks
        == FillMask.load(tiny_hugging_face).predict("the [MASK]").masks
    )
    assert attention_maps(folder, "the cat") is not None


@pytest.mark.parametrize("size", ["vocab_size", "max_position_embeddings", "intermediate_size", "hidden_size"])
@pytest.mark.parametrize("value", [10**9, 2**40, 10**30])
def test_a_configuration_that_describes_more_than_the_memory_is_refused(
    tiny_hugging_face: Path, tmp_path: Path, size: str, value: int
) -> None:
    folder = with_config(tiny_hugging_face, tmp_path / "changed", {size: value})
    weights = {name: weight for name, weight in load_file(folder / "model.safetensors").items() if weight.ndim < 2}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})  # all matrices would be made at random
    with pytest.raises(UserError, check=coded("weights-do-not-match", "model-not-loadable")):
        Embedder.load(folder)


def with_tokenizer(source: Path, folder: Path, change: dict[str, Any]) -> Path:
    """A copy with other steps in tokenizer.json."""
    shutil.copytree(source, folder)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    return folder


@pytest.mark.long
def test_a_regular_expression_that_panics_is_one_error_without_a_backtrace(
    tiny_hugging_face: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pattern = {"Regex": "(?:x+x+)+y"}
    step = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    folder = with_tokenizer(tiny_hugging_face, tmp_path / "changed", {"pre_tokenizer": step})
    for load in (load_tokenizer, Tokenizer.load, FillMask.load):
        with pytest.raises(UserError, check=coded("damaged-tokenizer")):
            load(folder)
    assert "panicked" not in capfd.readouterr().err


def test_a_text_on_which_the_tokenizer_panics_is_one_error(
    tiny_hugging_face: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pattern = {"Regex": "(?:(?:qz)+(?:qz)+)+y"}  # not found by runs of one character
    step = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    folder = with_tokenizer(tiny_hugging_face, tmp_path / "changed", {"pre_tokenizer": step})
    for use in (Embedder.load(folder).embed, lambda texts: FillMask.load(folder).predict(texts[0] + " [MASK]")):
        with pytest.raises(UserError, check=coded("damaged-tokenizer")):
            use(["qz" * 500])
    assert "panicked" not in capfd.readouterr().err


DOUBLED = [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40
BYTES = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}] * 40
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
LONG = {"id": "[CLS]", "ids": [2] * 100_000, "tokens": ["[CLS]"] * 100_000}
REPEATED = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, TEXT] * 2_000


@pytest.mark.parametrize(
    ("step", "values"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": DOUBLED}),
        ("normalizer", {"type": "Sequence", "normalizers": BYTES}),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": BYTES}),
        ("decoder", {"type": "Sequence", "decoders": DOUBLED}),
        (
            "post_processor",
            {"type": "TemplateProcessing", "single": REPEATED, "pair": [TEXT], "special_tokens": {"[CLS]": LONG}},
        ),
    ],
)
def test_steps_that_multiply_a_text_are_refused_before_they_run(
    tiny_hugging_face: Path, tmp_path: Path, step: str, values: dict[str, Any]
) -> None:
    change = {step: values}
    folder = with_tokenizer(tiny_hugging_face, tmp_path / "changed", change)
    for load in (load_tokenizer, Tokenizer.load):
        with pytest.raises(UserError, check=coded("growing-tokenizer")):
            load(folder)


@pytest.mark.parametrize("template", ["single", "pair"])
def test_a_post_processor_with_ids_that_the_model_does_not_know_is_refused(
    tiny_hugging_face: Path, tmp_path: Path, template: str
) -> None:
    beyond = {"id": "[CLS]", "ids": [10**6], "tokens": ["[CLS]"]}
    parts = {"single": [TEXT], "pair": [TEXT, {"Sequence": {"id": "B", "type_id": 1}}]}
    parts[template].append({"SpecialToken": {"id": "[CLS]", "type_id": 0}})
    step = {"type": "TemplateProcessing", **parts, "special_tokens": {"[CLS]": beyond}}
    folder = with_tokenizer(tiny_hugging_face, tmp_path / "changed", {"post_processor": step})
    for load in (load_tokenizer, FillMask.load, Embedder.load):
        with pytest.raises(UserError, match="1,000,000", check=coded("other-tokenizer")):
            load(folder)


def test_a_text_that_the_tokenizer_cannot_encode_is_one_error(tiny_hugging_face: Path, tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {}, "unk_token": "[UNK]"}
    folder = with_tokenizer(tiny_hugging_face, tmp_path / "changed", {"model": model})
    for use in (Embedder.load(folder).embed, lambda texts: FillMask.load(folder).predict(texts[0] + " [MASK]")):
        with pytest.raises(UserError, check=coded("damaged-tokenizer")):
            use(["qz"])
    with pytest.raises(UserError, check=coded("damaged-tokenizer")):
        SentenceEncoder(load_tokenizer(folder))("qz")


@pytest.mark.parametrize("padding", [{"strategy": {"Fixed": 10**13}}, {"pad_to_multiple_of": 10**13}])
def test_padding_and_truncation_of_a_file_are_not_used(
    tiny_hugging_face: Path, tmp_path: Path, padding: dict[str, Any]
) -> None:
    token = {"direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}
    values = {"strategy": "BatchLongest", "pad_to_multiple_of": None, **token, **padding}
    cut = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    folder = with_tokenizer(tiny_hugging_face, tmp_path / "changed", {"padding": values, "truncation": cut})
    assert len(load_tokenizer(folder)("the cat sat on the mat")["input_ids"]) == 8
    assert len(Tokenizer.load(folder).encode_text("the cat sat")) == 3


def test_a_tokenizer_whose_unknown_token_is_none_is_refused(tiny_hugging_face: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_hugging_face, tmp_path / "changed"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unk_token": ""}))
    with pytest.raises(UserError, match="tokenizer", check=coded("model-not-loadable")):
        load_tokenizer(folder)


def test_a_tokenizer_with_ids_that_the_model_does_not_know_is_refused(tiny_hugging_face: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(tiny_hugging_face, folder)
    values = json.loads((folder / "tokenizer.json").read_text())
    values["model"]["vocab"]["▁dog"] = 64
    (folder / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="ids up to 64 .*=64", check=coded("other-tokenizer")):
        load_tokenizer(folder)


def test_an_added_token_beyond_the_vocabulary_refuses_no_model(tiny_hugging_face: Path, tmp_path: Path) -> None:
    folder = tmp_path / "added"
    shutil.copytree(tiny_hugging_face, folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.add_tokens([f"<figure{number}>" for number in range(64)])
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder).convert_tokens_to_ids("<figure63>") >= 64
    assert np.isfinite(Embedder.load(folder).embed(["the cat"]).vectors).all()
