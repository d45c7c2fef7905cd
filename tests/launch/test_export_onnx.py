"""`clozeworks export --onnx`: graphs that compute what transformers computes, and int8 that predicts what they do."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import transformers
from onnx import numpy_helper

from data_prep.base.errors import UsageError, UserError
from launch import export, register
from tests.support import fork_server
from tests.support.error_codes import coded
from tests.support.launch_command import run
from tests.support.toy_run import make_run
from tests.test_layout import REPOSITORY
from trainer.finetuning.examples import Examples
from trainer.finetuning.experiment import Experiment, make_model
from trainer.finetuning.finetune_settings import FinetuneSettings
from trainer.finetuning.fitted_card import FitFacts
from trainer.finetuning.fitted_model import save_fitted_model
from trainer.finetuning.task_data import encode_task, make_task
from trainer.hf_export import onnx_export
from trainer.inference.preprocessor import Preprocessor, load_text_tokenizer
from trainer.inference.pulled_model import pull
from trainer.model.model_folder import file_digests
from trainer.model.quiet_transformers import quiet_transformers

TEXTS = ["the cat sat on the mat", "a dog ran to it and slept in the garden", "it was a day", "cat " * 60]
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 40}
CONFIGS: dict[str, Any] = {
    "bert": lambda: transformers.BertConfig(**SIZES),
    "roberta": lambda: transformers.RobertaConfig(**SIZES, pad_token_id=0),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**SIZES, pad_token_id=1),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SIZES, local_attention=8, global_attn_every_n_layers=2, pad_token_id=0, cls_token_id=2, sep_token_id=3
    ),
    "deberta-v2": lambda: transformers.DebertaV2Config(
        **SIZES,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        type_vocab_size=0,
        position_biased_input=False,
    ),
    "eurobert": lambda: transformers.EuroBertConfig(**SIZES, num_key_value_heads=1, pad_token_id=0),
}
HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")


def make_folder(tiny: Path, folder: Path, family: str, head: str, untied: bool = False) -> Path:
    """A model of random weights far from the initial ones, with the tokenizer of the tiny BERT."""
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = CONFIGS[family]()
    config.tie_word_embeddings = not untied
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    model.save_pretrained(folder)
    return folder


def called(*arguments: str | Path) -> str:
    """The output of the command."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        run(patch, export, *arguments)
    return printed.getvalue()


def theirs_and_ours(folder: Path, head: str, num_rows: int = 5, length: int = 11) -> list[tuple[Any, Any]]:
    """Outputs of transformers and of plain onnxruntime at the tokens of a batch with padding at the end of rows."""
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    mask = (np.arange(length) < np.linspace(length, 1, num_rows).astype(int)[:, None]).astype(np.int64)
    draw = np.random.default_rng(0)
    values = {"input_ids": draw.integers(5, 20, mask.shape) * mask, "attention_mask": mask}
    values["token_type_ids"] = draw.integers(0, 2, mask.shape) * mask
    given = {each.name: values[each.name] for each in session.get_inputs()}
    with quiet_transformers(), torch.no_grad():
        model = getattr(transformers, f"AutoModel{head}").from_pretrained(folder, dtype=torch.float32).eval()
        expected = model(**{name: torch.from_numpy(value) for name, value in given.items()})
    names = [each.name for each in session.get_outputs()]
    at = ... if head == "ForSequenceClassification" else mask.astype(bool)
    ours = session.run(names, given)
    return [(expected[name].numpy()[at], value[at]) for name, value in zip(names, ours, strict=True)]


def check_alike(folder: Path, head: str) -> None:
    for expected, actual in theirs_and_ours(folder, head):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(actual, expected, atol=1e-4)


def left_behind(output: Path) -> list[str]:
    return sorted(path.name for path in output.parent.iterdir() if output.name in path.name)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with labels; one is longer than the positions of the models."""
    path = tmp_path_factory.mktemp("table") / "texts.tsv"
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{'xy'[at % 2]}\n" for at, text in enumerate(TEXTS)))
    return path


@pytest.fixture(scope="module")
def exported(tokenizer_folder: Path, table: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The export of a checkpoint with both graphs, and what the command printed; not to be changed."""
    folder = tmp_path_factory.mktemp("exported")
    checkpoint = make_run(folder / "run", tokenizer_folder)
    output = folder / "tiny"
    arguments = ("--onnx", "--int8", "--int8-data", table, "--min-agreement", "0")
    return output, called("--checkpoint", checkpoint, "--output", output, *arguments)


@pytest.fixture(scope="module")
def fitted(tiny_hugging_face: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ModernBERT with a classifier, as `clozeworks finetune` saves it; not to be changed."""
    folder = tmp_path_factory.mktemp("fitted")
    encoder = make_folder(tiny_hugging_face, folder / "encoder", "modernbert", "MaskedLM")
    task = make_task("classification", ("x", "y"))
    some = Examples(TEXTS[:2], None, ["x", "y"])
    preprocessor = Preprocessor(load_text_tokenizer(encoder), 20, False)
    data = encode_task(task, {"train": some, "valid": some}, preprocessor)
    model = make_model(Experiment(FinetuneSettings(model=encoder, train=""), encoder, data, "", {}), "full", 0)
    with torch.no_grad():
        model.classifier.weight.mul_(20)
    facts = FitFacts(
        task="classification",
        base_model="encoder",
        variant="full",
        text_column="text",
        pair_column=None,
        label_column="label",
        max_length=20,
        learning_rate=1e-3,
        seed=0,
        best_epoch=1,
        num_examples={"train": 2},
        valid_scores={},
        scores={"accuracy": 0.5},
        scored_on="valid",
        train_sha256="0" * 64,
    )
    save_fitted_model(model, encoder, folder / "model", facts, None)
    return folder / "model"


@pytest.mark.long
def test_a_checkpoint_becomes_a_graph_that_computes_what_transformers_computes(exported: tuple[Path, str]) -> None:
    folder, printed = exported
    check_alike(folder, "ForMaskedLM")
    graph = onnx.load(folder / "model.onnx").graph
    shapes = {
        each.name: [axis.dim_param for axis in each.type.tensor_type.shape.dim]
        for each in (*graph.input, *graph.output)
    }
    axes = ["batch_size", "sequence_length"]
    names = ("input_ids", "attention_mask", "token_type_ids")
    assert shapes == {**dict.fromkeys(names, axes), "logits": [*axes, ""]}
    assert "model.onnx: " in printed and "exported step-00000020, " in printed
    types = {each.data_type for each in onnx.load(folder / "model_quantized.onnx").graph.initializer}
    assert onnx.TensorProto.INT8 in types and {each.data_type for each in graph.initializer} & {2, 3} == set()


@pytest.mark.long
def test_the_card_and_the_provenance_describe_both_graphs(exported: tuple[Path, str]) -> None:
    folder, printed = exported
    card = (folder / "README.md").read_text()
    assert 'ORTModelForMaskedLM.from_pretrained("DIRECTORY", file_name="model.onnx")' in card
    rows = [line for line in card.splitlines() if line.startswith("| `model")]
    assert len(rows) == 2 and all(row in printed for row in rows)
    provenance = json.loads((folder / "provenance.json").read_text())
    assert provenance["onnx"]["max_difference"] < 1e-4 and provenance["onnx"]["libraries"]["onnx"]
    assert provenance["int8"]["unit"] == "masked tokens" and provenance["int8"]["num_rows"] == len(TEXTS)
    assert provenance["files_sha256"] == file_digests(folder), "push refuses files that no check saw"
    notes = (str(REPOSITORY), "site-packages", ".py")
    assert not any(note.encode() in (folder / "model.onnx").read_bytes() for note in notes)


@pytest.mark.long
def test_a_registered_version_has_the_graphs(
    exported: tuple[Path, str], database: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(monkeypatch, register, "--model", exported[0], "--name", "tiny", "--tracking-uri", database)
    pulled = pull("models:/tiny/1", tmp_path / "pulled", database)
    for name in ("model.onnx", "model_quantized.onnx"):
        assert (pulled / name).read_bytes() == (exported[0] / name).read_bytes()


@pytest.mark.long
def test_a_fitted_model_is_scored_in_int8(fitted: Path, table: Path, tmp_path: Path) -> None:
    """Labels, columns and length are those of the fit; what an earlier export wrote is replaced."""
    source = shutil.copytree(fitted, tmp_path / "source")
    (source / "model_quantized.onnx").write_bytes(b"old")
    with (source / "README.md").open("a") as card:
        card.write("\n## ONNX\n\nold section\n")
    before = file_digests(source)
    output = tmp_path / "exports" / "naïve 模型"
    arguments = ("--onnx", "--int8", "--int8-data", table, "--label-column", "label")
    printed = called("--model", source, "--output", output, *arguments)
    assert "of 4 rows of texts.tsv have the same prediction in int8 as in float32 (few: 100 or more" in printed
    check_alike(output, "ForSequenceClassification")
    described = json.loads((output / "provenance.json").read_text())
    assert {*described["int8"]["scores"]} == {"model.onnx", "model_quantized.onnx"}
    assert described["int8"]["agreement"] == 1 and described["onnx"]["outputs"] == ["logits"]
    text = (output / "README.md").read_text()
    assert text.count("## ONNX") == 1 and "old section" not in text and "accuracy" in text
    assert file_digests(source) == before and "token_type_ids" not in described["onnx"]["inputs"]
    assert left_behind(output) == [output.name]


@pytest.mark.long
def test_an_encoder_in_bf16_is_exported_in_fp32(tiny_hugging_face: Path, table: Path, tmp_path: Path) -> None:
    source = make_folder(tiny_hugging_face, tmp_path / "source", "bert", "MaskedLM", untied=True)
    with quiet_transformers():
        transformers.AutoModelForMaskedLM.from_pretrained(source).bfloat16().save_pretrained(source)
    output = tmp_path / "encoder"
    arguments = ("--onnx", "encoder", "--int8", "--int8-data", table, "--min-agreement", "0")
    printed = called("--model", source, "--output", output, *arguments)
    assert "the weights were BF16, and are float32 there" in printed and "4 texts of texts.tsv" in printed
    assert [each.name for each in onnx.load(output / "model.onnx").graph.output] == ["last_hidden_state"]
    check_alike(output, "")
    assert "ORTModelForFeatureExtraction" in (output / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_and_head(family: str, head: str, tiny_hugging_face: Path, tmp_path: Path) -> None:
    if (family, head) == ("eurobert", "QuestionAnswering"):
        return  # which transformers does not have
    source = make_folder(tiny_hugging_face, tmp_path / "source", family, head)
    called("--model", source, "--output", tmp_path / "output", "--onnx")
    check_alike(tmp_path / "output", f"For{head}")


@pytest.mark.long
@pytest.mark.fault(row="77", fault="a graph with a wrong weight", required="refused; nothing is left")
@pytest.mark.parametrize("error", [1e-2, float("nan")])
def test_a_graph_with_a_wrong_weight_is_refused(
    error: float, exported: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = onnx.load(exported[0] / "model.onnx")
    weight = next(each for each in graph.graph.initializer if each.name.endswith("decoder.bias"))
    values = numpy_helper.to_array(weight).copy()
    values[7] += error
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))

    def write(model: Any, inputs: Any, outputs: Any, path: Path) -> int:
        onnx.save_model(graph, path)
        return 18

    monkeypatch.setattr(onnx_export, "_write", write)
    with pytest.raises(UserError, match="nothing was exported", check=coded("export-differs")):
        called("--model", exported[0], "--output", tmp_path / "wrong", "--onnx")
    assert left_behind(tmp_path / "wrong") == []


@pytest.fixture
def without_exporter(exported: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The exported folder, for which the exporter's work is a copy of its graph."""

    def write(model: Any, inputs: Any, outputs: Any, path: Path) -> int:
        shutil.copy(exported[0] / "model.onnx", path)
        return 18

    monkeypatch.setattr(onnx_export, "_write", write)
    return exported[0]


@pytest.mark.long
def test_int8_that_predicts_something_else_is_refused(
    without_exporter: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_wrong_int8(folder: Path) -> Path:
        graph = onnx.load(folder / "model.onnx")
        for weight in graph.graph.initializer:
            if weight.name.endswith("decoder.bias"):
                values = numpy_helper.to_array(weight) + 1000 * np.eye(1, weight.dims[0], 9, np.float32)[0]
                weight.CopyFrom(numpy_helper.from_array(values, weight.name))
        onnx.save_model(graph, folder / "model_quantized.onnx")
        return folder / "model_quantized.onnx"

    monkeypatch.setattr("trainer.evaluation.int8_agreement.add_int8", add_wrong_int8)
    arguments = ("--model", without_exporter, "--output", tmp_path / "wrong", "--onnx", "--int8", "--int8-data", table)
    with pytest.raises(UserError, match="--min-agreement 0.99", check=coded("int8-differs")):
        called(*arguments)
    assert left_behind(tmp_path / "wrong") == []


@pytest.mark.long
def test_a_dry_run_checks_and_writes_nothing(without_exporter: Path, tmp_path: Path) -> None:
    printed = called("--model", without_exporter, "--output", tmp_path / "new", "--onnx", "--dry-run")
    assert "model.onnx: " in printed and "nothing was written" in printed
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "m"), "--model is only valid with --onnx"),
        (("--model", "m", "--checkpoint", "c", "--onnx"), "not allowed with"),
        (("--checkpoint", "c", "--int8"), "--int8 is only valid with --onnx"),
        (("--checkpoint", "c", "--onnx", "--int8"), "--int8-data FILE"),
        (("--checkpoint", "c", "--onnx", "--int8-data", "f.tsv"), "--int8-data is only valid with --int8"),
        (("--checkpoint", "c", "--onnx", "--min-agreement", "0"), "--min-agreement is only valid with --int8"),
        (("--checkpoint", "c", "--onnx", "--int8", "--min-agreement", "nan"), "from 0 to 1, got 'nan'"),
        (("--checkpoint", "c", "--onnx", "graph"), "invalid choice"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, check=lambda ended: ended.code == 2):
        called(*arguments, "--output", "new")
    assert message in capsys.readouterr().err


def test_what_is_missing_is_refused_before_any_work(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--model", tiny_hugging_face, "--output", tmp_path / "new", "--onnx")
    monkeypatch.setattr(onnx_export, "add_onnx", None)
    with pytest.raises(UsageError, check=coded("missing-path")):
        called(*arguments, "--int8", "--int8-data", tmp_path / "none.tsv")
    with pytest.raises(UserError, check=coded("output-not-empty")):
        called("--model", tiny_hugging_face, "--output", tiny_hugging_face, "--onnx")
    inside = tiny_hugging_face / "." / "onnx"
    with pytest.raises(UsageError, match="is inside", check=coded("output-inside-model")):
        called("--model", tiny_hugging_face, "--output", inside, "--onnx")
    assert not inside.exists()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UsageError, check=coded("missing-extra")) as raised:
        called(*arguments)
    assert "[onnx]" in raised.value.fix
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("architecture", "auto_class"),
    [
        ("BertModel", "AutoModel"),  # as of a model fine-tuned for vectors
        ("BertForPreTraining", "AutoModelForMaskedLM"),
        ("EuroBertForTokenClassification", "AutoModelForTokenClassification"),
    ],
)
def test_what_a_folder_is_exported_as(architecture: str, auto_class: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert onnx_export._head_of(tmp_path, "model")[0] == auto_class
    assert onnx_export._head_of(tmp_path, "encoder")[0] == "AutoModel"


@pytest.mark.long
def test_weights_beside_the_graphs_have_the_names_that_optimum_looks_for(
    tiny_hugging_face: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above 2 GB; the record has both files, and another export copies none of them."""
    monkeypatch.setattr(onnx_export, "_LARGEST_FILE", 0)
    first, second = tmp_path / "first", tmp_path / "second"
    called("--model", tiny_hugging_face, "--output", first, "--onnx", "--int8", "--int8-data", table,
           "--min-agreement", "0")  # fmt: skip
    graphs = {"model.onnx", "model.onnx_data", "model_quantized.onnx", "model_quantized.onnx_data"}
    assert {path.name for path in first.glob("*.onnx*")} == graphs
    check_alike(first, "ForMaskedLM")
    onnxruntime.InferenceSession(str(first / "model_quantized.onnx"), providers=["CPUExecutionProvider"])
    described = json.loads((first / "provenance.json").read_text())
    assert described["onnx"]["num_bytes"] == sum(path.stat().st_size for path in first.glob("model.onnx*"))
    monkeypatch.setattr(onnx_export, "_LARGEST_FILE", 2**40)
    called("--model", first, "--output", second, "--onnx")
    assert {path.name for path in second.glob("*.onnx*")} == {"model.onnx"}


KILLED = """
import os, shutil, signal
from trainer.hf_export import onnx_export
onnx_export._write = lambda model, inputs, outputs, path: shutil.copy(os.environ["GRAPH"], path) and 18
onnx_export.OnnxModel = lambda path: os.kill(os.getpid(), signal.SIGKILL)
from launch.__main__ import main
main()
"""


@pytest.mark.long
@pytest.mark.fault(
    row="77", fault="SIGKILL of an ONNX export whose graph is written", required="no output; the same command works"
)
def test_a_killed_export_leaves_no_output(without_exporter: Path, tmp_path: Path) -> None:
    output = tmp_path / "new"
    command = ["-c", KILLED, "export", "--model", str(without_exporter), "--output", str(output), "--onnx"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "GRAPH": str(without_exporter / "model.onnx")}
    killed = fork_server.start(command, tmp_path, environment)
    printed = killed.communicate(timeout=600)
    assert killed.returncode == -9, printed
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".new.") and (left / "model.onnx").is_file(), "it was in the middle"
    called("--model", without_exporter, "--output", output, "--onnx")
    check_alike(output, "ForMaskedLM")


@pytest.mark.long
@pytest.mark.fault(row="77", fault="the disk is full when a graph is written", required="clear error; nothing is left")
@pytest.mark.parametrize("source", ["--checkpoint", "--model"])
def test_a_full_disk_leaves_nothing(
    source: str, run_folder: Path, without_exporter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(onnx_export, "_write", full)
    given = run_folder if source == "--checkpoint" else without_exporter
    with pytest.raises(UserError, match="No space left", check=coded("unwritable-file")):
        called(source, given, "--output", tmp_path / "new", "--onnx")
    assert left_behind(tmp_path / "new") == []


def test_a_class_without_a_known_head_is_refused(tiny_hugging_face: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_hugging_face, tmp_path / "pairs")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertLMHeadModel"]}))
    with pytest.raises(UserError, match="--onnx encoder", check=coded("onnx-without-head")):
        called("--model", folder, "--output", tmp_path / "new", "--onnx")
