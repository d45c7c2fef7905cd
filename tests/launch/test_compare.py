"""`clozeworks compare` reads runs by their status and groups them by label."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from data_prep.base.errors import UserError
from launch import compare, predict
from tests.support.error_codes import coded
from tests.trainer.finetuning.test_fitted_model import save
from trainer.inference.preprocessor import Preprocessor, load_text_tokenizer
from trainer.tracking.status import State, write_status

FACTS = dict.fromkeys(("mlm_probability", "mask_unit", "seed", "sequence_length", "rows", "valid_split"), "1")


def run_of(folder: Path, loss: float, rows: str = "1", state: State = "finished") -> Path:
    folder.mkdir()
    values = {"step": 5, "max_steps": 5, "tokens_seen": 100, "skipped_steps": 0, "world_size": 1}
    facts = {**FACTS, "tokenizer": "a", "rows": rows}
    write_status(folder, state, values | {"metrics": {"valid/mlm_loss": loss}, "evaluation": facts})
    return folder


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["compare.py", *arguments])
    compare.main()


def test_groups_of_runs_are_compared_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [run_of(tmp_path / f"old-{n}", 3.0 + n / 10) for n in range(2)]
    new = [run_of(tmp_path / f"new-{n}", 2.0 + n / 20) for n in range(2)]
    output = tmp_path / "out"
    command(monkeypatch, *(f"{name}={a},{b}" for name, (a, b) in (("old", old), ("new", new))), "--output", str(output))
    out = capsys.readouterr().out
    assert "minus old" in out and "2 and 2 runs" in out and "better" in out
    values = json.loads((output / "comparison.json").read_text())
    assert values["scores"][1]["difference"] == pytest.approx(-1.025)
    assert "| valid/mlm\\_loss | lower | new |" in (output / "comparison.md").read_text()
    assert (output / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    assert compare.names_in(str(run_of(tmp_path / "lr=1", 3.0))) == [(None, str(tmp_path / "lr=1"))]
    assert compare.names_in("a=b,c") == [("a", "b"), ("a", "c")]
    assert compare.names_in("models:/n@x") == [(None, "models:/n@x")]
    for text in ("a=", "=b", "a=,"):
        with pytest.raises(UserError, check=coded("invalid-group")):
            compare.names_in(text)


@pytest.mark.parametrize("arguments", [["{old}", "{old}/nothing"], ["a={old},{old}/nothing", "b={old}"]])
def test_what_is_no_run_and_no_model_is_named(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = run_of(tmp_path / "old", 3.0)
    with pytest.raises(UserError, match="nothing"):
        command(monkeypatch, *(each.format(old=old) for each in arguments))


def test_one_run_is_nothing_to_compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, check=coded("nothing-to-compare")):
        command(monkeypatch, str(run_of(tmp_path / "old", 3.0)))


def test_a_run_that_may_still_change_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped, other = run_of(tmp_path / "stopped", 3.0, state="stopped"), run_of(tmp_path / "other", 2.0)
    command(monkeypatch, str(stopped), str(other))
    out = capsys.readouterr().out
    assert f"{stopped} has not finished" in out and f"{other} has not finished" not in out


@pytest.fixture(scope="module")
def fitted(tiny_hugging_face: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Fitted models before any fit: two of the classes x and y, one of x and z, and one of numbers."""
    folder = tmp_path_factory.mktemp("fitted modèles")
    preprocessor = Preprocessor(load_text_tokenizer(tiny_hugging_face), 32, True)
    for name in ("one", "two", "other"):
        save("classification", tiny_hugging_face, preprocessor, folder / name)
    save("regression", tiny_hugging_face, preprocessor, folder / "number")
    turn = json.loads((folder / "two" / "config.json").read_text())
    turn["id2label"] = {"0": "y", "1": "x"}  # the same classes in another order
    (folder / "two" / "config.json").write_text(json.dumps(turn))
    (folder / "other" / "config.json").write_text(json.dumps(turn | {"id2label": {"0": "x", "1": "z"}}))
    return {name: folder / name for name in ("one", "two", "other", "number")}


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    path = tmp_path / "held out.tsv"
    path.write_text("a\tc\n" + "".join(f"{'the cat ' * (n % 5)}sat\t{'xy'[n % 3 == 0]}\n" for n in range(40)))
    return path


def test_fitted_models_are_scored_side_by_side_as_predict_scores_them(
    fitted: dict[str, Path],
    examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    command(
        monkeypatch, f"1={fitted['one']}", f"2={fitted['two']}", "--labeled", str(examples), "--output", str(output)
    )
    out = capsys.readouterr().out
    rows = json.loads((output / "comparison.json").read_text())["scores"]
    scores = {(row["metric"], row["group"]): row["mean"] for row in rows}
    assert {metric for metric, _ in scores} == {"labeled/accuracy", "labeled/f1", "labeled/mcc"}
    assert scores["labeled/accuracy", "1"] + scores["labeled/accuracy", "2"] == pytest.approx(1)  # turned round
    over_rows = [row for row in rows if row.get("basis") == "40 rows"]
    assert [row["metric"] for row in over_rows] == ["labeled/accuracy"] and None not in over_rows[0]["interval"]
    assert (output / "comparison.png").is_file()
    monkeypatch.setattr("sys.argv", ["predict.py", "--model", str(fitted["one"]), "--input", str(examples)])
    monkeypatch.setattr("sys.argv", [*sys.argv, "--label-column", "c", "--output", str(tmp_path / "predicted.tsv")])
    predict.main()
    assert "not compared" not in out
    assert (
        f"accuracy {scores['labeled/accuracy', '1']:.4f}, f1 {scores['labeled/f1', '1']:.4f}" in capsys.readouterr().out
    )


def test_fits_of_several_seeds_have_a_spread(
    fitted: dict[str, Path],
    examples: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    again = shutil.copytree(fitted["two"], tmp_path / "again")
    facts = json.loads((again / "finetune.json").read_text())
    (again / "finetune.json").write_text(json.dumps(facts | {"seed": 7}))
    command(monkeypatch, str(fitted["one"]), f"both={fitted['one']},{again}", "--labeled", str(examples))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (group,) = [line for line in lines if line[:2] == ["both", "2"]]
    assert group[2:4] == ["0,", "7"]
    both = next(line for line in lines if line[:1] == ["labeled/accuracy"] and line[2] == "both")
    assert float(both[3]) == 0.5 and float(both[4]) > 0.1


@pytest.mark.parametrize(
    ("other", "code", "part"),
    [
        ("number", "other-task", "regression"),
        ("other", "other-labels", "(y, z: only one of them has each)"),
        ("pretrained", "not-fine-tuned", "clozeworks finetune"),
        ("run", "missing-path", "nothing"),
    ],
)
def test_models_that_do_not_compare_on_labels_are_refused_before_any_is_loaded(
    other: str,
    code: str,
    part: str,
    fitted: dict[str, Path],
    examples: Path,
    tiny_hugging_face: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.finetuning.fitted_model.load_pretrained", None)
    named = {**fitted, "pretrained": tiny_hugging_face, "run": fitted["one"]}
    file = examples.with_name("nothing.tsv") if other == "run" else examples
    with pytest.raises(UserError, check=coded(code)) as raised:
        command(monkeypatch, str(fitted["one"]), str(named[other]), "--labeled", str(file))
    assert part in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_of_other_columns_or_labels_is_refused(
    fitted: dict[str, Path], examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (str(fitted["one"]), str(fitted["two"]), "--labeled")
    with pytest.raises(UserError, check=coded("unknown-column")):
        command(monkeypatch, *both, str(examples), "--label-column", "nothing")
    (tmp_path / "w.tsv").write_text("a\tc\nthe cat\tw\n")
    with pytest.raises(UserError, check=coded("unknown-label")):
        command(monkeypatch, *both, str(tmp_path / "w.tsv"))
    (tmp_path / "empty.tsv").write_text("")
    with pytest.raises(UserError):
        command(monkeypatch, *both, str(tmp_path / "empty.tsv"))


SQUAD = {"context": "the cat sat", "qas": [{"question": "it was", "answers": [{"text": "cat", "answer_start": 4}]}]}
UNANSWERED = {"context": "a dog", "qas": [{"question": "to it", "is_impossible": True, "answers": []}]}
LABELED = {
    "pair_classification": ("f.csv", "a,b,c\nthe cat,a dog,x\n,sat,y\n", "accuracy f1 mcc"),
    "multilabel_classification": (
        "f.jsonl",
        '{"a": "the cat", "c": ["x", "y"]}\n{"a": "it", "c": ["x", "x"]}\n{"a": "sat", "c": []}\n',
        "f1 f1_macro accuracy",
    ),
    "regression": ("f.tsv", "a\tc\nthe cat\t1.5\nit sat\tmuch\n", "spearman pearson rmse"),
    "token_classification": (
        "f.jsonl",
        '{"a": ["the", "cat"], "c": ["x", "y"]}\n{"a": ["it", "sat"], "c": ["x"]}\n',
        "f1 precision recall accuracy",
    ),
    "question_answering": (
        "f.json",
        json.dumps({"data": [{"paragraphs": [SQUAD, UNANSWERED]}]}),
        "f1 exact_match",
    ),
}
"""A file for each task, whose second row is bad, and the metrics."""
OF_SQUAD = ["--text-column", "context", "--pair-column", "question", "--label-column", "answers"]


def saved_twice(name: str, tiny_hugging_face: Path, tmp_path: Path) -> list[str]:
    """The same model twice, before any fit, as two groups."""
    preprocessor = Preprocessor(load_text_tokenizer(tiny_hugging_face), 32, True)
    save(name, tiny_hugging_face, preprocessor, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    return [f"{which}={tmp_path / which}" for which in ("one", "two")]


@pytest.mark.parametrize("name", LABELED)
def test_models_of_every_task_are_scored_on_a_file_without_its_bad_rows(
    name: str,
    tiny_hugging_face: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = saved_twice(name, tiny_hugging_face, tmp_path)
    file, content, metrics = LABELED[name]
    (tmp_path / file).write_text(content)
    options = OF_SQUAD if name == "question_answering" else []
    command(monkeypatch, *models, "--labeled", str(tmp_path / file), *options, "--output", str(tmp_path / "out"))
    printed = capsys.readouterr()
    assert [line.partition(" (row 2, column")[0] for line in printed.err.splitlines() if "no score" in line] == [
        f"{tmp_path / which}: warning: no score for row 2" for which in ("one", "two")
    ]
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["scores"]
    assert {row["metric"] for row in rows} == {f"labeled/{metric}" for metric in metrics.split()}
    assert all(row.get("difference", 0) == 0 and "not_compared" not in row for row in rows)
    of_rows = [row["basis"] for row in rows if "too few rows" in row.get("basis", "")]
    num_scored = 2 if name == "multilabel_classification" else 1
    is_mean = name in ("pair_classification", "multilabel_classification", "question_answering")
    assert of_rows == [f"no interval: too few rows ({num_scored})"] * is_mean


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("classification", '{"a": "the cat", "c": ["x", "y"]}'),
        ("multilabel_classification", '{"a": "the cat", "c": 2.5}'),
        ("regression", '{"a": "the cat", "c": "x"}'),
        ("token_classification", '{"a": "the cat", "c": "x"}'),
        ("question_answering", '{"a": "the cat", "b": "it", "c": "dog"}'),
        ("classification", '{"a": {"text": "the cat"}, "c": "x"}'),
    ],
)
def test_a_file_of_another_task_is_refused_with_its_row(
    name: str, content: str, tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = saved_twice(name, tiny_hugging_face, tmp_path)
    (tmp_path / "f.jsonl").write_text(content + "\n")
    with pytest.raises(UserError, match="f.jsonl, row 1, column '[ac]': ", check=coded("invalid-cell")):
        command(monkeypatch, *models, "--labeled", str(tmp_path / "f.jsonl"))


def test_tags_of_another_scheme_are_scored_as_those_of_the_model(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = saved_twice("token_classification", tiny_hugging_face, tmp_path)
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    for which, names in (("one", ("O", "S-X")), ("two", ("S-X", "O"))):
        path = tmp_path / which / "config.json"
        path.write_text(json.dumps(config | {"id2label": dict(enumerate(names))}))
    (tmp_path / "f.conll").write_text("the S-X\ncat O\nsat S-X\n\nit O\n")
    options = ["--text-column", "1", "--label-column", "2", "--output", str(tmp_path / "out")]
    command(monkeypatch, *models, "--labeled", str(tmp_path / "f.conll"), *options)
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["scores"]
    accuracies = [row["mean"] for row in rows if row["metric"] == "labeled/accuracy"]
    assert sum(accuracies) == pytest.approx(1), "each word is right for one of them"


def test_models_that_a_labeled_file_does_not_suit_are_refused(
    tiny_hugging_face: Path, examples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = saved_twice("question_answering", tiny_hugging_face, tmp_path)
    facts = json.loads((tmp_path / "one" / "finetune.json").read_text())
    for which in ("one", "two"):
        (tmp_path / which / "finetune.json").unlink()  # as a model from the Hub
    with pytest.raises(UserError, match="--pair-column is missing", check=coded("missing-pair-column")):
        command(monkeypatch, *models, "--labeled", str(examples), "--text-column", "a", "--label-column", "c")
    for which in ("one", "two"):
        (tmp_path / which / "finetune.json").write_text(json.dumps(facts | {"task": "embedding"}))
    refusal = f"{tmp_path / 'one'} was fine-tuned for vectors .* `compare --suite`"
    with pytest.raises(UserError, match=refusal, check=coded("not-fine-tuned")):
        command(monkeypatch, *models, "--labeled", str(examples))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--label-column", "c"],
        ["--labeled", "f.tsv", "--text", "t"],
        ["--labeled", "f.tsv", "--suite", "glue"],
        ["--labeled", "f.tsv", "--minimal-pairs", "p"],
        ["--quoting"],
        ["--no-quoting"],
    ],
)
def test_options_of_labels_need_a_labeled_file_alone(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, check=lambda ended: ended.code == 2):
        compare.parse_arguments(["a", "b", *arguments])
    assert "--labeled" in capsys.readouterr().err
