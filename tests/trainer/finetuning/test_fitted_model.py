"""A saved fit is what was fitted, for every task, and is registered as what it is."""

from __future__ import annotations

import json
import re
import shutil
from ast import literal_eval
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.finetuning.answer_task import Answer
from trainer.finetuning.examples import Examples
from trainer.finetuning.experiment import Experiment, make_model
from trainer.finetuning.finetune_settings import FinetuneSettings
from trainer.finetuning.fitted_card import FitFacts
from trainer.finetuning.fitted_model import FittedModel, save_fitted_model
from trainer.finetuning.task_data import encode_task, make_task
from trainer.inference.preprocessor import Preprocessor
from trainer.inference.pulled_model import pull
from trainer.model.model_folder import check_model_folder, read_provenance
from trainer.registry.model_versions import ModelVersion, trained_on
from trainer.registry.registration import provenance_tags, register
from trainer.tracking.mlflow_server import connect

TEXTS = ["the cat sat", "a dog ran to it"]
EXAMPLES = {
    "classification": Examples(TEXTS, None, ["x", "y"]),
    "regression": Examples(TEXTS, None, [0.5, 2.0]),
    "token_classification": Examples([text.split() for text in TEXTS], None, [["x", "y", "x"], ["x"] * 5]),
    "question_answering": Examples(TEXTS, ["it was", "it was"], [Answer("cat", 4), Answer("dog", 2)]),
    "pair_classification": Examples(TEXTS, ["it was", "it was"], ["x", "y"]),
    "multilabel_classification": Examples(TEXTS, None, [["x"], ["x", "y"]]),
}


def save(name: str, model_folder: Path, preprocessor: Preprocessor, output: Path, variant: str = "full") -> FittedModel:
    """Save a model before any fit, and return it as the fitted model that predicts."""
    task = make_task(name, ("x", "y"))
    some = EXAMPLES[name]
    data = encode_task(task, {"train": some, "valid": some}, preprocessor)
    settings = FinetuneSettings(model=model_folder, train="")
    model = make_model(Experiment(settings, model_folder, data, "", {}), "full", 0)
    pair = "b" if name in ("question_answering", "pair_classification") else None
    facts = FitFacts(
        name,
        "models:/base@champion",
        variant,
        "a",
        pair,
        "c",
        20,
        1e-3,
        0,
        1,
        {"train": 2},
        {},
        {"f1": 0.5},
        "test",
        "d",
    )
    save_fitted_model(model, model_folder, output, facts, None)
    return FittedModel(model.eval(), task, Preprocessor(preprocessor.tokenizer, 20, True))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_loaded_model_predicts_as_the_saved_one(
    tiny_hugging_face: Path, preprocessor: Preprocessor, tmp_path: Path, name: str
) -> None:
    fitted = save(name, tiny_hugging_face, preprocessor, tmp_path / "model")
    check_model_folder(tmp_path / "model", strict=True)
    title = f"# base@champion, fine-tuned for {name.replace('_', ' ')}\n"
    assert title in (tmp_path / "model" / "README.md").read_text()
    loaded = FittedModel.load(tmp_path / "model")
    unlabeled = Examples(EXAMPLES[name].texts, EXAMPLES[name].pairs, None)
    assert loaded.predict(unlabeled) == fitted.predict(unlabeled)
    assert loaded.preprocessor.max_length == 20
    literal = loaded.preprocessor.tokenizer("the [SEP] cat")["input_ids"]
    assert literal.count(loaded.preprocessor.tokenizer.sep_token_id) == 1, "as it was fitted"
    tokenizer = (tmp_path / "model" / "tokenizer.json").read_bytes()
    assert tokenizer == (tiny_hugging_face / "tokenizer.json").read_bytes()
    assert torch.equal(fitted.model.get_input_embeddings().weight, loaded.model.get_input_embeddings().weight)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_code_of_the_card_runs_in_the_folder(
    tiny_hugging_face: Path,
    preprocessor: Preprocessor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """As a reader runs it, with transformers alone; another folder's name works too."""
    save(name, tiny_hugging_face, preprocessor, tmp_path / "model")
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "model" / "README.md").read_text(), re.DOTALL)
    assert "trainer" not in code and "clozeworks" not in code
    monkeypatch.chdir(tmp_path / "model")
    exec(compile(code, name, "exec"), {})
    printed = capsys.readouterr().out.strip()
    if name == "question_answering":
        assert printed in "Anna came home in the evening."
    elif name == "token_classification":
        assert re.fullmatch(
            r"\[({'entity_group': '[xy]', 'score': .*, 'word': .*, 'start': \d+, 'end': \d+}(, )?)*\]", printed
        )
    else:
        answers = literal_eval(printed)
        answer = answers[0][0] if name == "multilabel_classification" else answers if "pair" in name else answers[0]
        assert answer.keys() == {"label", "score"}


def test_config_json_determines_the_task_of_a_folder_from_elsewhere(
    tiny_hugging_face: Path, preprocessor: Preprocessor, tmp_path: Path
) -> None:
    save("regression", tiny_hugging_face, preprocessor, tmp_path / "model")
    (tmp_path / "model" / "finetune.json").unlink()
    loaded = FittedModel.load(tmp_path / "model")
    assert loaded.task.name == "regression"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": "abc"}, "finetune.json .*max_length: "),
        ({"max_length": -3}, "max_length: "),
        ({"text_column": None}, "text_column: "),
        ({"task": "poetry"}, "task: "),
    ],
)
def test_a_fit_whose_facts_were_changed_by_hand_is_refused(
    tiny_hugging_face: Path, preprocessor: Preprocessor, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    save("regression", tiny_hugging_face, preprocessor, tmp_path)
    path = tmp_path / "finetune.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message, check=coded("damaged-model")):
        FittedModel.load(tmp_path)
    path.write_text('{"max_length": 32}')
    with pytest.raises(UserError, match="finetune.json .*task: Field required", check=coded("damaged-model")):
        FittedModel.load(tmp_path)


def test_class_names_without_numbers_are_refused(
    tiny_hugging_face: Path, preprocessor: Preprocessor, tmp_path: Path
) -> None:
    save("classification", tiny_hugging_face, preprocessor, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"id2label": {"x": "a"}}))
    with pytest.raises(UserError, match="'x'", check=coded("model-not-loadable")):
        FittedModel.load(tmp_path)


def test_an_encoder_is_refused(tiny_hugging_face: Path) -> None:
    with pytest.raises(UserError, check=coded("not-fine-tuned")):
        FittedModel.load(tiny_hugging_face)


def test_a_fitted_model_names_the_data_and_the_teachers_that_its_encoder_saw(
    tiny_hugging_face: Path, preprocessor: Preprocessor, tmp_path: Path
) -> None:
    encoder = tmp_path / "encoder"
    shutil.copytree(tiny_hugging_face, encoder)
    seen = {"data_digests": {"shards": "a" * 64}, "data_lineage": ["a" * 64, "b" * 64]}
    taught = {"teacher": {"address": "large", "sha256": "2" * 64}, "teachers_sha256": ["1" * 64, "2" * 64]}
    (encoder / "provenance.json").write_text(json.dumps(seen | taught))
    save("classification", encoder, preprocessor, tmp_path / "model")
    assert taught.items() <= read_provenance(tmp_path / "model").items()
    tags = provenance_tags(tmp_path / "model", read_provenance(tmp_path / "model"))
    version = ModelVersion("moods", 1, (), datetime.now(UTC), None, tags)
    assert trained_on([version], "b" * 12) == [version] and version.data_digests == ("a" * 64,)
    save("classification", encoder, preprocessor, tmp_path / "scratch", variant="scratch")
    tags = provenance_tags(tmp_path / "scratch", read_provenance(tmp_path / "scratch"))
    assert replace(version, tags=tags).data_lineage == (), "weights from scratch saw none of it"
    assert not taught.keys() & read_provenance(tmp_path / "scratch").keys(), "nor learned from a teacher"
    cards = [(tmp_path / name / "README.md").read_text() for name in ("model", "scratch")]
    beginnings = [card[card.index("\n# ") : card.index("\n## ")] for card in cards]  # the registry shows them too
    assert ["random weights" in each for each in beginnings] == [False, True]
    assert ["fine-tuned" in each for each in beginnings] == [True, False]


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "token_classification",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("classification", "question_answering")),
    ],
)
def test_a_fitted_model_is_registered_as_what_it_is(
    tiny_hugging_face: Path,
    preprocessor: Preprocessor,
    tmp_path: Path,
    database: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(name, tiny_hugging_face, preprocessor, tmp_path / "model")
    registration = register(tmp_path / "model", "fitted", "champion", database)
    pulled = pull(registration.model_uri, tmp_path / "pulled", database)
    assert FittedModel.load(pulled).task.name == name
    tags = connect(database).get_model_version("fitted", "1").tags
    assert tags["clozeworks.task"] == name and tags["clozeworks.scores.test/f1"] == "0.5"
    assert json.loads((pulled / "provenance.json").read_text())["base_model"] == "models:/base@champion"
    if name != "question_answering":  # for which transformers 5 has no pipeline
        import mlflow

        monkeypatch.setenv("MLFLOW_TRACKING_URI", database)
        assert mlflow.transformers.load_model(registration.model_uri)("the cat sat")
        assert mlflow.pyfunc.load_model(registration.model_uri).predict("the cat sat") is not None


@pytest.mark.long
@pytest.mark.parametrize("kind", ["own", "wordpiece", "byte level", "roberta", "xlm-roberta"])
def test_the_pipeline_of_transformers_finds_whole_names(kind: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    """The fit learns a few names by heart; the tokenizers cut each of them into several tokens."""
    import transformers

    from data_prep.tokenizer.hugging_face_tokenizer import write_hugging_face_tokenizer
    from data_prep.tokenizer.tokenizer import Tokenizer
    from tests.support.foreign_tokenizers import WRITERS
    from trainer.finetuning.finetune import finetune
    from trainer.hf_export.word_offsets import begin_at_words

    source, encoder = tokenizer_folder, tmp_path / "encoder"
    if kind != "own":
        source = WRITERS[kind](tmp_path / "source", ["lives in a town with the river"] * 20)
    encoder.mkdir()
    write_hugging_face_tokenizer(source, encoder, model_max_length=64)
    begin_at_words(encoder, Tokenizer.load(source))
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    vocab_size = len(transformers.AutoTokenizer.from_pretrained(encoder))
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=vocab_size, max_position_embeddings=64, **sizes)
    transformers.BertForPreTraining(config).save_pretrained(encoder)
    firsts, lasts = ("Anna", "Boris", "Chloe"), ("Smith", "Jones", "Quirk")
    rows = [
        {"text": [first, last, "lives", "in", "a", "town"], "label": ["B-PER", "I-PER", "O", "O", "O", "O"]}
        for first in firsts
        for last in lasts
    ]
    table = tmp_path / "train.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows * 12))
    options: dict[str, Any] = {"seeds": 1, "learning_rates": (5e-3,), "epochs": 6, "batch_size": 16}
    result = finetune(
        encoder,
        table,
        valid=table,
        task="token_classification",
        output=tmp_path / "fitted",
        is_tracked=False,
        **options,
    )
    assert result.scores["full"][0] == 1.0
    text = "Anna Smith lives in a town"
    for strategy in ("simple", "first", "average", "max"):
        tagger = transformers.pipeline("token-classification", str(result.folder), aggregation_strategy=strategy)
        (found,) = tagger(text)
        assert (found["entity_group"], text[found["start"] : found["end"]]) == ("PER", "Anna Smith"), strategy
    card = (result.folder / "README.md").read_text()
    assert "Labels: `B-PER`, `I-PER`, `O`, as in column `label`" in card and "not calibrated" in card


@pytest.mark.long
@pytest.mark.parametrize("variant", ["full", "frozen"])
def test_a_text_has_any_number_of_classes(variant: Any, tiny_hugging_face: Path, tmp_path: Path) -> None:
    """The fit learns whether a text has both classes or none; the served function answers what it predicts."""
    from trainer.finetuning.finetune import finetune
    from trainer.registry import served_rows

    texts = {"the cat sat": ["cat", "sat"], "a dog ran": []}
    rows = [{"text": text, "label": label} for text, label in texts.items()] * 60
    table = tmp_path / "train.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"seeds": 1, "learning_rates": (3e-3,), "epochs": 10, "batch_size": 16}
    result = finetune(
        *(tiny_hugging_face, table),
        valid=table,
        task="multilabel_classification",
        output=tmp_path / "fitted",
        compare=(variant,),
        is_tracked=False,
        **options,
    )
    fitted = FittedModel.load(result.folder)
    assert (fitted.task.name, fitted.model.config.problem_type) == (
        "multilabel_classification",
        "multi_label_classification",
    )
    predictions, _ = fitted.predict(Examples([*texts], None, None))
    settings = {"task": "multilabel_classification", "folder": "model", "max_length": 32}
    answers = served_rows._load_pyfunc(str(tmp_path / "fitted"), settings).predict([*texts])
    assert [[each["label"] for each in answer] for answer in answers] == [each.label for each in predictions]
    if variant == "full":
        assert [each.label for each in predictions] == [*texts.values()] and result.scores["full"][0] == 1.0
    for prediction, answer in zip(predictions, answers, strict=True):
        for each in answer:
            assert each["score"] == pytest.approx(prediction.columns[f"probability_{each['label']}"], abs=1e-5)
