"""Tasks of a suite for vectors of texts: `retrieval` (Thakur et al. 2021, BEIR) and `sts` (Cer et al. 2017).

Both take any encoder. Vectors are those of `clozeworks embed`: by the folder's own pooling, else the mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from data_prep.base.errors import UsageError, UserError
from data_prep.base.load_settings import validate_settings
from data_prep.base.logs import logger
from data_prep.base.settings import Settings
from data_prep.base.terminal import counted, listed
from trainer.evaluation.suite_settings import BASELINE, own_settings
from trainer.finetuning.embedding_task import words_in_common
from trainer.finetuning.examples import Columns, Examples, read_examples
from trainer.finetuning.finetune_settings import Pooling
from trainer.finetuning.regression_task import RegressionTask
from trainer.finetuning.tables import json_objects

if TYPE_CHECKING:
    from trainer.inference.embedding import Embedder

LOG = logger(__name__)
CELLS = 1 << 25
"""Cosines of queries and all documents that are in memory at a time."""
DEEPEST = 10
"""Ranks that nDCG and MRR read."""


class _VectorSettings(Settings):
    pooling: Pooling | None = None
    dimension: int | None = Field(None, ge=1)
    """Vectors are cut to this size, for models that were fitted with Matryoshka sizes."""
    batch_size: int = Field(32, ge=1)

    def vectors(self, embedder: Embedder, texts: Sequence[str]) -> tuple[np.ndarray, int]:
        """Return float32 vectors (num_texts, size) of length 1, and the number of truncated texts."""
        found = embedder.embed(texts, self.pooling, batch_size=self.batch_size)
        size = found.vectors.shape[1]
        if self.dimension is not None and self.dimension > size:
            raise UsageError(
                f"dimension={self.dimension} exceeds the {size:,} numbers of the model's vectors",
                fix=f"give at most {size:,}, or leave it out",
                code="dimension-too-large",
            )
        vectors = found.vectors[:, : self.dimension]
        if not np.isfinite(vectors).all():
            raise UserError(
                "the model's vectors are not finite", fix="evaluate another model", code="vectors-not-finite"
            )
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(lengths > 0, lengths, 1.0), found.num_truncated


class RetrievalTaskSettings(_VectorSettings):
    """Settings of `retrieval` in a suite."""

    split: str = Field("test", pattern=r"^[\w.-]+$")
    """Name of the file of judgments: `qrels/SPLIT.tsv`."""
    recall_at: tuple[int, ...] = (10, 100)


class _Collection:
    """Documents and judged queries of a BEIR directory."""

    def __init__(self, folder: Path, split: str) -> None:
        self.qrels = _read_qrels(folder / "qrels" / f"{split}.tsv")
        queries, self.documents = _read_texts(folder / "queries.jsonl"), _read_texts(folder / "corpus.jsonl")
        if missing := [name for name in self.qrels if name not in queries]:
            raise UsageError(
                f"{folder / 'qrels' / f'{split}.tsv'} judges queries that queries.jsonl does not have: "
                f"{listed(missing)}",
                fix="copy the data set again",
                code="unknown-query",
            )
        self.queries = {name: queries[name] for name in self.qrels}
        relevant = {name for judged in self.qrels.values() for name, score in judged.items() if score > 0}
        self.num_missing = len(relevant - self.documents.keys())


class Retrieval:
    """Rank all documents for each query by cosine: `ndcg_at_10`, `mrr_at_10`, `recall_at_N`; means over the queries.

    `files.data` is a directory as BEIR publishes them: `corpus.jsonl` (`_id`, `text`, perhaps `title`),
    `queries.jsonl` (`_id`, `text`) and `qrels/SPLIT.tsv`. The metrics are those of trec_eval: documents with a score
    above 0 are relevant, and of equal cosines (as float32) the greater id comes first. A relevant document that is not
    in the corpus counts as not found. `baseline/NAME` is the ranking by words in common (tf-idf).
    """

    version = "1"
    needs_seeds = False

    def check(self, settings: Mapping[str, Any]) -> None:
        """Check the settings and read the files."""
        given = self._settings(settings)
        _Collection(settings["files"]["data"], given.split)

    def metric_names(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of all metrics that a call with these settings returns."""
        names = ["ndcg_at_10", "mrr_at_10", *(f"recall_at_{depth}" for depth in self._settings(settings).recall_at)]
        yield from names
        yield from (f"{BASELINE}{name}" for name in names)
        yield from ("queries", "documents", "truncated_texts")

    def __call__(self, model: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        from trainer.inference.embedding import Embedder

        given = self._settings(settings)
        collection = _Collection(settings["files"]["data"], given.split)
        if collection.num_missing:
            LOG.warning(
                f"{counted(collection.num_missing, 'relevant document')} of {settings['files']['data']} are not in "
                "corpus.jsonl, and count as not found"
            )
        names, texts = [*collection.documents], [*collection.documents.values()]
        questions = [*collection.queries.values()]
        embedder = Embedder(model)
        (queries, first), (documents, second) = (given.vectors(embedder, some) for some in (questions, texts))
        scores = self._scores(queries, documents, names, collection.qrels, given.recall_at)
        asked, written = words_in_common([questions, texts])
        words = self._scores(asked, written, names, collection.qrels, given.recall_at)
        counts = {"queries": len(questions), "documents": len(texts), "truncated_texts": first + second}
        return scores | {f"{BASELINE}{name}": value for name, value in words.items()} | counts

    @staticmethod
    def _scores(
        queries: Any,
        documents: Any,
        names: Sequence[str],
        qrels: Mapping[str, Mapping[str, int]],
        depths: Sequence[int],
    ) -> dict[str, float]:
        rankings = ranked_documents(queries, documents, names, max([DEEPEST, *depths]))
        return retrieval_scores(zip(qrels.values(), rankings, strict=True), depths)

    @staticmethod
    def _settings(settings: Mapping[str, Any]) -> RetrievalTaskSettings:
        given = validate_settings(RetrievalTaskSettings, own_settings(settings), "settings of retrieval")
        if any(depth < 1 for depth in given.recall_at) or len(set(given.recall_at)) < len(given.recall_at):
            raise UsageError(
                f"recall_at={list(given.recall_at)} has a depth below 1, or one twice",
                fix="give depths such as [10, 100]",
                code="invalid-recall-depth",
            )
        _check_files("retrieval", settings, "data", "one directory as BEIR publishes them", "DIR")
        return given


class _ColumnSettings(Settings):
    text: str = "sentence1"
    pair: str = "sentence2"
    label: str = "score"


class StsTaskSettings(_VectorSettings):
    """Settings of `sts` in a suite."""

    columns: _ColumnSettings = _ColumnSettings()
    quoting: bool = True
    header: bool = True
    skip_incomplete: bool = False


class Sts:
    """Correlate the cosines of pairs of texts with people's scores: `spearman` and `pearson`, 0 for constant cosines.

    `files.pairs` is a table (tsv, csv, jsonl or parquet). `baseline/NAME` is the cosine of words in common (tf-idf).
    """

    version = "1"
    needs_seeds = False

    def check(self, settings: Mapping[str, Any]) -> None:
        """Check the settings and read the table."""
        self._read(settings)

    def metric_names(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of all metrics that a call with these settings returns."""
        yield from ("spearman", "pearson", f"{BASELINE}spearman", f"{BASELINE}pearson")
        yield from ("pairs", "skipped_rows", "truncated_texts")

    def __call__(self, model: Path, settings: Mapping[str, Any]) -> dict[str, float]:
        from trainer.finetuning.scores import regression_scores
        from trainer.inference.embedding import Embedder

        given, examples = self._read(settings)
        pairs, labels = examples.pairs or [], examples.labels or []
        embedder = Embedder(model)
        (lefts, first), (rights, second) = (given.vectors(embedder, some) for some in (examples.texts, pairs))
        words = words_in_common([examples.texts, pairs])
        cosines = {"": (lefts * rights).sum(axis=1), BASELINE: np.asarray(words[0].multiply(words[1]).sum(axis=1))}
        scores = {
            f"{prefix}{name}": value
            for prefix, some in cosines.items()
            for name, value in regression_scores(labels, some.ravel().tolist()).items()
            if name != "rmse"
        }
        return scores | {
            "pairs": len(pairs),
            "skipped_rows": examples.num_incomplete,
            "truncated_texts": first + second,
        }

    @staticmethod
    def _read(settings: Mapping[str, Any]) -> tuple[StsTaskSettings, Examples]:
        given = validate_settings(StsTaskSettings, own_settings(settings), "settings of sts")
        _check_files("sts", settings, "pairs", "one table", "FILE")
        path, columns, task = settings["files"]["pairs"], given.columns, RegressionTask(pair=True)
        named = Columns(columns.text, columns.pair, columns.label)
        examples = read_examples(
            path, named, task.parse_text, task.parse_label, given.quoting, given.header, given.skip_incomplete
        )
        if len(set(examples.labels or [])) < 2:
            raise UsageError(
                f"{path} has the same score in every row of column {columns.label!r}",
                fix="give another column with columns.label",
                code="nothing-to-correlate",
            )
        return given, examples


def ranked_documents(queries: Any, documents: Any, names: Sequence[str], depth: int) -> Iterator[list[str]]:
    """Yield for each query the ids of its best documents, at most `depth`, in trec_eval's order.

    `queries` (num_queries, size) and `documents` (num_documents, size) are rows of length 1, dense or sparse.
    """
    order = sorted(range(len(names)), key=lambda number: names[number], reverse=True)  # of equal cosines
    documents, names = documents[order], [names[number] for number in order]
    depth = min(depth, len(names))
    block = max(1, min(256, CELLS // len(names)))
    for start in range(0, queries.shape[0], block):
        cosines = queries[start : start + block] @ documents.T
        cosines = np.asarray(cosines if isinstance(cosines, np.ndarray) else cosines.todense())
        for row in cosines.astype(np.float32):  # trec_eval reads scores as float32
            last = np.partition(row, len(row) - depth)[len(row) - depth]
            best = np.flatnonzero(row >= last)
            yield [names[number] for number in best[np.argsort(-row[best], kind="stable")][:depth]]


def retrieval_scores(
    judged: Iterator[tuple[Mapping[str, int], Sequence[str]]], depths: Sequence[int]
) -> dict[str, float]:
    """Return the means over queries, from the score of each judged document and the ranking of each query."""
    columns: dict[str, list[float]] = {}
    for scores, ranking in judged:
        gains = [max(0, scores.get(name, 0)) for name in ranking]
        ideal = sorted((score for score in scores.values() if score > 0), reverse=True)
        first = next((rank for rank, gained in enumerate(gains[:DEEPEST], start=1) if gained), None)
        found = {
            "ndcg_at_10": _discounted(gains[:DEEPEST]) / _discounted(ideal[:DEEPEST]) if ideal else 0.0,
            "mrr_at_10": 0.0 if first is None else 1.0 / first,
        }
        for depth in depths:
            found[f"recall_at_{depth}"] = sum(map(bool, gains[:depth])) / len(ideal) if ideal else 0.0
        for name, value in found.items():
            columns.setdefault(name, []).append(value)
    return {name: math.fsum(values) / len(values) for name, values in columns.items()}


def _discounted(gains: Sequence[int]) -> float:
    return sum(gained / math.log2(1 + rank) for rank, gained in enumerate(gains, start=1))


def _check_files(name: str, settings: Mapping[str, Any], key: str, what: str, shown: str) -> None:
    files = settings["files"]
    if files.keys() != {key}:
        raise UsageError(
            f"{name} reads {what}, got files={sorted(files)}",
            fix=f"set files: {{{key}: {shown}}}",
            code="invalid-task-files",
        )


def _read_texts(path: Path) -> dict[str, str]:
    """Return the texts of a BEIR file by their ids, each with its title before it."""
    texts: dict[str, str] = {}
    with _opened(path) as file:
        for number, values in enumerate(json_objects(file, path), start=1):
            name, parts = values.get("_id"), [values.get("title") or "", values.get("text")]
            if not isinstance(name, str) or not name or not all(isinstance(part, str) for part in parts):
                problem = "has no _id and text that are strings"
            elif name in texts:
                problem = f"has the _id {name!r} of another object"
            else:
                texts[name] = " ".join(map(str, parts)).strip()
                continue
            raise UsageError(
                f"{path}, object {number:,}, {problem}",
                fix='give lines such as {"_id": "d1", "title": "", "text": "a text"}, each with an id of its own',
                code="invalid-retrieval-text",
            )
    if not any(texts.values()):
        raise UsageError(f"{path} has no text", fix="copy the data set again", code="no-examples")
    return texts


def _read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Return the score of each judged document by query, from lines of query, document and score after a header."""
    qrels: dict[str, dict[str, int]] = {}
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            cells = line.rstrip("\r\n").split("\t")
            if number == 1 or cells == [""]:
                if number == 1 and len(cells) == 3 and _is_integer(cells[2]):
                    raise _invalid_judgment(path, number, "is a judgment, and BEIR's first line names the columns")
                continue
            if len(cells) != 3 or not all(cells) or not _is_integer(cells[2]):
                raise _invalid_judgment(path, number, "is not query, document and a whole number, separated by tabs")
            query, document, score = cells
            if qrels.setdefault(query, {}).setdefault(document, int(score)) != int(score):
                raise _invalid_judgment(path, number, f"gives {document!r} another score for the query {query!r}")
    if not qrels:
        raise UsageError(f"{path} has no judgments", fix="copy the data set again", code="no-examples")
    return qrels


def _is_integer(cell: str) -> bool:
    digits = cell.removeprefix("-")
    return digits.isascii() and digits.isdigit()


def _invalid_judgment(path: Path, number: int, problem: str) -> UsageError:
    return UsageError(
        f"{path}, line {number:,}, {problem}",
        fix="give the header query-id, corpus-id, score, then one judgment per line",
        code="invalid-judgment",
    )


def _opened(path: Path) -> Any:
    """Open a text file without a byte order mark; a line ends at a line feed alone."""
    try:
        return open(path, encoding="utf-8-sig", newline="\n")
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read ({error.strerror})",
            fix="give a directory with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv; settings.split names SPLIT",
            code="missing-task-file",
        ) from None
