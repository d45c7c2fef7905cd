"""The Python API: lazy, documented, and functions that no package of the same name replaces."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import trainer
from data_prep.base.errors import UsageError, UserError
from data_prep.storage import hub
from data_prep.storage.hub import hub_download_command, hub_name
from tests.support import fork_server
from tests.support.error_codes import coded
from trainer import Embedder, FillMask
from trainer.hf_export.export_source import ExportSource
from trainer.inference.pulled_model import find_model

REPOSITORY = Path(__file__).resolve().parents[2]


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)


def test_importing_the_package_imports_no_heavy_library() -> None:
    code = "import sys, trainer; print({'torch', 'deepspeed', 'mlflow', 'transformers', 'numpy'} & set(sys.modules))"
    assert run_python("-c", code).stdout == "set()\n"


@pytest.mark.parametrize("name", trainer.__all__)
def test_every_name_is_there_documented_and_in_the_overview(name: str) -> None:
    value = getattr(trainer, name)
    assert inspect.getdoc(value) and name in dir(trainer)
    if inspect.isfunction(value) or name in ("FillMask", "Embedder"):
        assert f"\n  {name}(" in run_python("-m", "trainer").stdout


@pytest.mark.long
def test_functions_stay_functions_when_the_modules_behind_them_are_imported() -> None:
    packages = {path.parent.name for path in (REPOSITORY / "trainer").glob("*/__init__.py")}
    assert packages and not packages & set(trainer.__all__)
    code = "import trainer.hf_export.export, trainer.finetuning.finetune as f; from trainer import export, finetune\n"
    code += "assert finetune is f.finetune and callable(export)"
    assert fork_server.run(["-c", code], REPOSITORY, os.environ | fork_server.FIXED).returncode == 0


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = trainer.nothing


def test_the_module_explains_itself_and_refuses_arguments() -> None:
    shown = run_python("-m", "trainer")
    assert shown.returncode == 0 and "launch/pretrain.py" in shown.stdout and not shown.stderr
    refused = run_python("-m", "trainer", "run_something")
    assert refused.returncode == 2 and "run_something" in refused.stderr and "[unexpected-arguments]" in refused.stderr


@pytest.mark.parametrize("kind", [str, Path])
def test_models_open_from_a_directory_as_string_or_path(tiny_hugging_face: Path, kind: type) -> None:
    fill_mask = FillMask(kind(tiny_hugging_face))
    (candidates,) = fill_mask("the [MASK] sat", top_k=3)
    assert len(candidates) == 3 and candidates == fill_mask.predict("the [MASK] sat", 3).masks[0]
    vectors = Embedder(kind(tiny_hugging_face))(["the cat", "a dog sat on the mat"])
    assert vectors.shape == (2, 16) and vectors.dtype == np.float32


@pytest.mark.long
def test_a_run_fills_masks_and_embeds_as_its_export_does(
    small_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source(small_tokenizer)
    for module in ("trainer.inference.checkpoint_model", "trainer.hf_export.export"):
        monkeypatch.setattr(f"{module}.read_source", lambda checkpoint: source)
    run, text = tmp_path / "run", "the old river [MASK] the narrow valley."
    (run / "checkpoints").mkdir(parents=True)
    exported = trainer.export(str(run), str(tmp_path / "encoder")).output
    assert FillMask(run).predict(text).filled == FillMask(exported).predict(text).filled
    assert np.array_equal(Embedder(run)([text]), Embedder(exported)([text]))


def make_source(tokenizer: Path) -> ExportSource:
    from tests.support.toy_run import tiny_config
    from trainer.hf_export.model_card import TrainingFacts
    from trainer.objectives.pretraining import PretrainingModel

    config = tiny_config("run", model={"vocab_size": 800, "hidden_size": 32, "intermediate_size": 48})
    torch.manual_seed(0)
    model = PretrainingModel(config.model)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return ExportSource(config, weights, tokenizer, TrainingFacts())


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("bert-base-uncased", True),
        ("google-bert/bert-base-uncased", True),
        ("missing/run/dir", False),
        ("./run", False),
        ("/run", False),
        ("models:/english@champion", False),
        ("config.yaml", False),
        ("", False),
    ],
)
def test_names_on_the_hub_are_distinguished_from_paths(
    text: str, is_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name(text) == (text if is_name else None)


def test_a_directory_is_no_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_name("runs") is None and hub_name("runs/one") is None


@pytest.mark.long
def test_without_network_a_hub_name_is_answered_with_the_command() -> None:
    code = "from trainer import FillMask; from data_prep.base.errors import run_command\n"
    code += "run_command(lambda: FillMask('google-bert/bert-base-uncased'))"
    answer = run_python("-c", code, HF_HUB_OFFLINE="1")
    assert answer.returncode == 2 and "[hub-name-offline]" in answer.stderr
    assert hub_download_command("google-bert/bert-base-uncased") in answer.stderr
    assert "hf download google-bert/bert-base-uncased --local-dir bert-base-uncased" in answer.stderr


def test_with_network_a_hub_name_is_downloaded_without_code_and_pickles(
    tiny_hugging_face: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(name: str, **options: object) -> str:
        asked.update(name=name, **options)
        return str(tiny_hugging_face)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert FillMask("someone/tiny").predict("the [MASK] sat").num_tokens == 3
    assert asked["name"] == "someone/tiny" and asked["etag_timeout"] == 5.0
    assert asked["allow_patterns"] == ["*.json", "*.txt", "*.model", "README.md", "*.safetensors"]
    hub.download_from_hub("someone/tiny", with_weights=False)
    assert "*.safetensors" not in list(asked["allow_patterns"])  # type: ignore[call-overload]


def test_a_missing_model_and_a_failed_download_are_two_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    for error, kind, code in (
        (RepositoryNotFoundError("404", response=Mock(headers={})), UsageError, "unknown-model"),
        (OSError("No space left on device"), UserError, "hub-download-failed"),
    ):
        monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=error))
        with pytest.raises(kind, match="someone/tiny", check=coded(code)):
            hub.download_from_hub("someone/tiny")


@pytest.mark.parametrize(
    ("model", "code"),
    [
        ("./missing", "unknown-model"),
        ("models:/english", "invalid-model-address"),
        ("models:/a@b@c", "invalid-model-address"),
    ],
)
def test_a_wrong_model_is_refused_before_anything_is_loaded(model: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "examples.tsv").write_text("not even read")
    with pytest.raises(UsageError, match=model, check=coded(code)):
        FillMask(model)
    with pytest.raises(UsageError, match=model, check=coded(code)):
        trainer.finetune(model, tmp_path / "examples.tsv", is_tracked=False)


@pytest.mark.long
def test_fine_tuning_from_python_gives_a_model_and_its_scores(tiny_hugging_face: Path, tmp_path: Path) -> None:
    rows = [f"{'cat' if number % 2 else 'dog'} sat on the mat\t{number % 2}" for number in range(60)]
    (tmp_path / "examples.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    lines: list[str] = []
    result = trainer.finetune(
        tiny_hugging_face,
        str(tmp_path / "examples.tsv"),
        output=tmp_path / "fitted",
        learning_rates=[1e-2],
        seeds=2,
        is_tracked=False,
        log=lines.append,
    )
    mean, spread = result.scores["full"]
    assert result.metric == "accuracy" and 0 <= mean <= 1 and spread >= 0 and result.registration is None
    assert (result.folder / "model.safetensors").is_file() and result.folder == tmp_path / "fitted" / "model"
    assert (tmp_path / "fitted" / "report.txt").read_text().strip() == result.report and result.report in "\n".join(
        lines
    )
    with pytest.raises(UsageError, check=coded("output-not-empty")):
        trainer.finetune(
            tiny_hugging_face, tmp_path / "examples.tsv", output=tmp_path / "fitted", seeds=1, is_tracked=False
        )


@pytest.mark.parametrize(
    ("arguments", "code", "names"),
    [
        ({"task": "classify"}, "unknown-task", ["task='classify'", "token_classification"]),
        ({"task": "pair_classification"}, "missing-pair-column", ["task=pair_classification", "with pair_column="]),
        ({"seeds": 0}, "count-too-small", ["seeds=0"]),
        ({"compare": "full,half"}, "unknown-variant", ["full,half"]),
        ({"max_length": 1}, "max-length-too-small", ["max_length=1"]),
        ({"alias": "best"}, "alias-without-name", ["alias='best'", "register=NAME"]),
        ({"label_column": "klass"}, "unknown-column", ["'klass'", "with label_column="]),
    ],
)
def test_errors_of_fine_tuning_from_python_name_its_parameters(
    arguments: dict[str, object], code: str, names: list[str], tiny_hugging_face: Path, tmp_path: Path
) -> None:
    (tmp_path / "examples.tsv").write_text("text\tlabel\na cat\t1\na dog\t0\n")
    with pytest.raises(UsageError, check=coded(code)) as raised:
        trainer.finetune(
            tiny_hugging_face,
            tmp_path / "examples.tsv",
            output=tmp_path / "fitted",
            is_tracked=False,
            **arguments,  # type: ignore[arg-type]
        )
    assert not [name for name in names if name not in str(raised.value)] and "--" not in str(raised.value)


@pytest.mark.long
def test_variants_are_compared_with_as_many_seeds_as_asked(tiny_hugging_face: Path, tmp_path: Path) -> None:
    rows = [f"{'cat' if number % 2 else 'dog'} sat on the mat\t{number % 2}" for number in range(40)]
    (tmp_path / "examples.tsv").write_text("\n".join(["text\tlabel", *rows]) + "\n")
    result = trainer.finetune(
        tiny_hugging_face,
        tmp_path / "examples.tsv",
        output=tmp_path / "fitted",
        compare="frozen,full",
        seeds=1,
        epochs=1,
        learning_rates=[1e-2],
        is_tracked=False,
    )
    assert set(result.scores) == {"frozen", "full"} and {len(each.fits) for each in result.results} == {1}


def test_a_run_that_the_server_does_not_have_is_an_unknown_model() -> None:
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST

    client = Mock(get_run=Mock(side_effect=MlflowException("no run", RESOURCE_DOES_NOT_EXIST)))
    with pytest.raises(UsageError, match="runs:/123/model.*tracking-uri", check=coded("unknown-model")):
        find_model(client, "runs:/123/model")


def test_errors_of_export_and_register_name_their_parameters(tmp_path: Path, tiny_hugging_face: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"^output={tmp_path} is not empty", check=coded("output-not-empty")):
        trainer.export(tmp_path / "run", tmp_path)
    with pytest.raises(UsageError, match="^alias='a b' is not", check=coded("invalid-alias")):
        trainer.register(tiny_hugging_face, "english", "a b")


@pytest.mark.long
def test_an_unknown_model_is_answered_with_what_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError

    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny" / "checkpoints" / "step-00000030").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", Mock(side_effect=LocalEntryNotFoundError("offline")))
    refused = coded("unknown-model", "invalid-model-address", "hub-name-offline")
    for model, near in (
        ("runs/tinny", "did you mean runs/tiny?"),
        ("runs/tiny/checkpoints/step-00000031", "step-00000030"),
        ("model:/english@champion", "did you mean models:/english@champion?"),
        ("models://english@champion", "models:/NAME@ALIAS"),
        ("runz/tiny", "did you mean runs/tiny?"),
        ("./runz/tiny", "did you mean runs/tiny?"),
        ("nothing/like/it", "a checkpoint"),
    ):
        with pytest.raises(UsageError, check=refused) as raised:
            FillMask(model)
        assert near in str(raised.value)
