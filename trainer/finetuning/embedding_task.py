"""Embeddings: vectors in which an anchor is nearer to its positive text than to the positives of other anchors.

A fit minimizes sentence-transformers' CachedMultipleNegativesRankingLoss (Henderson et al. 2017, section 4.4; Gao et
al. 2021): the gradient of a whole batch, in memory of a few texts. Every positive, and every negative of a triplet, is
a negative of all other anchors in the batch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from data_prep.base.errors import UsageError
from trainer.finetuning.examples import Examples, text_of
from trainer.finetuning.tasks import EncodedExamples, ExamplePrediction, Outputs, Predictions, Task, num_longer
from trainer.inference.preprocessor import Collator, Preprocessor, Row

if TYPE_CHECKING:
    from trainer.finetuning.pair_model import PairModel

DEEPEST = 10
"""Ranks that nDCG and MRR read."""
BLOCK = 1024
"""Anchors whose cosines with all candidates are in memory at a time."""
PARTS = ("anchor", "positive", "negative")


class EmbeddingTask(Task):
    """An anchor (the text), its positive (the label), and for triplets a negative (the pair).

    The score of an example is the rank of its positive among all texts of its part, anchors apart. Other positives of
    an equal anchor are left out of the ranking, and equal cosines count against the positive.
    """

    name = "embedding"
    auto_class = "AutoModel"
    metrics = ("ndcg_at_10", "mrr_at_10", "accuracy")
    example_score = "ndcg_at_10"
    baseline_name = "tf-idf"
    result_columns = ()
    can_freeze = False

    def __init__(self, pair: bool = False, pooling: str = "mean", dimensions: Sequence[int] = ()) -> None:
        self.needs_pair = pair
        self.pooling, self.dimensions = pooling, tuple(dimensions)
        self._baselines: list[tuple[Examples, Predictions]] = []

    def configured(self, pooling: str, dimensions: Sequence[int], hidden_size: int) -> EmbeddingTask:
        too_large = [size for size in dimensions if not 1 <= size <= hidden_size]
        if too_large:
            raise UsageError(
                f"--matryoshka {too_large[0]} is not a size from 1 to the {hidden_size:,} of the model's vectors",
                fix=f"give sizes from 1 to {hidden_size:,}",
                code="invalid-matryoshka",
            )
        return EmbeddingTask(self.needs_pair, pooling, dimensions)

    def head_options(self) -> dict[str, Any]:
        return {}

    def module(self, encoder: Any, max_length: int) -> PairModel:
        from trainer.finetuning.pair_model import PairModel

        return PairModel(encoder, self.pooling, self.dimensions, max_length)

    def collator(self, preprocessor: Preprocessor) -> PairCollator:
        return PairCollator(preprocessor.tokenizer.pad_token_id or 0)

    def parse_label(self, cell: Any, text: Any) -> str:
        return text_of(cell)

    def encode(self, examples: Examples, preprocessor: Preprocessor) -> EncodedExamples:
        columns = [texts for texts in (examples.texts, examples.labels, examples.pairs) if texts is not None]
        rows_of, lengths_of = zip(*map(preprocessor.rows, columns), strict=True)
        rows: list[Row] = [dict(zip(PARTS, some, strict=False)) for some in zip(*rows_of, strict=True)]
        lengths = [max(some) for some in zip(*lengths_of, strict=True)]
        for row, *texts in zip(rows, *columns, strict=True):
            row["texts"] = texts
        return EncodedExamples(rows, list(range(len(rows))), lengths, num_longer(lengths, preprocessor))

    def decode(self, outputs: Outputs, encoded: EncodedExamples, examples: Examples) -> Predictions:
        vectors = np.stack([output["logits"] for output in outputs])  # (num_examples, num_parts * hidden_size)
        anchors, *others = np.split(vectors, 3 if examples.pairs is not None else 2, axis=1)
        return ranked(anchors, others, examples)

    def baseline(self, train: Sequence[Any], examples: Examples) -> Predictions:
        """Return the rankings by the cosine of tf-idf, for words that are in the examples."""
        for known, predictions in self._baselines:
            if known is examples:
                return predictions
        from sklearn.feature_extraction.text import TfidfVectorizer

        columns = [list(examples.texts), list(examples.labels or []), *([examples.pairs] if examples.pairs else [])]
        vectorizer = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]")
        vectorizer.fit([text for texts in columns for text in texts])
        anchors, *others = (vectorizer.transform(texts) for texts in columns)
        self._baselines.append((examples, ranked(anchors, others, examples)))
        return self._baselines[-1][1]

    def score(self, labels: Sequence[str], predictions: Sequence[ExamplePrediction]) -> dict[str, float]:
        ranks = [prediction.columns["rank"] for prediction in predictions]
        scores = {
            "ndcg_at_10": [gain(rank) for rank in ranks],
            "mrr_at_10": [1.0 / rank if rank <= DEEPEST else 0.0 for rank in ranks],
            "accuracy": [float(rank == 1) for rank in ranks],
        }
        return {name: math.fsum(values) / max(1, len(values)) for name, values in scores.items()}

    def score_example(self, label: str, prediction: ExamplePrediction) -> float:
        return gain(prediction.columns["rank"])

    def yardstick(self, train: Sequence[str]) -> tuple[Callable[[Any], Any], str]:
        return lambda text: "", "the ranking by the words that two texts have in common, weighted by tf-idf"

    def describe_labels(self, labels: Sequence[str]) -> str:
        return f"{len(set(labels)):,} different positives"


class PairCollator(Collator):
    """Pads each part of examples (anchors, positives, negatives) to its longest row."""

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return by the name of a part its tensors (num_rows, length) by name."""
        from transformers import BatchEncoding

        parts = [name for name in PARTS if name in rows[0]]
        return {name: BatchEncoding(super(PairCollator, self).__call__([row[name] for row in rows])) for name in parts}

    def training_batches(self, rows: Sequence[Row], batch_size: int, seed: int) -> Any:
        """Return sentence-transformers' sampler, of which no batch has a text twice: it would be its own negative."""
        import torch
        from sentence_transformers.base.sampler import NoDuplicatesBatchSampler

        texts = _Texts([row["texts"] for row in rows])
        return NoDuplicatesBatchSampler(texts, batch_size, drop_last=False, generator=torch.Generator(), seed=seed)


class _Texts:
    """The texts of examples, as the sampler reads them: a table by rows."""

    def __init__(self, texts: Sequence[Sequence[str]]) -> None:
        self._texts = texts
        self.column_names = list(PARTS[: len(texts[0])])

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, number: int) -> dict[str, str]:
        return dict(zip(self.column_names, self._texts[number], strict=True))


def gain(rank: int) -> float:
    """Return nDCG at 10 of a ranking in which one text is relevant, at this rank (from 1)."""
    return 1.0 / math.log2(1 + rank) if rank <= DEEPEST else 0.0


class _Candidates(NamedTuple):
    """Different texts: for each the part (0 for positives, 1 for negatives) and the example that has it first."""

    number_of: dict[str, int]
    places: list[tuple[int, int]]


def _candidates(examples: Examples) -> _Candidates:
    number_of: dict[str, int] = {}
    places: list[tuple[int, int]] = []
    for part, texts in enumerate((examples.labels or [], examples.pairs or [])):
        for number, text in enumerate(texts):
            if text not in number_of:
                number_of[text] = len(places)
                places.append((part, number))
    return _Candidates(number_of, places)


def ranked(anchors: Any, others: Sequence[Any], examples: Examples) -> Predictions:
    """Return for each example the nearest candidate, with the rank of the positive from 1.

    `anchors` (num_examples, size) are vectors, dense or sparse; `others` those of the positives and any negatives.
    """
    number_of, places = _candidates(examples)
    names = list(number_of)
    chosen = [[number for part, number in places if part == which] for which in range(len(others))]
    rows = [_unit(vectors[some]) for vectors, some in zip(others, chosen, strict=True) if some]
    positives = [number_of[text] for text in examples.labels or []]
    of_anchor: dict[str, list[int]] = defaultdict(list)
    for text, positive in zip(examples.texts, positives, strict=True):
        of_anchor[text].append(positive)
    predictions = []
    for start in range(0, len(positives), BLOCK):
        block = _unit(anchors[start : start + BLOCK])
        cosines = np.concatenate([_dense(block @ some.T) for some in rows], axis=1)  # (block, num_candidates)
        for place, values in enumerate(cosines, start=start):
            own = positives[place]
            value = values[own]
            values[of_anchor[examples.texts[place]]] = -np.inf
            rank = 1 + int(np.count_nonzero(values >= value))
            nearest = own if rank == 1 else int(values.argmax())
            predictions.append(ExamplePrediction(names[nearest], None, {"rank": rank}))
    return predictions


def _unit(vectors: Any) -> Any:
    """Return rows of length 1, float64; a row of zeros stays."""
    if isinstance(vectors, np.ndarray):
        vectors = vectors.astype(np.float64)
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(lengths > 0, lengths, 1.0)
    return vectors  # those of tf-idf have this length


def _dense(values: Any) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else np.asarray(values.todense())
