"""The command that fits: from a labeled file to a registered model that loads without this project."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest
import torch
import transformers

from data_prep.base.errors import UsageError, UserError
from launch import embed, finetune, predict, register
from tests.support import fork_server
from tests.support.error_codes import coded
from trainer.finetuning.examples import Examples
from trainer.finetuning.tables import is_missing, read_table, write_table
from trainer.finetuning.task_data import make_task
from trainer.finetuning.tasks import ExamplePrediction
from trainer.inference.pulled_model import pull
from trainer.model.quiet_transformers import quiet_transformers
from trainer.tracking.mlflow_server import connect

FILLERS = "it was a day the sat on mat ran to in and slept".split()
WITHOUT_PROJECT = """
import sys
for name in ("trainer", "launch", "data_prep"):
    sys.modules[name] = None
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
folder = sys.argv[1]
model = AutoModelForSequenceClassification.from_pretrained(folder)
answers = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(folder))
print([answer["label"] for answer in answers(["cat sat on the mat", "dog ran to it"])])
"""

WITHOUT_DEEPSPEED = """
import sys
sys.modules["deepspeed"] = None
from launch import finetune, predict
finetune.main()
sys.argv = ["predict.py", "--model", "fitted/model", "--input", "animals.tsv", "--output", "said.tsv"]
predict.main()
"""


@pytest.fixture
def labeled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of texts whose class is the animal in them; commands run in its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    draw = random.Random(0)
    lines = ["sentence\tanimal"]
    for _ in range(160):
        animal = draw.choice(("cat", "dog"))
        lines.append(" ".join([animal, *draw.choices(FILLERS, k=draw.randint(2, 6))]) + f"\t{animal}")
    path = tmp_path / "animals.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def run(monkeypatch: pytest.MonkeyPatch, model: Path | str, labeled: Path, *more: str) -> None:
    usual = {"--train": str(labeled), "--text-column": "sentence", "--label-column": "animal"}
    given = {"--model": str(model), "--task": "classification", **usual}
    words = [word for option, value in given.items() if option not in more for word in (option, value)]
    monkeypatch.setattr(sys, "argv", ["finetune.py", *words, *more])
    finetune.main()


@pytest.mark.long
def test_from_a_file_to_a_registered_model_and_its_predictions(
    tiny_hugging_face: Path,
    labeled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    empty_database: Path,
) -> None:
    shutil.copy(empty_database, "mlflow.db")
    options = ["--learning-rates", "1e-2", "--epochs", "4", "--seeds", "2", "--batch-size", "16"]
    options += ["--tracking-uri", "sqlite:///mlflow.db"]
    run(monkeypatch, tiny_hugging_face, labeled, *options, "--register", "animals", "--alias", "champion")
    out = capsys.readouterr().out
    assert re.search(r"about \d+:\d\d in total", out) and "registered animals version 1" in out
    saved = json.loads(Path("fitted/model/finetune.json").read_text())
    assert f"saved: full, seed {saved['seed']}, learning rate 0.01" in out and saved["quoting"] is True
    assert "clozeworks predict --model models:/animals@champion --tracking-uri sqlite:///mlflow.db --input" in out
    assert (labeled.parent / "fitted" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (labeled.parent / "fitted" / "report.txt").read_text().strip() in out

    client = connect(f"sqlite:///{labeled.parent}/mlflow.db")
    experiment = client.get_experiment_by_name("finetuning")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    parent = runs.pop("classification-animals")
    assert set(runs) == {"full-seed0-rate0.01", "full-seed1-rate0.01"}
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert {run.info.status for run in [parent, *runs.values()]} == {"FINISHED"}
    assert {run.data.tags["mlflow.source.name"] for run in [parent, *runs.values()]} == {"launch/finetune.py"}
    description = parent.data.tags["mlflow.note.content"]
    assert f"`{tiny_hugging_face.name}`, fine-tuned for classification on `animals.tsv`: full." in description
    assert "`full/accuracy_mean` first: the mean over the seeds on the test examples" in description
    assert str(labeled.parent) not in description
    assert parent.data.metrics["full/accuracy_mean"] >= 0.9
    known = {"split_seed": "0", "max_length": "32", "early_stopping": "null", "learning_rates.full": "[0.01]"}
    assert known.items() <= parent.data.params.items()
    curve = client.get_metric_history(runs["full-seed0-rate0.01"].info.run_id, "valid/accuracy")
    assert [point.step for point in curve] == [8, 16, 24, 32]
    assert "metrics: mlflow ui" in out and parent.info.run_id in out
    assert {item.path for item in client.list_artifacts(parent.info.run_id)} == {"curves.png", "report.txt"}

    folder = pull("models:/animals@champion")
    answer = fork_server.run(["-c", WITHOUT_PROJECT, str(folder)], labeled.parent, os.environ | fork_server.FIXED)
    assert answer.stdout.strip().endswith("['cat', 'dog']"), answer.stderr

    arguments = ["--model", "models:/animals@champion", "--input", str(labeled), "--output", "said.jsonl"]
    monkeypatch.setattr(sys, "argv", ["predict.py", *arguments])
    predict.main()
    rows = [json.loads(line) for line in Path("said.jsonl").read_text().splitlines()]
    assert len(rows) == 160 and set(rows[0]) == {
        "sentence",
        "animal",
        "predicted",
        "probability",
        "probability_cat",
        "probability_dog",
    }
    assert sum(row["predicted"] == row["animal"] for row in rows) >= 150
    assert all(abs(row["probability_cat"] + row["probability_dog"] - 1) < 1e-5 for row in rows)


@pytest.mark.long
def test_a_comparison_shows_counts_scores_and_failures(
    tiny_hugging_face: Path, labeled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--compare", "scratch,frozen,full", "--learning-rates", "1e-2", "1e-3", "--epochs", "2", "--seeds", "1"]
    run(monkeypatch, tiny_hugging_face, labeled, *options, "--no-tracking", "--output", "compared")
    out = capsys.readouterr().out
    for line in ("scores on test", "accuracy by length of the text"):
        assert line in out
    assert "wrong predictions of frozen (seed 0)" in out or "frozen makes no errors" in out
    table = out[out.index("scores on test") :].splitlines()[2:5]
    assert {line.split()[0] for line in table} == {"scratch", "frozen", "full"}
    scores = json.loads(Path("compared/scores.json").read_text())
    assert scores["scored_on"] == "test" and scores["num_examples"] == {"train": 128, "valid": 16, "test": 16}
    assert set(scores["variants"]) == {"scratch", "frozen", "full"}
    for line in table:
        found = scores["variants"][line.split()[0]]
        means = [f"{found['mean'][metric]:.4f}" for metric in ("accuracy", "f1", "mcc")]
        assert line.split()[1:] == [f"{found['learning_rate']:g}", *means]  # of one seed no spread is known
        assert set(found["valid_score_by_rate"]) == {"0.01", "0.001"} and len(found["fits"]) == 1
        assert found["fits"][0]["scores"]["accuracy"] == found["mean"]["accuracy"]
    assert not Path("mlflow.db").exists()


@pytest.mark.slow  # a process of its own, which imports torch and transformers again
@pytest.mark.spawn
def test_fitting_and_predicting_do_without_deepspeed(tiny_hugging_face: Path, labeled: Path) -> None:
    arguments = ["--model", str(tiny_hugging_face), "--task", "classification", "--train", str(labeled)]
    arguments += ["--text-column", "sentence", "--label-column", "animal", "--no-tracking"]
    arguments += ["--seeds", "1", "--learning-rates", "1e-2"]
    command = [sys.executable, "-c", WITHOUT_DEEPSPEED, *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(finetune.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=labeled.parent, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "said.tsv: 160 predictions by classification" in done.stdout


def test_a_dry_run_estimates_and_writes_nothing(
    tiny_hugging_face: Path, labeled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, tiny_hugging_face, labeled, "--dry-run")
    out = capsys.readouterr().out
    assert (
        "full: 5 fits of 3 epochs" in out
        and "nothing was written" in out
        and "full: trained parameters: encoder " in out
    )
    assert [path.name for path in labeled.parent.iterdir()] == ["animals.tsv"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--compare", "full", "--compare", "half"), "unknown-variant"),
        (("--seeds", "0"), "count-too-small"),
        (("--learning-rates", "5", "--learning-rates", "1e-3"), "invalid-learning-rate"),
        (("--alias", "champion"), "alias-without-name"),
        (("--register", "a/b"), "--name"),
        (("--output", "."), "not empty"),
        (("--text-column", "text"), "'text'.*sentence, animal.*unknown-column"),
        (("--metric", "spearman"), "accuracy, f1, mcc.*unknown-metric"),
        (("--task", "pair_classification"), "missing-pair-column"),
        (("--experiment", "e" * 501), "the command line: experiment"),
        (("--max-length", "7"), "max-length-too-small"),
        (("--on-bad-row", "skip", "--label-column", "x"), "unknown-column"),
        (("--max-length", "0"), "max-length-too-small"),
    ],
)
def test_wrong_usage_is_reported_before_any_work(
    tiny_hugging_face: Path,
    labeled: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(UsageError) as caught:
        run(monkeypatch, tiny_hugging_face, labeled, *options)
    assert re.search(message, f"{caught.value} [{caught.value.code}]")
    assert not Path("fitted").exists() and not Path("mlflow.db").exists()


def test_an_error_of_some_rows_names_the_option_that_skips_them(
    tiny_hugging_face: Path, labeled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, check=coded("invalid-cell")) as caught:
        run(monkeypatch, tiny_hugging_face, labeled, "--dry-run", "--task", "regression")
    assert "--on-bad-row" not in caught.value.fix, "no row would be left"
    labeled.write_text(labeled.read_text() + "the cat sat\t\n")
    with pytest.raises(UsageError, check=coded("empty-cells")) as caught:
        run(monkeypatch, tiny_hugging_face, labeled, "--dry-run")
    assert "--on-bad-row skip" in caught.value.fix
    run(monkeypatch, tiny_hugging_face, labeled, "--dry-run", "--on-bad-row", "skip")
    assert "skipped 1 row of the file of train" in capsys.readouterr().out


REFUSED = """
import sys
from data_prep.base.errors import UserError
from launch import finetune
for options in sys.argv[1:]:
    more = options.split()
    sys.argv = ["finetune.py", *(word for pair in GIVEN if pair[0] not in more for word in pair), *more]
    try:
        finetune.main()
    except UserError as error:
        print(error, f"[{error.code}]")
    assert not {"torch", "transformers"} & set(sys.modules), options
"""


@pytest.mark.long
def test_wrong_arguments_are_reported_before_torch_is_loaded(labeled: Path) -> None:
    told = {
        "--task pair_classification": "[missing-pair-column]",
        "--task classification --pair-column other": "[unexpected-pair-column]",
        "--task classification --metric bleu": "[unknown-metric]",
        "--task classification --train animals.xlsx": "[unsupported-file-type]",
        "--task classification --test none.tsv": "[missing-path]",
        "--task classification --model . --label-column klass": "'klass'; its columns: sentence, animal",
        "--task classification --model . --no-tracking --text-column text": "[unknown-column]",
        "--task classification --train header.tsv": "[no-examples]",
        "--task classification --train gaps.tsv": "[empty-cells]",
        "--task classification --output animals.tsv": "--output animals.tsv is a file",
        "--task classification --output animals.tsv/a/b": "animals.tsv/a/b cannot be made",
        "--task classification --output /proc/a": "--output /proc/a cannot be written: /proc is not writable",
    }
    Path("header.tsv").write_text("sentence\tanimal\n")
    Path("gaps.tsv").write_text("sentence\tanimal\na cat\tcat\na dog\t\n")
    given = [("--model", "nowhere"), ("--train", "animals.tsv")]
    given += [("--text-column", "sentence"), ("--label-column", "animal")]
    command = [sys.executable, "-c", REFUSED.replace("GIVEN", repr(given)), *told]
    environment = os.environ | {"PYTHONPATH": str(Path(finetune.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=labeled.parent, env=environment, timeout=500)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and len(lines) == len(told), done.stderr
    assert [(line, what) for line, what in zip(lines, told.values(), strict=True) if what not in line] == []


def test_an_output_that_cannot_be_made_is_reported(
    tiny_hugging_face: Path, labeled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="animals.tsv/fitted cannot be "):
        run(monkeypatch, tiny_hugging_face, labeled, "--output", "animals.tsv/fitted", "--no-tracking")


@pytest.mark.long
def test_a_registry_that_refuses_takes_no_fit_away(
    tiny_hugging_face: Path,
    labeled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    empty_database: Path,
) -> None:
    shutil.copy(empty_database, "mlflow.db")

    def refuse(*given: object) -> None:
        raise UserError("registering animals failed: no room")

    monkeypatch.setattr("trainer.registry.registration.register", refuse)
    options = ["--learning-rates", "1e-2", "--epochs", "1", "--seeds", "1", "--no-tracking", "--register", "animals"]
    remedy = "no room.*fitted/model.*register --model fitted/model --name animals"
    remedy += " --tracking-uri sqlite:///mlflow.db"
    options += ["--tracking-uri", "sqlite:///mlflow.db"]
    with pytest.raises(UserError, match=remedy):
        run(monkeypatch, tiny_hugging_face, labeled, *options)
    assert "scores on test" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.chdir(labeled.parent)
    monkeypatch.setattr(sys, "argv", ["register.py", "--model", "fitted/model", "--name", "animals"])
    register.main()
    out = capsys.readouterr().out
    assert "registered animals version 1" in out and "a text-classification pipeline" in out
    assert "loaded back from models:/animals/1: It was a fine day." in out and "clozeworks predict --model" in out


def test_predictions_go_neither_over_their_input_nor_into_a_missing_folder(
    labeled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for output, code in (("animals.tsv", "output-is-input"), ("none/out.tsv", "missing-output-folder")):
        arguments = ["--model", "nowhere", "--input", str(labeled), "--output", output]
        monkeypatch.setattr(sys, "argv", ["predict.py", *arguments])
        with pytest.raises(UsageError, check=coded(code)):
            predict.main()


def test_columns_of_the_input_named_as_those_of_the_predictions_are_kept_under_a_suffix_or_refused(
    tmp_path: Path,
) -> None:
    table = pandas.DataFrame({"text": ["a"], "predicted": ["old"], "probability_x": ["1"]}, dtype=object)
    task = make_task("classification", ("x", "y"))
    prediction = ExamplePrediction("x", 0.75, {"probability_x": 0.75, "probability_y": 0.25})
    model: Any = SimpleNamespace(task=task, predict=lambda examples, batch_size: ([prediction], 0))
    given = ["--model", "m", "--input", "in.tsv", "--output", "out.tsv"]
    for more in ([], ["--result-suffix", ""]):
        with pytest.raises(UsageError, match="'predicted', 'probability_x'", check=coded("existing-result-columns")):
            predict.check_result_columns(model, table, predict.parse_arguments([*given, *more]))
    arguments = predict.parse_arguments([*given, "--result-suffix", "_2"])
    predict.check_result_columns(model, table, arguments)
    found, _, _ = predict.add_predictions(model, Examples(["a"], None, None), table, arguments)
    assert found.iloc[0].to_dict() == {
        **{"text": "a", "predicted": "old", "probability_x": "1"},
        **{"predicted_2": "x", "probability_2": 0.75, "probability_x_2": 0.75, "probability_y_2": 0.25},
    }


@pytest.mark.parametrize("kind", ["tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_rows_without_a_text_have_no_prediction_and_leave_the_others_theirs(
    kind: str,
    head: str,
    tiny_hugging_face: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_hugging_face, "model")
    with quiet_transformers():
        getattr(transformers, f"AutoModelFor{head}").from_pretrained(tiny_hugging_face).save_pretrained("model")
    bad = "" if kind == "tsv" else None
    cells: list[Any] = ["a cat sat", bad, "the dog ran to it", "  " if kind == "parquet" else bad]
    rows = [{"text": cell, "question": "the dog"} for cell in cells]
    if kind == "jsonl":
        rows.append({"text": {"a": 1}, "question": "it"})
    given = ["--model", "model", "--text-column", "text", "--tracking-uri", "sqlite:///none.db"]
    given += ["--pair-column", "question"] if head == "QuestionAnswering" else []
    for name, table in (("all", rows), ("good", rows[0:3:2])):
        write_table(pandas.DataFrame(table, dtype=object), Path(f"{name}.{kind}"))
        monkeypatch.setattr(
            sys, "argv", ["predict.py", *given, "--input", f"{name}.{kind}", "--output", f"{name}-out.{kind}"]
        )
        predict.main()
        out, err = capsys.readouterr()
        assert f"{name}-out.{kind}: 2 predictions" in out
        assert ("no prediction for rows 2, 4" in err) == (name == "all")
    found, alone = (read_table(Path(f"{name}-out.{kind}")) for name in ("all", "good"))
    columns = [name for name in alone.columns if name not in ("text", "question")]
    assert columns and all(
        str(cell).removesuffix(".0") == str(other)  # pandas makes floats of integers with gaps
        for name in columns
        for cell, other in zip(found.loc[[0, 2], name], alone[name], strict=True)
    )
    assert all(is_missing(cell) for cell in found.drop([0, 2])[columns].to_numpy().ravel().tolist())


def test_a_tagger_reads_plain_text_and_is_scored_on_another_file(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_hugging_face, "model")
    names = {0: "O", 1: "B-X"}
    with quiet_transformers():
        model = transformers.AutoModelForTokenClassification.from_pretrained(tiny_hugging_face, id2label=names)
        model.classifier.bias.data = torch.tensor([0.0, 100.0])  # every word is an X
        model.save_pretrained("model")

    def predicted(source: str, *more: str) -> str:
        given = ["--model", "model", "--input", source, "--output", "out.jsonl", "--tracking-uri", "sqlite:///none.db"]
        monkeypatch.setattr(sys, "argv", ["predict.py", *given, *more])
        predict.main()
        out, err = capsys.readouterr()
        assert ("skipped 1 blank line of lines.txt" in err) == (source == "lines.txt")
        return out

    Path("lines.txt").write_text("the cat sat\n\na dog\n")
    assert "scores" not in predicted("lines.txt")
    assert read_table(Path("out.jsonl"))["predicted"].tolist() == [["B-X"] * 3, ["B-X"] * 2]
    Path("gold.conll").write_text("the O\ncat S-X\n\na S-X\ndog S-X\n")
    out = predicted("gold.conll", "--text-column", "1", "--label-column", "2")
    assert "scores of 2 rows against 2: f1 0.8571, precision 0.7500, recall 1.0000, accuracy 0.7500" in out
    Path("gold.conll").write_text("the S-Y\n")
    with pytest.raises(UsageError, check=coded("unknown-label")):
        predicted("gold.conll", "--text-column", "1", "--label-column", "2")


def test_unpaired_quotation_marks_are_warned_of_and_quoting_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("q.tsv").write_text('sentence\tlabel\n" so good\t1\nbad film\t0\nthe end "\t1\nnice\t1\n')
    Path("fitted").mkdir()
    for name in ("config.json", "model.safetensors"):
        Path("fitted", name).write_text("{}")
    facts = {"task": "classification", "text_column": "sentence"}
    given = ["--model", "fitted", "--input", "q.tsv", "--output", "out.tsv"]
    for remembered, options, num_texts in ((True, [], 2), (False, [], 4), (True, ["--no-quoting"], 4)):
        Path("fitted/finetune.json").write_text(json.dumps({**facts, "quoting": remembered}))
        arguments = predict.parse_arguments([*given, *options])
        _, columns, task = predict.fitted_folder(arguments)
        assert task is not None and len(predict.read_texts(arguments, columns, task)) == num_texts
        assert ("--no-quoting" in capsys.readouterr().err) == (num_texts == 2)
    embedded = ["--model", "fitted", "--input", "q.tsv", "--text-column", "sentence", "--output", "out.npy"]
    assert len(embed.input_texts(embed.parse_arguments(embedded))) == 2
    assert "--no-quoting" in capsys.readouterr().err


def test_the_output_of_a_fit_leads_to_its_model(labeled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("fitted/model").mkdir(parents=True)
    Path("fitted/model/config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["predict.py", "--model", "fitted", "--input", str(labeled), "--output", "o.tsv"])
    with pytest.raises(UsageError, match="Fix: give fitted/model", check=coded("not-a-model-folder")):
        predict.main()


def test_an_encoder_is_no_fitted_model(tiny_hugging_face: Path, labeled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["--model", str(tiny_hugging_face), "--input", str(labeled), "--output", "said.csv"]
    monkeypatch.setattr(sys, "argv", ["predict.py", *arguments])
    with pytest.raises(UsageError, match="BertForPreTraining", check=coded("not-fine-tuned")):
        predict.main()


PREDICT_REFUSED = """
import sys
from data_prep.base.errors import UsageError
from launch import predict
given = ["--output", "said.csv", "--text-column", "text"]
for model, table in zip(sys.argv[1::2], sys.argv[2::2]):
    sys.argv = ["predict.py", "--model", model, "--input", table, *given]
    try:
        predict.main()
    except UsageError as error:
        print(error, f"[{error.code}]")
    assert not {"torch", "transformers"} & set(sys.modules), model
"""


@pytest.mark.long
def test_a_model_without_a_task_and_a_missing_column_are_refused_before_torch_is_loaded(
    tiny_hugging_face: Path, labeled: Path
) -> None:
    run, fitted = labeled.parent / "run", labeled.parent / "fitted"
    (run / "checkpoints").mkdir(parents=True)
    shutil.copytree(tiny_hugging_face, fitted)
    config = json.loads((fitted / "config.json").read_text())
    (fitted / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    cases = {str(tiny_hugging_face): "[not-fine-tuned]", "run": "[not-fine-tuned]", "fitted": "[unknown-column]"}
    words = [word for model in cases for word in (model, "animals.tsv")]
    environment = os.environ | {"PYTHONPATH": str(Path(finetune.__file__).parents[1])}
    command = [sys.executable, "-c", PREDICT_REFUSED, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=labeled.parent, env=environment, timeout=500)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert [model in line and code in line for (model, code), line in zip(cases.items(), lines, strict=True)][:2] == [
        True,
        True,
    ]
    assert cases["fitted"] in lines[2] and "'text'" in lines[2]
