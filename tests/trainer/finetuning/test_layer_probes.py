"""Linear probes on every layer: what they read, what they find, what they write, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from transformers import AutoModel, BertConfig, EuroBertConfig, ModernBertConfig, RobertaConfig

from data_prep.base.errors import UsageError
from launch import finetune
from tests.support.error_codes import coded
from trainer.data.minimal_pairs import MinimalPair, subject_number
from trainer.finetuning.finetune_settings import FinetuneSettings, check_settings
from trainer.finetuning.frozen import layer_states
from trainer.finetuning.layer_probes import PENALTIES, _fits, length_classes, prepare_probes, run_probes
from trainer.finetuning.task_data import make_task

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "pad_token_id": 0,
}
FAMILIES = {
    "bert": BertConfig(**SMALL),
    "roberta": RobertaConfig(**SMALL),
    "modernbert": ModernBertConfig(**SMALL, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    "eurobert": EuroBertConfig(**SMALL, num_key_value_heads=2, bos_token_id=1, eos_token_id=2),
}
NORMED = {"modernbert", "eurobert"}


def settings(model: Path, folder: Path, **given: Any) -> FinetuneSettings:
    values = {"model": model, "output": folder / "probes", "layer": "all", "seeds": 2, "is_tracked": False}
    return FinetuneSettings(**{**values, **given})


def write_table(path: Path, columns: dict[str, list[Any]]) -> Path:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(num: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Texts about a cat or a dog, which a vector of word embeddings tells."""
    draw = random.Random(seed)
    labels = [draw.choice(["cat", "dog"]) for _ in range(num)]
    words = ["the", "garden", "sat", "ran", "on", "mat", "to", "it"]
    return [
        " ".join([*draw.choices(words, k=draw.randint(1, 6)), label, draw.choice(words)]) for label in labels
    ], labels


def probed(plan_settings: FinetuneSettings) -> tuple[dict[str, Any], list[str]]:
    """What is written and printed."""
    lines: list[str] = []
    run_probes(prepare_probes(plan_settings, lines.append), lines.append)
    output = Path(plan_settings.output)
    assert (output / "probes.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((output / "probes.json").read_text()), lines


@pytest.mark.parametrize("family", FAMILIES)
def test_the_states_are_those_of_transformers_and_the_one_before_the_final_norm(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(FAMILIES[family]).eval()
    batch = {"input_ids": torch.randint(3, 40, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    found = layer_states(model, batch)
    assert list(found) == ["0", "1", "2", "3", *(["norm"] if family in NORMED else [])]
    with torch.inference_mode():
        outputs = model(**batch, output_hidden_states=True)
    for number in range(3):
        assert torch.equal(found[str(number)], outputs.hidden_states[number])
    last = found["3"]
    if family in NORMED:
        norm = model.final_norm if family == "modernbert" else model.norm
        assert not torch.equal(last, found["norm"])
        with torch.inference_mode():
            last = norm(last)
    assert torch.equal(last, outputs.last_hidden_state)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([5] * 10, {5: "5", 4: "5", 9: "5"}),
        (list(range(3, 15)), {3: "3 to 4", 4: "3 to 4", 5: "5 to 6", 14: "13 to 14", 99: "13 to 14", 1: "3 to 4"}),
        ([3, 3, 3, 8], {3: "3 to 7", 8: "8"}),
    ],
)
def test_classes_of_lengths_hold_about_as_many_texts(lengths: list[int], expected: dict[int, str]) -> None:
    classes = length_classes(lengths)
    assert {length: classes(length) for length in expected} == expected


def test_the_subjects_number_follows_from_the_word_that_differs() -> None:
    one, two = "regular_plural_subject_verb_agreement_1", "regular_plural_subject_verb_agreement_2"

    def pair(good: str, bad: str, paradigm: str = one) -> MinimalPair:
        return MinimalPair(good=good, bad=bad, paradigm=paradigm, field="f", location="here")

    pairs = [
        pair("The cat sleeps.", "The cat sleep."),
        pair("The cats sleep.", "The cats sleeps."),
        pair("The boys were here.", "The boys was here."),
        pair("The women meet.", "The woman meet.", two),
        pair("The woman meets.", "The women meets.", two),
        pair("The cat sleeps.", "The cat sleep."),  # again
        pair("A dog ran.", "A cat ran."),  # not a matter of number
        pair("The cat sleeps.", "The cat sleep.", "another_paradigm"),
    ]
    found = [(each.text, each.number) for each in subject_number(pairs)]
    assert found == [
        ("The cat sleeps.", "singular"),
        ("The cats sleep.", "plural"),
        ("The boys were here.", "plural"),
        ("The women meet.", "plural"),
        ("The woman meets.", "singular"),
    ]


@pytest.mark.long
def test_probes_find_what_is_there_and_nothing_in_the_control(tiny_hugging_face: Path, tmp_path: Path) -> None:
    given, labels = texts(240)
    train = write_table(tmp_path / "train.jsonl", {"text": given, "label": labels})
    found, lines = probed(settings(tiny_hugging_face, tmp_path, train=train))
    names = [layer["layer"] for layer in found["layers"]]
    assert names[0] == "embeddings" and len(names) >= 2 and found["metric"] == "accuracy"
    embeddings = found["layers"][0]
    assert embeddings["score"]["mean"] > 0.85, "the words are in the embeddings"
    assert abs(embeddings["control"]["mean"] - 0.5) < 0.3
    assert 0.3 < found["baseline"]["scores"]["accuracy"] < 0.8
    assert [len(layer["probes"]) for layer in found["layers"]] == [2] * len(names)
    assert any(line.startswith("layer ") for line in lines) and not list(tmp_path.glob("probes/*.safetensors"))
    again, _ = probed(settings(tiny_hugging_face, tmp_path, train=train, output=tmp_path / "again"))
    assert again == found
    (only,) = probed(settings(tiny_hugging_face, tmp_path, train=train, layer="1", output=tmp_path / "one"))[0][
        "layers"
    ]
    assert only == found["layers"][1]


def test_a_probe_of_two_classes_ends_at_the_optimum_also_for_random_labels() -> None:
    draw = np.random.default_rng(0)
    features = draw.normal(size=(300, 40)).astype(np.float32) * np.geomspace(1, 0.01, 40, dtype=np.float32)
    labels = [*draw.choice(["a", "b"], 300)]
    found = list(_fits(make_task("classification", ("a", "b")), features, labels, PENALTIES))
    assert [fit.penalty for fit in found] == list(PENALTIES) and all(fit.converged for fit in found)
    exact = LogisticRegression(C=1 / (PENALTIES[-1] * 300), solver="newton-cg", tol=1e-10, max_iter=10_000)
    exact.fit(features.astype(np.float64), labels)
    assert found[-1].predict(features) == exact.predict(features).tolist()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tags", "pairs", "numbers", "length", "subject number"])
def test_every_kind_of_label_is_probed(kind: str, tiny_hugging_face: Path, tmp_path: Path) -> None:
    given, labels = texts(150)
    columns: dict[str, list[Any]] = {"text": given}
    named: dict[str, Any] = {"text_column": "text", "label_column": "label"}
    if kind == "tags":
        columns = {"text": [text.split() for text in given]}
        columns["label"] = [
            ["ANIMAL" if word in ("cat", "dog") else "OTHER" for word in text] for text in columns["text"]
        ]
        named["task"] = "token_classification"
    elif kind == "pairs":
        others, animals = texts(150, seed=1)
        columns |= {"second": others, "label": [str(a == b) for a, b in zip(labels, animals, strict=True)]}
        named |= {"task": "pair_classification", "pair_column": "second"}
    elif kind == "numbers":
        columns["label"] = [
            text.split().count("the") + 0.5 * (label == "cat") for text, label in zip(given, labels, strict=True)
        ]
        named["task"] = "regression"
    elif kind == "length":
        named = {"task": "length", "text_column": "text"}
    train = write_table(tmp_path / "train.jsonl", columns)
    if kind == "subject number":
        named = {"task": "subject_number"}
        nouns, paradigm = ["cat", "dog", "garden", "mat"], "regular_plural_subject_verb_agreement_1"
        pairs = [
            {
                "sentence_good": f"the {noun}{'s' * plural} {'ran'} {'are' if plural else 'is'} {word}",
                "sentence_bad": f"the {noun}{'s' * plural} {'ran'} {'is' if plural else 'are'} {word}",
                "UID": paradigm,
                "field": "morphology",
            }
            for noun in nouns
            for plural in (False, True)
            for word in ("it", "on", "to", "sat", "mat", "the")
        ]
        train = tmp_path / f"{paradigm}.jsonl"
        train.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    found, _ = probed(settings(tiny_hugging_face, tmp_path, train=train, **named))
    baseline, metric = found["baseline"]["scores"][found["metric"]], found["metric"]
    scores = [layer["score"]["mean"] for layer in found["layers"]]
    assert np.isfinite(scores).all()
    if kind in ("tags", "numbers"):
        better = min(scores) < baseline if "error" in metric else max(scores) > baseline
        assert better, (metric, scores, baseline)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"layer": "first"}, "unknown-layer"),
        ({"layer": "-1"}, "unknown-layer"),
        ({"layer": "٣"}, "unknown-layer"),
        ({"task": "question_answering"}, "unknown-task"),
        ({"task": "multilabel_classification"}, "unknown-task"),
        ({"task": "embedding"}, "unknown-task"),
        ({"epochs": 7}, "option-without-effect"),
        ({"learning_rates": (1e-3,)}, "option-without-effect"),
        ({"compare": ("frozen",)}, "option-without-effect"),
        ({"register": "name"}, "option-without-effect"),
        ({"pooling": "cls"}, "option-without-effect"),
        ({"matryoshka": (8,), "task": "length"}, "option-without-effect"),
        ({"layer": None, "task": "length"}, "unknown-task"),
    ],
)
def test_what_probes_do_not_have_is_refused_before_anything_is_read(given: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError, check=coded(code)):
        check_settings(settings(Path("no/model"), Path("no"), **{"train": "no/file", **given}))


@pytest.mark.long
def test_a_layer_that_the_model_lacks_is_named_with_those_it_has(tiny_hugging_face: Path, tmp_path: Path) -> None:
    given, labels = texts(40)
    train = write_table(tmp_path / "train.jsonl", {"text": given, "label": labels})
    with pytest.raises(UsageError, check=coded("unknown-layer")):
        prepare_probes(settings(tiny_hugging_face, tmp_path, train=train, layer="99"), print)
    assert not (tmp_path / "probes").exists()


@pytest.mark.long
def test_the_command_probes_and_a_dry_run_writes_nothing(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, labels = texts(60)
    train = write_table(tmp_path / "train.jsonl", {"text": given, "label": labels})
    words = ["--model", str(tiny_hugging_face), "--task", "length", "--text-column", "text", "--train", str(train)]
    words += ["--layer", "all", "--seeds", "1", "--output", str(tmp_path / "probes")]
    monkeypatch.setattr("sys.argv", ["finetune", *words, "--dry-run"])
    finetune.main()
    assert "dry run" in capsys.readouterr().out and not (tmp_path / "probes").exists()
    monkeypatch.setattr("sys.argv", ["finetune", *words])
    finetune.main()
    assert "selectivity" in capsys.readouterr().out and (tmp_path / "probes" / "probes.json").is_file()


@pytest.mark.parametrize(
    "words",
    [
        ["--task", "length"],
        ["--task", "length", "--text-column", "a", "--label-column", "b"],
        ["--task", "subject_number", "--text-column", "a"],
        ["--task", "classification", "--text-column", "a"],
    ],
)
def test_columns_that_a_task_needs_or_does_not_read(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        finetune.parse_arguments(["--model", "m", "--train", "t", *words])
    assert ended.value.code == 2 and "column" in capsys.readouterr().err
