"""What is refused of a folder from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.model.model_folder import check_model_folder, folder_digest, read_provenance
from trainer.model.pretrained import load_pretrained


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "1_Pooling" / "config.json").write_text("{}")
    return folder


def test_a_folder_of_safetensors_and_json_is_taken(folder: Path) -> None:
    check_model_folder(folder, strict=True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_folder_that_asks_for_code_of_its_own_is_refused(folder: Path, name: str) -> None:
    (folder / name).write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
    with pytest.raises(UserError, match=f"auto_map in {name}", check=coded("code-in-model")):
        check_model_folder(folder)


def test_code_beside_a_class_of_transformers_is_never_run(folder: Path, tmp_path: Path) -> None:
    """As in the published EuroBERT: transformers has the class, so the code that `auto_map` names is not needed."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes |= {"head_dim": 4, "num_key_value_heads": 2, "vocab_size": 16, "pad_token_id": 0}
    model = transformers.EuroBertForMaskedLM(transformers.EuroBertConfig(**sizes))
    model.save_pretrained(folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    values = json.loads((folder / "config.json").read_text())
    names = ("AutoConfig", "AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification", "AutoTokenizer")
    for reference in ("evil.Model", "somebody/else--evil.Model"):
        values["auto_map"] = dict.fromkeys(names, reference)
        (folder / "config.json").write_text(json.dumps(values))
        check_model_folder(folder)
        for auto_class in ("AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"):
            loaded, _ = load_pretrained(auto_class, folder, "a model")
            assert type(loaded).__module__.startswith("transformers.models.eurobert")
        loaded.save_pretrained(tmp_path / "saved")
        assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text())
        with pytest.raises(UserError, check=coded("code-in-model")):
            check_model_folder(folder, strict=True)
        with pytest.raises(UserError, match="auto_map in config.json", check=coded("code-in-model")):
            (folder / "config.json").write_text(json.dumps(values | {"model_type": "evil"}))
            check_model_folder(folder)
        with pytest.raises(UserError, match="auto_map in config.json", check=coded("code-in-model")):
            (folder / "config.json").write_text(json.dumps(values | {"text_config": {"auto_map": {"a": "evil.Model"}}}))
            check_model_folder(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"vision_config": {"auto_map": {"AutoModel": "evil.Model"}}},
        {"custom_pipelines": {"fill-mask": {"impl": "evil.Pipeline"}}},
        {"quantization_config": {"quant_method": "mxfp4"}},
    ],
)
def test_fields_that_bring_in_code_are_refused_at_any_depth(folder: Path, fields: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, check=coded("code-in-model")):
        check_model_folder(folder)


def test_a_label_may_have_the_name_of_such_a_field(folder: Path) -> None:
    labels = {"id2label": {"0": "auto_map"}, "label2id": {"auto_map": 0}, "quantization_config": None}
    (folder / "config.json").write_text(json.dumps(labels))
    check_model_folder(folder)


def test_an_adapter_whose_base_model_lies_elsewhere_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    with pytest.raises(UserError, check=coded("code-in-model")):
        check_model_folder(folder)


def test_weights_as_pickle_only_are_refused_and_beside_safetensors_not_taken_from_a_registry(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    check_model_folder(folder)
    with pytest.raises(UserError, match="pytorch_model.bin", check=coded("weights-not-safetensors", "code-in-model")):
        check_model_folder(folder, strict=True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, check=coded("weights-not-safetensors", "code-in-model")):
        check_model_folder(folder)


def test_code_in_a_registry_is_refused_in_any_depth(folder: Path) -> None:
    (folder / "1_Pooling" / "modeling.py").write_text("")
    with pytest.raises(UserError, match="modeling.py", check=coded("code-in-model")):
        check_model_folder(folder, strict=True)


def test_a_folder_without_a_config_or_with_a_damaged_one_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, check=coded("damaged-model")):
        check_model_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="what the user wrote", check=coded("not-a-model-folder")):
        check_model_folder(folder, name="what the user wrote")
    for file, what in (("tokenizer.json", "a tokenizer"), ("manifest.json", "a data set")):
        (folder / file).write_text("{}")
        with pytest.raises(UserError, match=f"is {what}, not a model", check=coded("not-a-model-folder")):
            check_model_folder(folder)


def test_json_nested_without_end_is_damage(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="config.json", check=coded("damaged-model")):
        check_model_folder(folder)


@pytest.mark.parametrize(
    "shard",
    [
        "../outside.safetensors",
        "/outside.safetensors",
        "1_Pooling/in.safetensors",
        "weights.dat",
        "none.safetensors",
        3,
    ],
)
def test_an_index_leads_to_safetensors_of_its_own_folder_alone(folder: Path, shard: Any) -> None:
    for path in ("../outside.safetensors", "1_Pooling/in.safetensors", "weights.dat"):
        (folder / path).write_bytes(b"weights")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors", "b": shard}}))
    check_model_folder(folder)  # beside the whole model no index is read
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    with pytest.raises(UserError, match="model.safetensors.index.json of ", check=coded("damaged-model")):
        check_model_folder(folder)
    (folder / "config.json").write_text(json.dumps({"transformers_weights": shard}))
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    with pytest.raises(UserError, match="config.json of ", check=coded("damaged-model")):
        check_model_folder(folder)
    (folder / "config.json").write_text(json.dumps({"transformers_weights": index.name}))
    check_model_folder(folder, strict=True)
    index.write_text("{}")
    with pytest.raises(UserError, check=coded("damaged-model")):
        check_model_folder(folder)


def test_the_digest_sees_every_byte_and_name_and_nothing_else(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before = folder_digest(folder)
    (folder / "model.safetensors").write_bytes(b"weightz")
    changed = folder_digest(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    assert folder_digest(folder) == before != changed
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert folder_digest(folder) != before


def test_provenance_of_an_export_is_read_unchanged(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) == {}
    written = {"step": 7, "mlflow_run_id": None, "data_lineage": ["a"], "scores": {"loss": 2}, "task": None}
    (tmp_path / "provenance.json").write_text(json.dumps(written))
    assert read_provenance(tmp_path) == written


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("data_lineage", [1, 2]),
        ("data_lineage", "a,b"),
        ("data_digests", ["a"]),
        ("scores", [1, 2]),
        ("scores", {"loss": "low"}),
        ("mlflow_run_id", 7),
    ],
)
def test_another_shape_is_named(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "provenance.json").write_text(json.dumps({"step": 7, name: value}))
    with pytest.raises(UserError, match=rf"provenance.json .*\({name}", check=coded("damaged-provenance")):
        read_provenance(tmp_path)
