"""What a registered model answers through MLflow's function: pairs, tags, long texts, batches with bad rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.model.quiet_transformers import quiet_transformers
from trainer.registry.registration import register
from trainer.registry.served_model import load_served
from trainer.tracking.mlflow_server import connect

TEXT, OTHER = "the cat sat on the mat", "a dog ran to it"
LONG = "the cat slept in the garden " * 20  # the model takes 32 tokens
Answer = Callable[[Any], Any]
Register = Callable[..., tuple[Path, Answer]]


@pytest.fixture
def registered(tiny_hugging_face: Path, tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch) -> Register:
    """Registers a folder like those of finetune.py; returns it, and what MLflow's function answers."""
    import mlflow

    def make(
        auto_class: Any = None, pair_column: str | None = None, source: Path = tiny_hugging_face, **head: Any
    ) -> tuple[Path, Answer]:
        folder = tmp_path / "model"
        shutil.copytree(source, folder)
        if auto_class is not None:
            with quiet_transformers():
                torch.manual_seed(0)
                model = auto_class.from_pretrained(tiny_hugging_face, **head)
                for weights in model.parameters():
                    weights.data *= 10  # else all texts are alike to it
                model.save_pretrained(folder)
            (folder / "finetune.json").write_text(json.dumps({"pair_column": pair_column, "max_length": 20}))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
        answer: Answer = mlflow.pyfunc.load_model(register(folder, "served", None, database).model_uri).predict
        return folder, answer

    return make


@pytest.mark.long
def test_a_model_of_pairs_reads_both_texts(registered: Register) -> None:
    from mlflow.exceptions import MlflowException

    folder, answer = registered(AutoModelForSequenceClassification, "second", num_labels=1, problem_type="regression")
    pair = {"text": TEXT, "text_pair": OTHER}
    pipeline = load_served(folder).pipeline()
    score = pipeline(pair)["score"]
    assert abs(score - pipeline(TEXT)[0]["score"]) > 1e-3, "else a second text left out would not be seen"
    for given in (pair, [pair], pandas.DataFrame([pair])):
        assert answer(given)["score"].tolist() == pytest.approx([score])
    assert len(answer({"text": LONG, "text_pair": LONG})) == 1
    with pytest.raises(MlflowException, match="schema"):
        answer(TEXT)


@pytest.mark.long
def test_a_long_text_is_cut_where_fitting_cut_it(registered: Register) -> None:
    folder, answer = registered(AutoModelForSequenceClassification, num_labels=2)
    cut = load_served(folder).pipeline()(LONG, truncation=True, max_length=20)
    assert answer(LONG)["score"].tolist() == pytest.approx([cut[0]["score"]])


@pytest.mark.long
@pytest.mark.parametrize("kind", ["class", "pair", "number", "tags"])
def test_a_long_text_and_rows_without_a_text_leave_the_answers_of_the_others(
    registered: Register, kind: str, tiny_hugging_face: Path, tmp_path: Path
) -> None:
    if kind == "tags":
        without_length = tmp_path / "without-length"
        shutil.copytree(tiny_hugging_face, without_length)
        values = json.loads((without_length / "tokenizer_config.json").read_text())
        del values["model_max_length"]
        (without_length / "tokenizer_config.json").write_text(json.dumps(values))
        labels = {"id2label": {0: "O", 1: "O"}, "label2id": {"O": 0}}
        _, answer = registered(AutoModelForTokenClassification, source=without_length, **labels)
    else:
        head = {"num_labels": 1, "problem_type": "regression"} if kind == "number" else {"num_labels": 2}
        _, answer = registered(AutoModelForSequenceClassification, "second" if kind == "pair" else None, **head)
    texts = [TEXT, LONG * 5, OTHER]
    batch = [{"text": text, "text_pair": text} for text in texts] if kind == "pair" else texts
    forms = [batch, pandas.DataFrame(batch) if kind == "pair" else pandas.DataFrame({"text": batch})]
    alone = [answer([each]) for each in batch]
    for form in forms:
        answers = answer(form)
        assert len(answers) == 3
        if kind == "tags":
            assert list(answers) == [each[0] for each in alone]
        else:
            assert answers["score"].tolist() == pytest.approx([each["score"].iloc[0] for each in alone], rel=1e-4)
    bad: list[Any] = ["", " ", None, float("nan"), 5]
    table = pandas.DataFrame({"text": [TEXT, *bad, OTHER]}, dtype=object)
    if kind == "pair":
        table["text_pair"] = table["text"]
    answers, is_bad = answer(table), [False, *([True] * len(bad)), False]
    if kind == "tags":
        assert answers == [alone[0][0], *([None] * len(bad)), alone[2][0]]
    else:
        assert answers["score"].isna().tolist() == is_bad == answers["label"].isna().tolist()
        assert answers["label"].iloc[[0, -1]].tolist() == [alone[0]["label"].iloc[0], alone[2]["label"].iloc[0]]
    with pytest.raises(Exception, match="no row has a text"):
        answer(table.iloc[[1, 2]])


@pytest.mark.long
def test_a_tagger_gives_every_piece_a_tag(registered: Register) -> None:
    _, answer = registered(AutoModelForTokenClassification, id2label={0: "O", 1: "O"}, label2id={"O": 0})
    assert answer("the cat sat") == ["O,O,O"]  # by themselves MLflow and transformers leave O out, or fail
    assert answer(LONG) == [",".join("O" * 30)]  # between [CLS] and [SEP]


@pytest.mark.long
def test_masks_of_a_long_text_are_filled_and_texts_without_a_mask_leave_the_others_theirs(
    registered: Register,
) -> None:
    _, answer = registered()
    assert len(answer("[MASK] " + LONG)) == 1
    good = ["[MASK] sat", "[MASK] and a [MASK]"]
    alone = answer(good)
    assert answer([good[0], "the cat sat", LONG + "[MASK]", "", good[1]]) == [alone[0], None, None, None, alone[1]]


@pytest.mark.parametrize(
    ("file", "values", "told"),
    [
        ("config.json", {"architectures": {"a": 1}}, "config.json has architectures="),
        ("finetune.json", {"max_length": "long"}, "finetune.json has max_length='long'"),
    ],
)
def test_a_folder_that_was_edited_by_hand_is_named(
    tiny_hugging_face: Path, tmp_path: Path, file: str, values: dict[str, Any], told: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_hugging_face, folder)
    with quiet_transformers():
        AutoModelForSequenceClassification.from_pretrained(tiny_hugging_face).save_pretrained(folder)
    before = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps(before | values))
    with pytest.raises(UserError, match=told):
        load_served(folder)


@pytest.mark.long
def test_weights_that_are_no_numbers_are_not_registered(tiny_hugging_face: Path, tmp_path: Path, database: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_hugging_face, folder)
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, check=coded("weights-not-finite")):
        register(folder, "served", "champion", database)
    assert not connect(database).search_registered_models()
