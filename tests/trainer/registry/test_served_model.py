"""What a registered model answers through MLflow's function: words with tags, spans, numbers, pairs, bad rows."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from tests.support.foreign_tokenizers import WRITERS
from trainer.finetuning.examples import Examples
from trainer.finetuning.fitted_model import FittedModel
from trainer.hf_export.export import write_sentence_transformer
from trainer.inference.embedding import Embedder
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
    served = load_served(folder)

    def number(*texts: str) -> float:
        return served.model(**served.tokenizer(*texts, return_tensors="pt", return_token_type_ids=True)).logits.item()

    score = number(TEXT, OTHER)
    assert abs(score - number(TEXT)) > 1e-3, "else a second text left out would not be seen"
    for given in (pair, [pair], pandas.DataFrame([pair])):
        assert answer(given) == pytest.approx([score])
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
    is_table = kind in ("class", "pair")
    for form in forms:
        answers = answer(form)
        assert len(answers) == 3
        if is_table:
            assert answers["score"].tolist() == pytest.approx([each["score"].iloc[0] for each in alone], rel=1e-4)
        elif kind == "number":
            assert answers == pytest.approx([each for (each,) in alone], rel=1e-4)
        else:
            assert [[word["tag"] for word in each] for each in answers] == [
                [word["tag"] for word in each] for (each,) in alone
            ]
    bad: list[Any] = ["", " ", None, float("nan"), 5]
    table = pandas.DataFrame({"text": [TEXT, *bad, OTHER]}, dtype=object)
    if kind == "pair":
        table["text_pair"] = table["text"]
    answers, is_bad = answer(table), [False, *([True] * len(bad)), False]
    if is_table:
        assert answers["score"].isna().tolist() == is_bad == answers["label"].isna().tolist()
        assert answers["label"].iloc[[0, -1]].tolist() == [alone[0]["label"].iloc[0], alone[2]["label"].iloc[0]]
    else:
        assert [each is None for each in answers] == is_bad
        if kind == "tags":
            assert [len(answers[place]) for place in (0, -1)] == [6, 5]
    with pytest.raises(Exception, match="no row has a text"):
        answer(table.iloc[[1, 2]])


@pytest.mark.long
def test_a_tagger_answers_with_words_and_their_places(registered: Register) -> None:
    names = {"id2label": {0: "O", 1: "B-X"}, "label2id": {"O": 0, "B-X": 1}}
    _, answer = registered(AutoModelForTokenClassification, **names)
    text = "  the cat\n\tsat\u00a0on"
    (words,) = answer(text)
    assert [text[word["start"] : word["end"]] for word in words] == ["the", "cat", "sat", "on"]
    assert [word["word"] for word in words] == ["the", "cat", "sat", "on"]
    assert {word["tag"] for word in words} <= {"O", "B-X"} and all(0.5 <= word["score"] <= 1.0 for word in words)
    (long,) = answer(LONG)
    assert len(long) == 120
    assert [word["tag"] is None for word in long] == [word["score"] is None for word in long]
    assert [word["tag"] is None for word in long] == [False] * 18 + [True] * 102  # 20 tokens with [CLS] and [SEP]


@pytest.mark.long
@pytest.mark.parametrize("is_pair", [False, True])
def test_a_classifier_reads_the_names_of_special_tokens_as_predict_does(registered: Register, is_pair: bool) -> None:
    folder, answer = registered(AutoModelForSequenceClassification, "second" if is_pair else None, num_labels=3)
    facts = json.loads((folder / "finetune.json").read_text())
    (folder / "finetune.json").unlink()  # it is not of finetune.py
    texts = [f"the cat {name} sat" for name in AutoTokenizer.from_pretrained(folder).all_special_tokens]
    texts += ["[SEP][SEP]", "[PAD] [PAD] a dog", LONG + "[MASK]"]
    texts += [text for text in ODD_TEXTS if "\ud800" not in text]  # which MLflow refuses
    pairs = [*texts[1:], OTHER] if is_pair else None
    fitted = FittedModel.load(folder)
    fitted = replace(fitted, preprocessor=replace(fitted.preprocessor, max_length=facts["max_length"]))
    expected, _ = fitted.predict(Examples(texts, pairs, None))
    given = [{"text": text, "text_pair": pair} for text, pair in zip(texts, pairs, strict=True)] if pairs else texts
    answers = answer(given)
    assert list(answers.columns) == ["label", "score"]
    assert answers["label"].tolist() == [guess.label for guess in expected]
    assert answers["score"].tolist() == pytest.approx([guess.probability for guess in expected], abs=1e-5)
    assert answer(given[0])["score"].tolist() == pytest.approx([expected[0].probability], abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_folder_of_vectors_answers_as_embed_does(registered: Register, pooling: str, tmp_path: Path) -> None:
    folder, answer = registered_vectors(registered, AutoModel, tmp_path, pooling)
    embedder = Embedder(folder)
    texts = [TEXT, OTHER, LONG, *(text for text in ODD_TEXTS if "\ud800" not in text)]
    expected = embedder(texts)
    assert embedder.max_length == 12 and expected.std(axis=0).min() > 0, "else all texts are alike"
    for given in (texts, pandas.DataFrame({"text": texts})):
        vectors = answer(given)
        assert [len(each) for each in vectors] == [16] * len(texts)
        assert torch.tensor(vectors).sub(torch.tensor(expected)).abs().max() < 1e-5
    assert answer(TEXT)[0] == pytest.approx(expected[0].tolist(), abs=1e-5)
    assert answer([TEXT, " ", None])[1:] == [None, None]


def registered_vectors(registered: Register, auto_class: Any, tmp_path: Path, pooling: str) -> tuple[Path, Answer]:
    """A registered encoder without a head, in a folder of sentence-transformers."""
    source = tmp_path / "source"
    build = runpy.run_path(str(Path(__file__).parents[2] / "support" / "tiny_hugging_face.py"))["build"]
    build(source)
    with quiet_transformers():
        model = auto_class.from_pretrained(source, add_pooling_layer=False)
        for weights in model.parameters():
            weights.data *= 10  # else all texts are alike to it
        model.save_pretrained(source)
    write_sentence_transformer(source, 12, 16, pooling)
    return registered(None, source=source)


ODD_TEXTS = [
    "Anna Smith lives in Paris.",
    "Zu\u0308rich \u202eabc\u202c \u05e9\u05dc\u05d5\u05dd \U0001f468\u200d\U0001f469\u200d\U0001f467 ok",
    "\u4e2d\u56fd\u4eba\u5728\u8fd9\u91cc",
    "two\nlines  of\ttext </s> [SEP] <mask> [MASK]",
    "half \ud800 a pair",
    "\u200b \u200b",
    "word " * 50,
]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["own", *WRITERS])
@pytest.mark.parametrize("task", ["token_classification", "question_answering", "regression", "classification"])
def test_the_function_answers_as_predict_does_for_every_tokenizer(
    task: str, kind: str, tokenizer_folder: Path, tiny_hugging_face: Path, tmp_path: Path
) -> None:
    from data_prep.tokenizer.hugging_face_tokenizer import write_hugging_face_tokenizer
    from trainer.registry import served_rows

    folder = tmp_path / "hf"
    if kind == "own":
        folder.mkdir()
        write_hugging_face_tokenizer(tokenizer_folder, folder, model_max_length=32)
    else:
        WRITERS[kind](folder, ["Anna Smith lives in Paris.", "two lines of text", "a word or two"] * 20)
    classes = {
        "token_classification": (AutoModelForTokenClassification, {"id2label": {0: "O", 1: "B-X", 2: "I-X"}}),
        "question_answering": (AutoModelForQuestionAnswering, {}),
        "regression": (AutoModelForSequenceClassification, {"num_labels": 1, "problem_type": "regression"}),
        "classification": (AutoModelForSequenceClassification, {"num_labels": 3}),
    }
    auto_class, head = classes[task]
    config = AutoConfig.from_pretrained(
        tiny_hugging_face, vocab_size=len(AutoTokenizer.from_pretrained(folder)), **head
    )
    torch.manual_seed(0)
    model = auto_class.from_config(config)
    for weights in model.parameters():
        weights.data *= 8
    with quiet_transformers():
        model.save_pretrained(folder)
    # Half a surrogate pair is refused by `predict` in the other tasks.
    texts = ODD_TEXTS if task in ("regression", "classification") else [*ODD_TEXTS[:4], *ODD_TEXTS[5:]]
    questions = [text[::-1] for text in texts]
    pairs = questions if task == "question_answering" else None
    read = [text.split() for text in texts] if task == "token_classification" else texts
    expected, _ = FittedModel.load(folder).predict(Examples(read, pairs, None))
    function = served_rows._load_pyfunc(str(tmp_path), {"task": task, "folder": "hf", "max_length": 32})
    given = [{"question": each, "context": text} for each, text in zip(questions, texts, strict=True)]
    answers = function.predict(given if pairs else texts)
    if task == "classification":
        answers = answers.to_dict("records")
    for text, answer, guess in zip(texts, answers, expected, strict=True):
        if task == "regression":
            assert answer == pytest.approx(guess.label, abs=1e-5)
        elif task == "classification":
            assert answer == {"label": guess.label, "score": pytest.approx(guess.probability, abs=1e-5)}
        elif task == "question_answering":
            assert answer["answer"] == guess.label.text and math.isclose(
                answer["score"], guess.probability, abs_tol=1e-5
            )
            assert answer["start"] is None or text[answer["start"] : answer["end"]] == answer["answer"]
        else:
            tags = [word["tag"] or "O" for word in answer]  # `predict` calls words without a prediction O
            assert tags == guess.label and [text[word["start"] : word["end"]] for word in answer] == text.split()


WITHOUT_PROJECT = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("trainer", "data_prep", "launch"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import mlflow
model = mlflow.pyfunc.load_model(sys.argv[1])
answers = model.predict(json.loads(sys.argv[2]))
print(json.dumps(answers if isinstance(answers, list) else answers.to_dict("records")))
"""


@pytest.mark.slow
@pytest.mark.spawn
@pytest.mark.parametrize("kind", ["tags", "answer", "number", "class", "vectors"])
def test_the_function_needs_nothing_of_this_project(
    registered: Register, kind: str, tmp_path: Path, database: str
) -> None:
    if kind == "tags":
        _, answer = registered(AutoModelForTokenClassification, num_labels=2)
    elif kind == "answer":
        _, answer = registered(AutoModelForQuestionAnswering, "question")
    elif kind == "vectors":
        _, answer = registered_vectors(registered, AutoModel, tmp_path, "cls")
    else:
        _, answer = registered(AutoModelForSequenceClassification, num_labels=1 if kind == "number" else 2)
    given: Any = [{"question": OTHER, "context": TEXT}] if kind == "answer" else [TEXT, OTHER]
    command = [sys.executable, "-c", WITHOUT_PROJECT, "models:/served/1", json.dumps(given)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, expected = json.loads(done.stdout.splitlines()[-1]), answer(given)
    if kind == "class":
        expected = expected.to_dict("records")
    if kind == "vectors":
        assert torch.tensor(found).sub(torch.tensor(expected)).abs().max() < 1e-6
        return
    assert found == pytest.approx(expected) if kind == "number" else found == expected


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
