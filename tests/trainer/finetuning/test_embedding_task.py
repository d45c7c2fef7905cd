"""Embeddings: the cached gradient, batches without a text twice, ranks, and a folder that loads without the project."""

from __future__ import annotations

import json
import math
import os
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from data_prep.base.errors import UsageError, UserError
from tests.support import fork_server
from tests.support.error_codes import coded
from tests.support.toy_run import tiny_config
from trainer.finetuning.embedding_task import EmbeddingTask, EvenEpochs, PairCollator, gain, ranked
from trainer.finetuning.examples import Examples
from trainer.finetuning.experiment import Best, make_model, prepare, run_variant
from trainer.finetuning.experiment_runs import ExperimentRuns
from trainer.finetuning.finetune import finetune
from trainer.finetuning.finetune_settings import FinetuneSettings, check_settings
from trainer.finetuning.fitted_model import FittedModel
from trainer.hf_export import export
from trainer.hf_export.export_source import ExportSource
from trainer.hf_export.model_card import TrainingFacts
from trainer.inference.embedding import Embedder

WORDS = "cat dog house garden mat day".split()
TEXTS = ["the cat sat on the mat", "a dog ran", "the garden " * 30, "sat [SEP]sat"]
WITHOUT_PROJECT = """
import json, os, sys
for name in ("trainer", "launch", "data_prep"):
    sys.modules[name] = None
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
print(json.dumps([model.encode(json.loads(sys.argv[2])).tolist(), model.max_seq_length, model.prompts, str(model[1])]))
os.chdir(sys.argv[1])
exec(sys.argv[3])
"""


def examples(count: int = 24, triplets: bool = False) -> Examples:
    """Anchor and positive have a rare word in common."""
    draw = random.Random(0)
    words = [WORDS[number % len(WORDS)] for number in range(count)]
    anchors, positives, negatives = (
        [f"{draw.choice(('it was', 'to', 'a'))} {word} {draw.choice(('ran', 'sat', 'slept'))}" for word in some]
        for some in (words, words, words[1:] + words[:1])
    )
    return Examples(anchors, negatives if triplets else None, positives)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    some = examples(120, triplets=True)
    rows = zip(some.texts, some.labels or [], some.pairs or [], strict=True)
    path.write_text(
        "".join(json.dumps(dict(zip(("anchor", "positive", "negative"), row, strict=True))) + "\n" for row in rows)
    )
    return path


def settings(model: Path, train: Path, **others: Any) -> FinetuneSettings:
    usual: dict[str, Any] = {"seeds": 1, "learning_rates": [1e-2], "epochs": 2, "batch_size": 16, "is_tracked": False}
    return FinetuneSettings(model=model, train=train, task="embedding", **{**usual, **others})


@pytest.mark.parametrize(
    ("dtype", "most", "sizes"),
    [(torch.float64, 1e-12, ()), (torch.float64, 1e-12, (8, 4)), (torch.float32, 1e-6, ())],
)
def test_the_cached_gradient_is_that_of_one_big_batch(
    tiny_hugging_face: Path, pairs: Path, dtype: torch.dtype, most: float, sizes: tuple[int, ...]
) -> None:
    """For 72 triplets, which are 3 batches of the cache for each part."""
    experiment = prepare(settings(tiny_hugging_face, pairs, pair_column="negative", matryoshka=sizes))
    model = make_model(experiment, "full", 0).to(dtype).eval()  # without dropout
    batch = experiment.collate(experiment.data.parts["train"].encoded.rows[:72])

    def gradients(loss: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss.backward()
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    cached = gradients(model(**batch).loss)
    whole = MultipleNegativesRankingLoss(model.network)
    vectors = [model.network(dict(part))["sentence_embedding"] for part in batch.values()]
    cuts = sorted({*sizes, 16}) if sizes else [16]
    losses = [whole.compute_loss_from_embeddings([each[:, :cut] for each in vectors], None) for cut in cuts]
    plain = gradients(torch.stack(losses).sum())
    assert len(plain) == sum(each.numel() for each in model.parameters())
    assert float((cached - plain).norm() / plain.norm()) < most
    with torch.no_grad():
        assert float(model(**batch).loss) == pytest.approx(float(torch.stack(losses).sum()), rel=1e-5)


def test_no_batch_has_a_text_twice_and_epochs_differ(tiny_hugging_face: Path, pairs: Path) -> None:
    experiment = prepare(settings(tiny_hugging_face, pairs))
    rows = experiment.data.parts["train"].encoded.rows
    assert len({row["texts"][0] for row in rows}) < len(rows), "else nothing is tested"
    sampler = experiment.collate.training_batches(rows, 16, epochs=2, seed=0)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epochs.append(list(sampler))
        for batch in epochs[-1]:
            texts = [text for number in batch for text in set(rows[number]["texts"])]
            assert len(texts) == len(set(texts))
        assert sorted(number for batch in epochs[-1] for number in batch)[: len(rows)] == list(range(len(rows)))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("repeats", [2, 3])
def test_a_fit_reads_every_pair_in_every_epoch(
    tiny_hugging_face: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeats: int
) -> None:
    """Anchors that repeat make more batches than the Trainer counts rows for, and not as many in every epoch."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"anchor": f"cat {number // repeats}", "positive": f"dog {number}"} for number in range(26)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = tmp_path / "other.jsonl"
    other.write_text(path.read_text().replace("dog", "day"))
    experiment = prepare(settings(tiny_hugging_face, path, valid=other, epochs=6, batch_size=8))
    read: list[tuple[str, ...]] = []
    original = PairCollator.__call__

    def noted(self: PairCollator, rows: Any) -> Any:
        read.extend(tuple(row["texts"]) for row in rows if row["texts"][1].startswith("dog"))
        return original(self, rows)

    monkeypatch.setattr(PairCollator, "__call__", noted)
    batches = experiment.collate.training_batches(experiment.data.parts["train"].encoded.rows, 8, epochs=6, seed=0)
    numbers = []
    for epoch in range(6):
        batches.set_epoch(epoch)
        numbers.append(list(batches))
        assert all(0 < len(batch) <= 8 for batch in numbers[-1])
    assert len({len(some) for some in numbers}) == 1
    run_variant(experiment, "full", ExperimentRuns(None, tmp_path).child, lambda model, fit: None)
    pairs = sorted((row["anchor"], row["positive"]) for row in rows)
    assert len(read) == 6 * len(rows)
    for epoch in range(6):
        assert sorted(read[epoch * len(rows) : (epoch + 1) * len(rows)]) == pairs


def test_an_epoch_with_fewer_batches_has_its_largest_ones_in_halves() -> None:
    class Sampler:
        def set_epoch(self, epoch: int) -> None:
            self.batches = [[[0, 1, 2], [3, 4]], [[4], [3, 2], [1, 0]], [[0, 1, 2, 3, 4]]][epoch]

        def __iter__(self) -> Any:
            return iter(self.batches)

    batches = EvenEpochs(Sampler(), 3)
    found = []
    for epoch in range(3):
        batches.set_epoch(epoch)
        found.append(list(batches))
    assert found == [[[0], [1, 2], [3, 4]], [[4], [3, 2], [1, 0]], [[0, 1], [2], [3, 4]]] and len(batches) == 3


def test_pairs_that_are_alone_in_their_batch_are_named(
    tiny_hugging_face: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pairs.jsonl"
    rows = [{"anchor": "cat", "positive": f"dog {number}"} for number in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    experiment = prepare(settings(tiny_hugging_face, path, valid=path))
    experiment.collate.training_batches(experiment.data.parts["train"].encoded.rows, 8, epochs=1, seed=0)
    assert "20 of 20 pairs are alone" in caplog.text


def test_ranks_are_those_of_a_plain_search() -> None:
    draw = np.random.default_rng(0)
    some = Examples(["a", "a", "b", "c"], ["n", "o", "p", "x"], ["x", "y", "z", "x"])
    anchors, positives, negatives = draw.normal(size=(3, 4, 5)).astype(np.float32)
    positives[3] = positives[0]  # the same text has the same vector
    negatives[3] = positives[0]
    vectors = dict(zip([*(some.labels or []), *(some.pairs or [])], [*positives, *negatives], strict=True))
    others = {"a": {"x", "y"}, "b": {"z"}, "c": {"x"}}
    for number, guess in enumerate(ranked(anchors, [positives, negatives], some)):
        own = (some.labels or [])[number]
        cosines = {
            name: float(anchors[number] @ vector / np.linalg.norm(vector))
            for name, vector in vectors.items()
            if name == own or name not in others[some.texts[number]]
        }
        order = sorted(cosines, key=lambda name: -cosines[name])
        assert guess.columns["rank"] == 1 + order.index(own) and guess.label == order[0]


def test_equal_vectors_are_the_worst_ranking() -> None:
    some = Examples(["a", "b", "c"], None, ["x", "y", "z"])
    same = np.ones((3, 4), np.float32)
    guesses = ranked(same, [same], some)
    assert [guess.columns["rank"] for guess in guesses] == [3, 3, 3]
    scores = EmbeddingTask().score(some.labels or [], guesses)
    assert scores == {"ndcg_at_10": pytest.approx(0.5), "mrr_at_10": pytest.approx(1 / 3), "accuracy": 0.0}
    assert gain(1) == 1.0 and gain(3) == 0.5 and gain(11) == 0.0 and gain(10) == 1 / math.log2(11)


@pytest.mark.long
@pytest.mark.parametrize(("pooling", "sizes"), [("mean", ()), ("cls", (8,))])
def test_the_folder_gives_the_vectors_of_embed_without_this_project(
    tiny_hugging_face: Path, pairs: Path, tmp_path: Path, pooling: Any, sizes: tuple[int, ...]
) -> None:
    result = finetune(
        tiny_hugging_face, pairs, task="embedding", pair_column="negative" if sizes else None, output=tmp_path / "out",
        seeds=1, learning_rates=[1e-2], epochs=2, batch_size=16, max_length=12, pooling=pooling, matryoshka=sizes,
        is_tracked=False,
    )  # fmt: skip
    assert result.metric == "ndcg_at_10" and "tf-idf" in result.report
    texts = [text for text in TEXTS if "[SEP]" not in text]
    card = (result.folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    words = ["-c", WITHOUT_PROJECT, str(result.folder), json.dumps(texts), code]
    answer = fork_server.run(words, tmp_path, os.environ | fork_server.FIXED)
    assert answer.returncode == 0, answer.stderr
    (of_script,) = [line for line in answer.stdout.splitlines() if line.startswith("[[")]
    vectors, longest, prompts, module = json.loads(of_script)
    embedder = Embedder(result.folder)
    unit = embedder(["A text.", "Another text."])  # those of the card
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    printed = [float(number) for number in re.findall(r"-?\d\.\d+", answer.stdout.partition("tensor(")[2])]
    np.testing.assert_allclose(printed, (unit @ unit.T).ravel(), atol=1e-3)
    assert f"{pooling} pooling" in card and ("The first 8 numbers" in card) == bool(sizes)
    np.testing.assert_allclose(embedder(texts), vectors, atol=1e-5)
    assert longest == embedder.max_length == 12 and pooling in module and not any(prompts.values())
    assert embedder.embed(texts).num_truncated == 1
    facts = json.loads((result.folder / "finetune.json").read_text())
    assert facts["pooling"] == pooling and tuple(facts["matryoshka"]) == sizes and facts["text_column"] == "anchor"
    with pytest.raises(UsageError, match="vectors") as caught:
        FittedModel.load(result.folder)
    assert "clozeworks embed" in str(caught.value.fix)


@pytest.mark.long
def test_a_eurobert_is_fitted_and_registered(tiny_eurobert: Path, pairs: Path, tmp_path: Path, database: str) -> None:
    result = finetune(
        tiny_eurobert, pairs, task="embedding", output=tmp_path / "out", seeds=1, learning_rates=[1e-2], epochs=1,
        batch_size=16, max_length=12, register="vectors", alias="champion", tracking_uri=database,
    )  # fmt: skip
    plain = SentenceTransformer(str(result.folder), device="cpu")
    vectors = Embedder("models:/vectors@champion", tracking_uri=database)(TEXTS[:3])
    np.testing.assert_allclose(plain.encode(TEXTS[:3]), vectors, atol=1e-5)
    assert np.abs(vectors - Embedder(tiny_eurobert)(TEXTS[:3])).max() > 1e-3, "the fit changed it"


def test_an_encoder_that_no_class_of_transformers_computes_is_refused(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("runs/one", model={"family": "custom", "norm": "rmsnorm", "position_embedding": "sinusoidal"})
    source = ExportSource(config, {}, tmp_path, TrainingFacts())
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(export, "read_source", lambda checkpoint: source)
    with pytest.raises(UserError, check=coded("not-in-transformers")):
        prepare(settings(tmp_path / "run", pairs))


def test_a_fit_learns_and_repeats(tiny_hugging_face: Path, pairs: Path) -> None:
    given = settings(tiny_hugging_face, pairs, epochs=6, batch_size=32, valid=pairs)
    fits = []
    for _ in range(2):
        experiment, best = prepare(given), Best("ndcg_at_10")
        model = make_model(experiment, "full", 0)
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        result = run_variant(experiment, "full", ExperimentRuns(None, pairs.parent).child, best.keep)
        fits.append(result.fits[0])
        fitted, _ = best.kept
        changed = [name for name, weight in fitted.named_parameters() if not torch.equal(weight, before[name])]
        assert len(changed) == len(before), "every weight is trained"
    assert fits[0].scores == fits[1].scores and fits[0].points == fits[1].points
    first = next(point.value for point in fits[0].points if point.name == "valid/ndcg_at_10")
    assert fits[0].valid_scores["ndcg_at_10"] > first


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        ({"compare": "frozen"}, "nothing-to-train", "frozen"),
        ({"pooling": "max"}, "unknown-pooling", "max"),
        ({"task": "classification", "pooling": "cls"}, "option-of-embedding", "--pooling"),
        ({"task": "classification", "matryoshka": (4,)}, "option-of-embedding", "--matryoshka"),
        ({"metric": "f1"}, "unknown-metric", "f1"),
        ({"text_column": "query"}, "unknown-column", "query"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(
    tiny_hugging_face: Path, pairs: Path, given: dict[str, Any], code: str, said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        check_settings(replace(settings(tiny_hugging_face, pairs), **given))
    assert caught.value.code == code


@pytest.mark.parametrize("size", [0, 17])
def test_a_size_that_the_vectors_do_not_have_is_refused(tiny_hugging_face: Path, pairs: Path, size: int) -> None:
    with pytest.raises(UsageError, match=f"--matryoshka {size}", check=coded("invalid-matryoshka")):
        prepare(settings(tiny_hugging_face, pairs, matryoshka=(size,)))
