"""A tag for each word: entities, parts of speech.

Words are joined by spaces and read as running text, which is what the encoder was pretrained on, and tokens find their
words again by their place in it. A word's tag is predicted at its first token (Devlin et al. 2018, section 5.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.finetune.examples import Examples, text_of
from trainer.finetune.labeled_tables import is_missing
from trainer.finetune.scores import tagging_scores
from trainer.finetune.sequence_tasks import softmax
from trainer.finetune.tasks import IGNORED, Encoded, Output, Prediction, Preprocessor

OUTSIDE = "O"


class TokenTask:
    """One of `names` for each word of a text."""

    name = "token_classification"
    auto_class = "AutoModelForTokenClassification"
    metrics: tuple[str, ...] = ("f1", "precision", "recall", "accuracy")
    example_score = "words right"
    needs_pair = False

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = tuple(names)
        # A word that was cut off has no prediction; it is taken for what most words are.
        self.default = OUTSIDE if OUTSIDE in self.names or not self.names else self.names[0]

    def head_options(self) -> dict[str, Any]:
        return {
            "num_labels": len(self.names),
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: number for number, name in enumerate(self.names)},
        }

    def parse_text(self, cell: Any) -> list[str]:
        words = [text_of(word) for word in _items(cell, "words")]
        if not words:
            raise ValueError("there is no word")
        return words

    def parse_label(self, cell: Any, text: Any) -> list[str]:
        tags = _items(cell, "tags")
        if len(tags) != len(text):
            raise ValueError(f"{len(tags)} tags for {len(text)} words; each word needs one")
        missing = [place for place, tag in enumerate(tags, start=1) if is_missing(tag)]
        if missing:
            raise ValueError(f"word {missing[0]:,} has no tag; each word needs one, and {OUTSIDE!r} is one")
        return [text_of(tag).strip() for tag in tags]

    def encode(self, examples: Examples, preprocessor: Preprocessor) -> Encoded:
        encoded = preprocessor.tokenizer(
            [" ".join(words) for words in examples.texts],
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=preprocessor.has_token_types,
        )
        rows, places = [], []
        for number, words in enumerate(examples.texts):
            offsets = encoded["offset_mapping"][number]
            kept = _kept(len(offsets), preprocessor.max_length)
            first = {word: place for place, word in reversed(_word_of_tokens(words, offsets)) if place in kept}
            order = {place: index for index, place in enumerate(kept)}
            row = {name: [encoded[name][number][place] for place in kept] for name in encoded if name.endswith("_ids")}
            if examples.labels is not None:
                row["labels"] = [IGNORED] * len(kept)
                for word, place in first.items():
                    row["labels"][order[place]] = self.names.index(examples.labels[number][word])
            rows.append(row)
            places.append({word: order[place] for word, place in first.items()})
        lengths = [len(offsets) for offsets in encoded["offset_mapping"]]
        num_truncated = sum(length > preprocessor.max_length for length in lengths)
        return Encoded(rows, list(range(len(rows))), lengths, num_truncated, places)

    def decode(self, outputs: Sequence[Output], encoded: Encoded, examples: Examples) -> list[Prediction]:
        predictions = []
        for output, places, words in zip(outputs, encoded.places, examples.texts, strict=True):
            probabilities = softmax(output["logits"])  # (length, num_labels)
            best = probabilities.argmax(axis=-1)
            tags = [self.names[best[places[word]]] if word in places else self.default for word in range(len(words))]
            sure = [float(probabilities[places[word]].max()) if word in places else 0.0 for word in range(len(words))]
            predictions.append(Prediction(tags, sum(sure) / len(sure), {"probabilities": sure}))
        return predictions

    def score(self, labels: Sequence[Sequence[str]], predictions: Sequence[Prediction]) -> dict[str, float]:
        return tagging_scores(labels, [prediction.label for prediction in predictions])

    def score_example(self, label: Sequence[str], prediction: Prediction) -> float:
        guesses: Sequence[str] = prediction.label
        return sum(tag == guess for tag, guess in zip(label, guesses, strict=True)) / len(label)

    def show_label(self, label: Sequence[str]) -> str:
        return " ".join(label)


def _items(cell: Any, what: str) -> list[Any]:
    """The items of a list (Parquet's are numpy's), or of a text parted by spaces."""
    if isinstance(cell, str):
        return cell.split()
    if isinstance(cell, np.ndarray):
        return list(cell.tolist())
    if not isinstance(cell, list):
        raise ValueError(f"the cell holds a {type(cell).__name__}, and this task reads a list of {what}, or a text")
    return cell


def _kept(length: int, most: int) -> list[int]:
    """Places of a sequence that stay when its middle is cut out before the closing [SEP]."""
    return list(range(length)) if length <= most else [*range(most - 1), length - 1]


def _word_of_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(place of a token, number of its word); special tokens and spaces have none.

    A token may begin with the space before its word, so it belongs to the word that its last character lies in.
    """
    word_at: list[int] = []
    for number, word in enumerate(words):
        word_at += [number] * len(word) + [-1]
    found = [(place, word_at[end - 1]) for place, (begin, end) in enumerate(offsets) if end > begin]
    return [(place, word) for place, word in found if word >= 0]
