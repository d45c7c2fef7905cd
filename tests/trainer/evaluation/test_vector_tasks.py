"""Retrieval and similarity of texts in suites: pytrec-eval's figures, ties, files as BEIR publishes them, refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval
from scipy.stats import spearmanr

from data_prep.base.errors import UserError
from tests.support.error_codes import coded
from trainer.evaluation.evaluate_suite import evaluate_suite, prepare_suite
from trainer.evaluation.suite_settings import load_suite
from trainer.evaluation.suite_tasks import find_task
from trainer.evaluation.vector_tasks import Retrieval, Sts, ranked_documents, retrieval_scores
from trainer.inference.embedding import Embedder

WORDS = "cat dog house garden mat day ran sat slept".split()
QRELS = "query-id\tcorpus-id\tscore\n"


def write_collection(folder: Path, documents: dict[str, str], queries: dict[str, str], qrels: str) -> dict[str, Any]:
    """Write a BEIR directory; returns the settings of a task that reads it."""
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = (json.dumps({"_id": key, "title": "", "text": text}) for key, text in texts.items())
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / "test.tsv").write_text(QRELS + qrels)
    return {"files": {"data": folder}, "seed": 0}


@pytest.fixture
def collection(tmp_path: Path) -> dict[str, Any]:
    draw = random.Random(0)
    documents = {f"d{number}": " ".join(draw.choices(WORDS, k=5)) for number in range(30)}
    documents["d30"] = documents["d3"]  # a tie
    queries = {f"q{number}": " ".join(draw.choices(WORDS, k=2)) for number in range(6)}
    queries["unjudged"] = "cat"
    rows = [f"q{number}\td{draw.randrange(31)}\t{score}" for number in range(6) for score in (0, 1, 2)]
    return write_collection(tmp_path, documents, queries, "\n".join(dict.fromkeys(rows)) + "\n")


@pytest.mark.parametrize("seed", range(8))
def test_scores_and_ties_are_those_of_trec_eval(seed: int) -> None:
    """Few different cosines, apart by less than float32 holds; ids beyond ASCII; judged ones that are away."""
    draw = np.random.default_rng(seed)
    names = [f"{prefix}{number}" for number in range(40) for prefix in ("d", "é", "文", "\U0001f600")]
    documents, queries = draw.integers(0, 2, (len(names), 3)) + 1e-9 * draw.random((len(names), 3)), draw.random((9, 3))
    judged = [*names, "not in the corpus"]
    qrels = {
        f"q{number}": {judged[place]: int(draw.integers(-1, 4)) for place in draw.choice(len(judged), 30)}
        for number in range(9)
    }
    qrels["q8"] = dict.fromkeys(names[:3], 0)  # without a relevant document
    depths = (1, 5, 100)
    rankings = list(ranked_documents(queries, documents, names, 100))
    found = [retrieval_scores(iter([pair]), depths) for pair in zip(qrels.values(), rankings, strict=True)]
    cosines = queries @ documents.T
    run = {query: dict(zip(names, map(float, row), strict=True)) for query, row in zip(qrels, cosines, strict=True)}
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut", "recall", "recip_rank"}).evaluate(run)
    for query, own in zip(qrels, found, strict=True):
        expected = {f"recall_at_{depth}": theirs[query][f"recall_{depth}"] for depth in depths if depth > 1}
        expected |= {"ndcg_at_10": theirs[query]["ndcg_cut_10"]}
        reciprocal = theirs[query]["recip_rank"]
        expected |= {"mrr_at_10": reciprocal if reciprocal >= 0.1 else 0.0}
        assert {name: own[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    assert any(len(set(np.float32(row))) < len(row) for row in cosines), "else no tie is tested"
    means = retrieval_scores(zip(qrels.values(), rankings, strict=True), depths)
    assert means["ndcg_at_10"] == pytest.approx(np.mean([each["ndcg_at_10"] for each in found]))


def test_a_ranking_by_hand() -> None:
    documents = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    (ranking,) = ranked_documents(np.array([[1.0, 0.1]]), documents, ["a", "b", "c"], 10)
    assert ranking == ["b", "a", "c"], "of equal cosines the greater id comes first"
    scores = retrieval_scores(iter([({"a": 1, "away": 1, "b": 0}, ranking)]), (1, 2))
    assert scores["mrr_at_10"] == 0.5 and scores["recall_at_1"] == 0.0 and scores["recall_at_2"] == 0.5
    ideal = 1 + 1 / np.log2(3)
    assert scores["ndcg_at_10"] == pytest.approx(1 / np.log2(3) / ideal)


@pytest.mark.parametrize("family", ["bert", "eurobert"])
def test_retrieval_ranks_by_the_vectors_of_embed(
    tiny_hugging_face: Path, tiny_eurobert: Path, collection: dict[str, Any], family: str
) -> None:
    model = tiny_hugging_face if family == "bert" else tiny_eurobert
    scores = Retrieval()(model, collection)
    assert list(scores) == list(Retrieval().metric_names(collection))
    folder = collection["files"]["data"]
    texts = [
        {values["_id"]: values["text"] for values in map(json.loads, (folder / name).read_text().splitlines())}
        for name in ("queries.jsonl", "corpus.jsonl")
    ]
    vectors = [Embedder(model)([*some.values()]) for some in texts]
    queries, documents = (some / np.linalg.norm(some, axis=1, keepdims=True) for some in vectors)
    run = {
        query: dict(zip(texts[1], map(float, row), strict=True))
        for query, row in zip(texts[0], queries @ documents.T, strict=True)
    }
    qrels: dict[str, dict[str, int]] = {}
    for line in (folder / "qrels" / "test.tsv").read_text().splitlines()[1:]:
        query, document, score = line.split("\t")
        qrels.setdefault(query, {})[document] = int(score)
    theirs = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut_10", "recall_10"}).evaluate(run)
    assert scores["ndcg_at_10"] == pytest.approx(np.mean([each["ndcg_cut_10"] for each in theirs.values()]), abs=1e-9)
    assert scores["recall_at_10"] == pytest.approx(np.mean([each["recall_10"] for each in theirs.values()]), abs=1e-9)
    assert scores["queries"] == 6 and scores["documents"] == 31
    assert scores["baseline/ndcg_at_10"] > 0
    assert Retrieval()(model, {**collection, "dimension": 4}) != scores
    with pytest.raises(UserError, match="dimension=17", check=coded("dimension-too-large")):
        Retrieval()(model, {**collection, "dimension": 17})


def test_a_relevant_document_outside_the_corpus_is_named(
    tiny_hugging_face: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = write_collection(tmp_path, {"d": "a cat"}, {"q": "cat"}, "q\td\t1\nq\taway\t1\n")
    scores = Retrieval()(tiny_hugging_face, settings)
    assert scores["recall_at_10"] == 0.5 and scores["mrr_at_10"] == 1.0
    assert "1 relevant document of" in caplog.text


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("qrels/test.tsv", "q\td\t1\n", "invalid-judgment"),
        ("qrels/test.tsv", QRELS + "q d 1\n", "invalid-judgment"),
        ("qrels/test.tsv", QRELS + "q\td\t0.5\n", "invalid-judgment"),
        ("qrels/test.tsv", QRELS + "q\td\t1\nq\td\t2\n", "invalid-judgment"),
        ("qrels/test.tsv", QRELS, "no-examples"),
        ("qrels/test.tsv", QRELS + "other\td\t1\n", "unknown-query"),
        ("qrels/test.tsv", None, "missing-task-file"),
        ("corpus.jsonl", None, "missing-task-file"),
        ("corpus.jsonl", "", "no-examples"),
        ("corpus.jsonl", '{"_id": "d"}\n', "invalid-retrieval-text"),
        ("corpus.jsonl", '{"_id": 1, "text": "a"}\n', "invalid-retrieval-text"),
        ("corpus.jsonl", '{"_id": "d", "text": "a"}\n{"_id": "d", "text": "b"}\n', "invalid-retrieval-text"),
        ("corpus.jsonl", "[]\n", "invalid-json-line"),
    ],
)
def test_files_that_are_not_beirs_are_refused_before_a_model_is_loaded(
    tmp_path: Path, file: str, text: str | None, code: str
) -> None:
    settings = write_collection(tmp_path, {"d": "a cat"}, {"q": "cat"}, "q\td\t1\n")
    Retrieval().check(settings)
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, check=coded(code)):
        Retrieval().check(settings)


def test_sts_is_the_rank_correlation_of_cosines(tiny_hugging_face: Path, tmp_path: Path) -> None:
    draw = random.Random(1)
    rows = [
        (" ".join(draw.choices(WORDS, k=4)), " ".join(draw.choices(WORDS, k=4)), number % 6) for number in range(20)
    ]
    path = tmp_path / "sts.tsv"
    path.write_text("sentence1\tsentence2\tscore\n" + "".join(f"{a}\t{b}\t{c}\n" for a, b, c in rows))
    settings: dict[str, Any] = {"files": {"pairs": path}, "seed": 0}
    scores = Sts()(tiny_hugging_face, settings)
    assert list(scores) == ["spearman", "pearson", *list(Sts().metric_names(settings))[2:]]
    lefts, rights = (Embedder(tiny_hugging_face)([row[side] for row in rows]) for side in (0, 1))
    cosines = (lefts * rights).sum(1) / np.linalg.norm(lefts, axis=1) / np.linalg.norm(rights, axis=1)
    assert scores["spearman"] == pytest.approx(spearmanr([row[2] for row in rows], cosines).statistic, abs=1e-6)
    assert scores["pairs"] == 20 and abs(scores["baseline/spearman"]) <= 1


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("sentence1\tsentence2\tscore\na\tb\t1\nc\td\t1\n", "nothing-to-correlate"),
        ("sentence1\tsentence2\tscore\na\tb\tx\nc\td\t1\n", "invalid-cell"),
        ("sentence1\tsentence2\ta\nc\td\t1\n", "unknown-column"),
        ("", "no-examples"),
    ],
)
def test_a_table_without_scores_is_refused(tmp_path: Path, text: str, code: str) -> None:
    (tmp_path / "sts.tsv").write_text(text)
    with pytest.raises(UserError, check=coded(code)):
        Sts().check({"files": {"pairs": tmp_path / "sts.tsv"}, "seed": 0})


@pytest.mark.parametrize("name", ["retrieval", "sts"])
def test_other_files_and_unknown_settings_are_refused(tmp_path: Path, name: str) -> None:
    task = find_task(name)
    with pytest.raises(UserError, check=coded("invalid-task-files")):
        task.check({"files": {"train": tmp_path}, "seed": 0}, ())
    with pytest.raises(UserError, match="poling", check=coded("unknown-setting")):
        task.check({"files": {}, "poling": "cls", "seed": 0}, ())
    assert not task.needs_seeds


@pytest.mark.long
def test_a_suite_fits_vectors_and_then_retrieves_with_them(
    tiny_hugging_face: Path, tmp_path: Path, collection: dict[str, Any]
) -> None:
    draw = random.Random(0)
    words = [WORDS[number % 6] for number in range(60)]
    rows = [{"anchor": f"it was {word} {draw.random()}", "positive": f"a {word} ran {draw.random()}"} for word in words]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"task": "embedding", "pooling": "cls", "matryoshka": [8], "epochs": 1, "learning_rates": [1e-2]}
    values = {
        "name": "vectors",
        "data": str(tmp_path),
        "seeds": [0],
        "tasks": {
            "fit": {
                "files": {"train": "pairs.jsonl", "valid": "pairs.jsonl"},
                "metrics": ["valid/ndcg_at_10"],
                "settings": settings,
            },
            "search": {
                "function": "retrieval",
                "files": {"data": "."},
                "metrics": ["ndcg_at_10"],
                "starts_from": "fit",
                "settings": {"dimension": 8},
            },
        },
    }
    (tmp_path / "suite.yaml").write_text(json.dumps(values))
    model = tiny_hugging_face
    plan, opened = prepare_suite(load_suite(tmp_path / "suite.yaml"), str(model))
    output = tmp_path / "results"
    result = evaluate_suite(plan, opened, output, lambda text: None, is_tracked=False)
    assert result.is_complete
    (fitted,) = (output / "models").iterdir()
    assert Embedder(fitted).vectors.pooling == "cls"
    (search,) = (found for job, found in result.metrics.items() if job.task == "search")
    assert search == Retrieval()(fitted, {**collection, "dimension": 8}) != Retrieval()(model, collection)
